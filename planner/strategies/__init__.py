"""How may each op be split? Strategies asked of DTensor itself, and rules for our own ops."""
