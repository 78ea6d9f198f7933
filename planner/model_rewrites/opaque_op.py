"""The op that stands for the call of an opaque module, in whose forward the planner does not look.

Shapes or branches of such a forward depend on values. The op has the shapes of its results and what it costs among its
arguments, as measured by `planner.graph.opaque_calls`. `executor.ops.opaque` runs the module's own forward, on whole
tensors or on each rank's samples.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.model_rewrites.image_sizes.values import is_numbers
from planner.model_rewrites.tree_paths import tensors_by_path, tensors_in

OP_NAME = "shardplan.opaque.default"

SAMPLES = "0"
"""Of a tensor that is split by samples, along its first dim."""
WHOLE = "-"
MEAN, SUM = "mean", "sum"
"""Of a number that is the mean, or the sum, of those of all samples."""


class OpaqueCosts(NamedTuple):
    """What one call costs on whole tensors.

    Attributes:
        flops, backward_flops: FLOPs of each pass.
        nbytes, backward_nbytes: bytes that each pass reads and writes, those of matrix multiplications left out.
        saved_nbytes: bytes that autograd saves of tensors that exist only inside the module.
        rise_nbytes: peak of live bytes in the backward, beyond those at its start and the gradients that it returns.
        ops, backward_ops: ops that each pass dispatches.
    """

    flops: int
    backward_flops: int
    nbytes: int
    backward_nbytes: int
    saved_nbytes: int
    rise_nbytes: int
    ops: int
    backward_ops: int

    @property
    def moved_nbytes(self) -> int:
        """Bytes that both passes read and write."""
        return self.nbytes + self.backward_nbytes


class SampleSplit(NamedTuple):
    """How a call runs on each rank's samples.

    Attributes:
        inputs: path of a tensor among the arguments -> `SAMPLES` or `WHOLE`.
        outputs: for each tensor among the results, `SAMPLES`, `MEAN` or `SUM`.
    """

    inputs: Mapping[str, str]
    outputs: tuple[str, ...]

    @property
    def text(self) -> str:
        """The split as an argument of the op, such as ``0=0 mask=-;0 mean``."""
        return f"{' '.join(f'{path}={place}' for path, place in self.inputs.items())};{' '.join(self.outputs)}"

    @classmethod
    def parse(cls, text: str) -> SampleSplit | None:
        """Return the split of an op; None: it runs on whole tensors only."""
        if not text:
            return None
        inputs, _, outputs = text.rpartition(";")
        pairs = [each.rpartition("=") for each in inputs.split()]
        return cls({path: place for path, _, place in pairs}, tuple(outputs.split()))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueCall:
    """One call of an opaque module, as it is traced.

    Attributes:
        output: the result, with meta tensors.
        per_sample: costs that grow with the batch, at the traced batch.
        fixed: costs that do not.
        saved_arguments: paths of the arguments that autograd saves. It saves all parameters: see `executor.ops.opaque`.
        split: how it runs on each rank's samples; None: it runs on whole tensors only.
        rows: path of an argument that is split by samples -> its rows per sample.
    """

    output: Any
    per_sample: OpaqueCosts
    fixed: OpaqueCosts
    saved_arguments: frozenset[str]
    split: SampleSplit | None
    rows: Mapping[str, int]


@torch.library.custom_op("shardplan::opaque", mutates_args=())
def opaque_op(
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[int],
    dims: Sequence[int],
    dtypes: str,
    per_sample: Sequence[int],
    fixed: Sequence[int],
    saved: Sequence[int],
    split: str,
    cause: str,
    rows: Sequence[int],
) -> list[torch.Tensor]:
    """Return the tensors among the results of a module's call.

    Args:
        tensors: the tensors among its arguments, then its parameters.
        sizes: sizes of all dims of all results, one after the other.
        dims: number of dims of each result.
        dtypes: names of the results' dtypes, with blanks between them.
        per_sample, fixed: `OpaqueCosts`, in two parts.
        saved: positions of the tensors that autograd saves.
        split: `SampleSplit.text`; "" for whole tensors only.
        cause: why the module is one op, in a few words; "" if it was named.
        rows: rows per sample of each argument that ``split`` names, 1 of those that have no samples; (): 1 of all.
    """
    raise NotImplementedError("this op is only traced; shard_module runs the module's own forward")


class OpaqueArguments(NamedTuple):
    """The arguments of one call of the op, in its order."""

    tensors: Sequence[Any]
    sizes: Sequence[int]
    dims: Sequence[int]
    dtypes: str
    per_sample: Sequence[int]
    fixed: Sequence[int]
    saved: Sequence[int]
    split: str
    cause: str = ""
    rows: Sequence[int] = ()

    @property
    def costs(self) -> OpaqueCosts:
        """What the call costs."""
        return OpaqueCosts(*(a + b for a, b in zip(self.per_sample, self.fixed, strict=True)))

    def on_rank(self, split: int) -> OpaqueCosts:
        """Return what the call costs on one rank, where the samples are split into ``split`` parts."""
        return OpaqueCosts(*(round(a / split + b) for a, b in zip(self.per_sample, self.fixed, strict=True)))

    @property
    def sample_split(self) -> SampleSplit | None:
        """How the call runs on each rank's samples; None: it runs on whole tensors only."""
        return SampleSplit.parse(self.split)

    @property
    def result_dtypes(self) -> list[torch.dtype]:
        """The dtypes of the results."""
        return [getattr(torch, name) for name in self.dtypes.split()]

    def check(self) -> None:
        """Check the arguments, which may come from outside.

        Raises:
            ValueError: they contradict each other.
        """
        names, split = self.dtypes.split(), self.sample_split
        if not all(isinstance(getattr(torch, name, None), torch.dtype) for name in names):
            raise ValueError(f"unknown dtypes in {self.dtypes[:100]!r}")
        if sum(self.dims) != len(self.sizes) or len(names) != len(self.dims) or min(*self.sizes, *self.dims, 0) < 0:
            raise ValueError("sizes, dims and dtypes do not match")
        costs = *self.per_sample, *self.fixed
        if not len(self.per_sample) == len(self.fixed) == len(OpaqueCosts._fields) or min(costs) < 0:
            raise ValueError(f"a call has {len(OpaqueCosts._fields)} costs, of at least 0")
        if not all(0 <= index < len(self.tensors) for index in self.saved):
            raise ValueError("what autograd saves is among the tensors")
        if split is not None and not (
            len(split.inputs) <= len(self.tensors)
            and len(split.outputs) == len(self.dims)
            and set(split.inputs.values()) <= {SAMPLES, WHOLE}
            and set(split.outputs) <= {SAMPLES, MEAN, SUM}
        ):
            counts = f"{len(self.tensors)} tensors and {len(self.dims)} results"
            raise ValueError(f"{self.split[:100]!r} is no split of {counts}")
        named = 0 if split is None else len(split.inputs)
        if len(self.rows) not in (0, named) or min(self.rows, default=1) < 1:
            raise ValueError("rows per sample are positive, one for each argument that the split names")


