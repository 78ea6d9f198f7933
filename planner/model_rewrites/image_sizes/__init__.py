"""Models whose images are packed: a table says the size of each, and its values decide shapes, as in Qwen2-VL.

tables of sizes, and batches with them    tables
values of tensors on meta                 values
the modules that read them                encoders.encoders_of_sizes
position ids, made before the forward     positions.with_position_ids
attention of packed images                packed_attention
in a trace                                in_trace.sizes_known
"""
