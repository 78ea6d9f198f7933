"""Published measurements: their rows, their prices by the shipped cost model, and the fits of its constants to them."""
