"""Experts of a mixture-of-experts block, with tokens, experts, or the inner dim of every expert sharded on any axes.

A mesh axis that shards anything shards one of

    tokens                each rank runs its tokens through all experts; gradients of weights are partial
    experts               each rank runs the tokens that chose its experts; the result is partial
    the inner dim         each rank runs all tokens through its shard of every expert; the result is partial
    experts and tokens    tokens are sent to the ranks of their experts, and the results are sent back

Only the last case communicates inside the op, by all-to-alls in which each rank gets exactly the rows of its experts
(``token_exchange``). At most one axis can be of this kind. The gate and up weights of an expert lie in one tensor, one
after the other. Where the inner dim is sharded, a rank has the same shard of both: ``SS(1,2)``, a strided shard.
``shard_module`` replaces the forward of every module that ``planner.model_rewrites.experts`` knows, whichever
implementation its config names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cost_model.layouts.layout import Layout, format_layout
from executor.ops.grouped_gemm import GroupedGemm
from executor.ops.lookups.embedding import split_offset
from executor.ops.token_exchange import RoutedRows, TokenExchange, exchange_rows
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import local_of, make_dtensor, run_function
from planner.errors import PlanLayoutError
from planner.model_rewrites.experts import GATE_UP_MATRICES, experts_in

R, P, S0 = Replicate(), Partial(), Shard(0)
_GATE_UP_INNER = _StridedShard(1, split_factor=GATE_UP_MATRICES)
"""Placement of ``gate_up`` on an axis that shards the inner dim."""

_GRADIENTS: dict[tuple[Placement, Placement, Placement], tuple[Placement, Placement, Placement, Placement]] = {
    (R, R, R): (R, R, R, R),
    (S0, R, R): (S0, S0, P, P),
    (R, S0, S0): (P, P, S0, S0),
    (R, _GATE_UP_INNER, Shard(2)): (P, P, _GATE_UP_INNER, Shard(2)),
    (S0, S0, S0): (S0, S0, S0, S0),
}
"""Placements on one axis: (tokens, gate_up, down) -> (result, gradients of tokens and of routing weights, gradient of
gate_up, gradient of down)."""


def replace_experts(module: nn.Module, redistributor: Redistributor, *, opaque: Collection[nn.Module] = ()) -> None:
    """Replace the forward of the experts in ``module`` whose parameters are DTensors, but for those in ``opaque``."""
    for part, activation in experts_in(module):
        if part not in opaque and all(isinstance(parameter, DTensor) for parameter in part.parameters()):
            part.forward = _ExpertsForward(part, activation, redistributor)


class _ExpertsForward:
    """The forward of a module of experts."""

    def __init__(self, module: nn.Module, activation: str, redistributor: Redistributor) -> None:
        self._module, self._activation, self._redistributor = module, activation, redistributor
        # Signatures are looked up on forward.
        self.__signature__ = inspect.signature(module.forward)
        functools.update_wrapper(self, module.forward, updated=())

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        parameters = self._module._parameters  # typed as tensors, unlike attributes
        gate_up, down = parameters["gate_up_proj"], parameters["down_proj"]
        assert gate_up is not None
        assert down is not None
        given = hidden_states, top_k_index, top_k_weights, gate_up, down
        result = experts(self._redistributor, *given, self._activation)
        # In a local module there are no DTensors.
        return result if any(isinstance(tensor, DTensor) for tensor in given) else result.to_local()


def experts(
    redistributor: Redistributor,
    hidden: torch.Tensor,
    index: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> DTensor:
    """Return each token's weighted sum of its experts' results, [tokens, width].

    Args:
        redistributor: redistributes on the mesh.
        hidden: the tokens, [tokens, width].
        index: the experts chosen for each token, [tokens, chosen].
        routing_weights: [tokens, chosen].
        gate_up: [experts, 2 * inner, width], the gate's rows before up's.
        down: [experts, width, inner].
        activation: "silu" or "gelu".

    Raises:
        PlanLayoutError: layouts that the op does not cover.
    """
    inputs = [redistributor.as_dtensor(tensor) for tensor in (hidden, index, routing_weights, gate_up, down)]
    output = _output_layout([tuple(tensor.placements) for tensor in inputs])
    axis = _exchange_axis(redistributor, inputs)
    result: DTensor = run_function(_Experts, *inputs, redistributor, output, axis, activation)
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


def _output_layout(layouts: list[Layout]) -> Layout:
    """Return the layout of the result, given the layouts of hidden, index, routing weights, gate_up and down."""
    output: list[Placement] = []
    for tokens, index, weights, gate_up, down in zip(*layouts, strict=True):
        if not tokens == index == weights or (tokens, gate_up, down) not in _GRADIENTS:
            texts = ["(" + ", ".join(format_layout(layout)) + ")" for layout in layouts]
            raise PlanLayoutError(
                f"experts got tokens, their experts and their weights in {texts[0]}, {texts[1]}, {texts[2]}, "
                f"gate_up_proj in {texts[3]} and down_proj in {texts[4]}.",
                field="input_plan",
                what_to_do="On each axis shard the tokens, S(0) of both parameters, or both, or SS(1,2) of "
                "gate_up_proj and S(2) of down_proj; give tokens, experts and weights one layout.",
            )
        output.append(tokens if isinstance(tokens, Shard) else P if isinstance(down, Shard) else R)
    return tuple(output)


class _Experts(torch.autograd.Function):
    """The op in autograd. Local shapes: ``x`` [tokens, width], ``up_weights`` [experts, 2 * inner, width]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: DTensor,
        index: DTensor,
        routing_weights: DTensor,
        gate_up: DTensor,
        down: DTensor,
        redistributor: Redistributor,
        output: Layout,
        axis: int | None,
        activation: str,
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        x, up_weights, down_weights = local_of(hidden), local_of(gate_up), local_of(down)
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
        gate, up = inner.chunk(2, -1)
        weighted = _activate(gate, activation).mul_(up).mul_(row_weights.to(x.dtype))
        result = torch.zeros_like(x)
        row_results = gemm.forward(weighted, down_weights)
        if exchange is not None:
            del weighted
            row_results = exchange.to_tokens(row_results)
        result.index_add_(0, rows.token, row_results)
        ctx.save_for_backward(
            local_of(routing_weights), up_weights, down_weights, inner, rows.choice, gemm.counts, *saved
        )
        ctx.group = None if exchange is None else exchange.group
        ctx.redistributor, ctx.output, ctx.activation = redistributor, output, activation
        ctx.layouts = tuple(hidden.placements), layout, tuple(down.placements)
        ctx.shapes = [tuple(tensor.shape) for tensor in (hidden, routing_weights, gate_up, down)]
        ctx.tokens, ctx.per_expert = x.shape[0], gemm.per_expert
        return make_dtensor(result, redistributor.device_mesh, output, hidden.shape, contiguous_stride(hidden.shape))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 9
        redistributor: Redistributor = ctx.redistributor
        grad_out = redistributor.as_dtensor(gradient)
        out_layout, layouts = _gradient_layouts(tuple(grad_out.placements), ctx.layouts, ctx.output)
        locals_ = _local_gradients(ctx, local_of(redistributor.to_layout(grad_out, out_layout)))
        grad_hidden, grad_weights, grad_gate_up, grad_down = [
            None
            if local is None
            else make_dtensor(local, redistributor.device_mesh, layout, shape, contiguous_stride(shape))
            for local, layout, shape in zip(locals_, layouts, ctx.shapes, strict=True)
        ]
        return grad_hidden, None, grad_weights, grad_gate_up, grad_down, None, None, None, None


