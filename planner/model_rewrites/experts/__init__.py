"""The routed experts of a mixture-of-experts block as one op: what it is, where it is called, what it costs.

The number of tokens per expert depends on the data, which a trace does not see. So experts modules are traced as one
op, whose shapes do not depend on the routing. `planner` prices the op, assuming balanced experts;
`executor.ops.experts` runs the op.

The modules are those of transformers 5.0 and later: they are called as ``experts(hidden, index, weights)`` and hold
all experts' weights in two 3-dim parameters, with or without biases. Routers and shared experts are modules like any
other.

the op and its arguments         experts_op
modules that call it             modules
layouts that it runs in          placements.experts_placements
FLOPs and bytes of one rank      work.ExpertsWork
"""
