"""Models whose sequences may be in zigzag order, the boundaries that reorder them, and reasons against it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.pipeline_sessions import CONFIG, session_of
from torch import nn

from api.requests.model_registry import load_model, quiet_libraries
from planner.errors import PlanMismatchError
from planner.graph.capture import to_meta
from planner.graph.example_inputs import meta_inputs
from planner.graph.from_fx import trace
from planner.plan.sharding_plan import ShardingPlan
from planner.plan.token_order import zigzag_chunks, zigzag_indices
from planner.session import PlanningSession
from planner.strategies.token_dims import ModuleBoundary
from planner.strategies.token_reordering import Reordering, find_reordering
from planner.writing.reprice import estimate_plan

ROWS, WIDTH, VOCABULARY = 16, 8, 32
Mix = Callable[["Model", torch.Tensor], torch.Tensor]


@given(ranks=st.integers(1, 9), rows=st.integers(1, 9))
def test_zigzag_order_has_every_token_once_and_ranks_see_equally_many_keys(ranks: int, rows: int) -> None:
    order = zigzag_indices(ranks * rows, ranks)
    assert sorted(order) == list(range(ranks * rows))
    seen = [sum(token + 1 for token in order[rank * rows : (rank + 1) * rows]) for rank in range(ranks)]
    # With an odd number of rows, chunks differ by one.
    assert max(seen) - min(seen) <= (0 if rows % 2 == 0 else ranks * rows)


def test_a_ranks_chunks_are_equally_far_from_either_end() -> None:
    assert [zigzag_chunks(rank, 4) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(result.transpose(1, 2).flatten(2))


class Table(nn.Module):
    """Computes a table of positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[1], device=x.device).float().unsqueeze(-1) / 10


class Model(nn.Module):
    """A model of one block that applies ``mix`` to its tokens."""

    def __init__(self, mix: Mix, shifted: bool = False) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(ROWS, WIDTH)
        self.added = nn.Parameter(torch.zeros(1, ROWS, WIDTH))
        self.each = nn.Parameter(torch.zeros(ROWS, WIDTH, WIDTH))
        self.table, self.attention, self.head = Table(), Attention(), nn.Linear(WIDTH, VOCABULARY)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.mix, self.shifted = mix, shifted

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.mix(self, self.embed(ids))
        logits = self.head(x + self.attention(x))
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous() if self.shifted else labels
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def reordering_of(model: nn.Module) -> Reordering | str:
    ids = torch.zeros(2, ROWS, dtype=torch.int64)
    return find_reordering(trace(to_meta(model, None), meta_inputs({"ids": ids, "labels": ids})))


ALLOWED: dict[str, tuple[Mix, dict[ModuleBoundary, int]]] = {
    "no positions": (lambda model, x: x, {}),
    "a table of a module": (lambda model, x: x * model.table(x), {ModuleBoundary("table", "output", ""): 0}),
    "a part of a table": (
        lambda model, x: x * model.table(x)[..., :1].cos(),
        {ModuleBoundary("table", "output", ""): 0},
    ),
    "positions that are looked up": (
        lambda model, x: x + model.positions(torch.arange(ROWS, device=x.device)),
        {ModuleBoundary("positions", "input", "0"): 0},
    ),
    "dims that change places": (lambda model, x: x.transpose(0, 1).contiguous().transpose(0, 1).sigmoid(), {}),
    "heads": (lambda model, x: F.layer_norm(x.unflatten(-1, (2, 4)), (4,)).flatten(2), {}),
}


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("shifted", [True, False])
def test_models_that_work_token_by_token_can_be_reordered(name: str, shifted: bool) -> None:
    mix, boundaries = ALLOWED[name]
    reordering = reordering_of(Model(mix, shifted))
    assert isinstance(reordering, Reordering), reordering
    assert reordering.length == ROWS
    assert reordering.boundaries == {ModuleBoundary("", "input", "ids"): 1} | boundaries


