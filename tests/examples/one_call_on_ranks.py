"""Started by test_one_call.py with torchrun, for an own module or a Hugging Face model.

The own module is also planned by `build_plan` on each rank. Rank 0 writes what it saw to the file of the command line.
"""

import copy
import json
import os
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

EXAMPLE = Path(__file__).parents[2] / "examples/one_call.py"
INPUTS = (torch.empty(16, 32), torch.empty(16, dtype=torch.long))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.down(torch.relu(self.up(x))), y)


def whole(tensor: torch.Tensor) -> float:
    tensor = tensor.detach()
    return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def own_module(result: dict[str, object]) -> None:
    from executor import auto_parallelize, local_micro_batches, plan_of

    generator = torch.Generator().manual_seed(1)
    loader = [(torch.randn(16, 32, generator=generator), torch.arange(16) % 8)] * 3
    model = Net()
    unsharded = copy.deepcopy(model)
    reference = torch.optim.AdamW(unsharded.parameters(), lr=1e-2)
    expected = []
    for x, y in loader:
        expected.append(unsharded(x, y))
        expected[-1].backward()
        reference.step()
        reference.zero_grad()

    model = auto_parallelize(model, example_inputs=INPUTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in loader:
        parts = local_micro_batches(model, batch)
        for part in parts:
            loss = model(*part) / len(parts)
            loss.backward()
        losses.append(whole(loss))
        optimizer.step()
        optimizer.zero_grad()
    verification = plan_of(model).verification
    result["own"] = {
        "losses": losses,
        "expected": [whole(loss) for loss in expected],
        "verified": None if verification is None else verification.outcome,
        "assumed": plan_of(model).assumed,
    }


def hugging_face_model(result: dict[str, object]) -> None:
    from executor import local_micro_batches, plan_of

    torch.manual_seed(int(os.environ["RANK"]))  # rank 0's values count
    names = runpy.run_path(str(EXAMPLE))
    model, loader = names["model"], names["loader"]
    torch.manual_seed(0)
    unsharded = names["LlamaForCausalLM"](model.config)
    optimizer = torch.optim.AdamW(unsharded.parameters())
    start = [parameter.detach().clone() for parameter in unsharded.parameters()]
    before = whole(unsharded(**loader[-1]).loss)
    for batch in loader:
        unsharded(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    (part,) = local_micro_batches(model, loader[-1])
    parameters = dict(model.named_parameters())
    result["hugging-face"] = {
        "before": before,
        "loss": whole(model(**part).loss),
        "expected": whole(unsharded(**loader[-1]).loss),
        "difference": norm(
            parameters[name].full_tensor() - parameter for name, parameter in unsharded.named_parameters()
        ),
        "distance": norm(parameter - first for parameter, first in zip(unsharded.parameters(), start, strict=True)),
        "assumed": plan_of(model).assumed,
    }


def norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm([tensor.detach() for tensor in tensors]))


def main() -> None:
    from planner import build_plan

    torch.set_num_threads(1)
    rank, (_, model, file) = int(os.environ["RANK"]), sys.argv
    result: dict[str, object] = {}
    if model == "own":
        plan = build_plan(Net(), example_inputs=INPUTS, dtype="fp32")
        verified = None if plan.verification is None else plan.verification.outcome
        result["build_plan"] = {"assumed": plan.assumed, "verified": verified}
        document = {name: value for name, value in plan.to_dict().items() if name not in {"timings", "solver"}}
        Path(f"{file}-plan-{rank}").write_text(json.dumps(document))
        own_module(result)
    else:
        hugging_face_model(result)
    if rank == 0:
        Path(file).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
