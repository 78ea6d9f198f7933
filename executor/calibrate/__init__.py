"""How fast is this cluster? Kernels, collectives and the host, measured."""
