"""Layers and losses that a plan has as other ops, split by samples, on four processes."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.checked_values import CheckedValues
from support.gloo import run_on_gloo
from support.selected import selected
from support.trained_steps import Errors, errors_in_steps
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import HubertConfig, HubertForCTC

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner import build_plan
from planner.plan.sharding_plan import ShardingPlan

BATCH, TIME, WIDTH, CLASSES, LONGEST = 8, 12, 16, 6, 4


class Recurrent(nn.Module):
    """Recurrent layers that make their first states themselves."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.head = nn.LazyLinear(CLASSES)
        self.head(self.layer(torch.zeros(1, TIME, WIDTH))[0])

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layer(x)[0][:, -1]), targets[:, 0])


class Speech(nn.Module):
    """A CTC loss of targets in rows, whose lengths the forward makes, on an LSTM."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction
        self.layer = nn.LSTM(WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        log_probs = self.head(self.layer(x)[0]).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((x.shape[0],), TIME), torch.full((x.shape[0],), LONGEST)
        losses = F.ctc_loss(log_probs, targets, *lengths, reduction=self.reduction, zero_infinity=True)
        return losses.mean() if self.reduction == "none" else losses


class Normed(nn.Module):
    """Weights that a hook computes before each call, as many vocoders have them, and a loss of margins."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.layer = nn.utils.weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))
        self.head = nn.Bilinear(WIDTH, WIDTH, CLASSES)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.layer(x.transpose(1, 2)).mean(-1)
        return F.multi_margin_loss(self.head(hidden, x[:, 0]), targets[:, 0])


class Clamped(nn.Module):
    """Clamps numbers if any is infinite, as some samples' are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.where(x[..., :1] > 2, torch.inf, self.layer(x))
        if not torch.isfinite(hidden).all():
            limit = torch.finfo(hidden.dtype).max - 1000
            hidden = torch.clamp(hidden, min=-limit, max=limit)
        return F.cross_entropy(self.head(hidden.tanh().mean(1)), targets[:, 0])


def hubert() -> nn.Module:
    config = HubertConfig(
        vocab_size=CLASSES,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
        layerdrop=0.0,
        **dict.fromkeys(("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout"), 0.0),
        final_dropout=0.0,
        ctc_loss_reduction="mean",
    )
    module = HubertForCTC(config)
    assert isinstance(module, nn.Module)
    return module


MODULES = {
    "LSTM": functools.partial(Recurrent, nn.LSTM, bidirectional=True, num_layers=2),
    "GRU": functools.partial(Recurrent, nn.GRU),
    "RNN": functools.partial(Recurrent, nn.RNN),
    "CTC": functools.partial(Speech, "mean"),
    "summed CTC": functools.partial(Speech, "sum"),
    "CTC of each sample": functools.partial(Speech, "none"),
    "values that are checked": functools.partial(CheckedValues, WIDTH, CLASSES),
    "numbers that are not finite": Clamped,
    "weight norm, margins": Normed,
    "HubertForCTC": hubert,
}


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = MODULES[name]().train()
    targets = torch.randint(1, CLASSES, (BATCH, LONGEST))
    if name == "HubertForCTC":
        # Lengths that differ, and a label that is left out amid others.
        labels = torch.where(torch.rand(BATCH, LONGEST) < 0.3, -100, targets)
        return module, {"input_values": torch.randn(BATCH, 240), "labels": labels}
    return module, (torch.randn(BATCH, TIME, WIDTH), targets)


@functools.cache
def plan_of(name: str, planner: str = "ilp") -> ShardingPlan:
    module, inputs = made(name)
    options: dict[str, Any] = {"cluster": "1x4xtoy", "mesh": "dp=2,tp=2", "dtype": "fp32", "ac": "none"}
    return build_plan(module, example_inputs=inputs, planner=planner, tolerance=0.0, micro_batches=1, **options)


def all_errors(rank: int, plans: dict[str, dict[str, Any]]) -> dict[str, Errors]:
    return {
        name: errors_in_steps(ShardingPlan.from_dict(plan), functools.partial(made, name), 1e-3)
        for name, plan in plans.items()
    }


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, Errors]:
    return run_on_gloo(all_errors, 4, {name: plan_of(name).to_dict() for name in selected(request, "name")})[0]


@pytest.mark.parametrize("name", MODULES)
def test_losses_and_parameters_are_those_of_the_unsharded_module(errors: dict[str, Errors], name: str) -> None:
    assert max(errors[name]) < 1e-5


def test_numbers_are_not_finite_on_some_ranks() -> None:
    _, (x, _) = made("numbers that are not finite")
    assert {bool((part[..., 0] > 2).any()) for part in x.chunk(4)} == {True, False}


@pytest.mark.parametrize("name", [name for name in MODULES if "weight norm" not in name])  # it has much of the work
def test_the_batch_is_split(name: str) -> None:
    plan = plan_of(name)
    assert not plan.opaque_modules
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    whole = build_plan(*made(name)[:1], example_inputs=made(name)[1], cluster="1x1xtoy", dtype="fp32", micro_batches=1)
    assert plan.estimate is not None
    assert whole.estimate is not None
    assert plan.estimate.step_time_s < 0.6 * whole.estimate.step_time_s


class Mixed(nn.Module):
    """Mixes samples in shares that are drawn from a beta distribution, and draws classes by Gumbel's trick."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        share = torch.distributions.Beta(1.0, 1.0).sample()
        scores = self.head((share * x + (1 - share) * x.roll(1, 0)).mean(1))
        chosen = F.gumbel_softmax(scores, hard=True)
        return F.cross_entropy(scores, targets[:, 0]) + chosen.mul(scores).sum(-1).mean()


