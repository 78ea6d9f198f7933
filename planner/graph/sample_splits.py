"""`SampleSplits`: whether a module treats its samples independently, found by running it on samples and halves of them.

The trial runs on the CPU, with random parameters of the module's shapes. Where that takes too long, the dims that are
no features are short.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.model_rewrites.image_sizes.packed_attention import packed_attention
from planner.model_rewrites.image_sizes.tables import size_tables
from planner.model_rewrites.opaque_op import MEAN, SAMPLES, SUM, WHOLE, SampleSplit
from planner.model_rewrites.tree_paths import tensors_by_path, tensors_in

_MOST_FLOPS = 2e10
"""FLOPs of a trial: about a second."""
_SHORT = 8
_MOST_WEIGHTS = 1 << 26
"""Parameters of a module that is tried with three sets of samples; a larger one is tried with one."""
_MOST_RANDOM = 1 << 20
"""Random elements of a parameter; a larger one repeats its first column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnableCall:
    """One call of a module.

    Attributes:
        module: on the meta device.
        args, kwargs: its arguments, with meta tensors.
        sizes: shapes of each of the tensors with fewer and with more samples.
        flops: FLOPs with fewer samples.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    flops: float


class SampleSplits:
    """How the calls of modules run on each rank's samples; equal modules are tried once."""

    def __init__(self, samples: int) -> None:
        """Take the number of samples in the calls."""
        self._samples = samples
        self._found: dict[Hashable, SampleSplit | None] = {}

    def of(self, call: RunnableCall) -> SampleSplit | None:
        """Return how ``call`` runs on each rank's samples; None: on whole tensors only."""
        state = [*call.module.named_parameters(), *call.module.named_buffers()]
        key = (
            *(str(call.module), type(call.module), call.sizes, repr(call.args), repr(call.kwargs)),
            tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in state),
        )
        if key not in self._found:
            self._found[key] = _sample_split(call, self._samples)
        return self._found[key]


