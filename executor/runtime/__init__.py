"""A sharded module runs: hooks, FSDP, activation checkpointing and gradient reduction."""
