"""Modules of experts that the op implements, and the context in which they call it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from planner.model_rewrites.experts.experts_op import OWN_ACTIVATION, ActivationCosts, ExpertsForm

Activation = Callable[[torch.Tensor], torch.Tensor]

_OPTIONS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Attributes that transformers sets on experts modules; the op implements all values of these."""

_FIXED_OPTIONS = {"has_post_expert_norm": False, "_is_expert_parallel": False}
"""Others, with the values that the op implements."""

_GATED_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "silu": "silu", "GELUActivation": "gelu"}
"""Name of the activation's class or function -> the op's, where transformers' default gates."""

_PROBED_INNER = 4
"""Elements of the hidden size on which an activation is tried."""


class ExpertsModule(NamedTuple):
    """A module of experts that the op implements."""

    module: nn.Module
    form: ExpertsForm

    @property
    def parameters(self) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter | None, nn.Parameter | None]:
        """gate_up, down and their biases, as the op takes them."""
        gate_up, down = _names(self.form.gated)
        held = self.module._parameters  # typed as tensors, unlike attributes
        first, second = held[gate_up], held[down]
        assert first is not None
        assert second is not None
        return first, second, held.get(f"{gate_up}_bias"), held.get(f"{down}_bias")

    def arguments(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, their experts and their routing weights, which each class names in its own way."""
        bound = inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs)
        _, hidden, index, weights = bound.args
        return hidden, index, weights

    @property
    def activation(self) -> Activation:
        """The module's own function between its two GEMMs."""
        return _own_activation(self.module, self.form.gated)


def experts_form(module: nn.Module) -> ExpertsForm | None:
    """Return how a module of experts stores and computes them; None if the op does not implement the module.

    The costs of an activation of the module's own are not measured.
    """
    options = [getattr(module, name, None) for name in _OPTIONS]
    if not hasattr(module, "num_experts") or None in options:
        return None
    if any(getattr(module, name, None) != value for name, value in _FIXED_OPTIONS.items()):
        return None
    gated, biased, transposed, concatenated = map(bool, options)
    expected = dict.fromkeys(_names(gated), 3)
    if biased:
        expected |= {f"{name}_bias": 2 for name in _names(gated)}
    if {name: tensor.dim() for name, tensor in module.named_parameters()} != expected:
        return None
    form = ExpertsForm(OWN_ACTIVATION, gated, gated and not concatenated, transposed)
    gate = getattr(getattr(module, "_apply_gate", None), "__name__", "")
    if gated and concatenated and gate == "_default_apply_gate":
        function = getattr(module, "act_fn", None)
        named = _GATED_ACTIVATIONS.get(getattr(function, "__name__", type(function).__name__))
        if named is not None:
            return form._replace(activation=named)
    return form if _is_elementwise(module, form) else None


def experts_in(module: nn.Module) -> list[ExpertsModule]:
    """Return the experts modules in ``module`` that the op implements."""
    forms = [(part, experts_form(part)) for part in module.modules()]
    return [ExpertsModule(part, form) for part, form in forms if form is not None]


@contextmanager
def experts_as_one_op(module: nn.Module, costs_of: Callable[[Activation, int], ActivationCosts]) -> Iterator[None]:
    """Within this context, the experts modules in ``module`` call the op.

    Args:
        costs_of: measures the costs of an activation, given the matrices of the first GEMM's weight.
    """
    found = experts_in(module)
    costs: dict[type[nn.Module], ActivationCosts] = {}
    try:
        for part in found:
            kind, form = type(part.module), part.form
            if form.activation == OWN_ACTIVATION:
                if kind not in costs:
                    costs[kind] = costs_of(part.activation, form.matrices)
                form = form._replace(costs=costs[kind])
            priced = part._replace(form=form)
            part.module.__dict__["forward"] = functools.partial(_call, priced)
        yield
    finally:
        for part in found:
            part.module.__dict__.pop("forward", None)


def _call(part: ExpertsModule, *args: Any, **kwargs: Any) -> torch.Tensor:
    *form, costs = part.form
    output: torch.Tensor = torch.ops.shardplan.experts(
        *part.arguments(*args, **kwargs), *part.parameters, *form, list(costs)
    )
    return output


def _names(gated: bool) -> tuple[str, str]:
    return ("gate_up_proj" if gated else "up_proj"), "down_proj"


def _own_activation(module: nn.Module, gated: bool) -> Activation:
    function: Activation = getattr(module, "_apply_gate" if gated else "act_fn")
    return function


def _is_elementwise(module: nn.Module, form: ExpertsForm) -> bool:
    """Return whether an activation treats each row and each element of the hidden size by itself.

    It may not write to its input either, nor return a view of it. This is tried on a few numbers.
    """
    inner, matrices = _PROBED_INNER, form.matrices
    values = torch.linspace(-9, 9, 3 * matrices * inner, device="cpu").sin().mul(3).view(3, matrices * inner)
    by_matrix = (3, inner, matrices) if form.alternating else (3, matrices, inner)
    part = values.view(by_matrix)[:2, : inner // 2] if form.alternating else values.view(by_matrix)[:2, :, : inner // 2]
    try:
        with torch.no_grad():
            activation = _own_activation(module, form.gated)
            given = values.clone()
            whole, of_part = activation(given), activation(part.reshape(2, -1))
            return (
                whole.shape == (3, inner)
                and whole.untyped_storage()._cdata != given.untyped_storage()._cdata
                and torch.equal(given, values)
                and torch.equal(whole[:2, : inner // 2], of_part)
            )
    except Exception:  # noqa: BLE001  whatever a function of somebody's module may raise
        return False
