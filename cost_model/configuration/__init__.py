"""Seconds and bytes of a parallel configuration that is given by its degrees, as Megatron or torchtitan run it."""
