"""Checkpoints of ``torch.distributed.checkpoint`` (DCP): read by slices, and written as the state of a training run."""
