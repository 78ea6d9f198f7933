"""`opaque_calls`: what the calls of opaque modules return and cost, from a forward of the model on the meta device.

What depends on values has assumed ones (`planner.model_rewrites.assumed_values`). Forwards with more and with fewer
samples show what grows with the batch; with other values, whether a result has as many elements as values say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.counting.flop_count import FlopCount
from planner.counting.live_bytes import LiveBytesMode
from planner.errors import ModelError
from planner.graph.capture import ExampleInputs
from planner.graph.example_inputs import with_batch
from planner.graph.sample_splits import RunnableCall, SampleSplits
from planner.model_rewrites.assumed_values import AssumedValues
from planner.model_rewrites.attention_on_meta import attention_on_meta
from planner.model_rewrites.image_sizes.packed_attention import packed_attention
from planner.model_rewrites.image_sizes.tables import size_tables
from planner.model_rewrites.opaque_op import OpaqueCall, OpaqueCosts
from planner.model_rewrites.random_branches import likelier_branches
from planner.model_rewrites.replaced_calls.checkpoints import without_own_checkpoints
from planner.model_rewrites.tree_paths import tensors_by_path, tensors_in

_FEW, _MORE = 8, 12
"""Numbers of samples of the forwards."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """One call in one forward: its arguments and its result, with meta tensors, its costs, and what autograd saves."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    costs: OpaqueCosts
    saved_arguments: frozenset[str]


def opaque_calls(
    module: nn.Module, opaque: Collection[nn.Module], inputs: ExampleInputs, samples: int, batch: int
) -> dict[nn.Module, list[OpaqueCall]]:
    """Return opaque module -> its calls in one forward of ``module`` with ``batch`` samples.

    Args:
        module: on the meta device; it is not changed.
        opaque: submodules of it.
        inputs: arguments of the forward.
        samples: samples in ``inputs``.
        batch: samples of the calls that are returned.

    Raises:
        ModelError: the sizes of a result depend on values, or do not grow with the batch; a module is given numbers
            that are read from tensors; or it writes to its parameters.
    """
    measured: dict[Hashable, _Measured] = {}
    few, more, other = (
        _recorded(module, opaque, with_batch(inputs, samples, count), seed, measured)
        for seed, count in enumerate((_FEW, _MORE, _FEW))
    )
    calls: dict[nn.Module, list[OpaqueCall]] = {}
    splits = SampleSplits(_FEW)
    for part in opaque:
        if not len(few[part]) == len(more[part]) == len(other[part]):
            raise ModelError(f"{type(part).__name__} is called as often as samples or values say.")
        if any(_shapes(one) != _shapes(two) for one, two in zip(few[part], other[part], strict=True)):
            raise ModelError(f"{type(part).__name__} returns as many elements as values say.")
        if any(_numbers(one) != _numbers(two) for one, two in zip(few[part], other[part], strict=True)):
            raise ModelError(f"{type(part).__name__} is given numbers that the module around it reads from tensors.")
        pairs = list(zip(few[part], more[part], strict=True))
        each = [_at_batch(part, first, second, batch, splits) for first, second in pairs]
        if any(call.split != each[0].split for call in each):
            each = [dataclasses.replace(call, split=None) for call in each]  # a plan has one split for a module
        calls[part] = each
    return {part: each for part, each in calls.items() if each}


def _recorded(
    module: nn.Module,
    opaque: Collection[nn.Module],
    inputs: ExampleInputs,
    seed: int,
    measured: dict[Hashable, _Measured],
) -> dict[nn.Module, list[_Recorded]]:
    """Return opaque module -> its calls in a forward of ``module``.

    Args:
        module, opaque, inputs: as for `opaque_calls`.
        seed: of the assumed values.
        measured: kind of call -> what it costs, of earlier forwards too; new kinds are added.
    """
    recorded: dict[nn.Module, list[_Recorded]] = {part: [] for part in opaque}
    with ExitStack() as stack:
        values = AssumedValues(seed)
        for part in opaque:
            part.__dict__["forward"] = _RecordingForward(part, recorded[part], values, measured)
            stack.callback(part.__dict__.pop, "forward", None)
        stack.enter_context(values)
        stack.enter_context(without_own_checkpoints())
        stack.enter_context(likelier_branches())
        values.know((inputs.args, inputs.kwargs))
        module(*inputs.args, **inputs.kwargs)
    return recorded


class _Measured(NamedTuple):
    """What a call costs, and the positions of the arguments that autograd saves."""

    costs: OpaqueCosts
    saved: frozenset[int]


class _RecordingForward:
    """The forward of a module, which records what each call takes, returns and costs."""

    def __init__(
        self,
        module: nn.Module,
        recorded: list[_Recorded],
        values: AssumedValues,
        measured: dict[Hashable, _Measured],
    ) -> None:
        self._module, self._forward, self._recorded = module, module.forward, recorded
        self._values, self._measured = values, measured

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            given = iter(tensors)
            filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            run_args, run_kwargs = pytree.tree_unflatten(filled, structure)
            self._values.numbers.restart()
            with attention_on_meta(), packed_attention(self._module) if reads_sizes else nullcontext():
                return self._forward(*run_args, **run_kwargs)

        tensors, parameters = tensors_in(leaves), list(self._module.parameters())
        reads_sizes = bool(size_tables(tensors))
        versions = [parameter._version for parameter in parameters]
        output = run(tensors)
        if versions != [parameter._version for parameter in parameters]:
            raise ModelError(f"{type(self._module).__name__} writes to its parameters in its forward.")
        alike = str(self._module), repr((args, kwargs)), tuple(t.requires_grad for t in (*tensors, *parameters))
        if alike not in self._measured:
            self._measured[alike] = _measure(run, tensors, parameters)
        costs, saved = self._measured[alike]
        paths = list(tensors_by_path(args, kwargs))
        self._recorded.append(
            _Recorded(
                args=args,
                kwargs=kwargs,
                output=pytree.tree_map(lambda leaf: leaf, output),  # the caller may change the one it gets
                costs=costs,
                saved_arguments=frozenset(paths[index] for index in saved),
            )
        )
        return output


