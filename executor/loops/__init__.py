"""Loops that people have: a sharded module in transformers' ``Trainer`` and in accelerate's ``Accelerator``.

Every rank passes whole batches, and gets whole losses: to the loop, all ranks together are one process. The module cuts
each batch to the shards of its plan. A loop's own samplers, loss scales and metrics are then those of an unsharded run.

transformers' Trainer                     trainer.prepare_trainer
accelerate's Accelerator                  accelerator.prepare_accelerator
adapters of peft                          adapters
whole batches on every rank               adoption
whole tensors on rank 0                   whole_state
"""
