"""The tensors of a graph on the meta device, and which of them share a storage."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner.graph.op_graph import Op, OpGraph, Value


class _NonLeaf(torch.autograd.Function):
    """Returns a tensor that autograd treats as the result of an op: it needs a gradient and is no leaf."""

    @staticmethod
    def forward(ctx: Any, seed: torch.Tensor, tensor: list[torch.Tensor]) -> torch.Tensor:
        return tensor[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLayout:
    """How a result of an op lies in memory.

    Attributes:
        like: a tensor of its shape, strides and dtype.
        shares: index, among the op's tensors (inputs, then outputs), of the first one with the same storage.
        stride, offset: position in the storage, in elements.
        nbytes: bytes of the storage if the result has one of its own.
    """

    like: torch.Tensor
    shares: int
    stride: tuple[int, ...]
    offset: int
    nbytes: int

    @classmethod
    def of(cls, like: torch.Tensor, shares: int) -> ResultLayout:
        """Return how ``like``, a result of an op that has run, lies in memory."""
        stride = like.stride()
        reach = 1 + sum((length - 1) * step for length, step in zip(like.shape, stride, strict=True))
        nbytes = reach * like.dtype.itemsize if like.numel() else 0
        return cls(like=like, shares=shares, stride=stride, offset=int(like.storage_offset()), nbytes=nbytes)


class MetaTensors:
    """Tensors of a graph by value name, on the meta device.

    An op that equals an earlier op is not run. Its results are created only if an op that runs reads them.

    Attributes:
        root: value -> the first value with the same storage.
        storage_nbytes: value -> bytes of its storage.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.root: dict[str, str] = {}
        self.storage_nbytes: dict[str, int] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._like: dict[str, torch.Tensor] = {}
        self._roots: dict[int, str] = {}
        self._position: dict[str, tuple[tuple[int, ...], int]] = {}
        self._seed = torch.empty((), device="meta", requires_grad=True)
        produced = {name for op in graph.ops for name in op.outputs}
        for name, value in graph.values.items():
            if name not in produced:
                tensor = torch.empty(value.shape, dtype=value.dtype, device="meta")
                self.add(name, tensor.requires_grad_(value.requires_grad))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Make ``tensor`` the value ``name``."""
        self._tensors[name] = tensor
        self._position[name] = tensor.stride(), int(tensor.storage_offset())
        self.storage_nbytes[name] = tensor.untyped_storage().nbytes()
        storage = tensor.untyped_storage()._cdata
        self.root[name] = self._roots.setdefault(storage, name)

    def add_result(self, name: str, output: Value, like: torch.Tensor | None = None) -> None:
        """Make a new tensor, with the strides of ``like``, the value ``name``: the result of an op that is not run."""
        result = torch.empty(output.shape, dtype=output.dtype, device="meta")
        result = result if like is None else torch.empty_like(like, dtype=output.dtype)
        self.add(name, self.non_leaf(result) if output.requires_grad else result)

    def add_uncounted(self, name: str, output: Value, root: str) -> None:
        """Make a new tensor the value ``name``. Its bytes count as part of ``root``, so that only those are live."""
        tensor = torch.empty(output.shape, dtype=output.dtype, device="meta")
        self._roots[tensor.untyped_storage()._cdata] = self.root[root]
        self.add(name, tensor)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of value ``name``; the result of an op that was not run is created now."""
        if name not in self._tensors:
            like, root = self._like[name], self.root[name]
            tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
            if root != name:
                storage = self.tensor(root).untyped_storage()
                tensor = tensor.set_(storage, like.storage_offset(), like.shape, like.stride())
            self._roots.setdefault(tensor.untyped_storage()._cdata, root)
            self._tensors[name] = self.non_leaf(tensor) if like.requires_grad else tensor
        return self._tensors[name]

    def non_leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` as autograd sees the result of an op."""
        result: torch.Tensor = _NonLeaf.apply(self._seed, [tensor])  # type: ignore[no-untyped-call]
        return result

    def root_of_storage(self, storage: torch.UntypedStorage) -> str | None:
        """Return the first value that lies in ``storage``; None where no value does."""
        return self._roots.get(storage._cdata)

    def memory_key(self, names: Sequence[str]) -> Hashable:
        """Return a key that is equal for tensors with equal strides, offsets, storage sizes and sharing of storages."""
        roots = [self.root[name] for name in names]
        return tuple(
            (self._position[name], self.storage_nbytes[name], roots.index(root))
            for name, root in zip(names, roots, strict=True)
        )

    def result_layouts(self, op: Op) -> tuple[ResultLayout, ...]:
        """Return how the results of ``op``, which has run, lie in memory."""
        roots = [self.root[name] for name in (*op.inputs, *op.outputs)]
        return tuple(ResultLayout.of(self._tensors[name], roots.index(self.root[name])) for name in op.outputs)

    def add_layouts(self, op: Op, results: Sequence[ResultLayout]) -> None:
        """Note how the results of ``op``, which is not run, would lie in memory."""
        names = (*op.inputs, *op.outputs)
        for position, (name, result) in enumerate(zip(op.outputs, results, strict=True), len(op.inputs)):
            self._like[name] = result.like
            if result.shares < position:
                root = self.root[names[result.shares]]
                self.root[name], self.storage_nbytes[name] = root, self.storage_nbytes[root]
                self._position[name] = result.stride, result.offset
            else:
                self.root[name], self.storage_nbytes[name] = name, result.nbytes
                self._position[name] = result.stride, 0
