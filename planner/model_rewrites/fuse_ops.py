"""Modules whose own code is a chain of small ops, and the fused ops in its place.

Which modules are meant is not guessed from their names alone: the code of a class is run on small random tensors, and
only where it gives what the op gives (in float32, to rounding) does the op take its place. Known are RMSNorm, gated
MLPs, rotary embeddings of attention, and the loss of causal language models, as transformers writes them.
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
    """What modules call: the arguments of each are those of the op in `planner.model_rewrites.fused_kernels`."""

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
"""The ops themselves, which a trace sees and nobody runs."""


def fuse_ops(module: nn.Module, ops: FusedOps, *, opaque: Collection[nn.Module] = ()) -> nn.Module:
    """Return ``module``, in which from now on what can be fused calls ``ops``; ``opaque`` parts stay as they are."""
    rotated: dict[Forward, Forward] = {}
    hidden = {part for outer in opaque for part in outer.modules()}
    for part in module.modules():
        # A forward of the module's own is somebody's, and not what its class says.
        if part in hidden or "forward" in vars(part):
            continue
        own = type(part).forward
        if _is_norm(part):
            _replace(part, functools.partial(_norm, part, _eps_of(part), ops))
        elif (activation := gated_mlp_activation(part)) is not None:
            _replace(part, functools.partial(_gated_mlp, part, activation, ops))
        elif isinstance(part, FusedGateUpMLP):
            _replace(part, functools.partial(_packed_gated_mlp, part, ops))
        elif uses_rotary(own):
            if own not in rotated:
                rotated[own] = _with_rotation(own, ops)
            _replace(part, types.MethodType(rotated[own], part))
        if _has_causal_loss(part):
            setattr(part, _LOSS_FUNCTION, functools.partial(_causal_loss, ops.cross_entropy))
    return module


def _replace(module: nn.Module, forward: Forward) -> None:
    """Put ``forward`` in the place of the module's own, whose signature it keeps."""
    module.__dict__["forward"] = _Forward(forward, module.forward)


class _Forward:
    """A forward in the place of a module's own."""

    def __init__(self, function: Forward, own: Forward) -> None:
        self._function = function
        self.__signature__ = inspect.signature(own)
        functools.update_wrapper(self, own, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the one argument of a call, whatever it is called."""
    (found,) = (*args, *kwargs.values())
    assert isinstance(found, torch.Tensor)
    return found


# --- norms ---


def _eps_of(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _is_norm(module: nn.Module) -> bool:
    """Tell whether a module is an RMSNorm that is a chain of ops (torch's own is one op already)."""
    weights, eps = module._parameters, _eps_of(module)
    weight = weights.get("weight")
    if isinstance(module, nn.RMSNorm) or module._modules or len(weights) != 1 or weight is None or weight.dim() != 1:
        return False
    kind: Any = type(module)
    return isinstance(eps, float) and _norm_agrees(kind, eps)


@functools.lru_cache(maxsize=256)
def _norm_agrees(kind: Any, eps: float) -> bool:
    x, weight = _random(0, 2, 3, 8), _random(1, 8)
    stand_in = types.SimpleNamespace(weight=weight, variance_epsilon=eps, eps=eps)
    return _agrees(lambda: kind.forward(stand_in, x), lambda: fused_kernels.rms_norm_forward(x, weight, eps)[0])


def _norm(module: nn.Module, eps: float, ops: FusedOps, *args: Any, **kwargs: Any) -> torch.Tensor:
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return ops.rms_norm(_only(args, kwargs), weight, eps)


# --- gated MLPs ---

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def gated_mlp_activation(module: nn.Module) -> str | None:
    """Return the activation of a gated MLP; None of any other module."""
    parts = module._modules
    if any(not isinstance(parts.get(name), nn.Module) for name in _PROJECTIONS) or not hasattr(module, "act_fn"):
        return None
    kind: Any = type(module)
    return _gate_that_agrees(kind, _Activation(module.act_fn))


@dataclass(frozen=True, slots=True)
class _Activation:
    """An activation, equal to others of its class and settings."""

    function: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Activation) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[type, str]:
        # A module's repr shows what it is set to; a function's is its own.
        return type(self.function), repr(self.function)


@functools.lru_cache(maxsize=256)
def _gate_that_agrees(kind: Any, activation: _Activation) -> str | None:
    x, gate, up, down = _random(0, 2, 3, 8), _random(1, 12, 8), _random(2, 12, 8), _random(3, 8, 12)
    stand_in = types.SimpleNamespace(
        gate_proj=functools.partial(nn.functional.linear, weight=gate),
        up_proj=functools.partial(nn.functional.linear, weight=up),
        down_proj=functools.partial(nn.functional.linear, weight=down),
        act_fn=activation.function,
    )
    for name in fused_kernels.ACTIVATIONS:
        if _agrees(
            lambda: kind.forward(stand_in, x),
            lambda name=name: fused_kernels.gated_forward(x @ gate.t(), x @ up.t(), name) @ down.t(),  # type: ignore[misc]
        ):
            return name
    return None


def _gated_mlp(module: Any, activation: str, ops: FusedOps, *args: Any, **kwargs: Any) -> torch.Tensor:
    x = _only(args, kwargs)
    found: torch.Tensor = module.down_proj(ops.gated(module.gate_proj(x), module.up_proj(x), activation))
    return found


def _packed_gated_mlp(module: FusedGateUpMLP, ops: FusedOps, *args: Any, **kwargs: Any) -> torch.Tensor:
    pairs = module.gate_up_proj(_only(args, kwargs))
    found: torch.Tensor = module.down_proj(ops.gated_pairs(pairs, module.activation))
    return found


# --- rotary embeddings ---


def uses_rotary(forward: Forward) -> bool:
    """Tell whether a forward calls a function of its module that turns queries and keys."""
    inner = forward
    while isinstance(inner, types.FunctionType) and hasattr(inner, "__wrapped__"):
        if _cell_of_wrapped(inner) is None:
            return False
        inner = inner.__wrapped__
    return (
        isinstance(inner, types.FunctionType)
        and _ROTARY_FUNCTION in inner.__code__.co_names
        and _rotation_agrees(inner.__globals__.get(_ROTARY_FUNCTION))
    )


def _cell_of_wrapped(wrapper: types.FunctionType) -> int | None:
    """Return in which cell of its closure a decorator's function has what it wraps; None where that is not clear."""
    wrapped, held = wrapper.__dict__["__wrapped__"], list[int]()
    for index, cell in enumerate(wrapper.__closure__ or ()):
        with contextlib.suppress(ValueError):  # an empty cell
            if cell.cell_contents is wrapped:
                held.append(index)
    return held[0] if len(held) == 1 else None


@functools.lru_cache(maxsize=256)
def _rotation_agrees(function: Forward | None) -> bool:
    if function is None:
        return False
    q, k, cos, sin = _random(0, 2, 4, 3, 8), _random(1, 2, 2, 3, 8), _random(2, 1, 3, 8), _random(3, 1, 3, 8)
    return _agrees(
        lambda: function(q, k, cos, sin),
        lambda: (fused_kernels.rotary_forward(q, cos, sin), fused_kernels.rotary_forward(k, cos, sin)),
    )


def _with_rotation(forward: Forward, ops: FusedOps) -> Forward:
    """Return ``forward`` as it is, but that it calls ``ops`` to turn queries and keys; other code is not affected."""
    assert isinstance(forward, types.FunctionType)
    if hasattr(forward, "__wrapped__"):  # such as what takes arguments by their old names
        place, cells = _cell_of_wrapped(forward), list(forward.__closure__ or ())
        assert place is not None
        inner = _with_rotation(forward.__wrapped__, ops)
        cells[place] = types.CellType(inner)
        found = _copy(forward, forward.__globals__, tuple(cells))
        found.__dict__["__wrapped__"] = inner
        return found
    own = forward.__globals__[_ROTARY_FUNCTION]

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **named: Any) -> Any:
        usual = not rest and named.get("unsqueeze_dim", 1) == 1 and set(named) <= {"unsqueeze_dim"}
        if usual and all(_is_turned_by(tensor, cos) for tensor in (q, k)):
            return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)
        return own(q, k, cos, sin, *rest, **named)

    return _copy(forward, {**forward.__globals__, _ROTARY_FUNCTION: rotate}, forward.__closure__)


