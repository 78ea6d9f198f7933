"""`profile_graph`: what each op costs on one device, unsplit: FLOPs, bytes moved, tensors saved for backward.

The graph runs once, op by op, on meta tensors under autograd. Saved-tensor hooks see what autograd saves. Tensors that
share a storage count once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from planner.counting.flop_count import FlopCount
from planner.counting.live_bytes import NOTHING
from planner.errors import ModelError
from planner.graph.capture import masks_select_all
from planner.graph.layer_caches import decoding_step
from planner.graph.op_graph import ATTENTION, Op, OpGraph, Value
from planner.graph.run_op import run_op
from planner.model_rewrites import fused_kernels, opaque_op
from planner.model_rewrites.experts import experts_op
from planner.model_rewrites.tree_paths import tensors_in
from planner.profile.dispatch_peak import OpRun, forward_peak, run_both_ways
from planner.profile.meta_tensors import MetaTensors, ResultLayout
from planner.profile.op_formulas import (
    cached_state_profile,
    cross_entropy_run,
    experts_profile,
    flash_attention_profile,
    flash_result,
    fused_op_profile,
    opaque_profile,
    with_kv_cache,
)
from planner.profile.op_profile import GraphProfile, OpProfile
from planner.profile.shared_input_linears import gradient_sums
from planner.regions.regions import op_signature
from planner.strategies.own_rules import is_shardable_cross_entropy, own_rules

_T = TypeVar("_T")

_REPEATS = frozenset(
    f"aten.{name}"
    for name in (
        "alias.default", "clone.default", "contiguous.default", "expand.default", "repeat_interleave.self_int",
        "reshape.default", "unsqueeze.default", "view.default", "_unsafe_view.default",
    )
)  # fmt: skip
"""Ops that repeat heads of keys and values, each of which gives all elements of its input."""


def profile_graph(
    graph: OpGraph,
    *,
    flash_attention: bool,
    cached_before: int | None = None,
    compiles: bool = True,
    shared_input_linears: bool = False,
) -> GraphProfile:
    """Return what every op of ``graph`` costs on one device, unsplit.

    Args:
        graph: the traced model.
        flash_attention: whether attention runs in a fused kernel; otherwise its scores are saved for backward.
        cached_before: tokens of each sequence that are in a key-value cache before the step; None: there is no cache.
        compiles: whether fused ops run as one kernel each way; otherwise their formulas run step by step.
        shared_input_linears: whether linear layers that read the same tensor accumulate its gradient in their GEMMs.
    """
    with torch.enable_grad(), masks_select_all():
        profiler = _Profiler(graph, flash_attention, cached_before, compiles)
        profiles = {op.name: profiler.profile(op) for op in graph.ops}
    for name, sums in gradient_sums(graph, shared_input_linears=shared_input_linears).items():
        profiles[name] = dataclasses.replace(profiles[name], **sums._asdict())
    return GraphProfile(ops=profiles, root=profiler.tensors.root, storage_nbytes=profiler.tensors.storage_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProfiledOp:
    """The profile of an op that has run, for all ops that equal it but for the names of their tensors.

    Attributes:
        saved: indices, among the op's tensors (inputs, then outputs), of those that are saved for backward.
    """

    profile: OpProfile
    results: tuple[ResultLayout, ...]
    saved: tuple[int, ...]


@dataclass(slots=True)
class _Saved:
    """What autograd saves while an op runs: tensors of the graph, and bytes of tensors that exist only in the op."""

    values: list[str] = dataclasses.field(default_factory=list)
    extra_nbytes: dict[int, int] = dataclasses.field(default_factory=dict)
    """Storage -> its bytes."""
    _alive: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """Holds the tensors, so that no other storage gets their address."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Return a context in which the tensors that autograd saves are noted."""

        # Autograd keeps hooks and what they return, out of the garbage collector's sight. Neither may lead to the
        # graph, or it is never freed.
        noted: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            noted.append(tensor.detach())
            return noted[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self._alive += noted
        noted.clear()

    def find(self, tensors: MetaTensors) -> None:
        """Tell the tensors of the graph among those that were noted from the others."""
        for tensor in self._alive:
            storage = tensor.untyped_storage()
            root = tensors.root_of_storage(storage)
            if root is not None:
                self.values.append(root)
            else:
                self.extra_nbytes[storage._cdata] = storage.nbytes()

    def claim(self, storage: torch.UntypedStorage, root: str) -> None:
        """Count ``storage``, which holds a result, as a tensor of the graph if autograd saves it."""
        if self.extra_nbytes.pop(storage._cdata, None) is not None:
            self.values.append(root)


class _Profiler:
    """Runs ops on meta tensors and profiles them; of equal ops only the first one runs."""

    def __init__(self, graph: OpGraph, flash_attention: bool, cached_before: int | None, compiles: bool) -> None:
        self._graph = graph
        self._flash = flash_attention
        self._compiles = compiles
        self._cached_before = cached_before
        self.tensors = MetaTensors(graph)
        self._profiled: dict[Hashable, _ProfiledOp] = {}
        self._producers = {name: op for op in graph.ops for name in op.outputs}

    def profile(self, op: Op) -> OpProfile:
        """Return the profile of ``op``; ops have to come in the graph's order."""
        if not isinstance(op.target, torch._ops.OpOverload):
            return self._run(op)
        if op.target is ATTENTION and self._cached_before is not None:
            return self._run(op)  # its profile depends on the op that makes its keys
        key = self._key(op)
        if key not in self._profiled:
            profile = self._run(op)
            profiled = self._by_position(op, profile)
            if profiled is not None:
                self._profiled[key] = profiled
            return profile
        profiled = self._profiled[key]
        self.tensors.add_layouts(op, profiled.results)
        if not profiled.saved:
            return profiled.profile
        names = (*op.inputs, *op.outputs)
        saved = tuple(self.tensors.root[names[i]] for i in profiled.saved)
        return dataclasses.replace(profiled.profile, saved=saved)

    def _key(self, op: Op) -> Hashable:
        """Return a key that is equal for ops that do the same to tensors that lie in memory in the same way."""
        signature = op_signature(op, tuple(self._graph.values[name] for name in op.inputs))
        root_nbytes = tuple(self._graph.values[self.tensors.root[name]].nbytes for name in op.inputs)
        has_backward = tuple(self._graph.values[name].requires_grad for name in op.outputs)
        return signature, self.tensors.memory_key(op.inputs), root_nbytes, has_backward

    def _by_position(self, op: Op, profile: OpProfile) -> _ProfiledOp | None:
        """Return the profile with tensors by position; None if autograd saves a tensor that is no input or output."""
        roots = [self.tensors.root[name] for name in (*op.inputs, *op.outputs)]
        if any(name not in roots for name in profile.saved):
            return None
        saved = tuple(roots.index(name) for name in profile.saved)
        return _ProfiledOp(profile=profile, results=self.tensors.result_layouts(op), saved=saved)

    def _run(self, op: Op) -> OpProfile:
        inputs = [self._graph.values[name] for name in op.inputs]
        outputs = [self._graph.values[name] for name in op.outputs]
        if op.target_name == experts_op.OP_NAME:
            return experts_profile(op, inputs, outputs[0], self.tensors)
        if op.target_name == opaque_op.OP_NAME:
            return opaque_profile(op, inputs, outputs, self.tensors)
        if op.target_name in fused_kernels.NAMES:
            return fused_op_profile(op, inputs, outputs[0], self.tensors, self._compiles)
        if op.target_name == decoding_step.OP_NAME:
            return cached_state_profile(op, outputs[0], self.tensors)
        saved, args = _Saved(), [self.tensors.tensor(name) for name in op.inputs]
        with saved.noting(), FlopCount() as count:
            op_result = self._ran(op, run_op, args)
        saved.find(self.tensors)
        results = tensors_in(op_result)
        # torch runs attention of tensors of other than four dims without a fused kernel.
        is_flash = op.target is ATTENTION and self._flash and len(inputs[0].shape) == 4
        if is_flash:
            results = [flash_result(self.tensors, results[0], args[0])]
        inner_nbytes = count.inner_nbytes(results)
        for name, tensor in zip(op.outputs, results, strict=True):
            self.tensors.add(name, tensor)
            saved.claim(tensor.untyped_storage(), self.tensors.root[name])
        if is_flash:
            profile = flash_attention_profile(op, inputs, outputs, self.tensors)
        else:
            profile = self._profile_of_run(op, inputs, outputs, args, saved, count.flops, inner_nbytes)
        if op.target is ATTENTION and self._cached_before is not None:
            return with_kv_cache(profile, inputs, self._cached_before, op.cache, self._kv_heads(op))
        return profile

    def _ran(self, op: Op, run: Callable[[Op, list[torch.Tensor]], _T], args: Sequence[torch.Tensor]) -> _T:
        try:
            return run(op, list(args))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # a trace does not check all arguments
            fqn = self._graph.calls[op.call].fqn
            raise ModelError(
                f"{op.target_name} in {fqn or 'the model itself'} does not run: {str(error).splitlines()[0]}.",
                what_to_do="Correct what the module gives it, such as a value of the model's config. An op that does "
                "not run on the meta device needs a kernel there.",
                module=fqn,
            ) from error

    def _kv_heads(self, op: Op) -> int:
        """Return the heads of keys before they were repeated for the heads of queries, as the cache has them."""
        name = op.inputs[1]
        keys = least = self._graph.values[name]
        while (producer := self._producers.get(name)) is not None and producer.target_name in _REPEATS:
            name = producer.inputs[0]
            least = min(least, self._graph.values[name], key=lambda value: value.nbytes)
        return keys.shape[1] * least.nbytes // keys.nbytes

    def _result_before(self, name: str) -> int:
        """Return the bytes of the model's result that was cast to the value ``name``; 0 where that is the result."""
        # Those that are computed after the value have no root yet.
        results = {self.tensors.root.get(output.value) for output in self._graph.outputs if not output.is_loss}
        root = self.tensors.root[name]
        while root not in results:
            producer = self._producers.get(root)
            if producer is None or not producer.target_name.startswith("aten.to."):
                return 0
            root = self.tensors.root[producer.inputs[0]]
        return 0 if root == self.tensors.root[name] else self._graph.values[root].nbytes

    def _profile_of_run(
        self,
        op: Op,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        args: Sequence[torch.Tensor],
        saved: _Saved,
        flops: float,
        inner_nbytes: int,
    ) -> OpProfile:
        """Return the profile of an op that has run.

        Args:
            args: the tensors that it ran on.
            saved: what autograd saved of it.
            flops: FLOPs of its forward.
            inner_nbytes: bytes of results of GEMMs that exist only inside the op.
        """
        saved_values, saved_extra_nbytes = tuple(dict.fromkeys(saved.values)), sum(saved.extra_nbytes.values())
        if op.target_name == "aten.cross_entropy_loss.default" and is_shardable_cross_entropy(op, inputs):
            saved_values, saved_extra_nbytes = (self.tensors.root[op.inputs[0]],), 8 * inputs[0].shape[0]
            run = cross_entropy_run(inputs[0], self._result_before(op.inputs[0]))
        else:
            run = self._ran(op, run_both_ways, args)
        if own_rules(op, inputs) is not None:
            crossing = len(inputs) + len(outputs)
            run = OpRun(run.rise, run.forward._replace(ops=crossing), run.backward._replace(ops=crossing))
        nbytes, backward_nbytes = self._bytes_moved(op, inputs, outputs, flops, saved_values, run)
        differentiable = _is_differentiable(inputs, outputs)
        # A GEMM's backward is one GEMM per differentiable factor; attention is two GEMMs of two factors each.
        factors = inputs[:2] if op.target is ATTENTION else inputs
        gemms = len([value for value in factors if value.requires_grad and len(value.shape) > 1])
        return OpProfile(
            flops=flops,
            backward_flops=flops * gemms if differentiable else 0.0,
            nbytes=nbytes,
            backward_nbytes=backward_nbytes,
            saved=saved_values if differentiable else (),
            saved_extra_nbytes=saved_extra_nbytes if differentiable else 0,
            cached_extra_nbytes=inner_nbytes,
            forward_peak_nbytes=forward_peak(op, args) if inner_nbytes else 0,
            backward_extra_nbytes=run.rise if differentiable else 0,
            forward_dispatched=run.forward,
            backward_dispatched=run.backward if differentiable else NOTHING,
        )

    def _bytes_moved(
        self,
        op: Op,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        flops: float,
        saved: Sequence[str],
        run: OpRun,
    ) -> tuple[int, int]:
        """Return the bytes that an op reads and writes, forward and backward; 0 for the forward of a view."""
        # An expanded tensor (a mask for the whole batch, for example) is read as often as it is stored.
        read_nbytes = sum(min(value.nbytes, self.tensors.storage_nbytes[value.name]) for value in inputs)
        written_nbytes = sum(value.nbytes for value in outputs)
        if op.target_name == "aten.embedding.default":
            read_nbytes = written_nbytes + inputs[1].nbytes
        is_view = self._is_view(op)
        differentiable = _is_differentiable(inputs, outputs)
        gradient_nbytes = sum(value.nbytes for value in inputs if value.requires_grad)
        if not differentiable:
            backward = 0
        elif is_view:
            # Autograd writes the gradients of several views of a tensor side by side into one tensor.
            backward = 2 * gradient_nbytes if len(outputs) > 1 else 0
        elif flops > 0 or run.backward.nbytes > 0:
            backward = written_nbytes + sum(self._graph.values[name].nbytes for name in saved) + gradient_nbytes
        else:
            backward = 0  # the gradient of a sum is that of each addend: nothing runs
        return 0 if is_view else read_nbytes + written_nbytes, backward

    def _is_view(self, op: Op) -> bool:
        root = self.tensors.root
        is_view = all(root[name] in {root[source] for source in op.inputs} for name in op.outputs)
        return is_view and "_." not in str(op.target)


def _is_differentiable(inputs: Sequence[Value], outputs: Sequence[Value]) -> bool:
    """Return whether an op has a backward."""
    return any(value.requires_grad for value in inputs) and any(value.requires_grad for value in outputs)
