"""The executor's own ops equal torch's, in every combination of layouts that they cover, on real processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from support.executor_cases import MESH
from support.gloo import run_on_gloo
from support.split_inputs import Inputs, close, layouts, leaf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from cost_model.layouts.layout import format_layout
from executor.ops.dispatch import OwnOps
from executor.redistribute import Redistributor
from planner.plan.sharding_plan import ShardingPlan

R, S0, S1 = Replicate(), Shard(0), Shard(1)
Call = Callable[..., torch.Tensor]


def embeddings() -> Iterator[tuple[str, Call, Inputs]]:
    table, ids = torch.randn(16, 8), torch.randint(0, 16, (8, 4))
    ids[0, :2] = 5
    for padding in (None, -11):
        for table_layout, ids_layout in layouts((R, R), (R, S0), (R, S1), (S0, R), (S1, R)):
            yield (
                f"embedding padding {padding}",
                lambda table, ids, padding=padding: F.embedding(ids, table, padding_idx=padding),
                ((table, table_layout), (ids, ids_layout)),
            )


def convolutions() -> Iterator[tuple[str, Call, Inputs]]:
    images, kernel, bias = torch.randn(8, 3, 8, 8), torch.randn(16, 3, 4, 4), torch.randn(16)
    for x, w, b in layouts((R, R, R), (S0, R, R), (R, S0, S0)):
        yield "conv2d", lambda x, w, b: F.conv2d(x, w, b, stride=4), ((images, x), (kernel, w), (bias, b))
        yield "conv2d valid", lambda x, w: F.conv2d(x, w, padding="valid"), ((images, x), (kernel, w))


def attentions() -> Iterator[tuple[str, Call, Inputs]]:
    query, key = torch.randn(4, 8, 6, 4), torch.randn(4, 4, 6, 4)
    masks = {"full": torch.randn(4, 8, 6, 6), "per head": torch.randn(1, 8, 6, 6), "one": torch.randn(1, 1, 6, 6)}
    for (layout,) in layouts((R,), (S0,), (S1,)):
        inputs = ((query, layout), (key, layout), (key + 1, layout))
        yield (
            "causal",
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            inputs,
        )
        for name, mask in masks.items():
            yield (
                f"mask {name}",
                lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m, enable_gqa=True),
                (*inputs, (mask, (R, R))),
            )


def masks() -> Iterator[tuple[str, Call, Inputs]]:
    bias, per_head = torch.randn(4, 8, 8, 6), torch.rand(1, 8, 8, 6) > 0.5
    for (layout,) in layouts((R,), (S0,), (S1,), (Shard(2),)):
        yield "where", lambda x: torch.where(per_head, x, -1.5), ((bias, layout),)


def losses() -> Iterator[tuple[str, Call, Inputs]]:
    logits, labels = 4 * torch.randn(16, 8), torch.randint(0, 8, (16,))
    labels[:7] = -100
    for logits_layout, labels_layout in layouts((R, R), (S0, S0), (S0, R), (S1, R)):
        for reduction in ("mean", "sum"):
            yield (
                f"cross entropy {reduction}",
                lambda x, y, how=reduction: F.cross_entropy(x, y, reduction=how),
                ((logits, logits_layout), (labels, labels_layout)),
            )
        yield (
            "ignoring 3",
            lambda x, y: F.cross_entropy(x, y.abs() % 8, ignore_index=3),
            ((logits, logits_layout), (labels, labels_layout)),
        )


def reductions() -> Iterator[tuple[str, Call, Inputs]]:
    """Sums, means and losses that are one number, or one for each element or row."""
    x, y = torch.randn(8, 4), torch.rand(8, 4)
    splits = ((R, R), (S0, S0), (S1, S1))
    for (layout,) in layouts((R,), (S0,), (S1,)):
        yield "sum", lambda x: x.sum() * x.mean(), ((x, layout),)
        yield "over the mean", lambda x: x / x.abs().mean(), ((x, layout),)
        yield "mean in another dtype", lambda x: torch.mean(x, dtype=torch.float64), ((x, layout),)
        yield "share", lambda x: (x.square() * (x > 0)).sum() / (x > 0).sum(), ((x, layout),)
        yield "sum in another dtype", lambda x: (x > 0).sum(dtype=torch.float64) * x.sum(), ((x, layout),)
        yield "mean of rows", lambda x: x.mean(1), ((x, layout),)
        yield "error against a constant", lambda x: F.mse_loss(x, torch.ones(8, 4)), ((x, layout),)
        yield "error of a constant", lambda x: F.mse_loss(torch.ones(8, 4), x), ((x, layout),)
    for x_layout, y_layout in layouts(*splits):
        inputs = ((x, x_layout), (y, y_layout))
        for how in ("mean", "sum", "none"):
            yield f"mse {how}", lambda x, y, how=how: F.mse_loss(x, y, reduction=how), inputs
            yield f"bce {how}", lambda x, y, how=how: F.binary_cross_entropy_with_logits(x, y, reduction=how), inputs
        yield "smooth", lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), inputs
        yield "huber", lambda x, y: F.huber_loss(x, y.detach(), delta=0.3), inputs
        yield "kl", lambda x, y: F.kl_div(x, y.detach(), reduction="batchmean"), inputs
    for x_layout, y_layout in layouts((R, R), (S0, S0)):
        inputs = ((x, x_layout), (y, y_layout))
        yield (
            "bce with weights of classes",
            lambda x, y: F.binary_cross_entropy_with_logits(x, y.detach(), pos_weight=torch.arange(1.0, 5.0)),
            inputs,
        )
        for name, size in (("one class", (1, 4)), ("elements", (8, 4))):
            yield (
                f"bce with weights of {name}",
                lambda x, y, size=size: F.binary_cross_entropy(x.sigmoid(), y.detach(), torch.full(size, 2.0)),
                inputs,
            )
        yield "probabilities of classes", lambda x, y: F.cross_entropy(x, y), inputs


def reductions_over_dims() -> Iterator[tuple[str, Call, Inputs]]:
    """Sums and means over the batch, of which what follows is not linear; and over other dims."""
    x = torch.randn(8, 4, 4)
    for (layout,) in layouts((R,), (S0,), (S1,), (Shard(2),)):
        yield "overlap", lambda x: 2 * x.square().sum((0, 2)) / (x.exp().sum(dim=[0, -1]) + 1.0), ((x, layout),)
        yield "from the center", lambda x: (x - x.mean(0, keepdim=True)).square().mean(0), ((x, layout),)
        yield "kept", lambda x: torch.sum(x, (-3, 1), True).exp(), ((x, layout),)
        yield "in another dtype", lambda x: torch.mean(x, dim=0, dtype=torch.float64).square(), ((x, layout),)
        yield "counted", lambda x: x.sum(0) * (x > 0).sum(0), ((x, layout),)
        yield "all dims", lambda x: x.mean((0, 1, 2)).exp(), ((x, layout),)
        yield "as in NumPy", lambda x: x.sum(axis=0, keepdims=True).exp(), ((x, layout),)
        yield "twice", lambda x: (2 * x).mean(0).square().sum(0), ((x, layout),)
        yield "other dims", lambda x: x.sum(1), ((x, layout),)


def products() -> Iterator[tuple[str, Call, Inputs]]:
    """Samples with as many samples, and with more columns than divide by them."""
    first = torch.randn(8, 4)
    for second in (torch.randn(4, 8), torch.randn(4, 12)):
        for x, y in layouts((R, R), (S0, R), (R, S1), (S1, S0), (S0, S1)):
            yield "matmul", torch.matmul, ((first, x), (second, y))
            yield "mm of a constant", lambda x, y: x.detach().mm(y), ((first, x), (second, y))
            yield "at a constant", lambda x, y: torch.matmul(other=y.detach(), input=x), ((first, x), (second, y))


def batch_norms() -> Iterator[tuple[str, Call, Inputs]]:
    """Normalized by statistics of the batch; the running statistics are whole on every rank."""
    images, scale, shift = torch.randn(8, 4, 2, 2), torch.rand(4), torch.randn(4)
    for x, w, b in layouts((R, R, R), (S0, R, R), (S1, S0, S0)):
        yield (
            "batch norm",
            lambda x, w, b: F.batch_norm(x, torch.zeros(4), torch.ones(4), w, b, training=True),
            ((images, x), (scale, w), (shift, b)),
        )


def losses_of_rows() -> Iterator[tuple[str, Call, Inputs]]:
    """Losses of classes with options that leave the classes whole; ranks ignore different numbers of labels."""
    logits, labels, images = torch.randn(16, 8), torch.randint(0, 8, (16,)), torch.randn(8, 5, 2, 2)
    labels[:7] = -100
    weight = torch.arange(1.0, 9.0)
    for x_layout, y_layout in layouts((R, R), (S0, S0)):
        inputs = ((logits, x_layout), (labels, y_layout))
        for how in ("mean", "sum", "none"):
            options = {"reduction": how, "label_smoothing": 0.1, "weight": weight}
            yield f"smoothed {how}", lambda x, y, options=options: F.cross_entropy(x, y, **options), inputs
            yield f"nll {how}", lambda x, y, how=how: F.nll_loss(x.log_softmax(1), y, reduction=how), inputs
        yield "weighted", lambda x, y: F.cross_entropy(x, y, weight), inputs
        pixels = (labels[:8].abs() % 5).reshape(8, 1, 1).expand(8, 2, 2).contiguous()
        yield "pixels", lambda x, y: F.cross_entropy(x, y, ignore_index=2), ((images, x_layout), (pixels, y_layout))


def check_all(rank: int) -> list[str]:
    with implicit_replication():
        return check()


def check() -> list[str]:
    mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
    redistributor = Redistributor.from_plan(mesh, ShardingPlan(mesh=MESH))
    torch.manual_seed(0)
    wrong = []
    attention = (attentions, masks)
    sums = (losses, reductions, reductions_over_dims, losses_of_rows)
    cases = (embeddings, convolutions, *attention, *sums, products, batch_norms)
    for name, call, inputs in itertools.chain.from_iterable(make() for make in cases):
        text = f"{name} {[format_layout(layout) for _, layout in inputs]}"
        plain = [leaf(tensor) for tensor, _ in inputs]
        sharded = [leaf(distribute_tensor(tensor.detach(), mesh, layout)) for tensor, layout in inputs]
        expected = call(*plain)
        with OwnOps(redistributor):
            actual = call(*sharded)
        if not isinstance(actual, DTensor) or not close(actual, expected):
            wrong.append(f"{text}: {actual} for {expected}")
            continue
        gradient = torch.randn_like(expected)
        expected.backward(gradient)
        back = tuple(R if isinstance(placement, Partial) else placement for placement in actual.placements)
        actual.backward(distribute_tensor(gradient, mesh, back))
        for tensor, reference in zip(sharded, plain, strict=True):
            if reference.grad is not None and not close(tensor.grad, reference.grad):
                wrong.append(f"{text}: gradient {tensor.grad.placements}")
    return wrong + check_mean_over_no_label(redistributor, mesh)


def check_mean_over_no_label(redistributor: Redistributor, mesh) -> list[str]:
    logits = distribute_tensor(torch.randn(8, 4), mesh, (S0, S1))
    with OwnOps(redistributor):
        loss = F.cross_entropy(logits, torch.full((8,), -100))
    return [] if loss.to_local().isnan() else [f"a mean over no label is {loss}"]


def test_own_ops_equal_torchs() -> None:
    assert run_on_gloo(check_all, 4) == [[]] * 4
