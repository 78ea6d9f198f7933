"""Experts of a mixture-of-experts block, with tokens, experts, or the inner dim of every expert sharded on any axes.

A mesh axis that shards anything shards one of

    tokens                each rank runs its tokens through all experts; gradients of weights are partial
    experts               each rank runs the tokens that chose its experts; the result is partial
    the inner dim         each rank runs all tokens through its shard of every expert; the result is partial
    experts and tokens    tokens are sent to the ranks of their experts, and the results are sent back

Only the last case communicates inside the op, by all-to-alls in which each rank gets exactly the rows of its experts
(``token_exchange``). At most one axis can be of this kind. The gate and up weights of an expert lie in one tensor, one
after the other or row by row in turn. Where the inner dim is sharded, a rank has the same shard of both: ``SS(1,2)``, a
strided shard, where one lies after the other. ``planner.model_rewrites.experts`` has the placements, and knows the
modules whose forward ``shard_module`` replaces, whichever implementation their config names.

"silu" and "gelu" are computed by formulas, with as little memory as possible. Any other activation is the module's own
function, and autograd computes its gradient.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout, format_layout
from executor.ops.grouped_gemm import GroupedGemm
from executor.ops.lookups.embedding import split_offset
from executor.ops.token_exchange import RoutedRows, TokenExchange, exchange_rows
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import local_of, make_dtensor, run_function
from planner.errors import PlanLayoutError
from planner.model_rewrites.experts.experts_op import OWN_ACTIVATION, ExpertsForm
from planner.model_rewrites.experts.modules import Activation, ExpertsModule, experts_in
from planner.model_rewrites.experts.placements import ExpertsPlacement, experts_placements

R, S0 = Replicate(), Shard(0)


def replace_experts(module: nn.Module, redistributor: Redistributor, *, opaque: Collection[nn.Module] = ()) -> None:
    """Replace the forward of the experts in ``module`` whose parameters are DTensors, but for those in ``opaque``."""
    for part in experts_in(module):
        parameters = part.module.parameters()
        if part.module not in opaque and all(isinstance(parameter, DTensor) for parameter in parameters):
            part.module.forward = _ExpertsForward(part, redistributor)


class _ExpertsForward:
    """The forward of a module of experts."""

    def __init__(self, experts_module: ExpertsModule, redistributor: Redistributor) -> None:
        self._experts, self._redistributor = experts_module, redistributor
        forward = experts_module.module.forward
        self.__signature__ = inspect.signature(forward)  # signatures are looked up on forward
        functools.update_wrapper(self, forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        part = self._experts
        hidden, index, routing_weights = part.arguments(*args, **kwargs)
        result = experts(
            self._redistributor,
            hidden,
            index,
            routing_weights,
            *part.parameters,
            form=part.form,
            activation=part.activation,
        )
        given = (hidden, index, routing_weights, *part.module.parameters())
        # In a local module there are no DTensors.
        return result if any(isinstance(tensor, DTensor) for tensor in given) else result.to_local()


def experts(
    redistributor: Redistributor,
    hidden: torch.Tensor,
    index: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    form: ExpertsForm,
    activation: Activation | None = None,
) -> DTensor:
    """Return each token's weighted sum of its experts' results, [tokens, width].

    Args:
        redistributor: redistributes on the mesh.
        hidden: the tokens, [tokens, width].
        index: the experts chosen for each token, [tokens, chosen].
        routing_weights: [tokens, chosen].
        gate_up: [experts, matrices * inner, width], or transposed, as ``form`` says.
        down: [experts, width, inner], or transposed.
        gate_up_bias: [experts, matrices * inner]; both biases are given or neither.
        down_bias: [experts, width].
        form: how the experts are stored and what they compute.
        activation: [rows, matrices * inner] -> [rows, inner], for experts with an activation of their module's own.

    Raises:
        PlanLayoutError: layouts that the op does not cover.
    """
    tensors = (hidden, index, routing_weights, gate_up, down, gate_up_bias, down_bias)
    inputs = [None if tensor is None else redistributor.as_dtensor(tensor) for tensor in tensors]
    given = [tensor for tensor in inputs if tensor is not None]
    places = _placements(form, [tuple(tensor.placements) for tensor in given])
    axis = _exchange_axis(redistributor, given)
    result: DTensor = run_function(_Experts, *inputs, redistributor, places, axis, form, activation)
    return result


def _exchange_axis(redistributor: Redistributor, inputs: Sequence[DTensor]) -> int | None:
    """Return the axis that shards both tokens and experts; None if no axis shards both."""
    tokens, experts = inputs[0].placements, inputs[4].placements
    axes = [
        axis
        for axis, places in enumerate(zip(tokens, experts, strict=True))
        if places == (S0, S0) and redistributor.axis_size(axis) > 1
    ]
    if len(axes) > 1:
        raise PlanLayoutError(
            f"experts got tokens in ({', '.join(format_layout(tuple(tokens)))}) and down_proj in "
            f"({', '.join(format_layout(tuple(experts)))}): {len(axes)} axes shard both.",
            field="input_plan",
            what_to_do="Shard tokens and experts both on one axis at most; make one larger axis of two.",
        )
    return axes[0] if axes else None


def _placements(form: ExpertsForm, layouts: Sequence[Layout]) -> list[ExpertsPlacement]:
    """Return the placements on each axis, given the layouts of hidden, index, routing weights and all weights."""
    known = experts_placements(form)
    found: list[ExpertsPlacement] = []
    for tokens, index, routing, *weights in zip(*layouts, strict=True):
        places = [each for each in known if each.tokens == tokens and each.weights[: len(weights)] == tuple(weights)]
        if not places or not tokens == index == routing:
            texts = ["(" + ", ".join(format_layout(layout)) + ")" for layout in layouts]
            names = ("the first weight", "down_proj", "the first bias", "down_proj_bias")
            held = [f"{name} in {text}" for name, text in zip(names, texts[3:], strict=False)]
            inner = next(each.weights for each in known if each.weights[1] == Shard(form.inner_dim))
            raise PlanLayoutError(
                f"experts got tokens, their experts and their weights in {', '.join(texts[:3])}, {', '.join(held)}.",
                field="input_plan",
                what_to_do="On each axis shard the tokens, S(0) of all parameters, or both, or the inner dim "
                f"({', '.join(format_layout(inner[: len(held)]))} of these parameters); give tokens, experts and "
                "weights one layout.",
            )
        found.append(places[0])
    return found


class _Experts(torch.autograd.Function):
    """The op in autograd. Local shapes: ``x`` [tokens, width], ``up_weights`` [experts, matrices * inner, width]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: DTensor,
        index: DTensor,
        routing_weights: DTensor,
        gate_up: DTensor,
        down: DTensor,
        gate_up_bias: DTensor | None,
        down_bias: DTensor | None,
        redistributor: Redistributor,
        places: Sequence[ExpertsPlacement],
        axis: int | None,
        form: ExpertsForm,
        activation: Activation | None,
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        x, up_weights, down_weights = local_of(hidden), _by_output(gate_up, form), _by_output(down, form)
        layout, all_experts = tuple(gate_up.placements), gate_up.shape[0]
        exchange: TokenExchange | None = None
        if axis is None:
            first, count = split_offset(redistributor, all_experts, layout, 0)
            rows = RoutedRows.from_choices(local_of(index), first, count, all_experts)
            gemm = GroupedGemm.choose(rows.counts, None, rows.choice.shape[0], down_weights)
        else:
            rows, exchange, received = exchange_rows(redistributor, local_of(index), all_experts, layout, axis)
            gemm = GroupedGemm.choose(received.counts, received.counts_on_host, received.rows, down_weights)
        row_weights, tokens = _weights_of_rows(local_of(routing_weights), rows), x[rows.token]
        if exchange is not None:
            tokens, row_weights = exchange.to_experts(tokens), exchange.to_experts(row_weights)
        inner = gemm.forward(tokens, up_weights)
        # Received rows are saved, so that the backward does not exchange them again.
        saved = (x, None, None, None) if exchange is None else (tokens, row_weights, exchange.sizes, exchange.order)
        del tokens
        # Outputs of GEMMs are not written to: selective checkpointing keeps them.
        if gate_up_bias is not None:
            inner = gemm.by_row(local_of(gate_up_bias), inner).add_(inner)
        row_weights = row_weights.to(x.dtype)
        weighted = _activated(inner, form, activation).mul_(row_weights)
        result = torch.zeros_like(x)
        row_results = gemm.forward(weighted, down_weights)
        own_bias = local_of(down_bias) if down_bias is not None and _adds_bias(redistributor, places, form) else None
        if own_bias is not None:
            row_results = gemm.by_row(own_bias, row_results).mul_(row_weights).add_(row_results)
        if exchange is not None:
            del weighted
            row_results = exchange.to_tokens(row_results)
        result.index_add_(0, rows.token, row_results)
        ctx.save_for_backward(
            local_of(routing_weights),
            local_of(gate_up),
            local_of(down),
            own_bias,
            inner,
            rows.choice,
            gemm.counts,
            *saved,
        )
        ctx.group = None if exchange is None else exchange.group
        ctx.redistributor, ctx.places, ctx.form, ctx.activation = redistributor, places, form, activation
        ctx.shapes = [None if t is None else tuple(t.shape) for t in (gate_up, down, gate_up_bias, down_bias)]
        ctx.shapes = [tuple(hidden.shape), tuple(routing_weights.shape), *ctx.shapes]
        ctx.tokens, ctx.per_expert = x.shape[0], gemm.per_expert
        output = tuple(place.result for place in places)
        return make_dtensor(result, redistributor.device_mesh, output, hidden.shape, contiguous_stride(hidden.shape))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 12
        redistributor: Redistributor = ctx.redistributor
        grad_out = redistributor.as_dtensor(gradient)
        out_layout, layouts = _gradient_layouts(tuple(grad_out.placements), ctx.places)
        locals_ = _local_gradients(ctx, local_of(redistributor.to_layout(grad_out, out_layout)))
        hidden, routing_weights, *weights = [
            None
            if local is None
            else make_dtensor(local, redistributor.device_mesh, layout, shape, contiguous_stride(shape))
            for local, layout, shape in zip(locals_, layouts, ctx.shapes, strict=True)
        ]
        return (hidden, None, routing_weights, *weights, None, None, None, None, None)


