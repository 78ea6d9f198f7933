"""`torch_script`: a plan as a script that needs only torch, and transformers for a model of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from api.frameworks.expressed import Row
from api.frameworks.pytorch.axes import AxisRoles, axis_roles, parameter_layouts
from api.frameworks.pytorch.calls import Calls, observed_calls
from api.frameworks.pytorch.fsdp import Units, fsdp_units
from api.frameworks.pytorch.rows import script_rows
from api.frameworks.pytorch.steps import Step, inference_functions, training_functions
from api.frameworks.pytorch.styles import TensorStyles, tensor_styles, unsaid_parameters
from api.frameworks.pytorch.text import expression, function, imports, joined, literal, loop, mapping, wrapped
from api.requests.model_configs import preset_names, read_preset
from api.requests.model_registry import load_model, quiet_libraries
from planner.plan.sharding_plan import ShardingPlan

DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
_SAVED_OPS = (
    *("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "_grouped_mm.default", "convolution.default"),
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
)
"""Ops whose results the executor's selective checkpointing saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchScript:
    """A script, and what it says of each aspect of the plan.

    Attributes:
        text: the script, to be run by torchrun.
        rows: what is expressed, approximated or lost.
    """

    text: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """How a script gets its model: from a config of transformers, or from a function that the user fills in."""

    module: nn.Module | None
    values: Mapping[str, Any] | None = None
    classes: tuple[str, ...] = field(default=())


def torch_script(
    plan: ShardingPlan,
    module: nn.Module | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    example_inputs: Any = None,
) -> TorchScript:
    """Return ``plan`` as a script with torch's own parallelism.

    Args:
        plan: the plan.
        module: the model that the plan is for, on any device. None: it is built from ``config``, or from the preset
            that the plan names. Where there is neither, tensor parallelism cannot be said.
        config: values of the model's Hugging Face config. None: those of ``module`` or of the preset.
        example_inputs: arguments of one call of a ``module`` that is not from transformers; None: not known.

    Raises:
        ModelError: no model can be built from ``config``.
        PlanError: the plan does not fit the module.
    """
    model = _model(plan, module, config)
    layouts = parameter_layouts(plan, model.module)
    unsaid = () if model.module is None else unsaid_parameters(model.module, layouts, len(plan.layout_mesh.shape) - 1)
    roles = axis_roles(plan, layouts, can_shard_tensors=model.module is not None and not unsaid)
    styles = None
    if roles.tensor is not None and model.module is not None:
        calls = _calls(model.module, example_inputs)
        styles = tensor_styles(plan, model.module, layouts, roles.tensor, calls)
    units = fsdp_units(plan, model.module, layouts, roles)
    step = Step.of(plan, roles, styles, units, model.module)
    return TorchScript(
        text=_text(plan, model, roles, styles, units, step),
        rows=tuple(script_rows(plan, roles, styles, units, step, layouts, unsaid)),
    )


def _model(plan: ShardingPlan, module: nn.Module | None, config: Mapping[str, Any] | None) -> _Model:
    if config is None and module is None and plan.model in preset_names():
        config = read_preset(plan.model).values
    if module is None and config is not None:
        module = load_model({"hf_config": dict(config)}).module
    own: Any = getattr(module, "config", None)
    if module is None or not hasattr(own, "to_diff_dict"):
        return _Model(module=module)
    values = dict(config) if config is not None else own.to_diff_dict()
    dropped = ("transformers_version", "dtype", "torch_dtype", "auto_map", "_name_or_path")
    values = {key: value for key, value in values.items() if key not in dropped and not key.startswith("_")}
    return _Model(module=module, values=values, classes=(type(own).__name__, type(module).__name__))


