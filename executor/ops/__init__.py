"""How does an op run that DTensor cannot run as planned? Ops of our own, on local tensors."""