def _local_gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the local gradients of hidden, routing weights, gate_up and down, given ``gradient`` of the result."""
    weights, up_weights, down_weights, inner, choice, counts, tokens, received_weights, sizes, order = ctx.saved_tensors
    rows, gemm = RoutedRows(choice, counts, weights.shape[1]), GroupedGemm(counts, ctx.per_expert)
    exchange = None if ctx.group is None else TokenExchange(ctx.group, sizes, order)
    needs_x, _, needs_weights, needs_up, needs_down = ctx.needs_input_grad[:5]
    gate, up = inner.chunk(2, -1)
    row_weights = (_weights_of_rows(weights, rows) if exchange is None else received_weights).to(inner.dtype)
    grad_rows = gradient[rows.token]
    grad_rows = grad_rows if exchange is None else exchange.to_experts(grad_rows)
    grad_weighted = gemm.forward(grad_rows, down_weights.transpose(1, 2))
    gated = _activate(gate, ctx.activation).mul_(up)
    grad_weights = None
    if needs_weights:
        by_row = (grad_weighted * gated).sum(-1).to(weights.dtype)
        by_row = by_row if exchange is None else exchange.to_tokens(by_row)
        grad_weights = weights.new_zeros(weights.numel()).index_copy_(0, rows.choice, by_row).view(weights.shape)
    grad_down = gemm.weight_gradient(grad_rows, gated.mul_(row_weights), down_weights) if needs_down else None
    del grad_rows, gated
    grad_inner = _activation_gradient(grad_weighted.mul_(row_weights), gate, up, ctx.activation)
    del grad_weighted
    grad_up = None
    if needs_up:
        grad_up = gemm.weight_gradient(grad_inner, tokens[rows.token] if exchange is None else tokens, up_weights)
    grad_x = None
    if needs_x:
        grad_tokens = gemm.forward(grad_inner, up_weights.transpose(1, 2))
        if exchange is not None:
            del grad_inner
            grad_tokens = exchange.to_tokens(grad_tokens)
        grad_x = grad_tokens.new_zeros(ctx.tokens, grad_tokens.shape[1]).index_add_(0, rows.token, grad_tokens)
    return grad_x, grad_weights, grad_up, grad_down


def _gradient_layouts(
    gradient: Layout, inputs: tuple[Layout, Layout, Layout], output: Layout
) -> tuple[Layout, tuple[Layout, ...]]:
    """Return the layout in which the backward needs the result's gradient, and the layouts of the inputs' gradients.

    The inputs with gradients are hidden, routing weights, gate_up and down.

    Args:
        gradient: layout in which autograd gives the result's gradient.
        inputs: layouts of tokens, gate_up and down.
        output: layout of the result.
    """
    needed: list[Placement] = []
    by_axis: list[tuple[Placement, ...]] = []
    for grad_place, tokens, gate_up, down, out in zip(gradient, *inputs, output, strict=True):
        _, *gradients = _GRADIENTS[tokens, gate_up, down]
        # The backward is linear in the gradient, so a partial gradient can stay partial on an axis that shards nothing.
        stays_partial = out == R and grad_place.is_partial()
        needed.append(grad_place if stays_partial else R if out.is_partial() else out)
        by_axis.append((grad_place,) * 3 if stays_partial else tuple(gradients))
    tokens_layout, up_layout, down_layout = zip(*by_axis, strict=True)
    return tuple(needed), (tokens_layout, tokens_layout, up_layout, down_layout)


def _weights_of_rows(routing_weights: torch.Tensor, rows: RoutedRows) -> torch.Tensor:
    """Return the routing weight of each row, [rows, 1]."""
    return routing_weights.reshape(-1)[rows.choice].unsqueeze(1)


def _activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate)


def _activation_gradient(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the gradients of gate and up, concatenated along the last dim.

    ``gradient`` is that of ``activation(gate) * up``; it is changed in place.
    """
    aten = torch.ops.aten
    backward = aten.silu_backward.default if activation == "silu" else aten.gelu_backward.default
    return torch.cat([backward(gradient * up, gate), gradient.mul_(_activate(gate, activation))], -1)
