"""Devices, links and clusters, and the measurements that were made on them.

a cluster, read from text or a file    cluster.ClusterSpec
the device catalogue                   devices.find_device, devices.toml
measurements of a cluster              measurements, sweep
"""
