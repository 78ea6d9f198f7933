"""Which modules are replaced, for tracing and for running alike?"""
