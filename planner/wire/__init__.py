"""How does a graph travel? `OpGraph` to JSON and back, as data that runs no code."""
