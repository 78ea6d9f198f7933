"""Measurements of a cluster: kernels, collectives and the host."""
