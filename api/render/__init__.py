"""Plans and tables as a person reads them in a terminal."""
