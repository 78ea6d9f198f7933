"""Replacement of modules whose forward is a chain of small ops by fused ops.

Candidates are RMSNorm, gated MLPs, rotary embeddings in attention, and the loss of causal language models, as
transformers writes them. A class is recognised by its results, not by its name: its code runs on small random tensors,
and is replaced only if its result equals the op's in float32, up to rounding.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner.model_rewrites import fused_kernels
from planner.model_rewrites.fused_projection_modules import FusedGateUpMLP

_ROTARY_FUNCTION = "apply_rotary_pos_emb"
_LOSS_FUNCTION = "loss_function"
_IGNORED = -100

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOps:
    """The functions that rewritten modules call, with the arguments of the ops in `fused_kernels`."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    gated: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
    gated_pairs: Callable[[torch.Tensor, str], torch.Tensor]
    rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    cross_entropy: Callable[[torch.Tensor, torch.Tensor, int, bool], torch.Tensor]


TRACED_OPS = FusedOps(
    rms_norm=fused_kernels.rms_norm_op,
    gated=fused_kernels.gated_op,
    gated_pairs=fused_kernels.gated_pairs_op,
    rotary=fused_kernels.rotary_op,
    cross_entropy=fused_kernels.cross_entropy_op,
)
"""The custom ops, for tracing only: they raise an error when they run."""


def fuse_ops(module: nn.Module, ops: FusedOps, *, opaque: Collection[nn.Module] = ()) -> nn.Module:
    """Return ``module``, changed in place to call ``ops`` wherever they compute the same as the module's code.

    Args:
        module: any module.
        ops: the functions to call.
        opaque: submodules that stay unchanged, with all of their submodules.
    """
    rotary_forwards: dict[Forward, Forward] = {}
    excluded = {part for outer in opaque for part in outer.modules()}
    for part in module.modules():
        # A forward that is set on the instance comes from a user, and may differ from the class's forward.
        if part in excluded or "forward" in vars(part):
            continue
        forward = type(part).forward
        if _is_rms_norm(part):
            _replace(part, functools.partial(_rms_norm, part, _eps_of(part), ops))
        elif (activation := gated_mlp_activation(part)) is not None:
            _replace(part, functools.partial(_gated_mlp, part, activation, ops))
        elif isinstance(part, FusedGateUpMLP):
            _replace(part, functools.partial(_fused_gate_up_mlp, part, ops))
        elif uses_rotary(forward):
            if forward not in rotary_forwards:
                rotary_forwards[forward] = _with_fused_rotary(forward, ops)
            _replace(part, types.MethodType(rotary_forwards[forward], part))
        if _has_causal_loss(part):
            setattr(part, _LOSS_FUNCTION, functools.partial(_causal_loss, ops.cross_entropy))
    return module


def _replace(module: nn.Module, forward: Forward) -> None:
    """Replace the module's forward by ``forward``, under the signature of the old one."""
    module.__dict__["forward"] = _Forward(forward, module.forward)