def _sample_split(call: RunnableCall, samples: int) -> SampleSplit | None:
    inputs = []
    for few, more in call.sizes:
        grown = [dim for dim, (a, b) in enumerate(zip(few, more, strict=True)) if a != b]
        if grown not in ([], [0]) or (grown and few[0] % samples):
            return None
        inputs.append(SAMPLES if grown else WHOLE)
    if SAMPLES not in inputs:
        return None
    if trials := _with_images(call, samples):
        found = (_split_of(call, shapes, inputs, tables) for shapes, tables in trials)
        return next((split for split in found if split is not None), None)
    # Halves of two samples.
    places = zip(call.sizes, inputs, strict=True)
    shapes = [(2 * few[0] // samples, *few[1:]) if place == SAMPLES else few for (few, _), place in places]
    whole_flops = 4 * call.flops / samples
    if whole_flops > _MOST_FLOPS:
        longest = max(math.prod(shape[1:-1]) for shape in shapes)
        tensors = tensors_in((call.args, call.kwargs))
        shapes = [_short(shape, tensor) for shape, tensor in zip(shapes, tensors, strict=True)]
        if whole_flops / longest * _SHORT > _MOST_FLOPS:
            return None
    return _split_of(call, shapes, inputs, {})


_SIDES = (4, 16)
"""Longest sides of images in a trial, in patches; where a module refuses them, the true ones follow."""
_MOST_FRAMES = 2
"""Most frames of a video in a trial."""
_MOST_FLOPS_OF_IMAGES = 3e11
"""FLOPs of a trial with images: some seconds. Encoders have up to a billion parameters, which no short dim avoids."""


def _with_images(call: RunnableCall, samples: int) -> list[tuple[list[tuple[int, ...]], dict[int, torch.Tensor]]]:
    """Return the trials of a module that reads the sizes of images: shapes of halves, and position -> whole table.

    The images are smaller in the first ones. None where the module reads no sizes, or takes too long.
    """
    tensors = tensors_in((call.args, call.kwargs))
    tables = size_tables(tensors)
    trials = []
    for side in (*_SIDES, max((int(table.values.max()) for table in tables), default=0)):
        values, rows, flops = {}, {}, 0.0
        for tensor, known, packed in tables:
            sizes = known[: 4 * len(known) // samples].clone()
            sizes[:, -2:].clamp_(max=side)
            sizes[:, :-2].clamp_(max=_MOST_FRAMES)
            pieces = int(sizes.prod(-1).sum())
            values[next(i for i, other in enumerate(tensors) if other is tensor)] = sizes
            rows[id(packed)] = pieces // 2
            flops = max(flops, 2 * call.flops * pieces / len(packed))
        if tables and flops <= _MOST_FLOPS_OF_IMAGES:
            shapes = [(rows.get(id(tensor), 2 * len(tensor) // samples), *tensor.shape[1:]) for tensor in tensors]
            trials.append((shapes, values))
    return trials


def _split_of(
    call: RunnableCall, shapes: list[tuple[int, ...]], inputs: list[str], tables: Mapping[int, torch.Tensor]
) -> SampleSplit | None:
    """Return how a call runs on samples, from a trial with tensors of these shapes, or with ``tables``."""
    with torch.random.fork_rng(devices=()), torch.enable_grad(), torch.device("cpu"):
        try:
            outputs = _tried(call, shapes, inputs, tables)
        except Exception:  # noqa: BLE001  whatever the module raises on such tensors
            return None
    paths = tensors_by_path(call.args, call.kwargs)
    return None if outputs is None else SampleSplit(dict(zip(paths, inputs, strict=True)), outputs)


def _short(shape: tuple[int, ...], tensor: torch.Tensor) -> tuple[int, ...]:
    """Return ``shape`` with short dims, but for the first, and the last one of numbers, which are features."""
    features = len(shape) - 1 if tensor.is_floating_point() else len(shape)
    return tuple(size if dim in (0, features) else min(size, _SHORT) for dim, size in enumerate(shape))


def _tried(
    call: RunnableCall, shapes: list[tuple[int, ...]], inputs: list[str], tables: Mapping[int, torch.Tensor]
) -> tuple[str, ...] | None:
    """Return how the outputs come of whole samples and of halves; errors of the module propagate."""
    torch.manual_seed(0)
    module, chances = _on_cpu(call.module), _Chances()
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))

    def outputs(tensors: list[torch.Tensor]) -> list[str | None]:
        return [_joined(*parts) for parts in zip(*(run(tensors, half) for half in (None, 0, 1)), strict=True)]

    def run(tensors: list[torch.Tensor], half: int | None) -> list[torch.Tensor]:
        given = iter([
            (tensor if place == WHOLE or half is None else tensor.chunk(2)[half]).clone()
            for tensor, place in zip(tensors, inputs, strict=True)
        ])  # fmt: skip
        filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, structure)
        with chances.of(half), packed_attention(module) if tables else nullcontext():
            return [result.detach() for result in tensors_in(module(*args, **kwargs))]

    dtypes = [tensor.dtype for tensor in tensors_in((call.args, call.kwargs))]
    buffers = [buffer.clone() for buffer in module.buffers()]
    places: list[str | None] = []
    is_large = sum(parameter.numel() for parameter in module.parameters()) > _MOST_WEIGHTS
    for shift in (2.0,) if is_large else (0.0, 2.0, -2.0):
        tensors = [
            _unlike_halves(_random((2 * shape[0], *shape[1:]), dtype), shift)
            if place == SAMPLES
            else _random(shape, dtype)
            for shape, place, dtype in zip(shapes, inputs, dtypes, strict=True)
        ]
        tensors = [tables.get(index, tensor) for index, tensor in enumerate(tensors)]
        alike = outputs(tensors)
        if None in alike or (places and alike != places):
            return None
        places = alike
    if not places or not all(map(_equal, buffers, module.buffers())):
        return None  # what it writes to its buffers comes of all samples
    if MEAN in places:
        for index, (tensor, place) in enumerate(zip(tensors, inputs, strict=True)):
            if place != SAMPLES or tensor.dtype != torch.int64:
                continue
            for label in _labels_of(call.module):
                partly = [*tensors[:index], _partly(tensor, label), *tensors[index + 1 :]]
                if not _runs_alike(functools.partial(outputs, partly), places):
                    return None
    return tuple(place for place in places if place)


def _unlike_halves(tensor: torch.Tensor, shift: float) -> torch.Tensor:
    """Return numbers whose statistics differ between the halves, as those of samples do."""
    if tensor.is_floating_point():
        half = len(tensor) // 2
        tensor[:half] += shift
        tensor[half:] -= shift
    return tensor


def _labels_of(module: nn.Module) -> list[int]:
    """Return the labels that a mean over the samples may leave out, as padding is left out.

    These are torch's -100, and the integers in the forwards in ``module`` and in what its attributes and its config say
    of padding and of what is ignored.
    """
    labels = {-100}
    for part in module.modules():
        forward = inspect.unwrap(type(part).forward)
        if inspect.isfunction(forward):
            code = forward.__code__
            named = (forward.__globals__.get(name) for name in code.co_names)
            labels.update(value for value in (*code.co_consts, *named) if type(value) is int)
        for attributes in (vars(part), getattr(getattr(part, "config", None), "__dict__", {})):
            labels.update(v for name, v in attributes.items() if type(v) is int and re.search("pad|ignore", name))
    return sorted(labels)


def _partly(tensor: torch.Tensor, label: int) -> torch.Tensor:
    """Return labels of which the first half has more that are ``label`` than the second."""
    changed = tensor.clone()
    changed[: len(tensor) // 4 or 1] = label
    return changed


def _runs_alike(outputs: Callable[[], list[str | None]], places: list[str | None]) -> bool:
    try:
        return outputs() == places
    except Exception:  # noqa: BLE001  no labels: the module has no such index
        return True


def _joined(whole: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> str | None:
    """Return how the results of the halves make that of the whole; None: they do not."""
    if whole.dim() and _equal(whole, torch.cat([first, second])):
        return SAMPLES
    if not whole.dim() and whole.is_floating_point():
        if _equal(whole, (first + second) / 2):
            return MEAN
        if _equal(whole, first + second):
            return SUM
    return None


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    return torch.randint(0, 2, shape).to(dtype)


def _on_cpu(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` with random parameters and buffers on the CPU."""
    copied = copy.deepcopy(module)
    copied.__dict__.pop("forward", None)
    for part in copied.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(_weights(name, parameter), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _random(tuple(buffer.shape), buffer.dtype).abs()
    return copied


def _weights(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return random weights of the size of trained ones: those of norms about 1, biases about 0.

    Biases of one sign would outweigh the samples, on which a branch may depend.
    """
    shape = tuple(parameter.shape)
    if not parameter.is_floating_point() or not shape:
        return _random(shape, parameter.dtype)
    drawn = (*shape[:-1], 1) if parameter.numel() > _MOST_RANDOM else shape
    scale = 1.0 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.1
    offset = 0.0 if len(shape) > 1 or re.search("bias|beta", name) else 1.0
    return (offset + scale * torch.randn(drawn)).expand(shape)


class _Chances(TorchDispatchMode):
    """Random numbers of which each sample gets the same, whether it runs with all samples or with one half of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._half: int | None = None
        self._calls = 0
        self._shapes: list[list[torch.Size]] = []
        """Of each call of a random op on all samples, the shapes of its results."""

    def of(self, half: int | None) -> _Chances:
        """Return the mode for a run of one half of the samples; None: of all of them."""
        self._half, self._calls = half, 0
        if half is None:
            self._shapes = []
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _drops_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        torch.manual_seed(self._calls)
        self._calls += 1
        if self._half is None:
            result = func(*args, **kwargs)
            self._shapes.append([tensor.shape for tensor in tensors_in(result)])
            return result
        names = [argument.name for argument in func._schema.arguments]
        twice = [_twice(name, value) for name, value in zip(names, args, strict=False)]
        whole = func(*twice, **{name: _twice(name, value) for name, value in kwargs.items()})
        if [tensor.shape for tensor in tensors_in(whole)] != self._shapes[self._calls - 1]:
            raise ValueError(f"all samples share the random numbers of {func}")
        mine = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.chunk(2)[self._half].clone(), whole)
        return args[0].copy_(mine) if func._schema.is_mutable else mine


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether ``func`` is an attention without dropout, which draws no numbers."""
    arguments = {each.name: each.default_value for each in func._schema.arguments}
    given = dict(zip(arguments, args, strict=False)) | dict(kwargs)
    return bool({"dropout_p": 1, **arguments, **given}["dropout_p"] == 0)


def _twice(name: str, value: Any) -> Any:
    """Return an argument of an op for twice as many samples: a tensor that has them, or a size."""
    if isinstance(value, torch.Tensor) and value.dim():
        return torch.cat([value, value])
    return [2 * value[0], *value[1:]] if name == "size" and value else value
