"""The errors of a module that cannot be traced, or not be trained as it is traced."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from planner.errors import ModelError
from planner.graph.capture import module_names
from planner.graph.op_graph import Op, OpGraph


def cannot_trace(module: nn.Module, export_error: Exception, fx_error: Exception) -> ModelError:
    """Return the error for a module that neither torch.export nor torch.fx captures; it names the submodule."""
    fqn = _failing_module(module, export_error)
    where = "" if fqn is None else f", in its module {fqn or '(root)'!r} ({type(module.get_submodule(fqn)).__name__})"
    return ModelError(
        f"cannot trace {type(module).__name__}{where}: "
        f"torch.export says {_reason(export_error)}; torch.fx says {_reason(fx_error)}.",
        what_to_do=_what_to_do(module, export_error),
        module=fqn,
        cause=_cause(export_error),
    )


def cannot_run(module: nn.Module, error: Exception) -> ModelError:
    """Return the error for a forward that does not run on the meta device."""
    return ModelError(
        f"{type(module).__name__} does not run on these inputs on the meta device: {_reason(error)}.",
        what_to_do=_what_to_do(module, error),
        module=_failing_module(module, error),
        cause=_cause(error),
    )


def shape_by_values(op: Any, fqn: str) -> ModelError:
    """Return the error for an op, in the module ``fqn``, whose result has a shape that depends on values."""
    return ModelError(
        f"{op} in {fqn or 'the root module'} returns as many elements as values say. A plan needs shapes that do not "
        "depend on values.",
        what_to_do="Write the module without nonzero, boolean indexing or sizes read from tensors: a mask and "
        "torch.where give a fixed shape.",
        module=fqn,
        cause=f"{op} returns as many elements as values say",
    )


def written_in_parts(fqn: str) -> ModelError:
    """Return the error for a tensor that is filled in parts, in the module ``fqn``, with what needs gradients."""
    return ModelError(
        f"{fqn or 'the root module'} assigns results that need gradients to parts of a tensor, as in out[:, 0] = x, "
        "and reads the tensor afterwards.",
        what_to_do="Collect the parts in a list, and join them by torch.stack or torch.cat.",
        module=fqn,
        cause="it assigns results that need gradients to parts of a tensor",
    )


def called_from_outside(fqn: str) -> ModelError:
    """Return the error for an opaque module of which a part is called from outside of it."""
    return ModelError(
        f"{fqn} is to run as one op, and a module inside it is called from outside of it.",
        what_to_do="Name a module around both as opaque, or call what is inside through it.",
        module=fqn,
        cause="a module inside it is called from outside",
    )


def check_is_plain(module: nn.Module) -> None:
    """Raise a `ModelError` that lists all parts of ``module`` which no trace reads: code and tensors of other kinds."""
    parts = dict(module.named_modules())
    scripted = [name for name, part in parts.items() if isinstance(part, torch.jit.ScriptModule)]
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    sharded = [name for name, tensor in tensors if isinstance(tensor, DTensor)]
    others: dict[str, list[str]] = {}
    for name, tensor in tensors:
        if _has_own_ops(type(tensor)) and name not in (*lazy, *sharded):
            others.setdefault(f"{type(tensor).__module__}.{type(tensor).__qualname__}", []).append(name)
    faults = [
        (scripted, "TorchScript, whose code cannot be traced", "Give it as it was before torch.jit.script or .trace."),
        (lazy, "a lazy parameter, which has no shape yet", "Call the module once with a small batch."),
        (sharded, "a DTensor, sharded already", "Give the module as it was before."),
        *((names, f"a {kind}, a tensor with ops of its own", _PLAIN_PARAMETERS) for kind, names in others.items()),
    ]
    found = [fault for fault in faults if fault[0]]
    if found:
        raise ModelError(
            " ".join(f"{_some(names)} is {what}." for names, what, _ in found),
            what_to_do=" ".join(dict.fromkeys(advice for *_, advice in found)),
            module=found[0][0][0] if scripted else found[0][0][0].rpartition(".")[0],
        )


_PLAIN_PARAMETERS = (
    "Give the module with plain parameters: as it was before it was quantized, or with quantized weights as frozen "
    "parameters of an integer dtype, which forward dequantizes."
)


def _has_own_ops(kind: type[torch.Tensor]) -> bool:
    """Return whether a class of tensors overrides torch's functions, ops or casts, as quantized weights do."""
    if issubclass(kind, FakeTensor):
        return False
    overridable = ("__torch_function__", "__torch_dispatch__", "to")
    return any(
        not any(_is_inherited(kind, name, base) for base in (torch.Tensor, nn.Parameter)) for name in overridable
    )


