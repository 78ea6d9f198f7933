"""A sharded module runs eagerly under ``torch.compile``: dynamo does not take its hooks and DTensor ops together.

Tried with torch 2.13: with the backend "eager" a block with tensor parallelism gets gradients of wrong shapes; AOT
autograd, which inductor needs, fails ("as_strided not supported with DTensor"). What is compiled is part of the plan:
the technique ``fused-ops``.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from executor.torch_internals.compile import call_eagerly, compiled_parts
from planner.errors import PlanMismatchError

_REASON = "a module sharded by shardplan runs eagerly; its plan compiles what the technique fused-ops names"
_WHAT_TO_DO = "Plan with techniques='fused-ops' to compile norms, activations, rotary embeddings and the loss."


def keep_eager(module: nn.Module) -> None:
    """Make the root ``module`` run eagerly under ``torch.compile``, with a warning, and refuse compiled submodules.

    With ``fullgraph=True`` torch raises an error with the reason.
    """
    call_eagerly(module, _REASON, _warn)
    module.register_forward_pre_hook(_refuse_compiled_submodules, prepend=True)


def _warn() -> None:
    warnings.warn(
        f"torch.compile does not compile a module that is sharded: it runs eagerly. {_WHAT_TO_DO}", stacklevel=4
    )


def _refuse_compiled_submodules(module: nn.Module, args: tuple[Any, ...]) -> None:
    compiled = compiled_parts(module)
    if compiled:
        raise PlanMismatchError(
            f"{len(compiled)} parts of a sharded module are compiled: {', '.join(compiled[:4])}. torch.compile does "
            "not take their hooks and DTensors together.",
            subject="module",
            expected="parts that run eagerly",
            found="compiled parts",
            what_to_do=f"Leave out .compile() of blocks. {_WHAT_TO_DO}",
        )
