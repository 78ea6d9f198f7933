"""Corrections of rows that the log of their run contradicts, and the mark of rows that their notes doubt."""

from __future__ import annotations

from collections.abc import Mapping

CORRECTIONS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("pytorch/torchtitan commit f738a03bf message", {"act_ckpt": "full", "compile": ""}),
    ("pytorch/torchtitan commit 8a749c618 message", {"compile": ""}),
)
"""(start of the source, columns with corrected values).

Both rows have the settings of deepseek_v3_16b.toml at their commits, which had changed between the run and the commit:
#1608 (08b8b244f, 2025-08-20 19:00 -0700) set activation_checkpoint.mode from full to selective, compile from off to the
loss, expert_parallel_degree from 1 to 8. The first log is of 18:28 that day, and its command has the 8 expert ranks
that the file did not have yet. The second, of the next day, says "Applied full activation checkpointing" and has one
expert rank."""

DOUBTED = "batch size may have been changed: verify before relying"
"""The text in the notes of rows with a doubtful batch. The page of AWS's rows states the default configuration, which
ends at step 1,000, and shows step 1,990."""


def corrected(row: Mapping[str, str]) -> dict[str, str]:
    """Return the row, corrected by ``CORRECTIONS``."""
    changes = (changes for start, changes in CORRECTIONS if row.get("source", "").startswith(start))
    return {**row, **next(changes, {})}


def doubted(row: Mapping[str, str]) -> str | None:
    """Return why the row's configuration is unreliable; None where it is reliable."""
    return "its own notes doubt its batch" if DOUBTED in row.get("notes", "") else None