NOT_ALLOWED: dict[str, tuple[Mix, str]] = {
    "a parameter of positions": (lambda model, x: x + model.added, "which is not made in a module of its own"),
    "a table computed where it is used": (
        lambda model, x: x * torch.arange(ROWS, device=x.device).unsqueeze(-1),
        "which is not made in a module of its own",
    ),
    "a weight for each token": (
        lambda model, x: torch.einsum("blh,lhk->blk", x, model.each),
        "aten.einsum.default in the root",
    ),
    "a parameter concatenated to each token": (
        lambda model, x: torch.cat([x, model.added.expand(2, -1, -1)], -1)[..., :WIDTH],
        "aten.cat.default in the root",
    ),
    "tokens twice": (lambda model, x: x.repeat_interleave(2, 1)[:, :ROWS], "aten.repeat_interleave"),
    "sums along the sequence": (lambda model, x: x.cumsum(1), "aten.cumsum.default in the root"),
    "means over the sequence": (lambda model, x: x - x.mean(1, keepdim=True), "aten.mean.dim in the root"),
    "tokens before": (lambda model, x: x + torch.roll(x, 1, 1), "aten.roll.default in the root"),
    "tokens shifted": (lambda model, x: x + F.pad(x, (0, 0, 1, 0))[:, :-1], "aten.pad.default in the root"),
    "a convolution": (lambda model, x: model.conv(x.transpose(1, 2)).transpose(1, 2), "aten.conv1d"),
    "a mask": (
        lambda model, x: model.attention(
            x, torch.ones(ROWS, ROWS, dtype=torch.bool, device=x.device).tril()[None, None]
        ),
        "has a mask",
    ),
    "another length": (lambda model, x: x + model.attention(x[:, : ROWS // 2]).repeat(1, 2, 1), "16 tokens"),
    "tokens turned round": (lambda model, x: x.flip(1), "aten.flip.default"),
    "a view across tokens": (lambda model, x: x.reshape(2, ROWS // 2, 2 * WIDTH).sigmoid().view_as(x), "reshape"),
}


@pytest.mark.parametrize("name", NOT_ALLOWED)
def test_models_that_depend_on_the_order_cannot_be_reordered_and_the_reason_is_returned(name: str) -> None:
    mix, reason = NOT_ALLOWED[name]
    reordering = reordering_of(Model(mix))
    assert isinstance(reordering, str), reordering
    assert reason in reordering


def test_a_loss_over_repeated_tokens_cannot_be_reordered() -> None:
    class Twice(Model):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.attention(self.embed(ids))).flatten(0, 1)
            return F.cross_entropy(logits.repeat_interleave(2, 0), labels.flatten().repeat_interleave(2))

    assert "aten.repeat_interleave" in str(reordering_of(Twice(lambda model, x: x)))


def test_a_loss_with_label_smoothing_cannot_be_reordered() -> None:
    class Smoothed(Model):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.attention(self.embed(ids)))
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)

    reordering = reordering_of(Smoothed(lambda model, x: x))
    assert reordering == "aten.cross_entropy_loss.default in the root may depend on the order of tokens"


def planned(zigzag: bool, **options: object) -> tuple[PlanningSession, ShardingPlan]:
    pins = [f"model.layers.*.self_attn.{name}_proj.weight:used=R@tp" for name in "qkvo"]
    session = session_of("1x4xtoy", pins=pins, micro_batches=8, zigzag=zigzag, **options)
    return session, session.plan(mesh="dp=2,tp=2")


def test_a_plan_has_the_same_price_from_its_file() -> None:
    _, plan = planned(True, ac="none", data_axes=["dp"])
    assert plan.zigzag is not None
    module = session_module()
    read = ShardingPlan.from_dict(plan.to_dict())
    assert estimate_plan(module, read).estimate == plan.estimate
    by_hand = dataclasses.replace(read, job=dataclasses.replace(read.job, zigzag=False))
    assert estimate_plan(module, by_hand).estimate == plan.estimate
    natural = dataclasses.replace(by_hand, zigzag=None)
    exchanged = estimate_plan(module, natural).estimate
    assert exchanged is not None
    assert plan.estimate is not None
    assert exchanged.communication_s > plan.estimate.communication_s
    exchanges = [sum(c.count for c in e.collectives if c.kind == "all_to_all") for e in (exchanged, plan.estimate)]
    assert exchanges[0] - exchanges[1] == 8 * 5 * 4  # micro-batches, blocks; queries and results, and their gradients


def session_module() -> nn.Module:
    with quiet_libraries():
        return load_model(CONFIG, seq=32).module


def test_a_plan_whose_zigzag_field_contradicts_its_layouts_is_an_error() -> None:
    _, plan = planned(True, ac="none", data_axes=["dp"])
    assert plan.zigzag is not None
    order = plan.zigzag
    for wrong, message in (
        (dataclasses.replace(order, axis="dp"), "axis of it would be tp"),
        (dataclasses.replace(order, outputs={}), "outputs of it would be"),
        (dataclasses.replace(order, length=16), "length of it would be 32"),
    ):
        with pytest.raises(PlanMismatchError, match=message):
            estimate_plan(session_module(), dataclasses.replace(plan, zigzag=wrong))


@pytest.mark.slow
def test_heterogeneous_blocks_are_split_on_the_same_axis() -> None:
    session, _ = planned(True, ac="full:2")
    for seed in range(4):
        plan = session.plan(planner=f"random:{seed}", mesh="dp=2,tp=2")
        assert estimate_plan(session_module(), plan).estimate == plan.estimate


@pytest.mark.parametrize("zigzag", [False, True])
def test_pipeline_stages_split_sequences_on_the_same_axis(zigzag: bool) -> None:
    pins = [f"model.layers.*.self_attn.{name}_proj.weight:used=R@tp" for name in "qkvo"]
    options = {"executable_only": False, "micro_batches": 8, "ac": "none", "pins": pins, "data_axes": ["dp"]}
    plan = session_of("1x8xtoy", blocks=4, zigzag=zigzag, **options).plan(mesh="pp=2,dp=2,tp=2")
    assert plan.pipeline is not None
    assert plan.estimate is not None
    reduce_scatters = [c for c in plan.estimate.collectives if (c.kind, c.axis) == ("reduce_scatter", "tp")]
    assert reduce_scatters, "attention is not split along the sequence: the test shows nothing"
    # Four blocks in two stages: two each, which exchange queries and results, and their gradients.
    exchanges = sum(c.count for c in plan.estimate.collectives if (c.kind, c.axis) == ("all_to_all", "tp"))
    assert exchanges >= 8 * 2 * 4 if not zigzag else exchanges < 8 * 2 * 4
    assert (plan.zigzag is not None) is zigzag
    if zigzag:
        assert plan.zigzag == dataclasses.replace(plan.zigzag, axis="tp", length=32)
