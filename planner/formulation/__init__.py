"""What is there to choose? Prices become a `Problem`, and its solution a `Decision`."""
