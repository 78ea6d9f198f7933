"""Attention whose sequence is split on one axis: context parallelism by gathering keys and values.

Queries, keys, values and the result [batch, heads, sequence, width] are this rank's rows. Keys and values of all ranks
are gathered for the kernel, in the backward again, and their gradients scattered as sums. Under a causal mask ranks
exchange halves of their queries (`_Halves`), so that all do the same work; `planner.strategies.context_parallel` says
how, and prices it. Where sequences are in an even order already, nothing is exchanged, and gathered keys are put in
their own order.

Each part of the keys that a part of the queries sees is one call of the kernel. The results of two parts are put
together by the logarithms of their sums of exponentials, and the kernel's backward, given the joint result and
logarithm, finds each part's share of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard

from cost_model.layout import Layout
from executor import torch_internals
from executor.attention_kernels import attend, attend_backward
from executor.redistribute import Redistributor, contiguous_stride, stride_as
from executor.torch_internals import local_of, make_dtensor, run_function, waited
from planner.even_order import even_halves, half_range

SEQUENCE = Shard(2)


def context_parallel_attention(
    redistributor: Redistributor,
    axis: int,
    inputs: list[DTensor],
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    *,
    is_even: bool = False,
) -> DTensor:
    """Return attention in the layout of ``inputs``: query, key, value, in one layout.

    Args:
        axis: of the mesh, the one on which the sequence is split.
        mask: this rank's rows and all keys; None where it is ``is_causal`` or there is none.
        is_even: whether sequences are in an even order already, keys as well; without a mask.
    """
    scale = inputs[0].shape[3] ** -0.5 if scale is None else scale
    found: DTensor = run_function(_ContextParallel, *inputs, mask, redistributor, axis, is_causal, scale, is_even)
    return found


class _Halves(NamedTuple):
    """The halves of a sequence on the ranks of an axis, and their exchange.

    Of 2n halves, rank r holds 2r and 2r + 1, and works on r and 2n - 1 - r: one first and one second half, as both are
    never even. Where a rank has an odd number of rows, its first half has one fewer.

    Attributes:
        is_even: whether ranks hold those that they work on.
    """

    group: Any
    ranks: int
    rank: int
    rows: int
    is_even: bool

    def range(self, half: int) -> range:
        """Return the rows of a half, in the whole sequence."""
        return half_range(half, self.rows)

    def length(self, half: int) -> int:
        """Return the rows of a half."""
        return len(self.range(half))

    @property
    def own(self) -> tuple[int, int]:
        """The halves that this rank holds when nothing is exchanged."""
        return 2 * self.rank, 2 * self.rank + 1

    @property
    def even(self) -> tuple[int, int]:
        """The halves that make work even."""
        return even_halves(self.rank, self.ranks)

    def _worker(self, half: int) -> int:
        return min(half, 2 * self.ranks - 1 - half)

    def to_even(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows ``[batch, heads, rows, width]`` of the even halves, one after the other."""
        if self.is_even:
            return tensor
        return self._exchange(tensor, self.own, self.even, self._worker, lambda half: half // 2)

    def to_own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Undo ``to_even``."""
        if self.is_even:
            return tensor
        return self._exchange(tensor, self.even, self.own, lambda half: half // 2, self._worker)

    def gathered(self, local: torch.Tensor) -> torch.Tensor:
        """Return all ranks' keys or values ``[batch, heads, rows, width]``, in their own order."""
        if not self.is_even:
            return _gathered(local, self.group)
        by_rank = torch_internals.all_gather(local, 0, self.group).split(local.shape[0])
        pieces: dict[int, torch.Tensor] = {}
        for rank, rows in enumerate(by_rank):
            halves = even_halves(rank, self.ranks)
            pieces |= zip(halves, rows.split([self.length(half) for half in halves], 2), strict=True)
        return torch.cat([pieces[half] for half in sorted(pieces)], 2)

    def scattered(self, addend: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the sum over ranks of ``addend``, as `gathered` is."""
        if not self.is_even:
            return _scattered(addend, self.rows, self.group)
        held = (self.range(half) for rank in range(self.ranks) for half in even_halves(rank, self.ranks))
        halves = [addend[:, :, rows.start : rows.stop] for rows in held]
        pieces = torch.cat([torch.cat(halves[i : i + 2], 2) for i in range(0, len(halves), 2)])
        return waited(torch_internals.reduce_scatter(pieces, 0, "sum", self.group))

    def _exchange(
        self,
        tensor: torch.Tensor,
        held: tuple[int, int],
        wanted: tuple[int, int],
        target: Callable[[int], int],
        source: Callable[[int], int],
    ) -> torch.Tensor:
        pieces = dict(zip(held, tensor.movedim(2, 0).split([self.length(half) for half in held]), strict=True))
        sending, arriving = sorted(held, key=lambda h: (target(h), h)), sorted(wanted, key=lambda h: (source(h), h))
        out, into = [0] * self.ranks, [0] * self.ranks
        for half in sending:
            out[target(half)] += self.length(half)
        for half in arriving:
            into[source(half)] += self.length(half)
        sent = torch.cat([pieces[half] for half in sending])
        arrived = torch_internals.all_to_all(sent, self.group, into, out)
        got = dict(zip(arriving, arrived.split([self.length(half) for half in arriving]), strict=True))
        # Heads lie next to each other, as the module around wants them.
        return torch.cat([got[half].transpose(0, 1) for half in wanted], 1).transpose(1, 2)


class _Part(NamedTuple):
    """A call of the kernel: a slice of this rank's queries, a slice of all keys."""

    queries: slice
    keys: slice
    causal: bool


def _parts(halves: _Halves | None, queries: int, keys: int) -> list[list[_Part]]:
    """Return the parts of each piece of this rank's queries."""
    if halves is None:
        return [[_Part(slice(0, queries), slice(0, keys), causal=False)]]
    found = []
    first = 0
    for half in halves.even:
        held = halves.range(half)
        rows = slice(first, first + len(held))
        before = [_Part(rows, slice(0, held.start), causal=False)] if held.start else []
        if held:
            found.append([*before, _Part(rows, slice(held.start, held.stop), causal=True)])
        first += len(held)
    return found


class _ContextParallel(torch.autograd.Function):
    """Saves this rank's rows alone."""

    @staticmethod
    def forward(
        ctx: Any,
        query: DTensor,
        key: DTensor,
        value: DTensor,
        mask: torch.Tensor | None,
        redistributor: Redistributor,
        axis: int,
        is_causal: bool,
        scale: float,
        is_even: bool,
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        layout = tuple(query.placements)
        group, ranks = redistributor.device_mesh.get_group(axis), redistributor.axis_size(axis)
        q, k, v = (local_of(tensor) for tensor in (query, key, value))
        halves = _Halves(group, ranks, redistributor.coordinate(axis), q.shape[2], is_even) if is_causal else None
        q = q if halves is None else halves.to_even(q)
        ctx.redistributor, ctx.group, ctx.layout, ctx.scale = redistributor, group, layout, scale
        ctx.shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        ctx.halves, ctx.parts = halves, _parts(halves, q.shape[2], k.shape[2] * ranks)
        keys, values = (_all_rows(tensor, group, halves) for tensor in (k, v))
        result, sums = _forward(q, keys, values, mask, ctx.parts, scale)
        del keys, values
        ctx.save_for_backward(q, k, v, mask, result, sums)
        own = result if halves is None else halves.to_own(result)
        shape = (*query.shape[:3], value.shape[3])
        return make_dtensor(own, redistributor.device_mesh, layout, shape, stride_as(own, shape, query))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 9
        redistributor: Redistributor = ctx.redistributor
        arrived = redistributor.to_layout(redistributor.as_dtensor(gradient), ctx.layout)
        halves: _Halves | None = ctx.halves
        of_result = local_of(arrived)
        of_result = of_result if halves is None else halves.to_even(of_result)
        q, k, v, mask, result, sums = ctx.saved_tensors
        keys, values = (_all_rows(tensor, ctx.group, halves) for tensor in (k, v))
        of_q, of_k, of_v = _backward(of_result, q, keys, values, mask, result, sums, ctx.parts, ctx.scale)
        del keys, values
        of_q = of_q if halves is None else halves.to_own(of_q)
        of_k, of_v = (_own_rows(tensor, k.shape[2], ctx.group, halves) for tensor in (of_k, of_v))
        made = [
            _made(local.contiguous(), redistributor, ctx.layout, shape)
            for local, shape in zip((of_q, of_k, of_v), ctx.shapes, strict=True)
        ]
        return *made, None, None, None, None, None, None


def _all_rows(local: torch.Tensor, group: Any, halves: _Halves | None) -> torch.Tensor:
    """Return all ranks' keys or values [batch, heads, all rows, width], in their own order."""
    return _gathered(local, group) if halves is None else halves.gathered(local)


def _own_rows(addend: torch.Tensor, rows: int, group: Any, halves: _Halves | None) -> torch.Tensor:
    """Return this rank's ``rows`` of the sum over ranks of ``addend`` [batch, heads, all rows, width]."""
    return _scattered(addend, rows, group) if halves is None else halves.scattered(addend)


def _gathered(local: torch.Tensor, group: Any) -> torch.Tensor:
    return torch_internals.all_gather(local, 2, group)


def _scattered(addend: torch.Tensor, rows: int, group: Any) -> torch.Tensor:
    """Return this rank's ``rows`` of the sum over ranks of ``addend`` [batch, heads, all rows, width]."""
    pieces = torch.cat(addend.split(rows, 2))
    return waited(torch_internals.reduce_scatter(pieces, 0, "sum", group))


def _made(local: torch.Tensor, redistributor: Redistributor, layout: Layout, shape: tuple[int, ...]) -> DTensor:
    return make_dtensor(local, redistributor.device_mesh, layout, shape, contiguous_stride(shape))


def _forward(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    pieces: list[list[_Part]],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result [batch, heads, rows, width] and the logarithms of sums [batch, heads, rows], float32."""
    found = []
    for parts in pieces:
        joint: tuple[torch.Tensor, torch.Tensor] | None = None
        for part in parts:
            k, v = keys[:, :, part.keys], values[:, :, part.keys]
            one = attend(q[:, :, part.queries], k, v, mask, part.causal, scale)
            joint = one if joint is None else _joined(*joint, *one)
        assert joint is not None
        found.append(joint)
    if len(found) == 1:
        return found[0]
    return torch.cat([result for result, _ in found], 2), torch.cat([sums for _, sums in found], 2)


def _joined(
    first: torch.Tensor, first_sums: torch.Tensor, second: torch.Tensor, second_sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over two parts of the keys, given each part's result and logarithm of its sum."""
    share = torch.sigmoid(second_sums - first_sums).unsqueeze(-1).to(first.dtype)
    return torch.lerp(first, second, share), torch.logaddexp(first_sums, second_sums)


def _backward(
    of_result: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    result: torch.Tensor,
    sums: torch.Tensor,
    pieces: list[list[_Part]],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's queries, and its addends to those of all keys and values."""
    parts = [part for piece in pieces for part in piece]
    if len(parts) == 1:
        return attend_backward(of_result, q, keys, values, mask, result, sums, parts[0].causal, scale)
    of_q, of_keys, of_values = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    for part in parts:
        by_row = [tensor[:, :, part.queries] for tensor in (of_result, q, result, sums)]
        k, v = keys[:, :, part.keys], values[:, :, part.keys]
        found = attend_backward(by_row[0], by_row[1], k, v, mask, by_row[2], by_row[3], part.causal, scale)
        of_q[:, :, part.queries] += found[0]
        of_keys[:, :, part.keys] += found[1]
        of_values[:, :, part.keys] += found[2]
    return of_q, of_keys, of_values
