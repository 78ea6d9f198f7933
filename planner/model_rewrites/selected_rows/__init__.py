"""Elements that a mask selects, ``x[mask]``: a planned run keeps all of them, and leaves the others out of the loss.

How many elements a mask selects is a matter of values, so a plan has no shape for them, and ranks with different
samples select different numbers. Most models select tokens for their loss only: ``cross_entropy(logits[mask],
labels[mask])``. Here ``x[mask]`` is all of ``x``, with the mask's dims as one dim of rows, and 1 or 0 in place of what
the mask leaves out. Functions that treat each row by itself keep the rows; a mean, a sum or a loss over the rows counts
those that the mask selects. Everything else that reads them is an error.

what selects rows                selection
calls that read rows             calls.SelectedRows, each_row, losses
how many there are               count.Count
in a trace                       trace.masks_keep_all
"""