def _local_gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the local gradients of hidden, routing weights and all weights, given ``gradient`` of the result."""
    form: ExpertsForm = ctx.form
    weights, gate_up, down, down_bias, inner, choice, counts, tokens, received_weights, sizes, order = ctx.saved_tensors
    up_weights, down_weights = _by_output(gate_up, form), _by_output(down, form)
    rows, gemm = RoutedRows(choice, counts, weights.shape[1]), GroupedGemm(counts, ctx.per_expert)
    exchange = None if ctx.group is None else TokenExchange(ctx.group, sizes, order)
    needs_x, _, needs_weights, needs_up, needs_down, needs_up_bias, needs_down_bias = ctx.needs_input_grad[:7]
    row_weights = (_weights_of_rows(weights, rows) if exchange is None else received_weights).to(inner.dtype)
    grad_rows = gradient[rows.token]
    grad_rows = grad_rows if exchange is None else exchange.to_experts(grad_rows)
    grad_weighted = gemm.forward(grad_rows, down_weights.transpose(1, 2))
    gated, activation_gradient = _recomputed(inner, form, ctx.activation)
    grad_weights = None
    if needs_weights:
        by_row = (grad_weighted * gated).sum(-1)
        if down_bias is not None:
            by_row += (gemm.by_row(down_bias, grad_rows) * grad_rows).sum(-1)
        by_row = by_row.to(weights.dtype)
        by_row = by_row if exchange is None else exchange.to_tokens(by_row)
        grad_weights = weights.new_zeros(weights.numel()).index_copy_(0, rows.choice, by_row).view(weights.shape)
    grad_down = None
    if needs_down:
        grad_down = _weight_gradient(gemm, grad_rows, gated.mul_(row_weights), down_weights, form)
    grad_down_bias = gemm.sum_by_expert(grad_rows * row_weights) if needs_down_bias else None
    del grad_rows, gated
    grad_inner = activation_gradient(grad_weighted.mul_(row_weights))
    del grad_weighted, activation_gradient
    grad_up = None
    if needs_up:
        own_tokens = tokens[rows.token] if exchange is None else tokens
        grad_up = _weight_gradient(gemm, grad_inner, own_tokens, up_weights, form)
        del own_tokens
    grad_up_bias = gemm.sum_by_expert(grad_inner) if needs_up_bias else None
    grad_x = None
    if needs_x:
        grad_tokens = gemm.forward(grad_inner, up_weights.transpose(1, 2))
        if exchange is not None:
            del grad_inner
            grad_tokens = exchange.to_tokens(grad_tokens)
        grad_x = grad_tokens.new_zeros(ctx.tokens, grad_tokens.shape[1]).index_add_(0, rows.token, grad_tokens)
    return grad_x, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias


def _gradient_layouts(gradient: Layout, places: Sequence[ExpertsPlacement]) -> tuple[Layout, list[Layout]]:
    """Return the layout in which the backward needs the result's gradient, and the layouts of the inputs' gradients.

    The inputs with gradients are hidden, routing weights, gate_up, down and their biases.

    Args:
        gradient: layout in which autograd gives the result's gradient.
        places: placements of the op on each axis.
    """
    needed: list[Placement] = []
    by_axis: list[tuple[Placement, ...]] = []
    for grad_place, place in zip(gradient, places, strict=True):
        # The backward is linear in the gradient, so a partial gradient can stay partial on an axis that shards nothing.
        if place.result == R and grad_place.is_partial():
            needed.append(grad_place)
            by_axis.append((grad_place,) * 6)
        else:
            needed.append(R if place.result.is_partial() else place.result)
            by_axis.append((place.tokens_gradient,) * 2 + place.weight_gradients)
    return tuple(needed), list(zip(*by_axis, strict=True))


def _by_output(weight: torch.Tensor, form: ExpertsForm) -> torch.Tensor:
    """Return the local part of ``weight`` as [experts, out, in]."""
    local = local_of(weight) if isinstance(weight, DTensor) else weight
    return local.transpose(1, 2) if form.transposed else local


def _weight_gradient(
    gemm: GroupedGemm, gradient: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, form: ExpertsForm
) -> torch.Tensor:
    """Return the gradient of a weight as it is stored; ``weights`` is [experts, out, in]."""
    if form.transposed:
        return gemm.weight_gradient(rows, gradient, weights.transpose(1, 2))
    return gemm.weight_gradient(gradient, rows, weights)


def _adds_bias(redistributor: Redistributor, places: Sequence[ExpertsPlacement], form: ExpertsForm) -> bool:
    """Return whether this rank adds the bias of ``down``: of ranks that share an expert's inner dim, the first does."""
    sharing = [axis for axis, place in enumerate(places) if place.weights[1] == Shard(form.inner_dim)]
    return all(redistributor.coordinate(axis) == 0 for axis in sharing)


