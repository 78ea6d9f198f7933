"""The experts of a mixture-of-experts block: their tokens, the experts, or each expert's inner dim split on any axes.

On each axis one of

    tokens split, matrices whole     each rank runs its tokens through all experts; gradients of matrices are partial
    experts split, tokens whole      each rank runs the tokens that chose its experts; the result is partial
    inner dim split, tokens whole    each rank runs all through its part of every expert; the result is partial
    experts and tokens split         each token goes to the ranks of its experts, and their results come back

so that nothing is communicated inside but in the last, which is for one axis alone: all-to-alls of as many rows as
there are for each rank (`token_exchange`). The gates and ups of an expert lie in one tensor one after the other,
and where the inner dim is split a rank has the same piece of both: `SS(1,2)`, a strided shard. ``shard_module`` puts
this in the place of the forward of every module that `experts` knows, under whatever implementation its config
names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cost_model.layouts.layout import Layout, format_layout
from executor.ops.embedding import split_offset
from executor.ops.grouped_gemm import ExpertProducts
from executor.ops.token_exchange import Exchange, Rows, exchanged_rows
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals import local_of, make_dtensor, run_function
from planner.errors import PlanLayoutError
from planner.model_rewrites.experts import GATE_UP_MATRICES, experts_in

R, P, S0 = Replicate(), Partial(), Shard(0)
_PACKED = _StridedShard(1, split_factor=GATE_UP_MATRICES)

_GRADIENTS: dict[tuple[Placement, Placement, Placement], tuple[Placement, Placement, Placement, Placement]] = {
    (R, R, R): (R, R, R, R),
    (S0, R, R): (S0, S0, P, P),
    (R, S0, S0): (P, P, S0, S0),
    (R, _PACKED, Shard(2)): (P, P, _PACKED, Shard(2)),
    (S0, S0, S0): (S0, S0, S0, S0),
}
"""Tokens, gate_up and down -> the result, and the gradients of tokens and their weights, of gate_up and of down."""


def replace_experts(module: nn.Module, redistributor: Redistributor) -> None:
    """Make the experts in ``module`` run as planned wherever their parameters are DTensors."""
    for part, activation in experts_in(module):
        if all(isinstance(parameter, DTensor) for parameter in part.parameters()):
            part.forward = _Forward(part, activation, redistributor)


class _Forward:
    """The forward of a module of experts."""

    def __init__(self, module: nn.Module, activation: str, redistributor: Redistributor) -> None:
        self._module, self._activation, self._redistributor = module, activation, redistributor
        # Signatures are looked up on forward.
        self.__signature__ = inspect.signature(module.forward)
        functools.update_wrapper(self, module.forward, updated=())

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        matrices = self._module._parameters  # an attribute may be a module, for all that is known of it
        gate_up, down = matrices["gate_up_proj"], matrices["down_proj"]
        assert gate_up is not None
        assert down is not None
        return experts(self._redistributor, hidden_states, top_k_index, top_k_weights, gate_up, down, self._activation)


def experts(
    redistributor: Redistributor,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> DTensor:
    """Return the experts' results [tokens, width], weighted and added; arguments as of `experts_op`.

    Raises:
        PlanLayoutError: layouts in which this is not possible without communication.
    """
    given = [redistributor.as_dtensor(tensor) for tensor in (hidden, index, weights, gate_up, down)]
    output = _output_layout([tuple(tensor.placements) for tensor in given])
    axis = _exchange_axis(redistributor, given)
    found: DTensor = run_function(_Experts, *given, redistributor, output, axis, activation)
    return found


def _exchange_axis(redistributor: Redistributor, given: Sequence[DTensor]) -> int | None:
    """Return the axis on which tokens and experts are both split; None where there is none."""
    tokens, experts = given[0].placements, given[4].placements
    axes = [
        axis
        for axis, places in enumerate(zip(tokens, experts, strict=True))
        if places == (S0, S0) and redistributor.axis_size(axis) > 1
    ]
    if len(axes) > 1:
        raise PlanLayoutError(
            f"experts got tokens in ({', '.join(format_layout(tuple(tokens)))}) and down_proj in "
            f"({', '.join(format_layout(tuple(experts)))}): both are split on {len(axes)} axes.",
            field="input_plan",
            what_to_do="Split tokens and experts both on one axis at most; make one larger axis of two.",
        )
    return axes[0] if axes else None


def _output_layout(layouts: list[Layout]) -> Layout:
    found: list[Placement] = []
    for tokens, index, weights, gate_up, down in zip(*layouts, strict=True):
        if not tokens == index == weights or (tokens, gate_up, down) not in _GRADIENTS:
            texts = ["(" + ", ".join(format_layout(layout)) + ")" for layout in layouts]
            raise PlanLayoutError(
                f"experts got tokens, their choice and its weights in {texts[0]}, {texts[1]}, {texts[2]}, gate_up_proj "
                f"in {texts[3]} and down_proj in {texts[4]}.",
                field="input_plan",
                what_to_do="On each axis split the tokens, S(0) of both matrices, or both, or SS(1,2) of gate_up_proj "
                "and S(2) of down_proj, with tokens, choice and weights alike.",
            )
        found.append(tokens if isinstance(tokens, Shard) else P if isinstance(down, Shard) else R)
    return tuple(found)


class _Experts(torch.autograd.Function):
    """Shapes below are this rank's: ``x`` [tokens, width], ``up`` [experts, 2 * inner, width], rows first."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: DTensor,
        index: DTensor,
        weights: DTensor,
        gate_up: DTensor,
        down: DTensor,
        redistributor: Redistributor,
        output: Layout,
        axis: int | None,
        activation: str,
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        x, up_matrices, down_matrices = local_of(hidden), local_of(gate_up), local_of(down)
        layout, all_experts = tuple(gate_up.placements), gate_up.shape[0]
        exchange: Exchange | None = None
        if axis is None:
            first, count = split_offset(redistributor, all_experts, layout, 0)
            rows = Rows.of(local_of(index), first, count, all_experts)
            products = ExpertProducts.of(rows.counts, None, rows.choice.shape[0], down_matrices)
        else:
            rows, exchange, arriving = exchanged_rows(redistributor, local_of(index), all_experts, layout, axis)
            products = ExpertProducts.of(arriving.counts, arriving.on_host, arriving.rows, down_matrices)
        row_weights, tokens = _of_rows(local_of(weights), rows), x[rows.token]
        if exchange is not None:
            tokens, row_weights = exchange.to_experts(tokens), exchange.to_experts(row_weights)
        inner = products.of_rows(tokens, up_matrices)
        # Where tokens came from other ranks they are kept as they came.
        kept = (x, None, None, None) if exchange is None else (tokens, row_weights, exchange.sizes, exchange.order)
        del tokens
        gate, up = inner.chunk(2, -1)
        weighted = _activated(gate, activation).mul_(up).mul_(row_weights.to(x.dtype))
        found = torch.zeros_like(x)
        results = products.of_rows(weighted, down_matrices)
        if exchange is not None:
            del weighted
            results = exchange.to_tokens(results)
        found.index_add_(0, rows.token, results)
        ctx.save_for_backward(local_of(weights), up_matrices, down_matrices, inner, rows.choice, products.counts, *kept)
        ctx.group = None if exchange is None else exchange.group
        ctx.redistributor, ctx.output, ctx.activation = redistributor, output, activation
        ctx.layouts = tuple(hidden.placements), layout, tuple(down.placements)
        ctx.shapes = [tuple(tensor.shape) for tensor in (hidden, weights, gate_up, down)]
        ctx.tokens, ctx.one_by_one = x.shape[0], products.one_by_one
        return make_dtensor(found, redistributor.device_mesh, output, hidden.shape, contiguous_stride(hidden.shape))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return (None,) * 9
        redistributor: Redistributor = ctx.redistributor
        arrived = redistributor.as_dtensor(gradient)
        wanted, layouts = _gradient_layouts(tuple(arrived.placements), ctx.layouts, ctx.output)
        local = local_of(redistributor.to_layout(arrived, wanted))
        found = _gradients(ctx, local)
        made = [
            None
            if piece is None
            else make_dtensor(piece, redistributor.device_mesh, layout, shape, contiguous_stride(shape))
            for piece, layout, shape in zip(found, layouts, ctx.shapes, strict=True)
        ]
        return made[0], None, made[1], made[2], made[3], None, None, None, None


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of this rank's hidden, weights, gate_up and down, given that of its result."""
    weights, up_matrices, down_matrices, inner, choice, counts, tokens, came_weights, sizes, order = ctx.saved_tensors
    rows, products = Rows(choice, counts, weights.shape[1]), ExpertProducts(counts, ctx.one_by_one)
    exchange = None if ctx.group is None else Exchange(ctx.group, sizes, order)
    needs_x, _, needs_weights, needs_up, needs_down = ctx.needs_input_grad[:5]
    gate, up = inner.chunk(2, -1)
    row_weights = (_of_rows(weights, rows) if exchange is None else came_weights).to(inner.dtype)
    arrived = gradient[rows.token]
    arrived = arrived if exchange is None else exchange.to_experts(arrived)
    of_weighted = products.of_rows(arrived, down_matrices.transpose(1, 2))
    product = _activated(gate, ctx.activation).mul_(up)
    of_weights = None
    if needs_weights:
        of_rows = (of_weighted * product).sum(-1).to(weights.dtype)
        of_rows = of_rows if exchange is None else exchange.to_tokens(of_rows)
        of_weights = weights.new_zeros(weights.numel()).index_copy_(0, rows.choice, of_rows).view(weights.shape)
    of_down = products.of_matrices(arrived, product.mul_(row_weights), down_matrices) if needs_down else None
    del arrived, product
    of_inner = _through_activation(of_weighted.mul_(row_weights), gate, up, ctx.activation)
    del of_weighted
    of_up = None
    if needs_up:
        of_up = products.of_matrices(of_inner, tokens[rows.token] if exchange is None else tokens, up_matrices)
    of_x = None
    if needs_x:
        passed = products.of_rows(of_inner, up_matrices.transpose(1, 2))
        if exchange is not None:
            del of_inner
            passed = exchange.to_tokens(passed)
        of_x = passed.new_zeros(ctx.tokens, passed.shape[1]).index_add_(0, rows.token, passed)
    return of_x, of_weights, of_up, of_down


