"""Exports, run by the frameworks that they are for, train as the unsharded model, with the collectives of the plan.

Where accelerate 1.15.0 or transformers 5.24.0 runs other collectives, the exact difference is written down here, with
the place in its source that makes it.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launched_exports import (
    BATCH,
    RANKS,
    ROOT,
    SEQ,
    Calls,
    Run,
    calls_of,
    launch_accelerate,
    launch_transformers,
    train_unsharded,
)
from transformers import LlamaConfig, LlamaForCausalLM

from api.frameworks.export import export_plan
from api.requests.model_registry import load_model
from executor.collective_counter import Counts
from executor.verify import expected_collectives
from planner import build_plan, estimate_plan
from planner.plan.sharding_plan import ShardingPlan

pytestmark = pytest.mark.slow

CONFIG = json.loads((ROOT / "examples/tiny_llama.json").read_text())
ONE_NODE = {"planner": "fsdp", "mesh": "fsdp=4", "cluster": "1x4xtoy"}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"planner": "ddp", "mesh": "dp=4", "cluster": "1x4xtoy", "micro_batches": 2},
    "fsdp": {**ONE_NODE, "micro_batches": 1},
    "layers kept": {**ONE_NODE, "micro_batches": 1},
    "full checkpointing": {**ONE_NODE, "micro_batches": 2, "ac": "full"},
    "hsdp": {"planner": "hsdp", "mesh": "dp=2,fsdp=2", "cluster": "2x2xtoy", "micro_batches": 2},
}
LAYERS = "model.layers.*"
GROUPS_OF_PLANS = "groups of plans"
"""The case "fsdp" with ``FSDP_PLAN``, which no export has: it undoes what frameworks do well."""

FSDP_PLAN = {"model.embed_tokens": "keep_full_weight", "model.norm": "free_full_weight", "lm_head": "free_full_weight"}
"""``fsdp_plan`` with which transformers gathers the parameters outside of the layers as plans do."""

EMBEDDING = HEAD = 4 * CONFIG["vocab_size"] * CONFIG["hidden_size"]
"""Bytes of parameters, as are the next ones."""
NORM = 4 * CONFIG["hidden_size"]
LAYER = 147_968
PARAMETERS = 21
ROTARY = 2 * 4 * CONFIG["hidden_size"] // CONFIG["num_attention_heads"] // 2
"""Bytes of the buffers ``inv_freq`` and ``original_inv_freq``."""


def planned(case: str) -> ShardingPlan:
    """Return the plan of a case; in "layers kept", layers stay gathered until the backward."""
    source = load_model({"hf_config": CONFIG})
    job = {"batch": BATCH, "seq": SEQ, "dtype": "fp32", "optimizer": "sgd"} | CASES[case]
    plan: ShardingPlan = build_plan(source.module, tp_plan=source.tp_plan, **job)
    if case == "layers kept":
        plan = estimate_plan(source.module, dataclasses.replace(plan, keep_gathered=(LAYERS,)))
    return plan


@pytest.fixture(scope="module")
def plans() -> dict[str, ShardingPlan]:
    return {case: planned(case) for case in CASES}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trainer_runs(
    plans: dict[str, ShardingPlan], model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    texts = {case: export_plan(plan, "transformers").text for case, plan in plans.items()}
    texts[GROUPS_OF_PLANS] = json.dumps(json.loads(texts["fsdp"]) | {"fsdp_plan": FSDP_PLAN})
    return launch_transformers(texts, model_folder, tmp_path_factory.mktemp("trainer"))


def check_training(run: Run, micro_batches: int, model_folder: Path) -> None:
    """Check losses, and parameters after the last step, against those of the unsharded model."""
    first = LlamaForCausalLM.from_pretrained(model_folder)
    expected = train_unsharded(LlamaForCausalLM.from_pretrained(model_folder), micro_batches)
    assert run.losses == pytest.approx(expected.losses, abs=1e-5)
    torch.testing.assert_close(run.parameters, expected.parameters, atol=1e-5, rtol=0)
    for name, value in first.named_parameters():
        assert (run.parameters[name] - value).abs().max() > 1e-4, name


def check_collectives(run: Run, plan: ShardingPlan, *differences: Calls) -> None:
    """Check the collectives of a step against the plan's, with the ``differences`` that are known."""
    expected = calls_of(without_loss(plan))
    for difference in differences:
        expected.update(difference)
    assert dict(run.calls) == {call: count for call, count in expected.items() if count}


def without_loss(plan: ShardingPlan) -> Counts:
    """Return the plan's collectives without the all-reduce of each micro-batch's loss and number of tokens.

    Here, a rank's loss is the mean of its own tokens, and gradients are averaged; the Trainer counts tokens beforehand.
    """
    counts = expected_collectives(plan)
    loss = {key: count for key, count in counts.items() if (key.phase, key.kind) == ("forward", "all_reduce")}
    assert {(key.bytes, count) for key, count in loss.items()} == {(8, plan.micro_batches)}
    return counts - Counter(loss)


def layers_again(micro_batches: int) -> Calls:
    """With micro-batches, the plan gathers layers once a step; its exports gather them in each forward.

    A row of the export says so. Neither configuration has a key for ``set_reshard_after_backward(False)``.
    """
    return Counter({("fsdp", "all_gather", LAYER): (micro_batches - 1) * CONFIG["num_hidden_layers"]})


