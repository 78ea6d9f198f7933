"""What runs inside a context, counted: FLOPs, live bytes, dispatched ops.

FLOPs                                     flop_count.FlopCount
live bytes, dispatched ops, bytes moved   live_bytes.LiveBytesMode
activations of a model's own, per element  activation_costs.activation_costs
"""
