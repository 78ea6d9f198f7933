"""Run by torchrun: several one-call scenarios, whose results rank 0 prints as one line of JSON."""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from executor import auto_parallelize, local_batch, mesh_of, plan_of
from planner import build_plan

STEPS = 3


class Regression(nn.Module):
    """A module without config, which returns its loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)


def own_batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 64, generator=generator)
    return x, x.sum(1, keepdim=True)


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig.from_json_file(Path("examples/tiny_llama.json"))).train()


def llama_batch(step, batch, seq):
    ids = torch.randint(64, (batch, seq), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def value(output):
    """Return the loss in a module's result."""
    return output if isinstance(output, torch.Tensor) else output.loss


def losses(model, batches, of_rank):
    """Return the loss of each step of AdamW; ``of_rank`` gives what this process feeds of a batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for batch in batches:
        arguments = of_rank(batch)
        loss = value(model(**arguments) if isinstance(arguments, dict) else model(*arguments))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    return found


def compared(model, batches_of, example_inputs=None, **options):
    reference = copy.deepcopy(model)
    sharded = auto_parallelize(model, example_inputs, **options)
    assert sharded is model
    plan = plan_of(sharded)
    batches = batches_of(plan)
    return {
        "sharded": losses(sharded, batches, lambda batch: local_batch(batch, sharded)),
        "unsharded": losses(reference, batches, lambda batch: batch),
        "mesh": str(plan.mesh),
        "is_given": options.get("mesh") is mesh_of(sharded),
        "shape": list(mesh_of(sharded).shape),
        "assumed": list(plan.assumed),
        "micro_batches": plan.micro_batches,
        "verification": plan.verification.outcome,
    }


def refusal(call):
    """Return what every rank's ``call`` raises."""
    said = [None] * dist.get_world_size()
    try:
        call()
        mine = None
    except Exception as error:  # noqa: BLE001
        mine = [type(error).__name__, str(error)]
    dist.all_gather_object(said, mine)
    return said


def fail(event):
    """Fail as a caller's own code may."""
    raise KeyError(event)


class NoForward(nn.Module):
    """A module that cannot be traced."""

    def forward(self, x):
        raise ZeroDivisionError("no forward")


def main():
    results = {}
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    own = [own_batch(step) for step in range(STEPS)]
    results["own"] = compared(Regression(), lambda plan: own, own[0])
    results["llama"] = compared(
        llama(), lambda plan: [llama_batch(step, plan.job.batch, plan.job.seq) for step in range(STEPS)]
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    torch.manual_seed(0)
    results["device_mesh"] = compared(Regression(), lambda plan: own, own[0], mesh=mesh)
    results["refusals"] = {
        "other_size": refusal(lambda: auto_parallelize(Regression(), own[0], cluster="1x8xtoy")),
        "no_inputs": refusal(lambda: auto_parallelize(Regression())),
        "mesh_of_some_ranks": refusal(lambda: auto_parallelize(Regression(), own[0], mesh=mesh["data"])),
        "not_a_planner_error": refusal(lambda: auto_parallelize(Regression(), own[0], progress=fail)),
        "untraceable": refusal(lambda: auto_parallelize(NoForward(), (torch.zeros(4, 4),))),
    }
    plans = [None] * dist.get_world_size()
    plan = build_plan(Regression(), example_inputs=own[0])
    dist.all_gather_object(plans, {**plan.to_dict(), "timings": {}, "solver": None})
    results["build_plan"] = {
        "equal": all(item == plans[0] for item in plans),
        "mesh": str(plan.mesh),
        "assumed": list(plan.assumed),
        "reason": plan.verification.reason,
    }
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
