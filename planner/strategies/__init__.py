"""How may each op be split? Strategies from DTensor's behaviour, and rules for the executor's own ops."""
