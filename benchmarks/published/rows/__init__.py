"""The rows of the published measurements: reading, correcting and dating them, and their models and machines."""
