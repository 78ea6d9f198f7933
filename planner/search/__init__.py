"""Which mesh, micro-batches and checkpointing are best? A branch and bound over all of them."""
