"""Vocabularies that no axis divides, split unevenly: plans run as planned, and train as the unsharded model."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from support.gloo import GlooRanks
from support.small_models import EIGHT_HEADS
from support.trained_steps import Errors, errors_in_steps
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from executor.verify import verify
from planner import PlanningSession
from planner.plan.sharding_plan import ShardingPlan

_GPT2 = {"vocab_size": 257, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64}
_BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 128}

MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: _causal(transformers.GPT2Config(**_GPT2, bos_token_id=0, eos_token_id=0)),
    "llama": lambda: _causal(transformers.LlamaConfig(**EIGHT_HEADS | {"vocab_size": 257})),
    "bias in the head": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_BERT, vocab_size=259)),
    "soft caps": lambda: _causal(transformers.Gemma2Config(**EIGHT_HEADS | {"vocab_size": 258})),
}
MESHES = ("tp=4", "dp=2,tp=2", "fsdp=4")
_FIELDS = ("plan", "compute_plan")
DRAWN = tuple(f"random:{seed}" for seed in range(4))


def _causal(config: Any) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config)


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = MODELS[name]()
    ids = torch.randint(0, 257, (8, 32))
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model.train(), {"input_ids": ids, "labels": ids}


def plans_of(name: str, mesh: str, planners: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """Return plans that are verified, at least one of which splits a vocabulary unevenly."""
    model, inputs = made(name)
    session = PlanningSession(
        model, example_inputs=inputs, cluster="1x4xtoy", dtype="fp32", **{"micro_batches": 1, **options}
    )
    plans = [session.plan(planner=planner, mesh=mesh) for planner in planners]
    for plan in plans:
        result = verify(model, plan, inputs)
        assert result.equal, result.differences
    tables = set(map(id, _tables(model)))
    names = [fqn for fqn, value in model.named_parameters(remove_duplicate=False) if id(value) in tables]
    assert {length for plan in plans for length in plan.uneven_lengths} == {len(weight) for weight in _tables(model)}
    documents = [plan.to_dict() for plan in plans]
    layouts = [document[field].get(name, ()) for document in documents for field in _FIELDS for name in names]
    assert any("S(0)" in layout for layout in layouts)
    return documents


def _tables(model: nn.Module) -> list[Tensor]:
    """Return the tables of embeddings of the words, which are longer than those of positions."""
    weights = [part.weight for part in model.modules() if isinstance(part, nn.Embedding)]
    return [weight for weight in weights if len(weight) in (257, 258, 259)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(4) as started:
        yield started


# --- training ----------------------------------------------------------------------------------------------------


def errors(rank: int, name: str, plans: list[dict[str, Any]]) -> list[Errors]:
    return [errors_in_steps(ShardingPlan.from_dict(plan), lambda: made(name), 1e-3) for plan in plans]


def check_training(ranks: GlooRanks, name: str, mesh: str, planners: Sequence[str], **options: Any) -> None:
    plans = plans_of(name, mesh, planners, **options)
    (found, *_) = ranks.call(errors, name, plans)
    assert max(itertools.chain(*found)) < 1e-5


def test_gpt2_trains_as_unsharded(ranks: GlooRanks) -> None:
    check_training(ranks, "gpt2", "dp=2,tp=2", ["ilp", *DRAWN])


def test_fsdp_stores_a_vocabulary_in_uneven_pieces(ranks: GlooRanks) -> None:
    check_training(ranks, "llama", "fsdp=4", ["fsdp"])


class ZLoss(nn.Module):
    """A softmax reads the logits, so that the planner leaves the vocabulary whole on axes that do not divide it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(257, 64), nn.Linear(64, 257)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.table(tokens))
        return F.cross_entropy(logits.view(-1, 257), labels.view(-1)) + logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("planner", DRAWN)
def test_what_is_planned_whole_runs_whole(planner: str) -> None:
    """The plan says what may be uneven; the ranks do not take another path for a length that could be."""
    model, ids = ZLoss(), torch.randint(0, 257, (8, 32))
    session = PlanningSession(model, example_inputs=(ids, ids), cluster="1x4xtoy", dtype="fp32", micro_batches=1)
    plan = session.plan(planner=planner, mesh="dp=2,tp=2")
    assert plan.uneven_lengths == ()
    result = verify(model, plan, (ids, ids))
    assert result.equal, result.differences


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_unsharded(ranks: GlooRanks, name: str, mesh: str) -> None:
    check_training(ranks, name, mesh, [*DRAWN, *(["fsdp"] if mesh == "fsdp=4" else [])])


@pytest.mark.slow
def test_fused_ops_train_as_unsharded(ranks: GlooRanks) -> None:
    check_training(ranks, "llama", "dp=2,tp=2", ["ilp", *DRAWN], techniques="fused")


# --- checkpoints, generation -------------------------------------------------------------------------------------


def resumed(rank: int, plans: list[dict[str, Any]], folder: str) -> float:
    """Return the error of parameters that one plan saved and another loaded."""
    expected, worst = dict(made("gpt2")[0].named_parameters()), 0.0
    for number, (saved, loaded) in enumerate(itertools.pairwise([*plans, plans[0]])):
        checkpoint = f"{folder}/{number}"
        dcp.save(get_model_state_dict(_sharded(saved)), checkpoint_id=checkpoint)
        model = _sharded(loaded)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=checkpoint)
        set_model_state_dict(model, state)
        for name, parameter in model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert whole.shape == expected[name].shape
            worst = max(worst, (whole - expected[name]).abs().max().item())
    return worst


def _sharded(plan: dict[str, Any]) -> nn.Module:
    read = ShardingPlan.from_dict(plan)
    return shard_module(made("gpt2")[0], device_mesh_for(read, device_type="cpu"), read)


@pytest.mark.slow
def test_a_checkpoint_has_the_true_size_and_is_read_under_another_plan(ranks: GlooRanks, tmp_path: Path) -> None:
    plans = [plan for mesh in MESHES for plan in plans_of("gpt2", mesh, DRAWN)]
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        assert ranks.call(resumed, plans, folder) == [0.0] * 4


def generated(rank: int, plans: list[dict[str, Any]]) -> list[bool]:
    prompt = torch.randint(0, 257, (3, 7), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = made("gpt2")[0].eval().generate(prompt, **options)
    return [torch.equal(_sharded(plan).eval().generate(prompt, **options), expected) for plan in plans]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[:2])
def test_generate_gives_the_same_tokens(ranks: GlooRanks, mesh: str) -> None:
    session = PlanningSession(
        made("gpt2")[0].eval(), cluster="1x4xtoy", batch=8, seq=16, dtype="fp32", phase="decode", micro_batches=1
    )
    plans = [session.plan(planner=planner, mesh=mesh).to_dict() for planner in ("ilp", *DRAWN)]
    assert ranks.call(generated, plans)[0] == [True] * len(plans)