def _weights_of_rows(routing_weights: torch.Tensor, rows: RoutedRows) -> torch.Tensor:
    """Return the routing weight of each row, [rows, 1]."""
    return routing_weights.reshape(-1)[rows.choice].unsqueeze(1)


def _activated(inner: torch.Tensor, form: ExpertsForm, activation: Activation | None) -> torch.Tensor:
    """Return the down GEMM's input, but for the routing weights: [rows, matrices * inner] -> [rows, inner]."""
    if form.activation == OWN_ACTIVATION:
        assert activation is not None
        return activation(inner).to(inner.dtype)
    gate, up = inner.chunk(2, -1)
    return _activate(gate, form.activation).mul_(up)


def _recomputed(
    inner: torch.Tensor, form: ExpertsForm, activation: Activation | None
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return ``_activated``, which the caller may overwrite, and a function from its gradient to that of ``inner``.

    The function changes the gradient in place.
    """
    if form.activation != OWN_ACTIVATION:
        gate, up = inner.chunk(2, -1)
        return _activated(inner, form, activation), lambda grad: _activation_gradient(grad, gate, up, form.activation)
    with torch.enable_grad():
        leaf = inner.detach().requires_grad_()
        result = _activated(leaf, form, activation)
    return result.detach().clone(), lambda grad: torch.autograd.grad(result, leaf, grad)[0]


def _activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate)


def _activation_gradient(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the gradients of gate and up, concatenated along the last dim.

    ``gradient`` is that of ``activation(gate) * up``; it is changed in place.
    """
    aten = torch.ops.aten
    backward = aten.silu_backward.default if activation == "silu" else aten.gelu_backward.default
    return torch.cat([backward(gradient * up, gate), gradient.mul_(_activate(gate, activation))], -1)
