"""Parameters that are gathered together, on four real processes: the unsharded module's numbers, and a usual loop."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.executor_cases import (
    LLAMA_BLOCKS,
    S0,
    Case,
    P,
    R,
    data_parallel,
    gathered,
    keeping,
    keeping_for_step,
    loss_of,
    make_batch,
    make_model,
    megatron,
    replicated_on_tp,
)
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from executor.torch_internals import allows_implicit_replication
from planner.plan.job import Job

STEPS = 3
MLP = {"fc1": ("weight", "bias"), "fc2": ("weight",), "": ("head.weight",)}
"""One group has parameters of the root, and one a bias."""
ALL_MLP = {"fc1": ("weight", "bias"), "fc2": ("weight", "bias"), "": ("head.weight", "head.bias")}
GPT2 = {"transformer.h.*": ("attn.c_attn.weight", "attn.c_attn.bias", "mlp.c_fc.weight")}
BERT = {"bert.encoder.layer.*": ("attention.output.dense.weight", "intermediate.dense.weight", "output.dense.weight")}
T5 = {
    "encoder.block.*": ("layer.1.DenseReluDense.wi.weight",),
    "decoder.block.*": ("layer.2.DenseReluDense.wi.weight",),
}
AC = "model.layers.*"

CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: gathered(replicated_on_tp("mlp"), MLP),
    "mlp, 2 micro-batches": lambda: gathered(replicated_on_tp("mlp", micro_batches=2), MLP),
    "gpt2": lambda: gathered(replicated_on_tp("gpt2"), GPT2),
    "bert": lambda: gathered(replicated_on_tp("bert"), BERT),
    "t5": lambda: gathered(replicated_on_tp("t5"), T5),
    "llama, split on two dims": lambda: gathered(megatron(), LLAMA_BLOCKS),
    "llama, 2 micro-batches": lambda: gathered(megatron(micro_batches=2), LLAMA_BLOCKS),
    "llama, full AC": lambda: gathered(megatron(activation_checkpointing={AC: "full"}), LLAMA_BLOCKS),
    "llama, selective AC": lambda: gathered(megatron(activation_checkpointing={AC: "selective"}), LLAMA_BLOCKS),
    "llama, full AC, 2 micro-batches": lambda: gathered(
        megatron(activation_checkpointing={AC: "full"}, micro_batches=2), LLAMA_BLOCKS
    ),
    "llama, vocabulary split, each side": lambda: gathered(
        megatron(vocabulary=True), {**LLAMA_BLOCKS, "lm_head": ("weight",), "model.embed_tokens": ("weight",)}
    ),
    "mlp, kept, 2 micro-batches": lambda: keeping(gathered(replicated_on_tp("mlp", micro_batches=2), MLP)),
    "gpt2, kept": lambda: keeping(gathered(replicated_on_tp("gpt2", micro_batches=2), GPT2)),
    "t5, kept": lambda: keeping(gathered(replicated_on_tp("t5"), T5)),
    "llama, kept, 3 micro-batches": lambda: keeping(gathered(megatron(micro_batches=3), LLAMA_BLOCKS)),
    "llama, kept, full AC, 2 micro-batches": lambda: keeping(
        gathered(megatron(activation_checkpointing={AC: "full"}, micro_batches=2), LLAMA_BLOCKS)
    ),
    "llama, kept, selective AC": lambda: keeping(
        gathered(megatron(activation_checkpointing={AC: "selective"}), LLAMA_BLOCKS)
    ),
    "mlp, kept for the step, 4 micro-batches": lambda: keeping_for_step(
        gathered(replicated_on_tp("mlp", micro_batches=4), MLP)
    ),
    "mlp, all kept for the step": lambda: keeping_for_step(gathered(replicated_on_tp("mlp", micro_batches=3), ALL_MLP)),
    "t5, kept for the step": lambda: keeping_for_step(gathered(replicated_on_tp("t5", micro_batches=4), T5)),
    "llama, kept for the step, 4 micro-batches": lambda: keeping_for_step(
        gathered(megatron(micro_batches=4), LLAMA_BLOCKS)
    ),
    "llama, kept for the step, full AC": lambda: keeping_for_step(
        gathered(megatron(activation_checkpointing={AC: "full"}, micro_batches=4), LLAMA_BLOCKS)
    ),
    "mlp, kept for the step, summed on tp after": lambda: keeping_for_step(
        summed_later(gathered(data_parallel("mlp", micro_batches=4), MLP))
    ),
    "mlp, over both axes": lambda: gathered(data_parallel("mlp"), MLP, 0, 1),
    "gpt2, over both axes, 2 micro-batches": lambda: gathered(data_parallel("gpt2", micro_batches=2), GPT2, 0, 1),
    "llama, over both axes, full AC": lambda: gathered(
        data_parallel("llama", activation_checkpointing={AC: "full"}, micro_batches=2), LLAMA_BLOCKS, 0, 1
    ),
    "llama, over both axes, kept": lambda: keeping(
        gathered(data_parallel("llama", micro_batches=2), LLAMA_BLOCKS, 0, 1)
    ),
    "llama, over both axes, kept for the step": lambda: keeping_for_step(
        gathered(data_parallel("llama", micro_batches=3), LLAMA_BLOCKS, 0, 1)
    ),
    "llama, with other parameters gathered alone": lambda: with_gathered_norms(gathered(megatron(), LLAMA_BLOCKS)),
}


def with_gathered_norms(case: Case) -> Case:
    plan = case.plan
    norms = {name: (S0, R) for name in plan.plan if "norm" in name}
    computed = dict.fromkeys(norms, (R, R))
    changed = dataclasses.replace(
        plan, plan={**plan.plan, **norms}, compute_plan={**plan.compute_plan, **computed}, micro_batches=2
    )
    return Case(case.family, changed)


def summed_later(case: Case) -> Case:
    """``case`` with the sums over tp of gathered parameters' gradients taken once a step."""
    gradients = {name: (layout[0], P) for name, layout in case.plan.gradient_plan.items()}
    return Case(case.family, dataclasses.replace(case.plan, gradient_plan=gradients))


