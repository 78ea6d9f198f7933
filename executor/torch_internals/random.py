"""Internals of torch for random ops: the handlers through which DTensor runs an op, and the default generators.

Checked with torch 2.13: ``DTensor._op_dispatcher._custom_op_handlers`` is read at each call, before DTensor's own
dispatch. DTensor's own tracker of random numbers does nothing on CPUs, and covers only some of the random ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

Region = Callable[[Sequence[Placement], torch.Generator | None], AbstractContextManager[None]]
"""(layout of a tensor, the caller's generator) -> a context in which a random op runs on this rank's shard."""

_regions: list[Region] = []
"""Regions of the runs that are active, innermost last; global state, as DTensor's handlers are."""


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return the default generators of the CPU, and of ``device`` if it is none."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        generators.append(torch.cuda.default_generators[device.index])
    return generators


@functools.cache
def random_ops() -> tuple[torch._ops.OpOverload, ...]:
    """Return the random ops that DTensor has a sharding rule for, without the backward of attention."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    with_rule = {*propagator.op_strategy_funcs, *propagator.op_single_dim_strategy_funcs}
    tagged = (op for op in with_rule if torch.Tag.nondeterministic_seeded in op.tags)
    return tuple(sorted((op for op in tagged if "backward" not in op.name()), key=str))


@contextmanager
def random_ops_run_in(region: Region) -> Iterator[None]:
    """Return a context in which DTensor runs each random op on local tensors inside ``region``."""
    handlers: dict[torch._ops.OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    before = {op: handlers.get(op) for op in random_ops()}
    _regions.append(region)
    try:
        handlers.update(dict.fromkeys(before, _run_random_op))
        yield
    finally:
        _regions.pop()
        for op, handler in before.items():
            if handler is None:
                del handlers[op]
            else:
                handlers[op] = handler


def random_region(
    layout: Sequence[Placement], generator: torch.Generator | None = None
) -> AbstractContextManager[None]:
    """Return the context in which a random op runs on this rank's shard of a tensor in ``layout``."""
    return _regions[-1](layout, generator) if _regions else nullcontext()


def _run_random_op(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` on local tensors as DTensor does, but inside the active region."""
    dispatcher: Any = DTensor._op_dispatcher
    call = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(call)
    sharding = call.output_sharding
    is_in_place = op._schema.is_mutable and isinstance(args[0], DTensor) and op._schema.arguments[0].alias_info
    if sharding.needs_redistribute:
        if is_in_place:
            raise NotImplementedError(f"{op} cannot run in place on a tensor in the layout {args[0].placements}.")
        dispatcher.redistribute_local_args(
            call, sharding.redistribute_schema, sharding.use_val_from_redistribute_schema
        )
    generator = call.local_kwargs.pop("generator", None)
    specs = sharding.output_spec
    spec = specs if not isinstance(specs, (tuple, list)) else specs[0]
    locals_on_meta = any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in call.local_args)
    with nullcontext() if locals_on_meta else random_region(spec.placements, generator):
        results = op(*call.local_args, **call.local_kwargs)
    return args[0] if is_in_place else dispatcher.wrap(results, specs)
