"""Which modules are replaced, both for tracing and for running? Experts, MLA, fused ops, fused projections."""