class _Forward:
    """A function that replaces a module's forward and has its signature and name."""

    def __init__(self, function: Forward, replaced: Forward) -> None:
        self._function = function
        self.__signature__ = inspect.signature(replaced)
        functools.update_wrapper(self, replaced, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _only_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the only argument of a call, positional or by keyword."""
    (argument,) = (*args, *kwargs.values())
    assert isinstance(argument, torch.Tensor)
    return argument


# --- RMSNorm ---


def _eps_of(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _is_rms_norm(module: nn.Module) -> bool:
    """Return whether a module is an RMSNorm written as a chain of ops (``nn.RMSNorm`` is one op already)."""
    weights, eps = module._parameters, _eps_of(module)
    weight = weights.get("weight")
    if isinstance(module, nn.RMSNorm) or module._modules or len(weights) != 1 or weight is None or weight.dim() != 1:
        return False
    kind: Any = type(module)
    return isinstance(eps, float) and _computes_rms_norm(kind, eps)


@functools.lru_cache(maxsize=256)
def _computes_rms_norm(kind: Any, eps: float) -> bool:
    x, weight = _random(0, 2, 3, 8), _random(1, 8)
    stand_in = types.SimpleNamespace(weight=weight, variance_epsilon=eps, eps=eps)
    return _are_equal(lambda: kind.forward(stand_in, x), lambda: fused_kernels.rms_norm_forward(x, weight, eps)[0])


def _rms_norm(module: nn.Module, eps: float, ops: FusedOps, *args: Any, **kwargs: Any) -> torch.Tensor:
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return ops.rms_norm(_only_argument(args, kwargs), weight, eps)


# --- gated MLPs ---

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def gated_mlp_activation(module: nn.Module) -> str | None:
    """Return the activation of a gated MLP, a key of `fused_kernels.ACTIVATIONS`; None for any other module."""
    parts = module._modules
    if any(not isinstance(parts.get(name), nn.Module) for name in _PROJECTIONS) or not hasattr(module, "act_fn"):
        return None
    kind: Any = type(module)
    return _computed_activation(kind, _Activation(module.act_fn))


@dataclass(frozen=True, slots=True)
class _Activation:
    """An activation function as a cache key: equal to others of the same class and settings."""

    function: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Activation) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[type, str]:
        # The repr of a module shows its settings; that of a function is unique to it.
        return type(self.function), repr(self.function)


@functools.lru_cache(maxsize=256)
def _computed_activation(kind: Any, activation: _Activation) -> str | None:
    """Return the activation with which the op equals the forward of class ``kind``; None if there is none."""
    x, gate, up, down = _random(0, 2, 3, 8), _random(1, 12, 8), _random(2, 12, 8), _random(3, 8, 12)
    stand_in = types.SimpleNamespace(
        gate_proj=functools.partial(nn.functional.linear, weight=gate),
        up_proj=functools.partial(nn.functional.linear, weight=up),
        down_proj=functools.partial(nn.functional.linear, weight=down),
        act_fn=activation.function,
    )
    for name in fused_kernels.ACTIVATIONS:
        if _are_equal(
            lambda: kind.forward(stand_in, x),
            lambda name=name: fused_kernels.gated_forward(x @ gate.t(), x @ up.t(), name) @ down.t(),  # type: ignore[misc]
        ):
            return name
    return None


def _gated_mlp(module: Any, activation: str, ops: FusedOps, *args: Any, **kwargs: Any) -> torch.Tensor:
    x = _only_argument(args, kwargs)
    output: torch.Tensor = module.down_proj(ops.gated(module.gate_proj(x), module.up_proj(x), activation))
    return output


def _fused_gate_up_mlp(module: FusedGateUpMLP, ops: FusedOps, *args: Any, **kwargs: Any) -> torch.Tensor:
    pairs = module.gate_up_proj(_only_argument(args, kwargs))
    output: torch.Tensor = module.down_proj(ops.gated_pairs(pairs, module.activation))
    return output


# --- rotary embeddings ---


def uses_rotary(forward: Forward) -> bool:
    """Return whether ``forward`` calls its Python module's ``apply_rotary_pos_emb`` and the op equals that function."""
    inner = forward
    while isinstance(inner, types.FunctionType) and hasattr(inner, "__wrapped__"):
        if _cell_of_wrapped(inner) is None:
            return False
        inner = inner.__wrapped__
    return (
        isinstance(inner, types.FunctionType)
        and _ROTARY_FUNCTION in inner.__code__.co_names
        and _computes_rotary(inner.__globals__.get(_ROTARY_FUNCTION))
    )


def _cell_of_wrapped(wrapper: types.FunctionType) -> int | None:
    """Return the index of the closure cell that holds a decorator's wrapped function; None unless exactly one does."""
    wrapped, indices = wrapper.__dict__["__wrapped__"], list[int]()
    for index, cell in enumerate(wrapper.__closure__ or ()):
        with contextlib.suppress(ValueError):  # an empty cell
            if cell.cell_contents is wrapped:
                indices.append(index)
    return indices[0] if len(indices) == 1 else None


@functools.lru_cache(maxsize=256)
def _computes_rotary(function: Forward | None) -> bool:
    if function is None:
        return False
    q, k, cos, sin = _random(0, 2, 4, 3, 8), _random(1, 2, 2, 3, 8), _random(2, 1, 3, 8), _random(3, 1, 3, 8)
    return _are_equal(
        lambda: function(q, k, cos, sin),
        lambda: (fused_kernels.rotary_forward(q, cos, sin), fused_kernels.rotary_forward(k, cos, sin)),
    )


def _with_fused_rotary(forward: Forward, ops: FusedOps) -> Forward:
    """Return a copy of ``forward`` that calls ``ops.rotary``; other users of the rotary function are not affected."""
    assert isinstance(forward, types.FunctionType)
    if hasattr(forward, "__wrapped__"):  # a decorator, such as the one that renames arguments
        index, cells = _cell_of_wrapped(forward), list(forward.__closure__ or ())
        assert index is not None
        inner = _with_fused_rotary(forward.__wrapped__, ops)
        cells[index] = types.CellType(inner)
        wrapper = _copy(forward, forward.__globals__, tuple(cells))
        wrapper.__dict__["__wrapped__"] = inner
        return wrapper
    unfused = forward.__globals__[_ROTARY_FUNCTION]

    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **kwargs: Any
    ) -> Any:
        has_defaults = not rest and kwargs.get("unsqueeze_dim", 1) == 1 and set(kwargs) <= {"unsqueeze_dim"}
        if has_defaults and all(_takes_rotary(tensor, cos) for tensor in (q, k)):
            return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)
        return unfused(q, k, cos, sin, *rest, **kwargs)

    return _copy(forward, {**forward.__globals__, _ROTARY_FUNCTION: rotate}, forward.__closure__)


