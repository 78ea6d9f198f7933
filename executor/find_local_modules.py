"""``find_local_modules``: the modules of a plan that ranks can run on their local tensors, without DTensor.

The module runs twice on meta. In the first run DTensor runs all ops, on tensors of global shapes. A module is a
candidate if the plan changes no layout inside it, no collective runs there, its parameters are replicated, no tensor
in it is a partial sum, and its gradients would come as addends on the axes on which FSDP sums them, and on no other. In
the second run the candidates run on local tensors, of local shapes. A candidate is local if its forward makes the same
calls of torch in both runs: the same functions, of tensors with the same local shapes, with the same other arguments.
Sizes of a shape (``view``, ``expand``, ``zeros``) may differ; anything else that depends on the size of the batch, such
as ``arange(batch)`` or a division by it, makes the module run by DTensor.
Outside of local modules the calls have to be the same, too, on DTensors where they were: a tensor that leaves a module
by an attribute or a hook would be plain.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import sharded_dim
from executor.ops.local_modules import LocalForward, is_plain_data
from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.resolve.resolved_plan import resolve_plan
from executor.step_on_meta import StepOnMeta, fake_processes, meta_copy, meta_inputs
from executor.torch_internals.dtensor import local_of
from planner.errors import PlannerError
from planner.model_rewrites.eager_masks import unpacked_sequences
from planner.model_rewrites.local_module import LocalModule
from planner.model_rewrites.tree_paths import tensors_by_path, tensors_in
from planner.plan.sharding_plan import ShardingPlan

_LEAST_CALLS = 3
"""Least number of calls of torch in a local module: entering and leaving it takes about as long as two on DTensors."""

_TAKE_SIZES = frozenset(
    {
        *(torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.expand, torch.Tensor.repeat),
        *(torch.Tensor.unflatten, torch.unflatten, torch.broadcast_to, torch.Tensor.broadcast_to),
        *(torch.zeros, torch.ones, torch.empty),
        *(torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty),
    }
)
"""Functions all of whose integers are sizes. A tensor of constants has no value that depends on them."""

_ALIASES = frozenset({torch.Tensor.view_as, torch.Tensor.detach, torch.Tensor.contiguous})
"""Functions that return the same values, of which conversions to and from DTensors make use. So do attributes."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What a call of torch reads or returns: a tensor on this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_dtensor: bool = field(compare=False)
    is_partial: bool = field(compare=False)


_COMPARED = (_Tensor, bool, int, float, complex, str, tuple, torch.dtype, torch.device)
"""Types of arguments that are compared by value."""


@dataclass(frozen=True, slots=True)
class _TorchCall:
    """A call of a function of torch.

    Attributes:
        leaves: the arguments in order, with `_Tensor` in place of tensors.
        results: the tensors in its result.
        is_local: whether it is a call inside of a module that runs on local tensors.
    """

    function: Any
    structure: str
    leaves: tuple[Any, ...]
    results: tuple[_Tensor, ...]
    is_local: bool

    @property
    def tensors(self) -> list[_Tensor]:
        """What it reads and returns."""
        return [each for each in (*self.leaves, *self.results) if isinstance(each, _Tensor)]

    def is_same_as(self, other: _TorchCall) -> bool:
        """Return whether both calls do the same on this rank's tensors."""
        same = (self.function, self.structure, self.results) == (other.function, other.structure, other.results)
        takes_sizes = self.function in _TAKE_SIZES
        return same and all(
            _is_equal(a, b) or (takes_sizes and type(a) is int and type(b) is int)
            for a, b in zip(self.leaves, other.leaves, strict=True)
        )


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two arguments are the same; of others than plain data and tensors, only one object is."""
    return a is b or (type(a) is type(b) and isinstance(a, _COMPARED) and bool(a == b))


class _Recorder(TorchFunctionMode):
    """A mode that keeps the calls of torch's functions that return or change tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_TorchCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Before the call, which may change tensors in place.
        leaves, structure = pytree.tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, slice))
        described = tuple(_described(leaf) for leaf in leaves)
        result = func(*args, **kwargs)
        is_skipped = func in _ALIASES or func.__name__ == "__get__"
        tensors = [] if is_skipped else tensors_in(result)
        if tensors or func is torch.Tensor.__setitem__:
            results = tuple(map(_described, tensors))
            self.calls.append(_TorchCall(func, str(structure), described, results, LocalForward.running > 0))
        return result


