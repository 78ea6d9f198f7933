"""Layouts of a tensor on a mesh, meshes, and their text form."""