@opaque_op.register_fake
def _(tensors: Sequence[torch.Tensor], *others: Any) -> list[torch.Tensor]:
    call = OpaqueArguments(tensors, *others)
    call.check()
    remaining = iter(call.sizes)
    return [
        tensors[0].new_empty([next(remaining) for _ in range(count)], dtype=dtype)
        for count, dtype in zip(call.dims, call.result_dtypes, strict=True)
    ]


@contextmanager
def opaque_as_one_op(
    calls: Mapping[nn.Module, Sequence[OpaqueCall]], causes: Mapping[nn.Module, str]
) -> Iterator[None]:
    """Within this context, each of the modules calls the op; its calls are taken in turns."""
    try:
        for module, each in calls.items():
            module.__dict__["forward"] = _forward(module, each, causes[module])
        yield
    finally:
        for module in calls:
            module.__dict__.pop("forward", None)


def _with_gradient_as(recorded: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return ``result``, which needs no gradient if the module's own result, ``recorded``, needs none."""
    is_number = result.is_floating_point() or result.is_complex()
    return result.detach() if is_number and not recorded.requires_grad else result


def _forward(module: nn.Module, calls: Sequence[OpaqueCall], cause: str) -> Callable[..., Any]:
    """Return the forward of an opaque module in a trace: a function, as torch.export asks for in the root."""
    in_turns = itertools.cycle(calls)

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = next(in_turns)
        leaves, structure = pytree.tree_flatten(call.output)
        results = tensors_in(leaves)
        by_path, parameters = tensors_by_path(args, kwargs), list(module.parameters())
        arguments = {path: tensor for path, tensor in by_path.items() if not is_numbers(tensor)}
        saved = [index for index, path in enumerate(arguments) if path in call.saved_arguments]
        split = None
        if call.split is not None:
            # A mask that only the trace makes has its samples first.
            places = {path: call.split.inputs.get(path, SAMPLES) for path in arguments}
            split = call.split._replace(inputs=places)
        tensors = torch.ops.shardplan.opaque(
            [*arguments.values(), *parameters],
            [size for result in results for size in result.shape],
            [result.dim() for result in results],
            " ".join(str(result.dtype).removeprefix("torch.") for result in results),
            list(call.per_sample),
            list(call.fixed),
            [*saved, *range(len(arguments), len(arguments) + len(parameters))],
            "" if split is None else split.text,
            cause,
            [] if split is None else [call.rows.get(path, 1) for path in arguments],
        )
        given = iter(tensors)
        # The op's results need gradients if its arguments do; those of the module may not.
        filled = [_with_gradient_as(leaf, next(given)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(filled, structure)

    forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    return forward