def test_drawn_numbers_leave_the_batch_split() -> None:
    _, inputs = made("RNN")
    options: dict[str, Any] = {"cluster": "1x4xtoy", "mesh": "dp=2,tp=2", "dtype": "fp32", "micro_batches": 1}
    plan = build_plan(Mixed(), example_inputs=inputs, **options)
    assert not plan.opaque_modules
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"


@pytest.mark.parametrize("name", ["values that are checked", "numbers that are not finite", "HubertForCTC"])
def test_checks_leave_data_parallelism_without_collectives_of_their_own(name: str) -> None:
    module, inputs = made(name)
    options: dict[str, Any] = {"cluster": "1x4xtoy", "dtype": "fp32", "micro_batches": 1, "ac": "none"}
    plan = build_plan(module, example_inputs=inputs, planner="data-parallel", **options)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert plan.estimate is not None
    assert {each.kind for each in plan.estimate.collectives} == {"all_reduce"}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
def test_as_many_states_as_samples_are_no_samples(kind: type[nn.RNNBase]) -> None:
    # A kernel that is given half of the layers' states reads beyond them.
    module = Recurrent(kind, bidirectional=True, num_layers=BATCH // 2)
    options: dict[str, Any] = {"cluster": "1x2xtoy", "mesh": "dp=2", "dtype": "fp32", "micro_batches": 1}
    plan = build_plan(module, example_inputs=made("RNN")[1], **options)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"


def test_ctc_in_a_job_of_bf16_is_computed_in_fp32() -> None:
    module, inputs = made("CTC")
    plan = build_plan(module, example_inputs=inputs, cluster="1x2xtoy", mesh="dp=2", dtype="bf16", micro_batches=1)
    assert run_on_gloo(loss_of, 2, plan.to_dict())[0] > 0


def loss_of(rank: int, plan: dict[str, Any]) -> float:
    module, inputs = made("CTC")
    parsed = ShardingPlan.from_dict(plan)
    mesh = device_mesh_for(parsed, device_type="cpu")
    shard_module(module, mesh, parsed)
    loss = module(*local_batch(inputs, mesh, parsed))
    loss.backward()
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)
