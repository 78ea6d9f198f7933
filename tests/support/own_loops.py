"""Training loops, run on a sharded model and on the unsharded one side by side, for ranks of a gloo process group."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from support.executor_cases import Case, loss_of, make_batch, make_model
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.runtime.optimizer_steps import set_accumulation_steps
from executor.shard import shard_module
from planner.errors import PlanMismatchError

TOLERANCE = 1e-5
"""Of losses; of gradients, parameters and states relative to the largest of their kind."""
ROUNDINGS = 3.0
"""Where a loop amplifies rounding: how many times the unsharded run's own distance from float64 a run may be off.

Two runs that round alike are off by twice that distance at most; the third is for sums in another order.
"""
# With a large eps an update is a smooth function of the gradient: rounding of tiny gradients is not amplified.
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, eps=1e-3),
}


Results = Mapping[str, Mapping[str, torch.Tensor | None]]
"""Kind -> name -> whole tensor; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a loop does until its optimizer has stepped once.

    Attributes:
        passes: number of backward passes.
        announced: number of passes that `set_accumulation_steps` is given before the step; 0: it is not called.
        evaluates: whether the model is evaluated before the step's last pass.
        reads: whether a gradient is read before the step's last pass.
        clears: what clears gradients before the step's last pass: "", "model", "optimizer", or "zeros": not to None.
        clears_late: whether `model.zero_grad()` runs between the first forward and its backward, not before the step.
        frozen: index of the module whose parameters change between frozen and trained before the step; None: no change.
        clip: the largest norm of gradients; 0: no clipping.
        moves: whether `model.to` is called before the step, with what the model has, and with another dtype (refused).
        resumes_under: name of the case under which the run goes on after the step, from a checkpoint; "": none.
    """

    passes: int = 1
    announced: int = 0
    evaluates: bool = False
    reads: bool = False
    clears: str = ""
    clears_late: bool = False
    frozen: int | None = None
    clip: float = 0.0
    moves: bool = False
    resumes_under: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A training loop, from the model's first values on.

    Attributes:
        case: name of a model and its plan.
        steps: its steps.
        optimizer: name of its optimizer.
        decays: whether the learning rate decays with each step.
    """

    case: str
    steps: tuple[Step, ...]
    optimizer: str = "SGD"
    decays: bool = False


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Trained:
    """A model in training with its optimizer, sharded or not."""

    def __init__(self, loop: Loop, case: Case, *, is_sharded: bool, dtype: torch.dtype = torch.float32) -> None:
        self.case, self.dtype = case, dtype
        self.model = make_model(case.family).to(dtype)
        if dtype == torch.float64 and isinstance(self.model, PreTrainedModel):
            self.model.set_experts_implementation("eager")  # torch has no grouped_mm in float64
        self.mesh = None
        if is_sharded:
            self.mesh = device_mesh_for(case.plan)
            shard_module(self.model, self.mesh, case.plan)
        self.optimizer = OPTIMIZERS[loop.optimizer](self.model)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7 if loop.decays else 1.0)

    def loss(self, seed: int) -> torch.Tensor:
        batch = make_batch(self.case.family, seed)
        if self.mesh is not None:
            batch = local_batch(batch, self.mesh, self.case.plan)
        return loss_of(self.model(**batch))

    def step(self, number: int, step: Step) -> list[float]:
        """Run a step, and return numbers to compare: losses, norms, a gradient's."""
        numbers = []
        if step.frozen is not None:
            self.freeze_or_thaw(step.frozen)
        if step.moves:
            self.model.to(device="cpu", dtype=self.dtype)
            if self.mesh is not None:
                _expect_refusal(self.model)
        if step.announced and self.mesh is not None:
            set_accumulation_steps(self.model, step.announced)
        if not step.clears_late:
            self.optimizer.zero_grad()
        for index in range(step.passes):
            seed = 100 * number + index
            if index == step.passes - 1:
                numbers += self.before_last_pass(step, seed)
            loss = self.loss(seed) / step.passes
            if step.clears_late and index == 0:
                self.model.zero_grad()
            loss.backward()
            numbers.append(full(loss.detach()).item())
        if step.clip:
            numbers.append(full(nn.utils.clip_grad_norm_(self.model.parameters(), step.clip)).item())
        self.optimizer.step()
        self.scheduler.step()
        return numbers

    def freeze_or_thaw(self, number: int) -> None:
        """Freeze a module, or let it train again; the last that trains stays so: torch runs no backward of none."""
        modules = [m for m in self.model.modules() if next(m.parameters(recurse=False), None) is not None]
        chosen = {id(parameter) for parameter in modules[number % len(modules)].parameters(recurse=False)}
        trains = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if {id(parameter) for parameter in trains} <= chosen:
            return
        for parameter in self.model.parameters():
            if id(parameter) in chosen:
                parameter.requires_grad_(not parameter.requires_grad)

    def resumed(self, loop: Loop, case: Case) -> _Trained:
        """Return this run, gone on from a checkpoint under the plan of ``case``."""
        folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folders)
        resumed = _Trained(loop, case, is_sharded=True)
        for run, transfer in ((self, dcp.save), (resumed, dcp.load)):
            model, optimizer = get_state_dict(run.model, run.optimizer)
            transfer({"model": model, "optimizer": optimizer}, checkpoint_id=folders[0])
        set_state_dict(resumed.model, resumed.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        resumed.scheduler.load_state_dict(self.scheduler.state_dict())
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folders[0])
        return resumed

    def before_last_pass(self, step: Step, seed: int) -> list[float]:
        numbers = []
        if step.evaluates:
            self.model.eval()
            with torch.no_grad():
                numbers.append(full(self.loss(seed)).item())
            self.model.train()
        if step.reads:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            numbers += [full(gradient.abs().sum()).item() for gradient in gradients[:2]]
            numbers += [full(gradient).square().sum().item() for gradient in gradients[-2:]]
        if step.clears == "optimizer":
            self.optimizer.zero_grad()
        elif step.clears:
            self.model.zero_grad(set_to_none=step.clears != "zeros")
        return numbers

    def results(self, number: int, step: Step) -> Results:
        """Run a step; return whole tensors by kind and name, and the step's numbers."""
        numbers = self.step(number, step)
        parameters = dict(self.model.named_parameters())
        states = {name: self.optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
        kinds: dict[str, dict[str, torch.Tensor | None]] = {
            "parameter": dict(parameters),
            "gradient": {name: parameter.grad for name, parameter in parameters.items()},
            "buffer": dict(self.model.named_buffers()),
            "number": {f"{index}": torch.tensor(value, dtype=torch.float64) for index, value in enumerate(numbers)},
        }
        for name, state in states.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    kinds.setdefault(key, {})[name] = value
        return {
            kind: {name: None if t is None else full(t).detach() for name, t in sorted(tensors.items())}
            for kind, tensors in kinds.items()
        }


def _expect_refusal(model: nn.Module) -> None:
    try:
        model.half()
    except PlanMismatchError:
        return
    raise AssertionError("half() was not refused")


def differences(loop: Loop, case_of: Callable[[str], Case]) -> list[str]:
    """Return where the sharded run of ``loop`` is not the unsharded one; all ranks call this function.

    Args:
        loop: the loop.
        case_of: returns a model and its plan, by name.
    """
    case = case_of(loop.case)
    expected, found = _Trained(loop, case, is_sharded=False), _Trained(loop, case, is_sharded=True)
    for number, step in enumerate(loop.steps):
        wrong = _differences(expected.results(number, step), found.results(number, step), TOLERANCE)
        if wrong:
            own = _rounding(loop, case, number)
            wrong = {key: off for key, off in wrong.items() if not off <= ROUNDINGS * own.get(key, 0.0)}
        if wrong:
            return [f"step {number}: {kind} of {name}, by {off}" for (kind, name), off in wrong.items()][:4]
        if step.resumes_under:
            expected.model.zero_grad()  # a checkpoint has no gradients
            found = found.resumed(loop, case_of(step.resumes_under))
    return []


def _rounding(loop: Loop, case: Case, last: int) -> dict[tuple[str, str], float]:
    """Return how far the unsharded run is from the same in float64 after the step ``last``, by kind and name."""
    runs = [_Trained(loop, case, is_sharded=False, dtype=dtype) for dtype in (torch.float64, torch.float32)]
    for number, step in enumerate(loop.steps[: last + 1]):
        exact, rounded = (run.results(number, step) for run in runs)
        if step.resumes_under:
            for run in runs:
                run.model.zero_grad()
    return _differences(exact, rounded, 0.0)


def _differences(expected: Results, found: Results, tolerance: float) -> dict[tuple[str, str], float]:
    """Return (kind, name) -> relative difference, of what differs by more; infinity: a tensor or kind is missing."""
    off: dict[tuple[str, str], float] = {}
    for kind in sorted({*expected, *found}):
        ours, others = expected.get(kind, {}), found.get(kind, {})
        largest = max((t.abs().max().item() for t in ours.values() if t is not None and t.numel()), default=0.0)
        for name in sorted({*ours, *others}):
            one, other = ours.get(name), others.get(name)
            if one is None or other is None:
                if one is not other:
                    off[kind, name] = math.inf
                continue
            scale = max(1.0, one.abs().item()) if kind == "number" else largest
            difference = (one - other).abs().max().item() if one.numel() else 0.0
            if not difference <= tolerance * scale:
                off[kind, name] = difference / scale if scale else math.inf
    return off
