"""Bytes of optimizer state per parameter, for optimizers with full, compressed or factored states."""

from __future__ import annotations

from cost_model.hardware.reading import ClusterError
from cost_model.kernels.optimizer_memory import OPTIMIZERS

COMPRESSED_STATES = {
    # two states of one byte, and a float32 scale for every 2048 of each: Dettmers et al., arXiv 2110.02861, section 2
    "adamw-8bit": 2 * (1 + 4 / 2048),
    # a row and a column of float32 sums for each matrix: Shazeer and Stern, arXiv 1804.04235; for 4096 x 4096, 8 / 4096
    "adafactor": 8 / 4096,
}
"""Bytes per parameter of optimizers with compressed or factored states."""


def optimizer_state_nbytes(name: str, master_dtype_nbytes: int = 4) -> float:
    """Return the bytes of state per parameter, without the float32 copy of the parameter.

    Raises:
        ClusterError: the optimizer is unknown.
    """
    key = name.lower()
    if key in COMPRESSED_STATES:
        return COMPRESSED_STATES[key]
    if key not in OPTIMIZERS:
        raise ClusterError(f"unknown optimizer {name!r}; known: {', '.join([*OPTIMIZERS, *COMPRESSED_STATES])}")
    return float(OPTIMIZERS[key].states * master_dtype_nbytes)
