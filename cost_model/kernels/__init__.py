"""Seconds of compute on one device: GEMMs, attention, memory-bound ops, optimizers."""