def _measure(
    run: Callable[[Sequence[torch.Tensor]], Any], tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> _Measured:
    """Return what ``run`` on ``tensors`` costs with its backward, and what autograd saves."""
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    positions = {tensor.untyped_storage()._cdata: index for index, tensor in enumerate(leaves)}
    of_parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
    saved: dict[int, torch.UntypedStorage] = {}
    saved_positions: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata in positions:
            saved_positions.add(positions[storage._cdata])
        elif storage._cdata not in of_parameters:
            saved[storage._cdata] = storage
        return tensor

    with torch.enable_grad(), LiveBytesMode() as live, FlopCount() as count:
        for leaf in leaves:
            live.ignore(leaf)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = [result for result in tensors_in(run(leaves)) if result.requires_grad]
        forward, flops, saved_nbytes = live.dispatched(), count.flops, sum(s.nbytes() for s in saved.values())
        saved.clear()
        wanted = [tensor for tensor in (*leaves, *parameters) if tensor.requires_grad]
        if not results or not wanted:
            return _Measured(OpaqueCosts(int(flops), 0, forward.nbytes, 0, 0, 0, forward.ops, 0), frozenset())
        before = live.peak = live.now
        gradients = torch.autograd.grad(results, wanted, [torch.empty_like(r) for r in results], allow_unused=True)
        returned = sum(gradient.untyped_storage().nbytes() for gradient in gradients if gradient is not None)
        backward = live.dispatched(forward)
    costs = OpaqueCosts(
        flops=int(flops),
        backward_flops=int(count.flops - flops),
        nbytes=forward.nbytes,
        backward_nbytes=backward.nbytes,
        saved_nbytes=saved_nbytes,
        rise_nbytes=max(int(live.peak - before) - returned, 0),
        ops=forward.ops,
        backward_ops=backward.ops,
    )
    return _Measured(costs, frozenset(saved_positions))


def _at_batch(module: nn.Module, few: _Recorded, more: _Recorded, batch: int, splits: SampleSplits) -> OpaqueCall:
    """Return a call with ``batch`` samples."""
    results = [
        torch.empty(
            _scaled(small.shape, large.shape, batch),
            dtype=small.dtype,
            device="meta",
            requires_grad=small.requires_grad,
        )
        for small, large in zip(tensors_in(few.output), tensors_in(more.output), strict=True)
    ]
    given = iter(results)
    output = pytree.tree_map_only(torch.Tensor, lambda _: next(given), few.output)
    # Whole numbers, so that what grows is a multiple of the traced batch (`planner.graph.op_graph.at_batch`).
    growth = [max(round((b - a) / (_MORE - _FEW)), 0) for a, b in zip(few.costs, more.costs, strict=True)]
    fixed = [max(cost - _FEW * slope, 0) for cost, slope in zip(few.costs, growth, strict=True)]
    by_path = tensors_by_path(few.args, few.kwargs)
    call = RunnableCall(
        module=module,
        args=few.args,
        kwargs=few.kwargs,
        sizes=tuple((small.shape, large.shape) for small, large in _pairs(few, more)),
        flops=few.costs.flops,
    )
    return OpaqueCall(
        output=output,
        per_sample=OpaqueCosts(*(slope * batch for slope in growth)),
        fixed=OpaqueCosts(*fixed),
        saved_arguments=few.saved_arguments | more.saved_arguments,
        split=splits.of(call),
        rows={path: max(len(tensor) // _FEW, 1) for path, tensor in by_path.items() if tensor.dim()},
    )


def _numbers(recorded: _Recorded) -> list[int | float]:
    """Return the numbers among the arguments, such as how many rows each expert has."""
    leaves = pytree.tree_leaves((recorded.args, recorded.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, (int, float))]


def _shapes(recorded: _Recorded) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors_in(recorded.output)]


def _pairs(few: _Recorded, more: _Recorded) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(tensors_in((few.args, few.kwargs)), tensors_in((more.args, more.kwargs)), strict=True))


def _scaled(few: Sequence[int], more: Sequence[int], batch: int) -> list[int]:
    """Return a shape at ``batch`` samples, from those at `_FEW` and `_MORE`.

    Raises:
        ModelError: a dim is neither the same for all batches nor proportional to them.
    """
    sizes = []
    for small, large in zip(few, more, strict=True):
        if small != large and small * _MORE != large * _FEW:
            raise ModelError(f"a result has {small} elements in a dim for {_FEW} samples, and {large} for {_MORE}.")
        sizes.append(small if small == large else small // _FEW * batch)
    return sizes
