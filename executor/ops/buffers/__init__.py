"""Ops that update buffers, which are plain and whole on every rank.

norms with running statistics           batch_norm
writes of DTensors to plain tensors     plain_writes
"""
