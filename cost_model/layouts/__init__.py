"""Layouts of a tensor on a mesh, meshes, and the text form of both.

a layout; a mesh            layout.Layout, .MeshSpec
a rank's part of a shape    layout.local_shape
linear layers               linear.linear_layout, .linear_gradients
partial tensors, copied     partial_clones.keep_partial_in_clones
"""
