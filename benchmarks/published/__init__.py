"""Published measurements: reading them, pricing them with the shipped cost model, fitting the shipped constants."""