def joined_tail(micro_batches: int) -> Calls:
    """The final norm and the head are one group, which stays gathered until the backward; in a plan, each is freed.

    accelerate: ``fsdp2_prepare_model``, utils/fsdp_utils.py, line 879; transformers:
    ``apply_fully_sharded_data_parallelism``, distributed/fsdp.py, line 228.
    """
    return Counter(
        {
            ("fsdp", "all_gather", NORM + HEAD): micro_batches,
            ("fsdp", "all_gather", NORM): -2 * micro_batches,
            ("fsdp", "all_gather", HEAD): -2 * micro_batches,
            ("fsdp", "reduce_scatter", NORM + HEAD): 1,
            ("fsdp", "reduce_scatter", NORM): -1,
            ("fsdp", "reduce_scatter", HEAD): -1,
        }
    )


def kept_tail(micro_batches: int) -> Calls:
    """The final norm and the head are a group each, and stay gathered until the backward.

    transformers joins them only where no other module is kept: ``is_norm_and_head_pair``, distributed/fsdp.py, line 95.
    """
    return Counter({("fsdp", "all_gather", NORM): -micro_batches, ("fsdp", "all_gather", HEAD): -micro_batches})


def embedding_again(micro_batches: int) -> Calls:
    """FSDP2 gathers the embedding in the backward too, which does not read it; a plan does not.

    torch: ``FSDPState._pre_backward``, torch/distributed/fsdp/_fully_shard/_fsdp_state.py, line 381.
    """
    return Counter({("fsdp", "all_gather", EMBEDDING): micro_batches})


BUFFERS: Calls = Counter({("dp", "broadcast", ROTARY): 1})
"""DDP broadcasts buffers at the first forward after a reduction (``will_sync_module_buffers`` in torch/nn/parallel/
distributed.py, line 2382). ``DistributedDataParallelKwargs(broadcast_buffers=False)`` in the script would turn it off;
accelerate's YAML has no key for it."""

GRADIENT_NORM: Calls = Counter({("fsdp", "all_reduce", 4 * PARAMETERS): 1})
"""The Trainer computes the norm of gradients without clipping too (``_get_grad_norm``, trainer.py, line 2789): one
all-reduce of 4 bytes for each parameter, since ``torch.stack`` in ``_get_total_norm`` (torch/nn/utils/clip_grad.py)
takes no partial DTensors."""


def token_counts(axis: str) -> Calls:
    """The Trainer gathers numbers of tokens as int64 (``_get_num_items_in_batch``, trainer.py, line 2350)."""
    return Counter({(axis, "all_gather", 8 * RANKS): 1})


def scattered_again(micro_batches: int) -> Calls:
    """With replicas, the Trainer reduce-scatters gradients of each micro-batch, and defers only the all-reduce.

    ``_defer_fsdp_gradient_reduction``, trainer.py, line 2618.
    """
    groups = Counter([LAYER] * CONFIG["num_hidden_layers"] + [EMBEDDING, NORM, HEAD])  # embedding and head are as large
    return Counter(
        {("fsdp", "reduce_scatter", nbytes): count * (micro_batches - 1) for nbytes, count in groups.items()}
    )


WITH_ACCELERATE: dict[str, tuple[Calls, ...]] = {
    "ddp": (BUFFERS,),
    "fsdp": (joined_tail(1), embedding_again(1)),
    # `fsdp_reshard_after_forward: false` keeps the embedding too.
    "layers kept": (joined_tail(1),),
    "full checkpointing": (layers_again(2), joined_tail(2)),
    "hsdp": (layers_again(2), joined_tail(2)),
}
OF_TRAINER = (token_counts("fsdp"), GRADIENT_NORM)
WITH_TRANSFORMERS: dict[str, tuple[Calls, ...]] = {
    "ddp": (token_counts("dp"),),
    "fsdp": (joined_tail(1), embedding_again(1), *OF_TRAINER),
    "layers kept": (kept_tail(1), embedding_again(1), *OF_TRAINER),
    "full checkpointing": (layers_again(2), kept_tail(2), embedding_again(2), *OF_TRAINER),
    "hsdp": (
        *(layers_again(2), kept_tail(2), embedding_again(2), scattered_again(2)),
        *(token_counts("dp"), GRADIENT_NORM),
    ),
    GROUPS_OF_PLANS: OF_TRAINER,
}


@pytest.mark.parametrize("case", WITH_ACCELERATE)
def test_accelerate_trains_as_planned(
    case: str, plans: dict[str, ShardingPlan], model_folder: Path, tmp_path: Path
) -> None:
    plan = plans[case]
    run = launch_accelerate(export_plan(plan, "accelerate").text, model_folder, tmp_path)
    check_training(run, plan.micro_batches, model_folder)
    check_collectives(run, plan, *WITH_ACCELERATE[case])


@pytest.mark.parametrize("case", WITH_TRANSFORMERS)
def test_transformers_trains_as_planned(
    case: str, plans: dict[str, ShardingPlan], model_folder: Path, trainer_runs: dict[str, Run]
) -> None:
    plan = plans["fsdp" if case == GROUPS_OF_PLANS else case]
    check_training(trainer_runs[case], plan.micro_batches, model_folder)
    check_collectives(trainer_runs[case], plan, *WITH_TRANSFORMERS[case])


@pytest.mark.parametrize("framework", ["accelerate", "transformers"])
@pytest.mark.parametrize("case", CASES)
def test_an_export_says_where_layers_come_again(case: str, framework: str, plans: dict[str, ShardingPlan]) -> None:
    plan = plans[case]
    is_sharded_in_parts = plan.micro_batches > 1 and case != "ddp"
    assert plan.keep_gathered_for_step == ((LAYERS,) if is_sharded_in_parts else ())
    fields = {row.field for row in export_plan(plan, framework).rows if row.outcome != "expressed"}
    assert fields == ({"FSDP groups"} if is_sharded_in_parts else set())
