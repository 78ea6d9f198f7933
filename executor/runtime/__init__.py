"""What happens while a sharded module runs? Hooks, gathers, checkpointing, reduction of gradients."""
