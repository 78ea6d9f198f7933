"""`Step`: how a script runs one step of a plan: the loss, the reduction of gradients, and the program around them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from api.frameworks.pytorch.axes import AxisRoles
from api.frameworks.pytorch.fsdp import Units
from api.frameworks.pytorch.styles import TensorStyles, shard_text
from api.frameworks.pytorch.text import expression, function, joined
from planner.model_rewrites.cache_argument import cache_argument
from planner.plan.ports import ports_of
from planner.plan.sharding_plan import ShardingPlan

R = Replicate()
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=1e-4)",
    "adam": "torch.optim.Adam(model.parameters(), lr=1e-4)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=1e-2)",
    "sgd-momentum": "torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)",
    "adagrad": "torch.optim.Adagrad(model.parameters(), lr=1e-2)",
}
"""Optimizer of a job -> its constructor in torch, which takes any parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a script.

    Attributes:
        reduction: who reduces gradients: DDP, FSDP, or a function of the script ("own").
        data: axes of the script's mesh that split the batch.
        data_ranks: their ranks.
        tensor: axis of tensor parallelism; None: there is none.
        labels: dim of the labels that is split over ``tensor``; None: they are whole.
        is_vocabulary_sharded: whether the logits are sharded over the vocabulary.
        autocast: whether the forward runs under autocast.
        units: FSDP units.
        is_hugging_face: whether the model is one of transformers.
        uses_cache: whether the model's forward takes ``use_cache``.
        keeps_logits: whether the model's forward takes ``logits_to_keep``.
        cache: argument for the key-value cache.
        styles: styles of tensor parallelism; None: there is none.
        is_causal: whether the labels are the next tokens.
    """

    reduction: Literal["ddp", "fsdp", "own"]
    data: tuple[str, ...]
    data_ranks: int
    tensor: str | None
    labels: int | None
    is_vocabulary_sharded: bool
    autocast: bool
    units: Units
    is_hugging_face: bool
    uses_cache: bool
    keeps_logits: bool
    cache: str
    styles: TensorStyles | None
    is_causal: bool

    @classmethod
    def of(
        cls,
        plan: ShardingPlan,
        roles: AxisRoles,
        styles: TensorStyles | None,
        units: Units,
        module: nn.Module | None,
    ) -> Step:
        """Return the step for ``plan``."""
        reduction: Literal["ddp", "fsdp", "own"] = "fsdp" if roles.shard else "own" if styles is not None else "ddp"
        parameters = () if module is None else tuple(inspect.signature(module.forward).parameters)
        is_hugging_face = hasattr(getattr(module, "config", None), "to_diff_dict")
        return cls(
            reduction=reduction,
            data=tuple(roles.axis_name(group) for group in (roles.replicate, roles.shard) if group),
            data_ranks=math.prod(roles.sizes[axis] for axis in roles.data),
            tensor=None if roles.tensor is None else roles.names[roles.tensor],
            labels=None if roles.tensor is None else _labels_dim(plan, roles.tensor),
            is_vocabulary_sharded=styles is not None and styles.is_vocabulary_sharded,
            autocast=plan.job.training and reduction != "fsdp" and plan.job.dtype != plan.job.stored_dtype,
            units=units,
            is_hugging_face=is_hugging_face,
            uses_cache="use_cache" in parameters,
            keeps_logits="logits_to_keep" in parameters,
            cache=(cache_argument(module) if module is not None else None) or "past_key_values",
            styles=styles,
            is_causal="ForCausalLM" in type(module).__name__ or "LMHead" in type(module).__name__,
        )


def _labels_dim(plan: ShardingPlan, axis: int) -> int | None:
    spec = plan.input_plan.get("input", plan.input_plan.get(""))
    port = None if spec is None else dict(ports_of(spec)).get("labels")
    placement = None if port is None else port.layout[axis]
    return placement.dim if isinstance(placement, Shard) else None


def training_functions(plan: ShardingPlan, roles: AxisRoles, step: Step) -> Iterator[str]:
    """Yield the functions that train: the loss, one step, the batches and the program."""
    yield _loss_sum(step)
    if step.reduction == "own":
        yield _own_reduction(step)
    yield _train_step(plan, step)
    yield _batches(plan, step)
    yield function(
        "main() -> None",
        "Train for a few steps.",
        "check_torch()",
        *_start(step),
        f"optimizer = {OPTIMIZERS.get(plan.job.optimizer, OPTIMIZERS['adamw'])}",
        "for number, micro_batches in enumerate(batches(mesh, steps=10)):",
        "    loss = train_step(model, micro_batches, mesh)",
        "    # To clip gradients: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "    optimizer.step()",
        "    optimizer.zero_grad()",
        "    if dist.get_rank() == 0:",
        '        print(f"step {number}: loss {loss.item():.6f}", flush=True)',
        "dist.destroy_process_group()",
    )


def _start(step: Step) -> list[str]:
    return [
        'if DEVICE == "cuda":',
        '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        "dist.init_process_group()",
        "mesh = init_device_mesh(DEVICE, tuple(MESH.values()), mesh_dim_names=tuple(MESH))",
        "model = shard(build_model(), mesh)",
    ]


def _inputs(step: Step) -> list[str]:
    """Return the lines that split a batch into labels and inputs."""
    if step.styles is None or step.tensor is None:
        return []
    mesh = f'mesh["{step.tensor}"]'
    lines = []
    for name, placement in step.styles.batch.items():
        whole = f"DTensor.from_local(inputs[{name!r}], {mesh}, [Replicate()])".replace("'", '"')
        lines.append(f'inputs["{name}"] = {whole}.redistribute(placements=[{shard_text(placement)}])')
    return lines


def _loss_sum(step: Step) -> str:
    cache = ", use_cache=False" if step.uses_cache else ""
    logits = f"model(**inputs{cache})"
    body = [
        'inputs = {name: value for name, value in batch.items() if name != "labels"}',
        'labels = batch["labels"]',
        *_inputs(step),
        f"logits = {logits}.logits" if step.is_hugging_face else f"logits = {logits}",
    ]
    loss = 'F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")'
    if step.is_vocabulary_sharded:
        body += [f"loss = {loss}", "return loss.to_local(), (labels != -100).sum()"]
    else:
        if step.tensor is not None:
            body += _local_logits(step)
        body += [f"return {loss}, (labels != -100).sum()"]
    arguments = "model: nn.Module, batch: dict[str, torch.Tensor], mesh: DeviceMesh"
    return function(
        f"loss_sum({arguments}) -> tuple[torch.Tensor, torch.Tensor]",
        "Return the sum of this rank's losses, and their number; labels[i] is the target of logits[i].",
        *body,
    )


def _local_logits(step: Step) -> list[str]:
    placement = "Replicate()" if step.labels is None else f"Shard({step.labels})"
    lines = [f"logits = logits.redistribute(placements=[{placement}]).to_local()"]
    if step.labels is not None:
        axis = f'mesh["{step.tensor}"]'
        lines.append(f"labels = labels.chunk({axis}.size(), dim={step.labels})[{axis}.get_local_rank()]")
    return lines


def _own_reduction(step: Step) -> str:
    reduce = [f'    dist.all_reduce(parameter.grad.to_local(), group=mesh["{axis}"].get_group())' for axis in step.data]
    return function(
        "reduce_gradients(model: nn.Module, mesh: DeviceMesh) -> None",
        "Sum gradients over the ranks that hold the same parameters, once a step.",
        "for parameter in model.parameters():",
        "    if parameter.grad is None:",
        "        continue",
        "    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)",
        *reduce,
    )


def _loss_axes(step: Step) -> tuple[str, ...]:
    """Return the axes over which ranks have different losses."""
    if step.tensor is not None and step.labels is not None and not step.is_vocabulary_sharded:
        return (*step.data, step.tensor)
    return step.data


def _train_step(plan: ShardingPlan, step: Step) -> str:
    axes = _loss_axes(step)
    reduced = [f'    dist.all_reduce(sums, group=mesh["{axis}"].get_group())' for axis in axes]
    factor = " * ranks" if step.reduction != "own" and step.data_ranks > 1 else ""
    forward = "loss, count = loss_sum(model, batch, mesh)"
    if step.autocast:
        dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[plan.job.dtype]
        forward = f"with torch.autocast(DEVICE, {dtype}):\n    {forward}"
    inner = [
        *forward.splitlines(),
        "sums = torch.stack([loss.detach(), count.to(loss.dtype)])",
        *[line.strip() for line in reduced],
        f"(loss{factor} / (sums[1] * len(micro_batches))).backward()",
        "total += sums[0] / sums[1] / len(micro_batches)",
    ]
    body = ["total = torch.zeros((), device=DEVICE)"]
    if factor:
        body.append(f"ranks = {step.data_ranks}  # gradients are averaged over them, and have to be summed")
    contexts = _contexts(plan, step)
    sync = _synchronisation(plan, step)
    if step.reduction == "ddp" and plan.micro_batches > 1:
        inner = ["with nullcontext() if is_last else model.no_sync():", *(f"    {line}" for line in inner)]
        sync = ["is_last = index == len(micro_batches) - 1"]
    loop = ["for index, batch in enumerate(micro_batches):" if sync else "for batch in micro_batches:"]
    loop += [f"    {line}" for line in (*sync, *inner)]
    if contexts:
        body += [f"with {', '.join(contexts)}:", *(f"    {line}" for line in loop)]
    else:
        body += loop
    body += ["reduce_gradients(model, mesh)"] if step.reduction == "own" else []
    return function(
        "train_step(model: nn.Module, micro_batches: list[dict[str, torch.Tensor]], mesh: DeviceMesh) -> torch.Tensor",
        "Accumulate gradients over the micro-batches, and return the mean of their mean losses, over all ranks.",
        *body,
        "return total",
    )


def _contexts(plan: ShardingPlan, step: Step) -> list[str]:
    if step.tensor is None:
        return []
    return [
        "implicit_replication()",
        *(["loss_parallel()"] if step.is_vocabulary_sharded and plan.job.training else []),
        *(["sdpa_kernel(SDPBackend.MATH)"] if plan.mesh.device == "cpu" else []),
    ]


def _synchronisation(plan: ShardingPlan, step: Step) -> list[str]:
    """Return the lines that tell FSDP which micro-batches reduce gradients; none for a single one."""
    if step.reduction != "fsdp" or plan.micro_batches == 1:
        return []
    # Without set_is_last_backward: after a backward that is not the last, torch 2.13 gathers the head once too often.
    lines = ["is_last = index == len(micro_batches) - 1"]
    patterns: dict[tuple[str, ...], list[str]] = {}
    for unit in step.units.units:
        calls = ["module.set_requires_gradient_sync(is_last, recurse=False)"] if unit.reduces_once else []
        if unit.all_reduces_once and not unit.reduces_once:
            calls.append("module.set_requires_all_reduce(is_last, recurse=False)")
        if unit.gathers_once:
            calls.append("module.set_reshard_after_backward(is_last, recurse=False)")
        patterns.setdefault(tuple(calls), []).append(expression(unit.pattern))
    for calls_of_unit, modules in patterns.items():
        if calls_of_unit:
            lines += [f"for module in {joined(modules)}:", *(f"    {call}" for call in calls_of_unit)]
    if step.units.root_reduces_once:
        lines.append("model.set_requires_gradient_sync(is_last, recurse=False)")
    return lines


def _batches(plan: ShardingPlan, step: Step) -> str:
    signature = "batches(mesh: DeviceMesh, steps: int) -> Iterator[list[dict[str, torch.Tensor]]]"
    doc = "Yield the micro-batches of each step, of this rank's samples: labels are -100 where there is no target."
    if not (step.is_hugging_face and step.is_causal and plan.job.seq):
        return function(signature, doc, 'raise NotImplementedError("fill in batches()")')
    rank, ranks = _data_rank(step), "" if step.data_ranks == 1 else f" // {step.data_ranks}"
    return function(
        signature,
        doc,
        f"generator = torch.Generator().manual_seed({rank})  # random tokens: put your data here",
        f"size = (MICRO_BATCHES, BATCH // MICRO_BATCHES{ranks}, SEQ + 1)",
        "for _ in range(steps):",
        '    tokens = torch.randint(CONFIG["vocab_size"], size, generator=generator).to(DEVICE)',
        '    yield [{"input_ids": part[:, :-1], "labels": part[:, 1:]} for part in tokens]',
    )


def _data_rank(step: Step) -> str:
    if step.tensor is None:
        return "dist.get_rank()"
    if not step.data:
        return "0"
    return f'dist.get_rank() // mesh["{step.tensor}"].size()'


_SHARDED_LAYER = '''\
class ShardedLayer(DynamicLayer):
    """Keys and values of one layer, sharded as attention is."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]'''