def _is_inherited(kind: type, name: str, base: type) -> bool:
    own, given = getattr(kind, name), getattr(base, name)
    return bool(getattr(own, "__func__", own) == getattr(given, "__func__", given))


def _some(names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0] or 'the root module'}{more}"


def vectorized(fqn: str) -> ModelError:
    """Return the error for a ``vmap`` in the module ``fqn``, whose ops cannot run one by one."""
    return ModelError(
        f"{fqn or 'the root module'} calls torch.vmap or torch.func, whose ops cannot be planned one by one.",
        what_to_do="Write it with ops on whole batches.",
        module=fqn,
        cause="it calls torch.vmap or torch.func",
    )


def _what_to_do(module: nn.Module, error: Exception) -> str:
    """Return how to make ``module`` traceable, after ``error`` of torch.export."""
    is_cast = any(p.is_floating_point() and p.dtype != torch.float32 for p in module.parameters())
    if is_cast and re.search(r"dtype|scalar type|should be the same|view_as_complex", str(error)):
        return "Plan with dtype='fp32', or cast in forward what keeps its own dtype, such as buffers and constants."
    if "autocast" in str(error):
        return "Leave torch.autocast out of forward: the plan's dtype casts parameters and inputs, as FSDP2 does."
    if "fake tensor in the exported program" in str(error):
        return "Do not write to parameters in forward, not through .data either: clip them after the optimizer's step."
    if "PackedSequence" in str(error):
        return (
            "Give the recurrent layer padded sequences, without pack_padded_sequence, and mask what is beyond their "
            "lengths."
        )
    if "FlexAttention" in str(error):
        return (
            "flex_attention is not planned: write it with F.scaled_dot_product_attention and a mask (for a model of "
            "transformers, attn_implementation='sdpa')."
        )
    if "_ctc_loss" in str(error):
        return (
            "Give the CTC loss its targets as [samples, longest], or return the log probabilities from forward, and "
            "compute the CTC loss from them in the training loop."
        )
    return "Check that it runs on these inputs, and keep data-dependent control flow out of forward."


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"


def _cause(error: BaseException) -> str:
    """Return what raised ``error``, in a few words, with the line of the model's code that did."""
    if isinstance(error, ModelError):
        cause = error.cause or error.detail.rstrip(".")
    elif "data-dependent" in str(error) or "Cannot call item" in str(error) or "on meta tensors" in str(error):
        cause = "it branches on values, or reads a number from a tensor"
    else:
        cause = _reason(error)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_MODELS)
    ]
    if not frames:
        return cause
    return f"{cause}, at {Path(frames[-1].filename).name}:{frames[-1].lineno}"


_NOT_MODELS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""How the paths of files begin that are not a model's."""


def _failing_module(module: nn.Module, error: BaseException) -> str | None:
    """Return the FQN of the innermost submodule whose forward raised ``error``; None if no forward did."""
    names = module_names(module)
    found, frame = None, error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        owner = frame.tb_frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
        if isinstance(owner, nn.Module) and owner in names and code.co_name == "forward":
            found = names[owner]
        frame = frame.tb_next
    return found


def check_trainable(graph: OpGraph) -> None:
    """Check that a training step of ``graph`` has a backward, without gradients that are sparse tensors.

    Raises:
        ModelError: it has none, or a lookup gives sparse gradients.
    """
    if not any(output.is_loss or output.is_result for output in graph.outputs):
        raise ModelError(
            "nothing that the forward returns needs a gradient, so that there is no backward to train with.",
            what_to_do='Return the loss, or results that depend on trained parameters; or plan phase="prefill".',
        )
    sparse = {graph.calls[op.call].fqn: None for op in graph.ops if _gives_sparse_gradients(op)}
    if sparse:
        raise ModelError(
            f"{', '.join(fqn or 'the root module' for fqn in sparse)}: the gradients are sparse tensors (sparse=True), "
            "which cannot be sharded.",
            what_to_do="Set sparse=False.",
            module=next(iter(sparse)),
        )


def _gives_sparse_gradients(op: Op) -> bool:
    if not isinstance(op.target, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in op.target._schema.arguments]
    return bool({**dict(zip(names, op.args, strict=False)), **op.kwargs}.get("sparse", False))
