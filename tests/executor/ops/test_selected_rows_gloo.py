"""Losses of what a mask selects, on four processes whose samples have different numbers of selected tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.gloo import run_on_gloo
from support.selected import selected
from support.trained_steps import Errors, errors_in_steps
from torch import nn

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner import build_plan
from planner.errors import ModelError, RunError
from planner.plan.sharding_plan import ShardingPlan

VOCABULARY, WIDTH, IGNORED = 32, 16, -100


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


class Selecting(nn.Module):
    """A body, a head in several layers, and the loss of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))


class Logits(Selecting):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(ids))
        return F.cross_entropy(logits[labels != IGNORED], labels[labels != IGNORED])


class HiddenStates(Selecting):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = labels != IGNORED
        return F.cross_entropy(self.head(self.body(ids)[mask]), labels[mask], label_smoothing=0.1)


class Places(Selecting):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, labels = self.body(ids).view(-1, WIDTH), labels.view(-1)
        places = torch.nonzero(labels != IGNORED).flatten()
        logits = self.head(torch.index_select(hidden, 0, places))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels[places])


class EachLoss(Selecting):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(self.head(self.body(ids)).transpose(1, 2), labels.clamp(min=0), reduction="none")
        return torch.masked_select(losses, labels != IGNORED).mean()


class Regression(Selecting):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, mask = self.body(ids), labels.ne(IGNORED)
        target = F.normalize(self.body.embedding(ids).detach()[mask], dim=-1)
        found = F.normalize(hidden[mask], dim=-1)
        similar = -(found * target).sum(-1).mean()
        return {"loss": F.mse_loss(hidden[mask], target) + similar, "similar": similar.detach()}


class PutBack(Selecting):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, mask = self.body(ids), labels != IGNORED
        out = torch.zeros_like(hidden)
        out[mask] = self.body.layers[0](hidden[mask])
        return self.head(out).pow(2).mean()


class Within(nn.Module):
    """A model whose loss is computed in a module below the root."""

    def __init__(self) -> None:
        super().__init__()
        self.model = HiddenStates()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch)
        return loss * 2


class Experts(nn.Module):
    """Experts that compute the tokens that choose them: one op, beside which the loss selects tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(hidden).softmax(-1).max(-1)
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            batch, token = torch.where(chosen == index)
            out[batch, token] = expert(hidden[batch, token])
        return out * weight.unsqueeze(-1)


class WithExperts(HiddenStates):
    def __init__(self) -> None:
        super().__init__()
        self.body.layers.append(Experts())


CASES: dict[str, type[nn.Module]] = {
    "logits": Logits,
    "hidden states": HiddenStates,
    "places": Places,
    "each loss": EachLoss,
    "regression": Regression,
    "put back": PutBack,
    "in a module": Within,
    "beside experts": WithExperts,
}
PLANNERS = ("ilp", "random:4")


def made(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (8, 6))
    labels = torch.where(torch.rand(8, 6) < torch.linspace(0.9, 0.1, 8)[:, None], ids, IGNORED)
    module = CASES[name]()
    return module, ({"ids": ids, "labels": labels},) if name == "in a module" else (ids, labels)


@functools.cache
def plan_of(name: str, planner: str) -> ShardingPlan:
    module, inputs = made(name)
    options: dict[str, Any] = {"cluster": "1x4xtoy", "mesh": "dp=2,tp=2", "dtype": "fp32", "ac": "none"}
    return build_plan(module, example_inputs=inputs, planner=planner, tolerance=0.0, micro_batches=1, **options)


def all_errors(rank: int, plans: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Errors]:
    return {
        key: errors_in_steps(ShardingPlan.from_dict(text), functools.partial(made, name))
        for key, (name, text) in plans.items()
    }


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, Errors]:
    plans = {}
    for case in selected(request, "case"):
        name, _, planner = case.partition(", ")
        plans[case] = name, plan_of(name, planner).to_dict()
    return run_on_gloo(all_errors, 4, plans)[0]


@pytest.mark.parametrize("case", [f"{name}, {planner}" for name in CASES for planner in PLANNERS])
def test_losses_and_parameters_are_those_of_the_unsharded_module(errors: dict[str, Errors], case: str) -> None:
    assert max(errors[case]) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_not_one_op(name: str) -> None:
    plan = plan_of(name, "ilp")
    assert list(plan.opaque_modules) == (["body.layers.2"] if name == "beside experts" else [])


class Returned(Selecting):
    """Returns what a mask selects, or divides by its number, where it is not trained."""

    counts = False

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = labels != IGNORED
        logits = self.head(self.body(ids))
        if self.training:
            return F.cross_entropy(logits[mask], labels[mask])
        return logits[mask].sum() / logits[mask].shape[0] if self.counts else logits[mask]


def test_what_is_selected_is_not_returned() -> None:
    _, inputs = made("logits")
    options: dict[str, Any] = {"cluster": "1x4xtoy", "mesh": "dp=2,tp=2", "dtype": "fp32"}
    with pytest.raises(ModelError, match="returns as many elements as values say"):
        build_plan(Returned().eval(), example_inputs=inputs, phase="prefill", **options)


def returned(rank: int, plan: dict[str, Any]) -> str:
    torch.manual_seed(0)
    module, inputs = Returned(), made("logits")[1]
    parsed = ShardingPlan.from_dict(plan)
    mesh = device_mesh_for(parsed, device_type="cpu")
    shard_module(module, mesh, parsed)
    with pytest.raises(RunError, match="returns elements that a mask selects") as error:
        module.eval()(*local_batch(inputs, mesh, parsed))
    module.counts = True
    with pytest.raises(ModelError, match="asks how many elements a mask selects"):
        module(*local_batch(inputs, mesh, parsed))
    return str(error.value)


def test_a_branch_that_was_not_planned_does_not_return_other_elements() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"cluster": "1x2xtoy", "mesh": "dp=2", "dtype": "fp32", "micro_batches": 1}
    plan = build_plan(Returned(), example_inputs=made("logits")[1], **options)
    assert not plan.opaque_modules
    assert len(set(run_on_gloo(returned, 2, plan.to_dict()))) == 1
