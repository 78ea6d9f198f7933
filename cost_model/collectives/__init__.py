"""Seconds of communication: NCCL's model, corrected by measurements, for any group of ranks.

any collective on any group         price.collective_time_s
groups of ranks of a mesh           axis_groups.AxisGroup
rings and trees, NVLS, send/recv    nccl, nvls, point_to_point
measured sweeps                     sweep_prices
"""
