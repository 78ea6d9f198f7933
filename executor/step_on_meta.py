"""``StepOnMeta``: one step of a plan on fake processes, with a copy of the module on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cost_model.layouts.quicker_dtensor import quicker_dtensor
from executor.call_trace import CallTrace
from executor.collective_counter import CollectiveCounter, Counts, axes_by_group
from executor.redistribute import conjugate
from executor.runtime.run_context import PhaseTracker
from executor.shard import ForwardObserver, shard_on_meta
from executor.torch_internals.dtensor import fake_process_group, local_of, make_dtensor
from planner.errors import PlanError
from planner.model_rewrites.assumed_values import AssumedValues
from planner.model_rewrites.cache_argument import (
    SHORT_PROMPT,
    cache_argument,
    is_encoder_decoder,
    recurrent_layer_numbers,
)
from planner.model_rewrites.image_sizes.tables import inputs_on_meta
from planner.model_rewrites.random_branches import likelier_branches
from planner.model_rewrites.tree_paths import computed_tensors, look_into_dataclasses, tensors_in
from planner.plan.sharding_plan import JobPhase, ShardingPlan


class Dispatched(NamedTuple):
    """Numbers of ops that have run: those that communicate, and those that draw random numbers."""

    collectives: int
    random: int


class StepOnMeta:
    """Runs one step of a plan on meta tensors, and counts its collectives."""

    def __init__(self, device_mesh: DeviceMesh, plan: ShardingPlan) -> None:
        self._device_mesh, self._plan = device_mesh, plan
        self._phases = PhaseTracker()
        self._counter = self._new_counter()
        self._trace = CallTrace(lambda: self._counter.last_op)

    def _new_counter(self) -> CollectiveCounter:
        return CollectiveCounter(axes_by_group(self._device_mesh), lambda: self._phases.phase)

    @property
    def dispatched(self) -> Dispatched:
        """The ops of some kinds that have run so far in the current micro-batch."""
        return Dispatched(self._counter.counts.total(), self._counter.random_ops)

    def sharded(self, module: nn.Module, plan: ShardingPlan, observer: ForwardObserver | None = None) -> nn.Module:
        """Return a copy of ``module`` on meta, sharded as ``plan`` says."""
        with self._trace.reported("sharding the module"):
            copied = meta_copy(module, plan.job.phase)
            model = shard_on_meta(copied, self._device_mesh, plan, self._phases, observer)
            self._trace.attach(model)
        return model

    @contextmanager
    def _values(self, batch: Any) -> Iterator[None]:
        """Return a context with the values that the planner assumed, for a plan with opaque modules."""
        if not self._plan.opaque_modules:
            yield
            return
        with AssumedValues() as values:
            values.know(batch)
            yield

    def decoding_batch(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Return the arguments of a decoding step, from those of one token."""
        self._counter = self._new_counter()
        with self._trace.reported("filling the cache"), self._counter, self._values(batch), likelier_branches():
            return _decoding_batch(model, batch, self._plan.job.seq or 0)

    def run_micro_batch(self, model: nn.Module, batch: Any, *, forward_only: bool = False) -> Counts:
        """Return the collectives of one micro-batch: of its forward and, in training, its backward."""
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
        self._counter = self._new_counter()
        with self._counter, self._values(batch):
            with (
                self._trace.reported("the forward"),
                torch.set_grad_enabled(self._plan.job.training),
                likelier_branches(),
            ):
                output = model(*args, **kwargs)
            if self._plan.job.training and not forward_only:
                with self._trace.reported("the backward"):
                    differentiated = _differentiated(output)
                    torch.autograd.backward(differentiated, list(map(_ones_like, differentiated)))
        return self._counter.counts


def _decoding_batch(model: nn.Module, batch: Any, tokens: int) -> dict[str, Any]:
    """Return the keyword arguments of a decoding step, including a cache of ``tokens`` tokens of each sequence.

    An encoder-decoder gets what its encoder made of ``batch``, in place of the encoder's inputs.

    Args:
        model: a sharded model that takes a key-value cache as transformers' models do.
        batch: keyword arguments; ``input_ids``, or the decoder's, holds one token of each of this rank's sequences.
        tokens: number of tokens in the cache, fewer with recurrent layers; with 0 the cache argument is None.
    """
    encodes = is_encoder_decoder(model)
    name = "decoder_input_ids" if encodes else "input_ids"
    if not isinstance(batch, Mapping) or name not in batch:
        raise PlanError(f"A decoding step needs {name}, by keyword.", what_to_do=f'Give {{"{name}": ...}}.')
    cache = cache_argument(model)
    if cache is None:
        raise PlanError(f"{type(model).__name__} takes no cache.", what_to_do="Verify the plan of its prefill.")
    arguments = {**batch, "use_cache": True}
    if recurrent_layer_numbers(model):
        tokens = min(tokens, SHORT_PROMPT)  # a scan over a long one runs thousands of ops
    with torch.no_grad():
        if encodes:
            output = model(**{**arguments, name: batch[name].expand(-1, max(tokens, 1))})
            arguments.pop(str(model.main_input_name))
            return {**arguments, "encoder_outputs": (output.encoder_last_hidden_state,), cache: output[cache]}
        prompt = {**arguments, name: batch[name].expand(-1, tokens)}
        return {**arguments, cache: getattr(model(**prompt), cache) if tokens else None}


def _ones_like(loss: torch.Tensor) -> torch.Tensor:
    if not isinstance(loss, DTensor):
        return torch.ones_like(loss)
    ones = torch.ones_like(local_of(loss))
    return make_dtensor(ones, loss.device_mesh, conjugate(tuple(loss.placements)), loss.shape, loss.stride())


def _differentiated(output: Any) -> list[torch.Tensor]:
    """Return what a step differentiates: the loss in a module's output, else all its numbers, else all its tensors."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return [loss]
    results = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    results = list({id(result): result for result in results}.values())
    return [result for result in results if result.dim() == 0] or results


@contextmanager
def fake_processes(size: int) -> Iterator[None]:
    """Return a context with a fake process group of ``size`` ranks: the current group, or a new one if there is none.

    DTensor makes its choices in less time there (``quicker_dtensor``).

    Raises:
        PlanError: the current process group has another size, or is not fake.
    """
    with ExitStack() as stack:
        if not dist.is_initialized():
            stack.enter_context(fake_process_group(size))
        elif dist.get_world_size() != size or dist.get_backend() != "fake":
            raise PlanError(
                f"verify needs {size} fake processes, but a process group of {dist.get_world_size()} "
                f"({dist.get_backend()}) is initialised.",
                what_to_do="Call it before init_process_group, or in another process.",
            )
        stack.enter_context(quicker_dtensor())
        yield


def meta_copy(module: nn.Module, phase: JobPhase) -> nn.Module:
    """Return a copy of ``module`` on meta, in eval mode unless ``phase`` is training; tied parameters stay tied."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        data = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for tensor in (*module.buffers(), *computed_tensors(module)):
        memo[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    copied: nn.Module = copy.deepcopy(module, memo)
    return copied if phase == "training" else copied.eval()


def meta_inputs(example_inputs: Any) -> Any:
    """Return ``example_inputs`` with tensors on meta in place of all tensors."""
    look_into_dataclasses(example_inputs)
    return inputs_on_meta(example_inputs)
