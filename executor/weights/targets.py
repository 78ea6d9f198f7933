"""The tensors of a module that a checkpoint holds: parameters and persistent buffers, each once, with all its names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from executor.torch_internals.dtensor import local_of
from planner.errors import WeightsError
from planner.model_rewrites.fuse_projections import FusedParameter, fused_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parameter or a persistent buffer.

    Attributes:
        names: its names in the module, several where it is tied.
        tensor: the parameter or the buffer.
        fused: the parts that a fused projection replaces; None: it is not fused.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    fused: FusedParameter | None = None

    @property
    def unfused_names(self) -> tuple[str, ...]:
        """Names in the module as it was before projections were fused."""
        return self.names if self.fused is None else tuple(self.fused.rows)

    @property
    def local(self) -> torch.Tensor:
        """What this rank stores of it."""
        return local_of(self.tensor) if isinstance(self.tensor, DTensor) else self.tensor.detach()


def targets_of(module: nn.Module) -> list[Target]:
    """Return the parameters and the persistent buffers of ``module``, in the order in which they are registered."""
    tensors: dict[int, torch.Tensor] = {}
    names: dict[int, list[str]] = {}
    fused = fused_parameters(module)
    for name, tensor in [*module.named_parameters(remove_duplicate=False), *_persistent_buffers(module)]:
        tensors[id(tensor)] = tensor
        names.setdefault(id(tensor), []).append(name)
    return [
        Target(names=tuple(own), tensor=tensors[key], fused=next((fused[n] for n in own if n in fused), None))
        for key, own in names.items()
    ]


def check_values(targets: Sequence[Target]) -> None:
    """Raise an error if some of ``targets`` are on meta."""
    on_meta = [target.names[0] for target in targets if target.tensor.is_meta]
    if on_meta:
        raise WeightsError(
            f"{len(on_meta)} tensors are on meta and have no values: {', '.join(on_meta[:8])}. Nothing has been "
            "written.",
            what_to_do="Call load_weights first.",
        )


def _persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = []
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                buffers.append((f"{prefix}.{name}".removeprefix("."), buffer))
    return buffers
