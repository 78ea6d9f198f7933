"""Plans and comparisons as text and tables for the terminal."""
