"""What does computing cost? Matrix products, attention, memory-bound ops, optimizers."""
