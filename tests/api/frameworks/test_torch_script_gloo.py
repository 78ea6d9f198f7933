"""Scripts of plans train on four gloo processes as the unsharded model does, with the collectives of the plan."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.gloo import GlooRanks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from api.frameworks.torch_script import TorchScript, torch_script
from api.requests.model_registry import load_model
from executor.collective_counter import CollectiveCounter, axes_by_group
from executor.verify import expected_collectives
from planner import build_plan
from planner.plan.mesh import PlanMesh
from planner.plan.sharding_plan import ShardingPlan

LLAMA = json.loads((Path(__file__).parents[3] / "examples/tiny_llama.json").read_text())
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 256,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
CONFIGS = {"llama": LLAMA, "qwen3": QWEN3, "gpt2": GPT2}
TWO_NODES, HOPPER = "2x2xtoy", "2x2xh100-sxm-80gb"
BATCH, SEQ, STEPS, LEARNING_RATE = 8, 32, 3, 0.5
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"planner": "ddp", "mesh": "dp=4", "cluster": "1x4xtoy"},
    "ddp, 2 micro-batches, selective": {
        "planner": "ddp",
        "mesh": "dp=4",
        "cluster": "1x4xtoy",
        "micro_batches": 2,
        "ac": "selective:1",
    },
    "fsdp": {"planner": "fsdp", "mesh": "fsdp=4", "cluster": "1x4xtoy"},
    "fsdp, 2 micro-batches, full": {
        "planner": "fsdp",
        "mesh": "fsdp=4",
        "cluster": "1x4xtoy",
        "micro_batches": 2,
        "ac": "full",
    },
    "hsdp": {"planner": "hsdp", "mesh": "dp=2,fsdp=2", "cluster": TWO_NODES},
    "hsdp, 2 micro-batches": {"planner": "hsdp", "mesh": "dp=2,fsdp=2", "cluster": TWO_NODES, "micro_batches": 2},
    "fsdp-tp": {"planner": "fsdp-tp", "mesh": "fsdp=2,tp=2", "cluster": HOPPER},
    "fsdp-tp, split samples": {"planner": "fsdp-tp", "mesh": "fsdp=2,tp=2", "cluster": "1x4xtoy"},
    "ilp": {"planner": "ilp", "mesh": "dp=2,tp=2", "cluster": "1x4xtoy"},
    "one axis for both": {"planner": "ilp", "mesh": "dp=4", "cluster": "1x4xtoy", "micro_batches": 2},
}
Sizes = Counter[tuple[str, str]]


def planned(model: str, case: str) -> tuple[ShardingPlan, TorchScript]:
    """Return the plan of a case, for CPUs, and its script."""
    source = load_model({"hf_config": CONFIGS[model]})
    plan = build_plan(source.module, tp_plan=source.tp_plan, batch=BATCH, seq=SEQ, dtype="fp32", **CASES[case])
    plan = dataclasses.replace(plan, mesh=PlanMesh.from_mesh(plan.mesh, "cpu"))
    return plan, torch_script(plan, source.module, config=CONFIGS[model])


def loaded(text: str) -> Any:
    """Return a script as a module, whose ``main`` has not run."""
    module = types.ModuleType("script")
    exec(compile(text, "script.py", "exec"), module.__dict__)
    return module


def global_batch(step: int) -> dict[str, torch.Tensor]:
    """Return a batch whose samples ignore different numbers of labels."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(256, (BATCH, SEQ + 1), generator=generator)
    ignored = torch.randint(SEQ // 2, (BATCH, 1), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.arange(SEQ) < ignored, -100)
    return {"input_ids": tokens[:, :-1], "labels": labels}


def parts(batch: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Return a batch in ``count`` equal parts."""
    return [{name: value.chunk(count)[index] for name, value in batch.items()} for index in range(count)]


def unsharded_losses(script: Any, micro_batches: int) -> list[float]:
    model, losses = script.build_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        total = 0.0
        for batch in parts(global_batch(step), micro_batches):
            logits = model(batch["input_ids"], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / micro_batches
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(rank: int, text: str, micro_batches: int, tensor_axis: str | None) -> tuple[list[float], Sizes]:
    """Return the losses of a rank that runs a script, and the bytes of the last step's collectives."""
    script = loaded(text)
    mesh = init_device_mesh("cpu", tuple(script.MESH.values()), mesh_dim_names=tuple(script.MESH))
    model = script.shard(script.build_model(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    tensor_ranks = 1 if tensor_axis is None else script.MESH[tensor_axis]
    losses = []
    for step in range(STEPS):
        whole = parts(global_batch(step), micro_batches)
        batches = [parts(batch, 4 // tensor_ranks)[rank // tensor_ranks] for batch in whole]
        with CollectiveCounter(axes_by_group(mesh), lambda: "forward") as counter:
            losses.append(script.train_step(model, batches, mesh).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, sizes(counter.counts)


def sizes(counts: Any) -> Sizes:
    """Return (axis, kind) -> bytes of a step."""
    total: Sizes = Counter()
    for key, count in counts.items():
        total[key.axis, key.kind] += key.bytes * count
    return total


@pytest.fixture(scope="module")
def ranks() -> Any:
    with GlooRanks(4) as started:
        yield started


DATA_PARALLEL = [case for case in CASES if case.startswith(("ddp", "fsdp,", "hsdp")) or case == "fsdp"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", CONFIGS)
def test_losses_equal_those_of_the_unsharded_model(ranks: GlooRanks, model: str, case: str) -> None:
    plan, script = planned(model, case)
    tensor_axis = tensor_axis_of(script)
    results = ranks.call(train, script.text, plan.micro_batches, tensor_axis)
    expected = unsharded_losses(loaded(script.text), plan.micro_batches)
    for losses, _ in results:
        assert losses == pytest.approx(expected, abs=1e-5)
    if case in DATA_PARALLEL and model != "gpt2":
        assert results[0][1] == sizes(expected_collectives(plan))


def tensor_axis_of(script: TorchScript) -> str | None:
    """Return the axis that the script calls ``tensor_parallel`` with."""
    _, _, after = script.text.partition("    tensor_parallel(model, mesh[")
    return after.split('"')[1] if after else None


def generate(rank: int, text: str) -> list[torch.Tensor]:
    """Return the last logits of a prompt and of two tokens after it."""
    script = loaded(text)
    mesh = init_device_mesh("cpu", tuple(script.MESH.values()), mesh_dim_names=tuple(script.MESH))
    model = script.shard(script.build_model(), mesh).eval()
    output = script.forward(model, {"input_ids": global_batch(0)["input_ids"]}, mesh)
    logits = [whole(output.logits)]
    for _ in range(2):
        token = logits[-1][:, -1:].argmax(-1)
        output = script.forward(model, {"input_ids": token, "cache": output.cache}, mesh)
        logits.append(whole(output.logits))
    return [value[:, -1] for value in logits]


def whole(logits: torch.Tensor) -> torch.Tensor:
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


@pytest.mark.parametrize("model", CONFIGS)
def test_generated_logits_equal_those_of_the_unsharded_model(ranks: GlooRanks, model: str) -> None:
    source = load_model({"hf_config": CONFIGS[model]})
    job = {"phase": "decode", "planner": "tp", "mesh": "tp=4", "cluster": "1x4xtoy"}
    plan = build_plan(source.module, tp_plan=source.tp_plan, batch=BATCH, seq=SEQ, dtype="fp32", **job)
    text = torch_script(plan, source.module, config=CONFIGS[model]).text
    unsharded, tokens = loaded(text).build_model().eval(), global_batch(0)["input_ids"]
    for logits in ranks.call(generate, text)[0]:
        with torch.no_grad():
            expected = unsharded(tokens).logits[:, -1]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
        tokens = torch.cat([tokens, expected.argmax(-1, keepdim=True)], dim=1)


def test_torchrun_runs_a_script(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(planned("llama", "fsdp-tp")[1].text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [f"step {number}" for number in range(10)]
