"""Agreement of ranks: an error of one rank is an error of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from planner.errors import WeightsError


class Ranks:
    """The ranks that hold a module together: those of its mesh, or this process alone."""

    def __init__(self, module: nn.Module) -> None:
        """Find the mesh of the DTensors of ``module``."""
        meshes = [parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor)]
        self.device = torch.device("cpu")
        self._group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if meshes:
            mesh = meshes[0]
            if mesh.device_type != "cpu":
                self.device = torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
            self._group = dist.group.WORLD if mesh.size() == dist.get_world_size() else mesh._flatten().get_group()
            self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        elif dist.is_initialized():
            self._group = dist.group.WORLD
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks; None: there is no other rank."""
        return self._group

    def global_rank(self, rank: int) -> int:
        """Return the global rank of ``rank``."""
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def gathered(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, on every rank; values are small and picklable."""
        values: list[Any] = [value] * self.size
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def from_rank(self, value: Any, source: int) -> Any:
        """Return the ``value`` of rank ``source``, on every rank; small and picklable."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=self.global_rank(source), group=self._group)
        return values[0]

    @contextmanager
    def agreeing(self, *, what: str) -> Iterator[None]:
        """Return a context whose error on one rank is raised on every rank. All ranks leave it together.

        Collectives within the context are the caller's to keep in step: a rank that fails leaves early.

        Args:
            what: what is done within it, for the message on the other ranks.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001  whatever it is, the others must hear of it
            error = raised
        texts = self.gathered(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
        if failed:
            rank, text = failed[0]
            raise WeightsError(
                f"Rank {rank} failed in {what}: {text}",
                what_to_do="See that rank's own error.",
            )