def _calls(module: nn.Module, example_inputs: Any) -> Calls:
    with quiet_libraries():
        try:
            return observed_calls(module, example_inputs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return Calls()  # a forward that does not run on meta: modules then redistribute what they share one by one


def _text(
    plan: ShardingPlan, model: _Model, roles: AxisRoles, styles: TensorStyles | None, units: Units, step: Step
) -> str:
    sections = [
        _constants(plan, model, roles),
        *_model_functions(plan, model),
        *([] if styles is None else _tensor_functions(roles, styles)),
        *_checkpoint_functions(plan),
        *_dim_rules(roles, units),
        _shard(plan, roles, styles, units),
        *(training_functions(plan, roles, step) if plan.job.training else inference_functions(plan, step)),
        'if __name__ == "__main__":\n    main()',
    ]
    body = wrapped("\n\n\n".join(sections))
    return f"{_header(plan, model, roles)}\n\n{imports(body, model.classes)}\n\n{body}\n"


def _header(plan: ShardingPlan, model: _Model, roles: AxisRoles) -> str:
    name = plan.model or (model.classes[1] if model.classes else "the model")
    verb = "Train" if plan.job.training else f"Run ({plan.job.phase})"
    mesh = ", ".join(f"{axis}={size}" for axis, size in roles.axes)
    ranks = plan.layout_mesh.size
    fill_in = [] if model.values is not None else ["# Fill in build_model() and batches(): the plan does not say them."]
    lines = [
        *fill_in,
        f'"""{verb} {name} on {ranks} devices ({mesh}) with torch\'s own parallelism.',
        "",
        "Written by shardplan, from a plan.",
        "",
        f"    torchrun --nproc-per-node {min(ranks, 8)}{f' --nnodes {ranks // 8}' if ranks > 8 else ''} script.py",
        '"""',
    ]
    return "\n".join(lines)


def _constants(plan: ShardingPlan, model: _Model, roles: AxisRoles) -> str:
    job = plan.job
    version = ".".join(torch.__version__.split(".")[:2])
    lines = [
        f'TORCH = "{version}"',
        f'DEVICE = "{plan.mesh.device}"',
        f"MESH = {{{', '.join(f'{_quote(name)}: {size}' for name, size in roles.axes)}}}",
        f"BATCH = {job.batch or roles_size(roles)}",
        f"SEQ = {job.seq}" if job.seq is not None else "",
        f"MICRO_BATCHES = {plan.micro_batches}" if job.training else "",
        f"CONFIG = {literal(model.values)}" if model.values is not None else "",
    ]
    return "\n".join(line for line in lines if line)


def roles_size(roles: AxisRoles) -> int:
    """Return the number of ranks."""
    size = 1
    for _, ranks in roles.axes:
        size *= ranks
    return size


def _model_functions(plan: ShardingPlan, model: _Model) -> Iterator[str]:
    yield function(
        "check_torch() -> None",
        "Stop with a message if this is not the version of torch that the script is for.",
        'if torch.__version__.split(".")[:2] != TORCH.split("."):',
        '    raise SystemExit(f"This script is for torch {TORCH}, and this is torch {torch.__version__}.")',
    )
    dtype = DTYPES[plan.job.stored_dtype]
    if model.values is None:
        yield function(
            "build_model() -> nn.Module",
            f"Return the model, with parameters in {dtype}.",
            'raise NotImplementedError("fill in build_model()")',
        )
    else:
        kind = ".to(" + dtype + ")" if dtype != "torch.float32" else ".float()"
        yield function(
            "build_model() -> nn.Module",
            "Return the model with random weights, equal on all ranks; load your own here.",
            "torch.manual_seed(0)",
            f"return {model.classes[1]}({model.classes[0]}.from_dict(CONFIG)){kind}",
        )


def _tensor_functions(roles: AxisRoles, styles: TensorStyles) -> Iterator[str]:
    assert roles.tensor is not None
    if styles.needs_shard_parameters:
        yield _SHARD_PARAMETERS
    if styles.gradients:
        yield _PIN_GRADIENT
    applied = [
        f"{name} = {mapping(entries)}\nparallelize_module(model, mesh, {name})"
        for name, entries in _named(styles)
        if entries
    ]
    ties = [f"model.{name} = model.{other}  # tied, and made two parameters above" for name, other in styles.ties]
    yield function(
        "tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None",
        "Shard the model over the axis of tensor parallelism; tensors between modules are DTensors.",
        *applied,
        "for module in model.modules():",
        "    for name, parameter in module.named_parameters(recurse=False):",
        "        if not isinstance(parameter, DTensor):",
        "            replicated = distribute_tensor(parameter, mesh, [Replicate()])",
        "            module.register_parameter(name, nn.Parameter(replicated, parameter.requires_grad))",
        *ties,
    )


def _named(styles: TensorStyles) -> tuple[tuple[str, Mapping[str, str]], ...]:
    """Return (name of a variable, styles) in the order in which they are applied."""
    entries = (("weights", styles.weights), ("inputs", styles.inputs), ("outputs", styles.outputs))
    return (*entries, ("gradients", styles.gradients))


_SHARD_PARAMETERS = '''\
class ShardParameters(ParallelStyle):
    """Shards parameters of a module that is neither nn.Linear nor nn.Embedding; its tensors are left alone."""

    def __init__(self, **placements: Shard) -> None:
        super().__init__()
        self.placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements.items():
            whole = getattr(module, name)
            sharded = distribute_tensor(whole, device_mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(sharded, whole.requires_grad))
        return module'''


_PIN_GRADIENT = '''\
class PinGradient(ParallelStyle):
    """Redistributes the gradient of one argument of a module, or of its result, to the tensor's own layout.

    Until then, it is partial: each rank has the part that comes from its share of the weights.
    """

    def __init__(self, argument: int | str | None = None) -> None:
        super().__init__()
        self.argument = argument

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def pin(tensor: DTensor) -> DTensor:
            return tensor.redistribute(placements=tensor.placements)

        def pin_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if isinstance(self.argument, int):
                before, after = args[: self.argument], args[self.argument + 1 :]
                return (*before, pin(args[self.argument]), *after), kwargs
            return args, {**kwargs, self.argument: pin(kwargs[self.argument])}

        if self.argument is None:
            module.register_forward_hook(lambda module, args, result: pin(result))
        else:
            module.register_forward_pre_hook(pin_argument, with_kwargs=True)
        return module'''


def _checkpoint_functions(plan: ShardingPlan) -> Iterator[str]:
    modes = plan.activation_checkpointing
    if not modes:
        return
    if "selective" in modes.values():
        own = ["_scaled_dot_product_flash_attention_for_cpu.default"] if plan.mesh.device == "cpu" else []
        ops = "".join(f"    torch.ops.aten.{op},\n" for op in (*_SAVED_OPS, *own))
        yield f"SAVED_OPS = {{\n{ops}}}"
        yield function(
            "save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy",
            "Save the results of matrix multiplications and attention, and recompute everything else.",
            "return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE",
        )
    body = []
    for mode in sorted(set(modes.values())):
        blocks = joined([expression(key) for key, value in modes.items() if value == mode])
        wrapper = "checkpoint_wrapper"
        if mode == "selective":
            body.append("contexts = partial(create_selective_checkpoint_contexts, save_products)")
            wrapper = "partial(checkpoint_wrapper, context_fn=contexts)"
        body.append(f"blocks = set({blocks})")
        arguments = f"checkpoint_wrapper_fn={wrapper}, check_fn=blocks.__contains__"
        body.append(f"apply_activation_checkpointing(model, {arguments})")
    yield function("checkpoint(model: nn.Module) -> None", "Recompute the plan's blocks in the backward pass.", *body)


def _shard(plan: ShardingPlan, roles: AxisRoles, styles: TensorStyles | None, units: Units) -> str:
    body = [f"tensor_parallel(model, mesh[{_quote(roles.axes[-1][0])}])"] if styles is not None else []
    body += ["checkpoint(model)"] if plan.activation_checkpointing else []
    if roles.shard:
        body += [*_fully_shard(plan, roles, units), "return model"]
    elif roles.replicate and styles is None and plan.job.training:
        body += [
            "model.to(DEVICE)",
            "return DistributedDataParallel(",
            "    model, process_group=mesh.get_group(), broadcast_buffers=False, gradient_as_bucket_view=True",
            ")",
        ]
    else:
        body += ["return model.to(DEVICE)"]
    return function(
        "shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module", "Return the model, sharded as the plan says.", *body
    )


def _fully_shard(plan: ShardingPlan, roles: AxisRoles, units: Units) -> Iterator[str]:
    names = ", ".join(_quote(roles.axis_name(group)) for group in (roles.replicate, roles.shard) if group)
    mesh = "mesh" if len(roles.axes) == (2 if roles.replicate else 1) else f"mesh[{names}]"
    rule = "free_dim" if roles.tensor is not None else "even_dim" if units.first_even_dim else None
    placement = [f'"shard_placement_fn": {rule}'] if rule else []
    options = ", ".join([f'"mesh": {mesh}', *_policy(plan), *placement])
    yield f"options: dict[str, Any] = {{{options}}}"
    for unit in units.units:
        arguments = ["**options"]
        arguments += [] if unit.reshard_after_forward else ["reshard_after_forward=False"]
        calls = [f"fully_shard(module, {', '.join(arguments)})"]
        calls += ["module.set_unshard_in_backward(False)  # a lookup's backward needs no weight"] * unit.is_lookup
        yield loop(expression(unit.pattern), *calls)
    yield "fully_shard(model, **options)"


def _dim_rules(roles: AxisRoles, units: Units) -> Iterator[str]:
    """Yield the function that tells FSDP which dim of a parameter to shard, where that is not always the first."""
    if not roles.shard:
        return
    if roles.tensor is not None:
        yield function(
            "free_dim(parameter: nn.Parameter) -> Shard",
            "Return what FSDP shards: the first dim that tensor parallelism does not.",
            "is_taken = isinstance(parameter, DTensor) and parameter.placements[0] == Shard(0)",
            "return Shard(1 if is_taken and parameter.dim() > 1 else 0)",
        )
    elif units.first_even_dim:
        yield function(
            "even_dim(parameter: nn.Parameter) -> Shard",
            "Return what FSDP shards: the first dim that its ranks divide.",
            f"ranks = MESH[{_quote(roles.axis_name(roles.shard))}]",
            "return Shard(next((dim for dim, size in enumerate(parameter.shape) if size % ranks == 0), 0))",
        )


def _policy(plan: ShardingPlan) -> Iterator[str]:
    job = plan.job
    if job.training and (job.dtype, job.reduce_dtype) != (job.stored_dtype, job.stored_dtype):
        values = f"param_dtype={DTYPES[job.dtype]}, reduce_dtype={DTYPES[job.reduce_dtype]}"
        yield f'"mp_policy": MixedPrecisionPolicy({values})'


def _quote(text: str) -> str:
    return f'"{text}"'