def inference_functions(plan: ShardingPlan, step: Step) -> Iterator[str]:
    """Yield the functions that run a prefill or the decoding of tokens."""
    contexts = ", ".join(["torch.no_grad()", *_contexts(plan, step)])
    cache, mesh = ", use_cache=True" if step.uses_cache else "", "model: nn.Module, inputs: dict[str, Any]"
    keeps = ", logits_to_keep=1" if step.keeps_logits else ""
    prepared = _inputs(step)
    prepared = ["inputs = dict(inputs)", *prepared] if prepared else []
    if step.tensor is not None and step.uses_cache:
        yield _SHARDED_LAYER
        prepared.append(f'inputs = {{"{step.cache}": Cache(layer_class_to_replicate=ShardedLayer), **inputs}}')
    yield function(
        f"forward({mesh}, mesh: DeviceMesh) -> Any",
        "Return the output of one forward for this rank's samples; with the last output's cache, of one more token.",
        f"with {contexts}:",
        *(f"    {line}" for line in prepared),
        f"    return model(**inputs{cache}{keeps})",
    )
    if not (step.is_hugging_face and step.is_causal and plan.job.seq):
        yield function(
            "prompt(mesh: DeviceMesh) -> dict[str, Any]", "Return this rank's inputs.", "raise NotImplementedError"
        )
    else:
        samples = "BATCH" if step.data_ranks == 1 else f"BATCH // {step.data_ranks}"
        yield function(
            "prompt(mesh: DeviceMesh) -> dict[str, Any]",
            "Return this rank's samples.",
            f"generator = torch.Generator().manual_seed({_data_rank(step)})  # random tokens: put your prompts here",
            f'tokens = torch.randint(CONFIG["vocab_size"], ({samples}, SEQ), generator=generator)',
            'return {"input_ids": tokens.to(DEVICE)}',
        )
    decode = [
        "logits = output.logits.full_tensor() if isinstance(output.logits, DTensor) else output.logits",
        "token = logits[:, -1:].argmax(-1)",
        f'output = forward(model, {{"input_ids": token, "{step.cache}": output.{step.cache}}}, mesh)',
    ]
    yield function(
        "main() -> None",
        "Read a prompt" + (", and generate some tokens." if plan.job.phase == "decode" else "."),
        "check_torch()",
        *_start(step),
        "model.eval()",
        "output = forward(model, prompt(mesh), mesh)",
        *(["for _ in range(8):", *(f"    {line}" for line in decode)] if plan.job.phase == "decode" else []),
        "if dist.get_rank() == 0:",
        '    print("logits", tuple(output.logits.shape), flush=True)',
        "dist.destroy_process_group()",
    )
