"""What each op costs before it is split: FLOPs, bytes, and what autograd keeps of it for the backward pass.

The graph is run once, op by op, on meta tensors with autograd on. What autograd packs is what it would save; tensors
that share a storage are one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner.graph.op_graph import Op, OpGraph, Value
from planner.graph.run_op import run_op
from planner.model_rewrites import experts, fused_kernels
from planner.profile.dispatch_peak import NOTHING, Dispatched, OpRun, forward_peak, run_both_ways, run_fused
from planner.profile.flop_count import FlopCount
from planner.profile.op_profile import GraphProfile, OpProfile
from planner.profile.shared_input_linears import shared_inputs
from planner.regions.regions import op_signature
from planner.strategies.own_rules import is_shardable_cross_entropy, own_rules

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
FLASH_BACKWARD_FLOPS = 2.5
"""FLOPs of flash attention's backward per FLOP of its forward: five products against two (FlashAttention-2, 2023)."""

CROSS_ENTROPY_COPIES = {True: 1, False: 3}
"""Float32 copies of the logits that `executor.ops.cross_entropy` has in its backward beside their gradient, by whether
those are in float32 themselves."""

CROSS_ENTROPY_PASSES = 6, 8
"""How often `executor.ops.cross_entropy` reads or writes the logits, forward (largest, differences, exponentials, sums)
and backward (differences, exponentials, ignored rows, product)."""


