"""The note on a plan whose model returns no loss."""

from __future__ import annotations

from planner.run.model_analysis import ModelAnalysis

NO_LOSS_NOTE = (
    "forward returns no loss: the backward begins at its results, which are whole or split by samples. "
    "What computes the loss from them is not priced."
)


def returns_no_loss(traced: ModelAnalysis) -> bool:
    """Return whether the forward returns no loss, so that the backward begins at its results."""
    return not any(output.is_loss for output in traced.graph.outputs)