def _copy(
    function: types.FunctionType, names: dict[str, Any], closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    """Return a copy of ``function`` with the globals ``names`` and the given closure."""
    copied = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    return copied


def _takes_rotary(x: torch.Tensor, cos: torch.Tensor) -> bool:
    """Return whether the op accepts ``x``: ``cos`` has its dtype and rotates the whole last dim of ``x``."""
    whole = x.dim() == 4 and cos.dim() == 3 and x.shape[3] == cos.shape[2] and x.shape[2] == cos.shape[1]
    return whole and x.dtype == cos.dtype and x.shape[3] % 2 == 0 and cos.shape[0] in (1, x.shape[0])


# --- the loss ---


def _has_causal_loss(module: nn.Module) -> bool:
    """Return whether a module is a transformers model with the default loss of causal language models."""
    loss_property = getattr(type(module), "loss_function", None)
    if not isinstance(loss_property, property) or loss_property.fset is None:
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    # Reading loss_function of a model that has no loss would log a warning.
    return code is not None and _LOSS_FUNCTION in code.co_names and _computes_causal_loss(module.loss_function)


@functools.lru_cache(maxsize=16)
def _computes_causal_loss(function: Forward) -> bool:
    logits, labels = _random(0, 2, 5, 7), torch.arange(10).reshape(2, 5) % 7
    labels[0, 2] = _IGNORED

    def formula(*args: Any) -> torch.Tensor:
        return fused_kernels.run_forward(fused_kernels.CROSS_ENTROPY, args)[0]

    return _are_equal(lambda: function(logits, labels, 7), lambda: _causal_loss(formula, logits, labels, 7))


def _causal_loss(
    cross_entropy: Callable[[torch.Tensor, torch.Tensor, int, bool], torch.Tensor],
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = _IGNORED,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return the next-token loss, a scalar, with the arguments of transformers' ``ForCausalLMLoss``."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    rows, targets = logits.view(-1, vocab_size), shift_labels.view(-1)
    loss = cross_entropy(rows, targets, ignore_index, num_items_in_batch is None)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


# --- comparison ---


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _are_equal(module_code: Callable[[], Any], op: Callable[[], Any]) -> bool:
    """Return whether a module's code returns what the op returns, up to rounding."""
    try:
        with torch.no_grad():
            torch.testing.assert_close(module_code(), op(), rtol=1e-5, atol=1e-6)
    except Exception:  # noqa: BLE001  code that fails on these arguments does not compute the op
        return False
    return True
