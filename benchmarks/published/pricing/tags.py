"""The tags that tables of training runs and of memory group rows by."""

from __future__ import annotations

from collections.abc import Mapping

from published.frameworks.configuration import precision_class
from published.rows.models import family_of


def run_tags(row: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a row of training_runs.csv or memory.csv."""
    return {
        "gpu": row["gpu"].split(" (")[0] or "not stated",
        "family": family_of(row["model"]),
        "framework": row.get("framework", "").split(" ")[0],
        "precision": precision_class(row.get("precision", "")),
        "trust": row.get("trust", ""),
    }
