"""The check that a model's forward returns a loss, and the note on a plan whose model returns none."""

from __future__ import annotations

from planner.run.model_analysis import ModelAnalysis

NO_LOSS_NOTE = (
    "forward returns no loss (a scalar that needs a gradient), so nothing says where the backward begins: "
    "that of the last ops is not priced. Let it return the loss."
)


def returns_no_loss(traced: ModelAnalysis) -> bool:
    """Return whether the forward returns no loss, so that no backward can begin."""
    return not any(output.is_loss for output in traced.graph.outputs)
