"""What does a plan mean for this module? Names, meshes, groups and checks, before anything is touched."""
