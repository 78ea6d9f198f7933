"""What does each op do? FLOPs, bytes read and written, and the tensors that autograd saves."""
