"""How can a tensor lie on a mesh? Layouts, meshes and their text form."""
