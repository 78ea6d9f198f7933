"""What does each choice cost? Seconds and bytes of strategies, redistributions and parameters' layouts."""
