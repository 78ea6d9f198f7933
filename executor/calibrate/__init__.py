"""Measurements of a cluster: kernels, collectives and the host.

collectives                  collectives
GEMMs, attention, streams    kernels.measure
a CPU's step                 host
"""