class _Computed(torch.autograd.Function):
    """Makes a tensor that counts as the result of an op: it needs a gradient and is no leaf."""

    @staticmethod
    def forward(ctx: Any, seed: torch.Tensor, tensor: list[torch.Tensor]) -> torch.Tensor:
        return tensor[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """A tensor that an op makes.

    Attributes:
        like: a tensor of its shape, strides and dtype.
        shares: where among the op's tensors (inputs, then outputs) the first with its storage is.
        stride, offset: in the storage.
        nbytes: of a storage that holds nothing else.
    """

    like: torch.Tensor
    shares: int
    stride: tuple[int, ...]
    offset: int
    nbytes: int

    @classmethod
    def of(cls, like: torch.Tensor, shares: int) -> _Result:
        """Return what is remembered of a tensor that an op made."""
        stride = like.stride()
        reach = 1 + sum((length - 1) * step for length, step in zip(like.shape, stride, strict=True))
        nbytes = reach * like.dtype.itemsize if like.numel() else 0
        return cls(like=like, shares=shares, stride=stride, offset=int(like.storage_offset()), nbytes=nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """An op that has run, for others that are equal but for their names.

    Attributes:
        saved: where among the op's tensors those are whose storages are kept.
    """

    profile: OpProfile
    results: tuple[_Result, ...]
    saved: tuple[int, ...]


class _Walk:
    """Runs the graph on meta tensors and notes what each op does; of equal ops only the first is run.

    The tensors that the others would make are made where an op that does run reads them.
    """

    def __init__(self, graph: OpGraph, flash_attention: bool, cached_before: int | None, compiles: bool) -> None:
        self._graph = graph
        self._flash = flash_attention
        self._compiles = compiles
        self._cached_before = cached_before
        self._made: dict[str, torch.Tensor] = {}
        self._like: dict[str, torch.Tensor] = {}
        self._roots: dict[int, str] = {}
        self._root_of: dict[str, str] = {}
        self._storage_nbytes: dict[str, int] = {}
        self._lie: dict[str, tuple[tuple[int, ...], int]] = {}
        self._seen: dict[Hashable, _Seen] = {}
        self._seed = torch.empty((), device="meta", requires_grad=True)

    def run(self, joins: bool) -> GraphProfile:
        produced = {name for op in self._graph.ops for name in op.outputs}
        for name, value in self._graph.values.items():
            if name not in produced:
                tensor = torch.empty(value.shape, dtype=value.dtype, device="meta")
                self._keep(name, tensor.requires_grad_(value.requires_grad))
        profiles = {op.name: self._profile(op) for op in self._graph.ops}
        for name, shared in shared_inputs(self._graph, joins=joins).items():
            profiles[name] = dataclasses.replace(profiles[name], **shared._asdict())
        return GraphProfile(ops=profiles, root=self._root_of, storage_nbytes=self._storage_nbytes)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self._made[name] = tensor
        self._lie[name] = tensor.stride(), int(tensor.storage_offset())
        self._storage_nbytes[name] = tensor.untyped_storage().nbytes()
        storage = tensor.untyped_storage()._cdata
        self._root_of[name] = self._roots.setdefault(storage, name)

    def _tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the graph; one that an op would have made that was not run is made now."""
        if name not in self._made:
            like, root = self._like[name], self._root_of[name]
            tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
            if root != name:
                storage = self._tensor(root).untyped_storage()
                tensor = tensor.set_(storage, like.storage_offset(), like.shape, like.stride())
            self._roots.setdefault(tensor.untyped_storage()._cdata, root)
            self._made[name] = _Computed.apply(self._seed, [tensor]) if like.requires_grad else tensor  # type: ignore[no-untyped-call]
        return self._made[name]

    def _profile(self, op: Op) -> OpProfile:
        if not isinstance(op.target, torch._ops.OpOverload):
            return self._run(op)
        key = self._key(op)
        if key not in self._seen:
            found = self._run(op)
            seen = self._remembered(op, found)
            if seen is not None:
                self._seen[key] = seen
            return found
        seen = self._seen[key]
        self._keep_results(op, seen)
        if not seen.saved:
            return seen.profile
        tensors = (*op.inputs, *op.outputs)
        saved = tuple(self._root_of[tensors[i]] for i in seen.saved)
        return dataclasses.replace(seen.profile, saved=saved)

    def _key(self, op: Op) -> Hashable:
        """Return what is equal for ops that do the same to tensors that lie in memory alike."""
        roots = [self._root_of[name] for name in op.inputs]
        lie = tuple(
            (self._lie[name], self._storage_nbytes[name], roots.index(root))
            for name, root in zip(op.inputs, roots, strict=True)
        )
        kept = tuple(self._graph.values[root].nbytes for root in roots)
        return op_signature(op, tuple(self._graph.values[name] for name in op.inputs)), lie, kept, len(op.outputs)

    def _remembered(self, op: Op, found: OpProfile) -> _Seen | None:
        """Return what the op did by the place of its tensors; None where it keeps what is none of them."""
        tensors = (*op.inputs, *op.outputs)
        roots = [self._root_of[name] for name in tensors]
        if any(name not in roots for name in found.saved):
            return None
        results = tuple(_Result.of(self._made[name], roots.index(self._root_of[name])) for name in op.outputs)
        return _Seen(profile=found, results=results, saved=tuple(roots.index(name) for name in found.saved))

    def _keep_results(self, op: Op, seen: _Seen) -> None:
        """Note how the tensors that the op would make would lie in memory."""
        tensors = (*op.inputs, *op.outputs)
        for position, (name, result) in enumerate(zip(op.outputs, seen.results, strict=True), len(op.inputs)):
            self._like[name] = result.like
            if result.shares < position:
                root = self._root_of[tensors[result.shares]]
                self._root_of[name], self._storage_nbytes[name] = root, self._storage_nbytes[root]
                self._lie[name] = result.stride, result.offset
            else:
                self._root_of[name], self._storage_nbytes[name] = name, result.nbytes
                self._lie[name] = result.stride, 0

    def _run(self, op: Op) -> OpProfile:
        inputs = [self._graph.values[name] for name in op.inputs]
        outputs = [self._graph.values[name] for name in op.outputs]
        if op.target_name == experts.OP_NAME:
            return self._experts(op, inputs, outputs[0])
        if op.target_name in fused_kernels.NAMES:
            return self._fused(op, inputs, outputs[0])
        saved: list[str] = []
        extra: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata in self._roots:
                saved.append(self._roots[storage._cdata])
            else:
                extra[storage._cdata] = storage.nbytes()
                kept.append(tensor)
            return tensor

        kept: list[torch.Tensor] = []
        given = [self._tensor(name) for name in op.inputs]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), FlopCount() as count:
            result = run_op(op, given)
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if op.target is ATTENTION and self._flash:
            results = [self._as_fused(results[0], given[0])]
        cached = sum(count.products.values()) - sum(
            count.products.get(tensor.untyped_storage()._cdata, 0) for tensor in results
        )
        for name, tensor in zip(op.outputs, results, strict=True):
            self._keep(name, tensor)
            storage = tensor.untyped_storage()._cdata
            if storage in extra:
                del extra[storage]
                saved.append(self._root_of[name])
        if op.target is ATTENTION and self._flash:
            return self._with_cache(op, inputs, self._flash_attention(op, inputs, outputs, count.flops))
        if op.target_name == "aten.cross_entropy_loss.default" and is_shardable_cross_entropy(op, inputs):
            saved, extra = [self._root_of[op.inputs[0]]], {0: 8 * inputs[0].shape[0]}
            run = _own_cross_entropy(inputs[0])
        else:
            run = run_both_ways(op, given)
        if own_rules(op, inputs) is not None:
            crossing = len(inputs) + len(outputs)
            run = OpRun(run.rise, run.forward._replace(ops=crossing), run.backward._replace(ops=crossing))
        is_view = all(
            self._root_of[name] in {self._root_of[source] for source in op.inputs} for name in op.outputs
        ) and "_." not in str(op.target)
        found = self._sum_up(
            op, inputs, outputs, count.flops, tuple(dict.fromkeys(saved)), sum(extra.values()), is_view, cached, run
        )
        found = dataclasses.replace(found, forward_peak_nbytes=forward_peak(op, given)) if cached else found
        return self._with_cache(op, inputs, found) if op.target is ATTENTION else found

    def _sum_up(
        self,
        op: Op,
        inputs: list[Value],
        outputs: list[Value],
        flops: float,
        saved: tuple[str, ...],
        extra: int,
        is_view: bool,
        cached: int,
        run: OpRun,
    ) -> OpProfile:
        # An expanded tensor (a mask for the whole batch, say) is read as often as it is stored.
        read = sum(min(v.nbytes, self._storage_nbytes[v.name]) for v in inputs)
        written = sum(v.nbytes for v in outputs)
        if op.target_name == "aten.embedding.default":
            read = written + inputs[1].nbytes
        differentiable = [v for v in inputs if v.requires_grad]
        backward = bool(differentiable) and any(v.requires_grad for v in outputs)
        gradient_bytes = sum(v.nbytes for v in differentiable)
        saved_bytes = sum(self._graph.values[name].nbytes for name in saved)
        moves = flops > 0 or run.backward.nbytes > 0
        # The gradients of several views of a tensor are put side by side in one of their own.
        beside = 2 * gradient_bytes if is_view and len(outputs) > 1 and backward else 0
        # Each product's backward is one product per differentiable factor; attention is two products of two each.
        factors = inputs[:2] if op.target is ATTENTION else inputs
        products = len([v for v in factors if v.requires_grad and len(v.shape) > 1])
        return OpProfile(
            flops=flops,
            backward_flops=flops * products if backward else 0.0,
            nbytes=0 if is_view else read + written,
            # The gradient of a sum is that of each addend: nothing runs.
            backward_nbytes=written + saved_bytes + gradient_bytes if backward and not is_view and moves else beside,
            saved=saved if backward else (),
            saved_extra_nbytes=extra if backward else 0,
            cached_extra_nbytes=cached,
            forward_peak_nbytes=0,
            backward_extra_nbytes=run.rise if backward else 0,
            forward_dispatched=run.forward,
            backward_dispatched=run.backward if backward else NOTHING,
        )

    def _as_fused(self, result: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Return a result of attention as a fused kernel makes it: its dims lie in memory as the query's do."""
        order = sorted(range(query.dim()), key=query.stride, reverse=True)
        places = [order.index(dim) for dim in range(query.dim())]
        made = torch.empty([result.shape[dim] for dim in order], dtype=result.dtype, device="meta").permute(places)
        return _Computed.apply(self._seed, [made]) if result.requires_grad else made  # type: ignore[no-untyped-call]

    def _flash_attention(self, op: Op, inputs: list[Value], outputs: list[Value], flops: float) -> OpProfile:
        """Return the profile of a fused kernel: it keeps its inputs, its output and one float32 per row of scores."""
        batch, heads, length, width = inputs[0].shape
        keys = inputs[1].shape[2]
        flops = 4.0 * batch * heads * length * keys * width
        moved = sum(min(v.nbytes, self._storage_nbytes[v.name]) for v in inputs) + sum(v.nbytes for v in outputs)
        saved = tuple(dict.fromkeys(self._root_of[name] for name in (*op.inputs, *op.outputs)))
        return OpProfile(
            flops=flops,
            backward_flops=FLASH_BACKWARD_FLOPS * flops,
            nbytes=moved,
            backward_nbytes=2 * moved,
            saved=saved,
            saved_extra_nbytes=4 * math.prod((batch, heads, length)),
            cached_extra_nbytes=0,
            forward_peak_nbytes=0,
            backward_extra_nbytes=0,
        )

    def _with_cache(self, op: Op, inputs: list[Value], found: OpProfile) -> OpProfile:
        """Return the profile of attention whose keys and values are in a cache, behind those of earlier steps."""
        if self._cached_before is None:
            return found
        new = inputs[1].shape[2]
        tokens = self._cached_before + new
        earlier = sum(value.nbytes for value in inputs[1:3]) // new * self._cached_before
        return dataclasses.replace(
            found, flops=found.flops / new * tokens, nbytes=found.nbytes + earlier, cached_tokens=tokens
        )

    def _keep_new(self, name: str, output: Value, like: torch.Tensor | None = None) -> None:
        """Note the result of an op that is not run; it lies in memory as ``like`` does."""
        result = torch.empty(output.shape, dtype=output.dtype, device="meta")
        result = result if like is None else torch.empty_like(like, dtype=output.dtype)
        self._keep(name, _Computed.apply(self._seed, [result]) if output.requires_grad else result)  # type: ignore[no-untyped-call]

    def _fused(self, op: Op, inputs: list[Value], output: Value) -> OpProfile:
        """Return the profile of one of `fused_kernels`: one kernel each way, or its formulas step by step."""
        # An expanded tensor is read as often as it is stored.
        given = [(value.shape, min(value.nbytes, self._storage_nbytes[value.name])) for value in inputs]
        work = fused_kernels.fused_work(op.target_name, given, output.nbytes)
        if self._compiles:
            run = OpRun(0, Dispatched(1, work.forward_nbytes), Dispatched(1, work.backward_nbytes))
        else:
            run = run_fused(op, [self._tensor(name) for name in op.inputs])
        lies_alike = op.target_name in (fused_kernels.GATED, fused_kernels.ROTARY)
        self._keep_new(op.outputs[0], output, self._tensor(op.inputs[0]) if lies_alike else None)
        backward = output.requires_grad
        crossing = len(inputs) + 1
        return OpProfile(
            flops=0.0,
            backward_flops=0.0,
            nbytes=work.forward_nbytes,
            backward_nbytes=work.backward_nbytes if backward else 0,
            saved=tuple(dict.fromkeys(self._root_of[op.inputs[i]] for i in work.saved)) if backward else (),
            saved_extra_nbytes=work.saved_extra_nbytes if backward else 0,
            cached_extra_nbytes=0,
            forward_peak_nbytes=0,
            backward_extra_nbytes=run.rise if backward else 0,
            forward_dispatched=run.forward._replace(ops=crossing),
            backward_dispatched=run.backward._replace(ops=crossing) if backward else NOTHING,
        )

    def _experts(self, op: Op, inputs: list[Value], output: Value) -> OpProfile:
        """Return the profile of `planner.model_rewrites.experts`' op, with its experts equally busy."""
        work = experts.ExpertsWork.from_shapes(
            [value.shape for value in inputs], inputs[4].shape[0], output.dtype.itemsize
        )
        self._keep_new(op.outputs[0], output)
        backward = output.requires_grad
        needed = [inputs[position].requires_grad for position in (0, 3, 4)]
        saved = tuple(dict.fromkeys(self._root_of[op.inputs[position]] for position in (0, 2, 3, 4)))
        crossing = len(inputs) + 1
        return OpProfile(
            flops=work.flops,
            backward_flops=work.backward_flops(*needed) if backward else 0.0,
            nbytes=work.forward_nbytes + work.weight_nbytes,
            backward_nbytes=work.backward_nbytes + 2 * work.weight_nbytes if backward else 0,
            saved=saved if backward else (),
            saved_extra_nbytes=work.saved_nbytes if backward else 0,
            cached_extra_nbytes=work.gemm_output_nbytes,
            forward_peak_nbytes=work.forward_peak_nbytes,
            backward_extra_nbytes=work.backward_rise_nbytes if backward else 0,
            forward_dispatched=Dispatched(crossing, work.forward_nbytes),
            backward_dispatched=Dispatched(crossing, work.backward_nbytes) if backward else NOTHING,
        )


def _own_cross_entropy(logits: Value) -> OpRun:
    """Return what is seen of our own cross entropy."""
    nbytes = 4 * math.prod(logits.shape)  # in float32
    forward, backward = (Dispatched(0, passes * nbytes) for passes in CROSS_ENTROPY_PASSES)
    return OpRun(CROSS_ENTROPY_COPIES[logits.dtype == torch.float32] * nbytes, forward, backward)


def profile(
    graph: OpGraph,
    *,
    flash_attention: bool,
    cached_before: int | None = None,
    compiles: bool = True,
    joins: bool = False,
) -> GraphProfile:
    """Return what every op of ``graph`` costs on one device, unsplit.

    Args:
        graph: the traced model.
        flash_attention: whether attention runs in a fused kernel; otherwise its scores are kept.
        cached_before: tokens of each sequence that are in a key-value cache before the step; None: there is no cache.
        compiles: whether fused ops are one kernel each way; otherwise they run step by step.
        joins: whether linear layers that read the same tensor add up its gradient in their products.
    """
    with torch.enable_grad():
        return _Walk(graph, flash_attention, cached_before, compiles).run(joins)
