"""What does communication cost? NCCL's model, corrected by measurements, for any group of ranks."""
