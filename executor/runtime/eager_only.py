"""A sharded module runs eagerly under ``torch.compile``: dynamo does not take its hooks and DTensor ops together.

Tried with torch 2.13: with the backend "eager" a block with tensor parallelism gets gradients of wrong shapes; AOT
autograd, which inductor needs, fails ("as_strided not supported with DTensor"). What is compiled is part of the plan: the
technique ``fused-ops``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from executor.torch_internals import run_eagerly
from planner.errors import PlanMismatchError

_REASON = "a module sharded by shardplan runs eagerly; its plan compiles what the technique fused-ops names"


def keep_eager(module: nn.Module) -> None:
    """Make the root ``module`` run eagerly under ``torch.compile``, with a warning, and refuse compiled submodules.

    With ``fullgraph=True`` torch raises an error with the reason.
    """
    call: Callable[..., Any] = run_eagerly(module._call_impl, _REASON)

    def call_eagerly(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            warnings.warn(
                "torch.compile does not compile a module that is sharded: it runs eagerly. Plan with "
                "techniques='fused-ops' to compile norms, activations, rotary embeddings and the loss.",
                stacklevel=2,
            )
        return call(*args, **kwargs)

    module._call_impl = call_eagerly  # type: ignore[method-assign]
    module.register_forward_pre_hook(_refuse_compiled_submodules, prepend=True)


def _refuse_compiled_submodules(module: nn.Module, args: tuple[Any, ...]) -> None:
    compiled = [name for name, part in module.named_modules() if name and part._compiled_call_impl is not None]
    if compiled:
        raise PlanMismatchError(
            f"{len(compiled)} parts of a sharded module are compiled: {', '.join(compiled[:4])}. torch.compile does not "
            "take their hooks and DTensors together.",
            subject="module",
            expected="parts that run eagerly",
            found="compiled parts",
            what_to_do="Leave out .compile() of blocks; plan with techniques='fused-ops' to compile norms, activations, "
            "rotary embeddings and the loss.",
        )
