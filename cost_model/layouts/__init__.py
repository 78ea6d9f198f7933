"""Layouts of a tensor on a mesh, meshes, and the text form of both.

a layout; a mesh            layout.Layout, .MeshSpec
a rank's part of a shape    layout.local_shape
uneven parts                uneven.piece_numel
linear layers               linear.linear_layout, .linear_gradients
what torch gets wrong       mended_torch.mend_torch
DTensor in less time        quicker_dtensor.quicker_dtensor
"""
