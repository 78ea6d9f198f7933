"""Attention with the sequence split over one axis: all-gathered keys and values, in natural or zigzag order.

the op, forward and backward        attention.context_parallel_attention
keys and values of all ranks        kv_all_gather
queries exchanged, in zigzag order  zigzag_attention, zigzag_chunks
"""
