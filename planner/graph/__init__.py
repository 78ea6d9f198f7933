"""The traced model: `trace_module` turns a module into an `OpGraph`. Of equal blocks, only three are traced.

the graph: ops, values, module calls    op_graph.OpGraph
a traced module, without the module     trace_module.TracedModule, .trace_module
capture with torch.fx                   capture, from_fx, trace_errors
repeated blocks, traced once            fold, unroll
loops over the samples                  sample_loops
modules that cannot be traced           opaque_trace, opaque_calls, sample_splits
tensors that are filled in parts        overwritten.Overwritten
caches of a decoder's layers            layer_caches
vocabularies that no axis divides       uneven_lengths.with_rounded_lengths
example inputs                          example_inputs.meta_inputs
an op, run on given tensors             run_op.run_op
"""
