"""``RandomState``: the random numbers of a sharded module, one stream that all ranks share, whatever their own seeds.

All ranks keep equal copies of the stream, the states of the default generators during the module's forward. Random ops
on plain tensors read it directly, so that all ranks draw the same numbers. Each random op on a DTensor draws one seed
from the stream. The op then runs under a generator seeded with that seed and the index of the rank's shard: ranks that
hold the same shard draw the same numbers, other ranks others. Python's and NumPy's own numbers, by which some models
drop layers, start at a seed of the stream in each forward. Between forwards the stream is put aside, and the generators
are the caller's own.

Activation checkpointing restores the state of the default generators before it runs a block again, so that the block
draws the same seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from executor.resolve.per_module import PerModule
from executor.resolve.sharded_as import not_sharded
from executor.torch_internals.random import default_generators, random_ops_run_in
from planner.errors import PlanTypeError
from planner.model_rewrites.random_branches import python_numbers

_SEEDS = 2**63
"""Seeds are at least 0 and less than this number."""


class RandomState:
    """The stream of random numbers of one sharded module on one mesh."""

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        """Start the stream at ``seed``, which all ranks of ``mesh`` pass alike."""
        index = torch.cuda.current_device() if mesh.device_type == "cuda" else 0
        self._device = torch.device(mesh.device_type, index)
        self._mesh_shape = tuple(mesh.shape)
        self._coordinate = tuple(mesh.get_coordinate() or (0,) * len(self._mesh_shape))
        self._states: list[torch.Tensor] = []
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Start the stream again at ``seed``."""
        generators = default_generators(self._device)
        self._states = [torch.Generator(g.device).manual_seed(seed % _SEEDS).get_state() for g in generators]

    def get(self) -> torch.Tensor:
        """Return the state of the stream, as bytes on the CPU."""
        return torch.cat(self._states)

    def set(self, state: torch.Tensor) -> None:
        """Continue the stream from ``state``, which ``get`` returned.

        Raises:
            PlanTypeError: ``state`` is of another size, so that it comes from another kind of device.
        """
        sizes = [part.numel() for part in self._states]
        if state.dtype != torch.uint8 or state.numel() != sum(sizes):
            raise PlanTypeError(
                f"The random state has {state.numel()} elements of {state.dtype}, not {sum(sizes)} bytes.",
                field="state",
                key="",
                what_to_do="Pass what random_state(module) returned on the same type of device.",
            )
        self._states = [part.clone() for part in state.cpu().split(sizes)]

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Return a context for a forward, in which the default generators are the stream."""
        generators = default_generators(self._device)
        before = [generator.get_state() for generator in generators]
        for generator, state in zip(generators, self._states, strict=True):
            generator.set_state(state)
        try:
            with python_numbers(drawn_seed()) as has_drawn:
                yield
                if has_drawn():
                    _drawn_from(torch.default_generator)  # so that the next forward has other numbers
        finally:
            self._states = [generator.get_state() for generator in generators]
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)

    @contextmanager
    def ops(self) -> Iterator[None]:
        """Return a context for a forward or a recomputation, in which random ops on DTensors run on shards."""
        with random_ops_run_in(self._shard):
            yield

    @contextmanager
    def _shard(self, layout: Sequence[Placement], generator: torch.Generator | None) -> Iterator[None]:
        source = torch.default_generator if generator is None else generator
        seed = _mixed(_drawn_from(source), self._shard_index(layout))
        generators = default_generators(self._device)
        before = [item.get_state() for item in generators]
        for item in generators:
            item.manual_seed(seed)
        try:
            yield
        finally:
            for item, state in zip(generators, before, strict=True):
                item.set_state(state)

    def _shard_index(self, layout: Sequence[Placement]) -> int:
        """Return the index of this rank's shard among all different shards of a tensor in ``layout``."""
        index = 0
        for axis, placement in enumerate(layout):
            if not (placement.is_replicate() or placement.is_partial()):
                index = index * self._mesh_shape[axis] + self._coordinate[axis]
        return index


def _drawn_from(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator).item())


def _mixed(seed: int, index: int) -> int:
    """Return a seed of the ``index``-th shard, by the mixing function of SplitMix64 (Steele et al., OOPSLA 2014)."""
    mask = 2**64 - 1
    value = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) % _SEEDS


def drawn_seed() -> int:
    """Return a seed that follows from this process's default generator, which does not advance."""
    with torch.random.fork_rng(devices=()):
        return int(torch.randint(_SEEDS - 1, (), dtype=torch.int64, device="cpu").item())


_of_module: PerModule[RandomState] = PerModule("random state")


def attach_random_state(module: nn.Module, state: RandomState) -> None:
    """Make ``state`` the one that the functions below find for ``module``."""
    _of_module[module] = state


def seed_random_ops(module: nn.Module, seed: int) -> None:
    """Start the random numbers of a sharded module at ``seed``: dropout masks, noise and all others of its forward.

    All ranks pass the same seed. ``torch.manual_seed`` has no effect on a module that is sharded already.

    Args:
        module: a module that ``shard_module`` returned.
        seed: any integer.

    Raises:
        PlanMismatchError: ``module`` was not sharded.
    """
    _find(module).seed(seed)


def random_state(module: nn.Module) -> torch.Tensor:
    """Return the state of a sharded module's random numbers, equal on all ranks, for a checkpoint: uint8 [bytes].

    Raises:
        PlanMismatchError: ``module`` was not sharded.
    """
    return _find(module).get()


def set_random_state(module: nn.Module, state: torch.Tensor) -> None:
    """Continue the random numbers of a sharded module from ``state``, which ``random_state`` returned: uint8 [bytes].

    Raises:
        PlanMismatchError: ``module`` was not sharded.
        PlanTypeError: ``state`` comes from another kind of device.
    """
    _find(module).set(state)


def _find(module: nn.Module) -> RandomState:
    state = _of_module.get(module)
    if state is None:
        raise not_sharded(module)
    return state
