"""The rows with their prices by the shipped cost model, and the checks of the accuracy table."""
