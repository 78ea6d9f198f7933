"""Ops that DTensor cannot run as planned, on local tensors."""
