"""Calls in a forward that a planned run replaces, and a trace by the same.

checks of values                 value_checks
branches on finite numbers       finite_branches
the module's own checkpointing   checkpoints
assignments to parts             assignments
buffers that are replaced        assigned_buffers
CTC loss, exponential numbers    other_ops
parts that are joined again      split_and_cat
in a trace                       in_trace.calls_as_ops
"""
