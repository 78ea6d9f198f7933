"""Seconds of communication: NCCL's model, corrected by measurements, for any group of ranks."""