def _described(leaf: Any) -> Any:
    if isinstance(leaf, slice):
        return tuple(map(_described, (leaf.start, leaf.stop, leaf.step)))
    if not isinstance(leaf, torch.Tensor):
        return leaf
    is_partial = isinstance(leaf, DTensor) and any(place.is_partial() for place in leaf.placements)
    local = local_of(leaf) if isinstance(leaf, DTensor) else leaf
    return _Tensor(tuple(local.shape), local.dtype, isinstance(leaf, DTensor), is_partial)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModuleCall:
    """A call of a module.

    Attributes:
        local: the layouts at its boundary; None where it cannot run on local tensors.
        calls: the calls of torch's functions inside.
        first: number of calls of torch's functions in the root before it.
        has_dtensors: whether DTensors are among its arguments or results.
    """

    local: LocalModule | None
    calls: tuple[_TorchCall, ...]
    first: int
    has_dtensors: bool

    def is_same_as(self, other: _ModuleCall) -> bool:
        """Return whether both calls of the module do the same on this rank's tensors."""
        return len(self.calls) == len(other.calls) and all(
            a.is_same_as(b) for a, b in zip(self.calls, other.calls, strict=True)
        )


class _Observer:
    """Records the calls of all modules in a sharded module."""

    def __init__(self, step: StepOnMeta) -> None:
        self._step = step
        self._recorder = _Recorder()
        self.by_fqn: dict[str, list[_ModuleCall]] = {}
        self.failed: str | None = None
        """FQN of the innermost module whose forward has failed."""

    def __call__(self, module: nn.Module) -> None:
        """Wrap the forwards in ``module``."""
        for fqn, part in module.named_modules():
            part.forward = functools.wraps(part.forward)(functools.partial(self._run, fqn, part.forward))

    def forget(self) -> None:
        """Forget all calls."""
        self.by_fqn.clear()
        self._recorder.calls.clear()

    def _run(self, fqn: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        first, before = len(self._recorder.calls), self._step.dispatched
        with nullcontext() if fqn else self._recorder:
            try:
                output = forward(*args, **kwargs)
            except Exception:
                self.failed = self.failed or fqn
                raise
        after = self._step.dispatched
        calls = tuple(self._recorder.calls[first:])
        local = None
        if after.collectives == before.collectives and not any(t.is_partial for call in calls for t in call.tensors):
            local = _boundary(args, kwargs, output, is_random=after.random > before.random)
        has_dtensors = any(isinstance(tensor, DTensor) for tensor in tensors_in((args, kwargs, output)))
        self.by_fqn.setdefault(fqn, []).append(
            _ModuleCall(local=local, calls=calls, first=first, has_dtensors=has_dtensors)
        )
        return output


def _boundary(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, *, is_random: bool) -> LocalModule | None:
    """Return the layouts of what enters and leaves a call; None where there is more than tensors, split or whole."""
    by_path = tensors_by_path(args, kwargs)
    inputs = {path: tuple(t.placements) for path, t in by_path.items() if isinstance(t, DTensor)}
    outputs = tuple(tuple(t.placements) if isinstance(t, DTensor) else None for t in tensors_in(output))
    layouts = [*inputs.values(), *(layout for layout in outputs if layout is not None)]
    is_plain = all(map(is_plain_data, pytree.tree_leaves((args, kwargs, output))))
    are_pieces = all(place.is_replicate() or type(place) is Shard for layout in layouts for place in layout)
    if not inputs or not is_plain or not are_pieces or any(" " in path or ";" in path for path in inputs):
        return None
    return LocalModule(inputs, outputs, is_random)


def find_local_modules(module: nn.Module, plan: ShardingPlan, example_inputs: Any) -> dict[str, str]:
    """Return FQN -> `LocalModule` as text, for the outermost modules that can run on local tensors under ``plan``.

    Args:
        module: as for ``verify``.
        plan: a plan without local modules.
        example_inputs: as for ``verify``.

    Raises:
        PlannerError: the plan does not run.
    """
    with fake_processes(plan.mesh.size), unpacked_sequences():
        run = functools.partial(_observed, module, plan=plan, inputs=meta_inputs(example_inputs))
        by_dtensor = run(texts={})
        if by_dtensor.error is not None:
            raise by_dtensor.error
        entries = _entries(by_dtensor.by_fqn, _closed_modules(module, plan))
        while texts := {fqn: local.text for fqn, local in _outermost(entries)}:
            by_local = run(texts=texts)
            wrong = [fqn for fqn in texts if not _is_same(by_dtensor.by_fqn[fqn], by_local.by_fqn.get(fqn, []))]
            if by_local.error is not None:
                # Neither the module that failed nor any around it is tried again.
                wrong = [fqn for fqn in entries if _is_in(by_local.failed, fqn)] or list(texts)
            if not wrong:
                return texts if _is_same_outside(by_dtensor.by_fqn, by_local.by_fqn, texts) else {}
            kinds = {_kind(fqn) for fqn in wrong}
            entries = {fqn: local for fqn, local in entries.items() if _kind(fqn) not in kinds}
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observed:
    """What a run has shown; with ``error``, ``failed`` is the innermost module in which it failed."""

    by_fqn: Mapping[str, list[_ModuleCall]]
    error: PlannerError | None
    failed: str | None


def _observed(module: nn.Module, *, plan: ShardingPlan, inputs: Any, texts: Mapping[str, str]) -> _Observed:
    """Return the calls of the forward of one micro-batch, with the local modules of ``texts``."""
    device_mesh = device_mesh_for(plan, device_type="cpu")
    step = StepOnMeta(device_mesh, plan)
    observer = _Observer(step)
    error = None
    try:
        model = step.sharded(module, dataclasses.replace(plan, local_modules=texts, micro_batches=1), observer)
        batch = local_batch(inputs, device_mesh, plan)
        if plan.job.phase == "decode":
            batch = step.decoding_batch(model, batch)
            observer.forget()
        step.run_micro_batch(model, batch, forward_only=True)
    except PlannerError as raised:
        error = raised
    return _Observed(by_fqn=observer.by_fqn, error=error, failed=observer.failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClosedModules:
    """The modules inside which the plan names nothing, neither in nor around an opaque one.

    Attributes:
        mesh_shape: ranks on each axis.
        fqns: their FQNs.
        reduced: FQN of a module with parameters in FSDP groups -> for each that is trained, the axes of more than one
            rank on which its gradient has to come as addends.
    """

    mesh_shape: tuple[int, ...]
    fqns: frozenset[str]
    reduced: Mapping[str, Sequence[frozenset[int]]]

    def may_be_local(self, fqn: str, local: LocalModule) -> bool:
        """Return whether the module ``fqn`` is closed, and all its gradients would come as FSDP reduces them."""
        split = {
            axis
            for layout in local.inputs.values()
            for axis, (place, size) in enumerate(zip(layout, self.mesh_shape, strict=True))
            if size > 1 and sharded_dim(place) is not None
        }
        axes = [axes for owner, each in self.reduced.items() if _is_in(owner, fqn) for axes in each]
        return fqn in self.fqns and all(each == split for each in axes)


def _closed_modules(module: nn.Module, plan: ShardingPlan) -> _ClosedModules:
    copied = meta_copy(module, plan.job.phase)
    names = {part: fqn for fqn, part in copied.named_modules()}
    resolved = resolve_plan(copied, device_mesh_for(plan, device_type="cpu"), plan)
    bounds = resolved.boundaries
    readers = [
        names[layouts.reader]
        for owned in resolved.parameters_outside_fsdp().values()
        for layouts in owned
        if layouts.redistributes
    ]
    named = {
        *bounds.inputs, *bounds.outputs, *bounds.zigzag_inputs, *bounds.zigzag_outputs, *bounds.local_outputs,
        *resolved.checkpointing, *(group.fqn for group in resolved.fsdp_groups), *readers, *resolved.sharders,
        *resolved.opaque_modules,
    }  # fmt: skip
    opaque = resolved.opaque_modules
    fqns = frozenset(
        fqn
        for fqn in names.values()
        if fqn
        and not any(_is_in(inner, fqn) and inner != fqn for inner in named)
        and not any(_is_in(fqn, outer) for outer in opaque)
    )
    reduced: dict[str, list[frozenset[int]]] = {}
    for group in resolved.fsdp_groups:
        for item in group.parameters:
            axes = frozenset(
                axis
                for axis, (place, size) in enumerate(zip(item.accumulated, plan.mesh.shape, strict=True))
                if size > 1 and (axis in group.axes or place.is_partial())
            )
            for owner, _ in item.slots if item.parameter.requires_grad else ():
                reduced.setdefault(names[owner], []).append(axes)
    return _ClosedModules(mesh_shape=plan.mesh.shape, fqns=fqns, reduced=reduced)


def _entries(by_fqn: Mapping[str, list[_ModuleCall]], closed: _ClosedModules) -> dict[str, LocalModule]:
    """Return the candidates: modules whose calls are worth it, and have all the same layouts at their boundary."""
    entries = {}
    for fqn, calls in by_fqn.items():
        local = calls[0].local
        is_worth_it = max(len(call.calls) for call in calls) >= _LEAST_CALLS
        if local is None or not is_worth_it or any(call.local != local for call in calls):
            continue
        if closed.may_be_local(fqn, local):
            entries[fqn] = local
    return entries


def _outermost(entries: Mapping[str, LocalModule]) -> Iterator[tuple[str, LocalModule]]:
    """Yield the candidates that are in no other."""
    for fqn, local in entries.items():
        if not any(other != fqn and _is_in(fqn, other) for other in entries):
            yield fqn, local


def _is_same(by_dtensor: list[_ModuleCall], by_local: list[_ModuleCall]) -> bool:
    return len(by_dtensor) == len(by_local) and all(
        not b.has_dtensors and a.is_same_as(b) for a, b in zip(by_dtensor, by_local, strict=True)
    )


def _is_same_outside(
    by_dtensor: Mapping[str, list[_ModuleCall]], by_local: Mapping[str, list[_ModuleCall]], local: Iterable[str]
) -> bool:
    """Return whether the root makes the same calls outside of the modules ``local``, on DTensors where they were."""
    inside = {call.first + index for fqn in local for call in by_dtensor[fqn] for index in range(len(call.calls))}
    before = [call for index, call in enumerate(by_dtensor[""][0].calls) if index not in inside]
    after = [call for call in by_local[""][0].calls if not call.is_local]
    return len(before) == len(after) and all(
        a.is_same_as(b) and [t.is_dtensor for t in a.tensors] == [t.is_dtensor for t in b.tensors]
        for a, b in zip(before, after, strict=True)
    )


def _is_in(fqn: str | None, outer: str) -> bool:
    """Return whether ``fqn`` is the module ``outer`` or one in it."""
    return fqn is not None and (fqn == outer or fqn.startswith(f"{outer}."))


def _kind(fqn: str) -> str:
    """Return ``fqn`` without its numbers: equal blocks are of one kind."""
    return re.sub(r"\d+", "*", fqn)
