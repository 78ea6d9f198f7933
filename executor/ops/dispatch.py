"""Dispatch of calls on DTensors to the executor's own ops: embedding, attention and others.

A ``TorchFunctionMode`` gets the calls before DTensor does. A call that ``planner.strategies.own_rules`` or
``cost_model.layouts.linear`` covers runs on local tensors with explicit layouts, forward and backward. DTensor runs all
other calls. Writes of DTensors to plain tensors write whole values (``executor.ops.buffers.plain_writes``).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from executor.ops.attention import attention
from executor.ops.buffers.batch_norm import batch_norm, batch_norm_op, instance_norm
from executor.ops.buffers.plain_writes import write_to_plain
from executor.ops.cat import concatenate
from executor.ops.convolution import convolution, transposed_convolution
from executor.ops.cross_entropy import cross_entropy
from executor.ops.linear import linear, product
from executor.ops.local import run_local
from executor.ops.lookups.embedding import embedding
from executor.ops.lookups.embedding_bag import embedding_bag
from executor.ops.reductions import COMPARISONS, LOSSES, compared, loss, nll_loss, total
from executor.ops.set_item import set_item
from executor.ops.where import where
from executor.redistribute import Redistributor
from executor.torch_internals.dtensor import local_of
from planner.model_rewrites.replaced_calls.finite_branches import LOOKS, OfFinite, branches_on_it
from planner.model_rewrites.replaced_calls.other_ops import REPLACEMENTS
from planner.model_rewrites.replaced_calls.value_checks import value_that_passes
from planner.model_rewrites.selected_rows.calls import SelectedRows
from planner.model_rewrites.tree_paths import tensors_in

OwnOp = Callable[..., Any]
"""(redistributor, the call's arguments) -> the call's result, or NotImplemented if the op does not cover the call."""

_OWN_OPS: dict[Callable[..., Any], OwnOp] = {
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    F.linear: linear,
    torch.conv1d: convolution(1),
    torch.conv2d: convolution(2),
    torch.conv3d: convolution(3),
    torch.conv_transpose1d: transposed_convolution(1),
    torch.conv_transpose2d: transposed_convolution(2),
    torch.conv_transpose3d: transposed_convolution(3),
    F.scaled_dot_product_attention: attention,
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    **{function: loss(function) for function in LOSSES},
    **{function: total(function) for function in (torch.sum, torch.Tensor.sum, torch.mean, torch.Tensor.mean)},
    **{function: compared(function) for function in COMPARISONS},
    F.batch_norm: batch_norm,
    torch.batch_norm: batch_norm_op,
    F.instance_norm: instance_norm,
    torch.where: where,
    torch.cat: concatenate,
    torch.Tensor.__setitem__: set_item,
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm), product),
}


_LOOKED_AT = frozenset({*_OWN_OPS, *REPLACEMENTS, torch.Tensor.__bool__})
"""Functions whose calls with a DTensor run otherwise than DTensor runs them."""

_EXECUTOR, _TORCH = (f"{path}{os.sep}" for path in (Path(__file__).parents[1], Path(torch.__file__).parent))
_MODULES_OF_TORCH = f"{_TORCH}nn{os.sep}"
_PASSING_ON = (torch.overrides.__file__, torch._tensor.__file__, torch.functional.__file__)
"""Files of torch through which calls of its functions in Python reach a mode."""

_UNEVEN = frozenset({F.embedding, F.embedding_bag, F.linear, F.cross_entropy})
"""Own ops whose shards may be uneven chunks. DTensor runs the others then, or refuses."""


_IN_PYTHON = ("torch.nn.functional", "torch.functional")


@functools.cache
def _undispatched(function: FunctionType) -> Callable[..., Any]:
    """Return a torch function in Python whose own call is not dispatched; a mode sees the calls in its body."""
    never = dict.fromkeys(
        (name for name in function.__globals__ if name.startswith("has_torch_function")), lambda *arguments: False
    )
    copied = FunctionType(function.__code__, {**function.__globals__, **never}, argdefs=function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return functools.wraps(function)(copied)


class OwnOps(TorchFunctionMode):
    """A mode in which the executor's own ops run the calls that have a DTensor among their arguments."""

    def __init__(
        self,
        redistributor: Redistributor,
        shared_input_linears: OwnOp | None = None,
        local_ops: Collection[str] = (),
        *,
        is_planned: bool = True,
    ) -> None:
        """Take what the ops need.

        Args:
            redistributor: redistributes on the mesh of the model.
            shared_input_linears: runs linear layers, and accumulates the gradient of an input that several of them
                read; None: autograd adds the gradients of the layers.
            local_ops: names of functions that run on local tensors.
            is_planned: whether shardplan made the plan, and so looked at what reads elements that a mask selects.
        """
        super().__init__()
        self._redistributor = redistributor
        self._local_ops = frozenset(local_ops)
        self._running: set[Callable[..., Any]] = set()
        self._selected_rows = SelectedRows() if is_planned else None
        self._own_ops = _OWN_OPS if shared_input_linears is None else {**_OWN_OPS, F.linear: shared_input_linears}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        rows = self._selected_rows
        if rows is not None and rows.may_run(func, args):
            is_own = _is_own_call(sys._getframe(1))
            result = self._run_on_selected_rows(rows, func, args, kwargs, is_own=is_own)
            if result is not NotImplemented:
                return result
        if func in LOOKS and args and isinstance(args[0], torch.Tensor) and branches_on_it(sys._getframe(1)):
            part = local_of(args[0]) if isinstance(args[0], DTensor) else args[0]
            return OfFinite(LOOKS[func]) if part.is_meta else func(part)
        tensors = [x for x in _arguments(args, kwargs) if isinstance(x, DTensor)] if func in _LOOKED_AT else ()
        if tensors and func is torch.Tensor.__bool__:
            passing = value_that_passes(sys._getframe(1))
            if passing is not None:
                return passing
        if tensors and func in REPLACEMENTS:
            with self:
                result = REPLACEMENTS[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if self._local_ops:
            result = self._run_local(func, args, kwargs)
            if result is not NotImplemented:
                return result
        own_op = self._own_ops.get(func)
        if own_op is not None and tensors and (func in _UNEVEN or not any(map(self._redistributor.is_uneven, tensors))):
            result = own_op(self._redistributor, *args, **kwargs)
            if result is not NotImplemented:
                return result
        result = write_to_plain(self._redistributor, func, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _run_on_selected_rows(
        self,
        rows: SelectedRows,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        is_own: bool,
    ) -> Any:
        if not any(isinstance(tensor, DTensor) for tensor in tensors_in((args, dict(kwargs)))):
            return NotImplemented
        self._selected_rows = None  # what the calls are made of is not looked at again
        try:
            with self:
                return rows.run(func, args, kwargs, is_own=is_own)
        finally:
            self._selected_rows = rows

    def _run_local(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a local op, or of a function of torch in Python, whose body may call one."""
        if getattr(func, "__name__", "") in self._local_ops:
            if any(isinstance(tensor, DTensor) for tensor in tensors_in((args, kwargs))):
                return run_local(self._redistributor, func, args, kwargs)
        elif _is_in_python(func) and func not in self._own_ops and func not in self._running:
            self._running.add(func)  # some dispatch again from a function that they call, as torch.meshgrid does
            try:
                with self:
                    return _undispatched(func)(*args, **kwargs)
            finally:
                self._running.discard(func)
        return NotImplemented


def _is_own_call(frame: FrameType | None) -> bool:
    """Return whether the executor, FSDP2 or autograd makes the call that ``frame`` is at, and no module's forward."""
    while frame is not None and frame.f_code.co_filename in _PASSING_ON:
        frame = frame.f_back
    name = "" if frame is None else frame.f_code.co_filename
    return name.startswith((_EXECUTOR, _TORCH)) and not name.startswith(_MODULES_OF_TORCH)


def _is_in_python(func: Callable[..., Any]) -> bool:
    """Return whether ``func`` is a function of torch in Python that calls others in its body."""
    return isinstance(func, FunctionType) and func.__module__ in _IN_PYTHON and func.__closure__ is None


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments of a call; a list or tuple yields its items."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