def _gradient_layouts(
    arrived: Layout, given: tuple[Layout, Layout, Layout], output: Layout
) -> tuple[Layout, tuple[Layout, ...]]:
    """Return the layout that the result's gradient is needed in, and those of the inputs' gradients."""
    wanted: list[Placement] = []
    found: list[tuple[Placement, ...]] = []
    for came, tokens, gate_up, down, out in zip(arrived, *given, output, strict=True):
        _, *gradients = _GRADIENTS[tokens, gate_up, down]
        # Where nothing is split the op is linear in its gradient: what is partial may stay so.
        keeps = out == R and came.is_partial()
        wanted.append(came if keeps else R if out.is_partial() else out)
        found.append((came,) * 3 if keeps else tuple(gradients))
    tokens_layout, up_layout, down_layout = zip(*found, strict=True)
    return tuple(wanted), (tokens_layout, tokens_layout, up_layout, down_layout)


def _of_rows(weights: torch.Tensor, rows: Rows) -> torch.Tensor:
    return weights.reshape(-1)[rows.choice].unsqueeze(1)


def _activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate)


def _through_activation(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the gradient of gates and ups, one after the other, given that of ``activation(gate) * up``."""
    aten = torch.ops.aten
    backward = aten.silu_backward.default if activation == "silu" else aten.gelu_backward.default
    return torch.cat([backward(gradient * up, gate), gradient.mul_(_activated(gate, activation))], -1)
