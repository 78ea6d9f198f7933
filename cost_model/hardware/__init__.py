"""Devices, links and clusters, and the measurements that were made on them."""