def _copy(
    function: types.FunctionType, names: dict[str, Any], closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    """Return a function of the same code, with other globals or another closure."""
    found = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    found.__kwdefaults__ = function.__kwdefaults__
    found.__dict__.update(function.__dict__)
    return found


def _is_turned_by(x: torch.Tensor, cos: torch.Tensor) -> bool:
    """Tell whether all of ``x`` is turned, and in the dtype that it has."""
    whole = x.dim() == 4 and cos.dim() == 3 and x.shape[3] == cos.shape[2] and x.shape[2] == cos.shape[1]
    return whole and x.dtype == cos.dtype and x.shape[3] % 2 == 0 and cos.shape[0] in (1, x.shape[0])


# --- the loss ---


def _has_causal_loss(module: nn.Module) -> bool:
    """Tell whether a module is a model of transformers with the usual loss of causal language models."""
    chosen = getattr(type(module), "loss_function", None)
    if not isinstance(chosen, property) or chosen.fset is None:
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    # Asked of a model that has no loss, transformers would warn.
    return code is not None and _LOSS_FUNCTION in code.co_names and _loss_agrees(module.loss_function)


@functools.lru_cache(maxsize=16)
def _loss_agrees(function: Forward) -> bool:
    logits, labels = _random(0, 2, 5, 7), torch.arange(10).reshape(2, 5) % 7
    labels[0, 2] = _IGNORED

    def formula(*args: Any) -> torch.Tensor:
        return fused_kernels.run_forward(fused_kernels.CROSS_ENTROPY, args)[0]

    return _agrees(lambda: function(logits, labels, 7), lambda: _causal_loss(formula, logits, labels, 7))


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
    """Return the loss of each position's prediction of the next; arguments as transformers'."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    rows, wanted = logits.view(-1, vocab_size), shift_labels.view(-1)
    loss = cross_entropy(rows, wanted, ignore_index, num_items_in_batch is None)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


# --- agreement ---


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _agrees(own: Callable[[], Any], ours: Callable[[], Any]) -> bool:
    """Tell whether a module's own code gives what ours gives."""
    try:
        with torch.no_grad():
            torch.testing.assert_close(own(), ours(), rtol=1e-5, atol=1e-6)
    except Exception:  # noqa: BLE001  code that does not run like this is not what the op stands for
        return False
    return True
