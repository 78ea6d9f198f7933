"""A training state in a folder, opened: its tensors can be read by slices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from executor.weights.dcp.source import MODEL, dcp_entries, is_dcp_folder
from executor.weights.lazy_tensors import LazyTensor, SelectedTensor
from planner.errors import WeightsError
from planner.model_rewrites.fused_projection_modules import split_rows

OPTIMIZER, STATE = "optimizer", "state"
OTHER_FILE = "training_state.pt"
"""Everything that is no tensor of a parameter's shape."""
VERSION = 1


def is_training_state(folder: Path) -> bool:
    """Return whether ``folder`` holds what ``save_training_state`` wrote."""
    return is_dcp_folder(folder) and (folder / OTHER_FILE).is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedState:
    """A training state: path of keys -> tensor, and what is no tensor of a parameter's shape."""

    tensors: Mapping[tuple[str, ...], LazyTensor]
    other: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path) -> OpenedState:
        """Return the training state in ``folder``.

        Raises:
            WeightsError: there is none.
        """
        if not is_training_state(folder):
            raise WeightsError(
                f"{str(folder)!r} holds no training state.",
                what_to_do="Give a folder that save_training_state wrote; load_weights reads other checkpoints.",
            )
        other = torch.load(folder / OTHER_FILE, weights_only=True, map_location="cpu")
        if other["version"] != VERSION:
            raise WeightsError(
                f"{str(folder)!r} holds a training state of version {other['version']}; this shardplan reads "
                f"{VERSION}.",
                what_to_do="Load it with the shardplan that wrote it.",
            )
        return cls(tensors=dcp_entries(folder), other=other)

    def of_model(self, names: Collection[str]) -> dict[str, LazyTensor]:
        """Return name -> tensor of the model; fused projections as their parts too, or only so if not in ``names``."""
        own = {".".join(path[1:]): tensor for path, tensor in self.tensors.items() if path[0] == MODEL}
        dropped = set(self.other["fused"]) - set(names)
        return {name: tensor for name, tensor in self._with_parts(own).items() if name not in dropped}

    def of_key(self, key: str) -> dict[str, LazyTensor]:
        """Return name of a parameter -> tensor of the optimizer's state under ``key``."""
        prefix = (OPTIMIZER, STATE)
        own = {path[2]: t for path, t in self.tensors.items() if path[:2] == prefix and path[3] == key}
        return self._with_parts(own)

    def keys(self) -> list[str]:
        """Return the keys of the tensors in the optimizer's state."""
        return sorted({path[3] for path in self.tensors if path[:2] == (OPTIMIZER, STATE)})

    def values(self) -> dict[str, dict[str, Any]]:
        """Return name of a parameter -> key -> value of the optimizer's state, of all but tensors."""
        values = dict(self.other["values"])
        for name, fused in self.other["fused"].items():
            if name in values:
                values |= dict.fromkeys(fused["rows"], values[name])
        return values

    def _with_parts(self, tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
        parts: dict[str, LazyTensor] = {}
        for name, fused in self.other["fused"].items():
            if name in tensors:
                rows = torch.arange(tensors[name].shape[0])
                for part, own in split_rows(rows, fused["rows"], fused["groups"]).items():
                    parts[part] = SelectedTensor(tensors[name], 0, own)
        return {**tensors, **parts}
