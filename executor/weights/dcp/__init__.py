"""Checkpoints of ``torch.distributed.checkpoint`` (DCP): read by slices, and written as the state of a training run.

the state of a training run      training_state.save_training_state
its optimizer                    optimizer_state
the same, opened                 opened_state.OpenedState
tensors of any DCP checkpoint    source.dcp_tensors
shards of several pieces         shards
"""