@dataclass(frozen=True)
class Result:
    loss_error: float
    gradient_error: float
    """Largest difference, relative to the model's largest gradient."""
    norm_error: float
    """Of the clipped norm, relative."""
    moved: tuple[str, ...]
    """Parameters that are not in their stored layout, or whose gradient is not."""
    flag_left_on: bool


def value(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_step(model: nn.Module, batches: list, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    total = 0.0
    for batch in batches:
        loss = loss_of(model(**batch)) / len(batches)
        loss.backward()
        total += value(loss).item()
    return total


def run_case(name: str) -> Result:
    case = CASES[name]()
    reference, model = make_model(case.family), make_model(case.family)
    stored = dict(case.plan.plan)
    mesh = device_mesh_for(case.plan)
    shard_module(model, mesh, case.plan)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (reference, model)]
    loss_error = gradient_error = norm_error = 0.0
    moved: list[str] = []
    for step in range(STEPS):
        whole = [make_batch(case.family, seed=10 * step + index) for index in range(case.plan.micro_batches)]
        expected = train_step(reference, whole, optimizers[0])
        loss = train_step(model, [local_batch(batch, mesh, case.plan) for batch in whole], optimizers[1])
        loss_error = max(loss_error, abs(loss - expected))
        wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
        largest = max(gradient.abs().max().item() for gradient in wanted.values())
        for fqn, parameter in model.named_parameters():
            error = (value(parameter.grad) - wanted[fqn]).abs().max().item() / largest
            gradient_error = max(gradient_error, error)
            if not parameter.placements == parameter.grad.placements == stored[fqn]:
                moved.append(fqn)
        norms = [value(nn.utils.clip_grad_norm_(one.parameters(), 0.5)).item() for one in (reference, model)]
        norm_error = max(norm_error, abs(norms[1] / norms[0] - 1))
        for optimizer in optimizers:
            optimizer.step()
        # Between two steps it is run without gradients too.
        with torch.no_grad():
            ours = loss_of(model(**local_batch(whole[0], mesh, case.plan)))
            loss_error = max(loss_error, abs(value(ours).item() - loss_of(reference(**whole[0])).item()))
    return Result(
        loss_error=loss_error,
        gradient_error=gradient_error,
        norm_error=norm_error,
        moved=tuple(moved),
        flag_left_on=allows_implicit_replication(),
    )


def run_cases(rank: int, names: list[str]) -> dict[str, Result]:
    return {name: run_case(name) for name in names}


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return run_on_gloo(run_cases, 4, list(CASES))[0]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_the_unsharded_modules(results: dict[str, Result], name: str) -> None:
    assert results[name].loss_error <= 1e-5
    assert results[name].gradient_error <= 1e-5
    assert results[name].norm_error <= 1e-5


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_gradients_end_in_their_stored_layouts(results: dict[str, Result], name: str) -> None:
    assert results[name].moved == ()
    assert not results[name].flag_left_on


def run_in_bf16(rank: int) -> tuple[float, float, set[torch.dtype]]:
    case = gathered(megatron(job=Job(dtype="bf16", reduce_dtype="fp32")), LLAMA_BLOCKS)
    reference, model = make_model("llama").to(torch.bfloat16), make_model("llama")
    mesh = device_mesh_for(case.plan)
    shard_module(model, mesh, case.plan)
    batch = make_batch("llama")
    expected = loss_of(reference(**batch))
    expected.backward()
    loss = loss_of(model(**local_batch(batch, mesh, case.plan)))
    loss.backward()
    wanted = {name: parameter.grad.float() for name, parameter in reference.named_parameters()}
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    errors = [(value(p.grad) - wanted[name]).abs().max().item() for name, p in model.named_parameters()]
    dtypes = {parameter.dtype for parameter in model.parameters()} | {p.grad.dtype for p in model.parameters()}
    return abs(value(loss).item() - expected.item()), max(errors) / largest, dtypes


def test_parameters_are_computed_in_bf16_and_kept_in_fp32() -> None:
    for loss_error, gradient_error, dtypes in run_on_gloo(run_in_bf16, 4):
        # bf16 has 8 bits: what is equal but for the order of sums differs by some 2**-8.
        assert loss_error <= 1e-2
        assert gradient_error <= 2e-2
        assert dtypes == {torch.float32}


KEEPING: dict[str, Callable[[Case], Case]] = {
    "not": lambda case: case,
    "from forward to backward": keeping,
    "for the step": keeping_for_step,
}


def run_state_dicts(rank: int, kept: str) -> list[float]:
    case = KEEPING[kept](gathered(megatron(), LLAMA_BLOCKS))
    mesh = device_mesh_for(case.plan)
    batch = local_batch(make_batch("llama"), mesh, case.plan)
    trained, loaded, whole = make_model("llama"), make_model("llama"), make_model("llama")
    for model in (trained, loaded):
        shard_module(model, mesh, case.plan)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    loss_of(trained(**batch)).backward()
    optimizer.step()
    expected = value(loss_of(trained(**batch))).item()
    # In the shards' layouts, while a backward is still to come; then as whole tensors, for an unsharded model.
    loaded.load_state_dict(trained.state_dict())
    found = [value(loss_of(loaded(**batch))).item()]
    set_model_state_dict(loaded, get_model_state_dict(trained))
    found.append(value(loss_of(loaded(**batch))).item())
    whole.load_state_dict({name: value(tensor) for name, tensor in trained.state_dict().items()})
    found.append(loss_of(whole(**make_batch("llama"))).item())
    return [abs(loss - expected) for loss in found]


@pytest.mark.parametrize("kept", KEEPING)
def test_state_dicts_hold_the_stored_parameters(kept: str) -> None:
    for errors in run_on_gloo(run_state_dicts, 4, kept):
        assert max(errors) <= 1e-5


def run_after_forwards_alone(rank: int, kept: str) -> list[float]:
    case = KEEPING[kept](gathered(megatron(), LLAMA_BLOCKS))
    mesh = device_mesh_for(case.plan)
    batch = local_batch(make_batch("llama"), mesh, case.plan)
    model = make_model("llama")
    shard_module(model, mesh, case.plan)
    parameters = dict(model.named_parameters())
    errors = []
    for trains in (False, True):
        with torch.set_grad_enabled(trains):
            model(**batch)  # nothing goes backward from here
        if not trains:  # between two steps of training they are as they rest
            errors += [float(dict(model.named_parameters())[name] is not own) for name, own in parameters.items()]
        with torch.no_grad():
            for own in parameters.values():
                own.mul_(0.9)
        whole = make_model("llama")
        whole.load_state_dict({name: value(tensor) for name, tensor in model.state_dict().items()})
        found = value(loss_of(model(**batch))).item()
        errors.append(abs(found - loss_of(whole(**make_batch("llama"))).item()))
    return errors


@pytest.mark.parametrize("kept", ["from forward to backward", "for the step"])
def test_what_is_kept_from_a_forward_without_backward_is_gathered_anew(kept: str) -> None:
    for errors in run_on_gloo(run_after_forwards_alone, 4, kept):
        assert max(errors) <= 1e-5


def run_given_up(rank: int) -> list[float]:
    """Give a step up after two of its three micro-batches, change the parameters, and run a whole one."""
    case = keeping_for_step(gathered(megatron(micro_batches=3), LLAMA_BLOCKS))
    mesh = device_mesh_for(case.plan)
    reference, model = make_model("llama"), make_model("llama")
    shard_module(model, mesh, case.plan)
    parameters = [list(one.parameters()) for one in (reference, model)]  # an optimizer's: amid a step others are seen
    whole = [make_batch("llama", seed) for seed in range(3)]
    batches = [local_batch(batch, mesh, case.plan) for batch in whole]
    errors = []
    for clears_between_forward_and_backward in (False, True):
        for batch in batches[:2]:
            loss_of(model(**batch)).backward()
        if not clears_between_forward_and_backward:
            model.zero_grad()
            with torch.no_grad():
                for parameter in itertools.chain(*parameters):
                    parameter.mul_(0.9)
        reference.zero_grad()
        for index in range(3):
            loss = loss_of(model(**batches[index])) / 3
            expected = loss_of(reference(**whole[index])) / 3
            if index == 0:
                model.zero_grad()
            loss.backward()
            expected.backward()
            errors.append(abs(value(loss).item() - expected.item()))
        wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
        largest = max(gradient.abs().max().item() for gradient in wanted.values())
        found = model.named_parameters()
        errors += [(value(p.grad) - wanted[name]).abs().max().item() / largest for name, p in found]
        model.zero_grad()
    return errors


def test_a_step_that_was_given_up_leaves_nothing() -> None:
    for errors in run_on_gloo(run_given_up, 4):
        assert max(errors) <= 1e-5


class Failing(nn.Module):
    """Fails where it is told to, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, fails: str = "") -> torch.Tensor:
        hidden = self.first(x)
        if fails == "forward":
            raise RuntimeError("on purpose")
        if fails == "backward":
            hidden.register_hook(_fail)
        return self.second(hidden).square().mean()


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("on purpose")


def failing_case() -> Case:
    plan = dataclasses.replace(
        replicated_on_tp("mlp").plan,
        plan={"*.weight": (S0, R)},
        compute_plan={"*.weight": (R, R)},
        gradient_plan={"*.weight": (S0, R)},
        fully_shard={"first": ("weight",), "second": ("weight",)},
        input_plan={"input": {"x": (S0, R)}},
    )
    return Case("mlp", plan)


def run_failures(rank: int, kept: str) -> list[float]:
    torch.manual_seed(0)
    model, x = Failing(), torch.randn(8, 8)
    case = KEEPING[kept](failing_case())
    mesh = device_mesh_for(case.plan)
    model(x).backward()
    wanted = model.first.weight.grad
    model.zero_grad()
    shard_module(model, mesh, case.plan)
    piece = local_batch({"x": x}, mesh, case.plan)
    errors = []
    for fails in ("forward", "backward"):
        try:
            model(**piece, fails=fails).backward()
        except RuntimeError:
            model.zero_grad()
        loss = model(**piece)
        loss.backward()
        errors.append((value(model.first.weight.grad) - wanted).abs().max().item())
        model.zero_grad()
    return errors


@pytest.mark.parametrize("kept", KEEPING)
def test_a_step_that_failed_leaves_the_next_one_intact(kept: str) -> None:
    for errors in run_on_gloo(run_failures, 4, kept):
        assert max(errors) <= 1e-6
