"""The fits of the constants that ship with the cost model, and the minimizers that they use."""
