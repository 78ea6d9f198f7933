"""Which pipeline is best? The same search over stages, their meshes and their splits."""
