"""`split_outputs`: along which dims an op treats its inputs piece by piece, found by running it on small tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from planner.model_rewrites.tree_paths import tensors_in

_PIECE = 2
"""Length of a piece along the dims that are split; there are two pieces."""
_SHORT = 16
"""Length of the other dims where an op runs on it: enough for most windows and groups of channels."""
_MOST_TRIALS = 32
"""The most ways in which plain inputs are split that are tried."""
_MOST_ELEMENTS = 20_000_000
"""The most elements of the inputs and results of a trial together: about 0.1 s, and 80 MB."""

Dims = tuple[int | None, ...]
"""For each tensor, the dim on which it is split; None: it stays whole."""


def split_outputs(
    run: Callable[[list[torch.Tensor]], Any],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    dims: Dims,
    name: str = "",
) -> Dims | None:
    """Return the dims on which the outputs of an op are split where its inputs are split on ``dims``.

    None: some output is not split, or the op is random, or fails on the trial's tensors. The first sizes on which the
    op runs decide: other dims of the tensors that are split are short, or else as long as they are.

    Args:
        run: the op, given its input tensors.
        shapes: shapes of the inputs.
        dtypes: dtypes of the inputs.
        dims: the dims on which the inputs are split.
        name: name of the op. With `masked_scatter` of packed rows, split by samples, each sample is taken to select as
            many elements as there are for it (`check_selected`).
    """
    for kept in (1, 2, None):
        small = [_trial_shape(shape, dim, kept) for shape, dim in zip(shapes, dims, strict=True)]
        with torch.random.fork_rng(devices=()), torch.no_grad():
            try:
                return _tried(run, small, dtypes, dims, name)
            except Exception:  # noqa: BLE001  whatever the op raises on tensors of such sizes
                continue
    return None


def with_plain_split(
    outputs_of: Callable[[Dims], Dims | None],
    shapes: Sequence[tuple[int, ...]],
    dims: Dims,
    plain: Collection[int],
    name: str = "",
) -> tuple[Dims, Dims] | None:
    """Return the dims on which inputs are split, and outputs, where those of tensors that are not ``plain`` are given.

    A plain tensor, which the forward makes itself, such as the first state of an LSTM, is whole on every rank. It stays
    so, or each rank takes its piece of dim 0 or 1, if that is as long as one of the split dims. Packed rows
    (`split_outputs`) are as long as several.

    Args:
        outputs_of: dims of the inputs -> those of the outputs, or None (`split_outputs`).
        shapes: shapes of the inputs.
        dims: dims of the inputs, None for plain ones.
        plain: positions of the plain inputs.
        name: name of the op.
    """
    sizes = {shape[dim] for shape, dim in zip(shapes, dims, strict=True) if dim is not None}

    def is_cut(position: int, dim: int, size: int) -> bool:
        packed = tuple(0 if each == position else given for each, given in enumerate(dims))
        rows = dim == 0 and _scatters_by_samples(name, packed, shapes)
        return size in sizes or (rows and any(size % samples == 0 for samples in sizes))

    options: list[tuple[int | None, ...]] = [
        (None, *(d for d, size in enumerate(shape[:2]) if is_cut(position, d, size))) if position in plain else (dim,)
        for position, (shape, dim) in enumerate(zip(shapes, dims, strict=True))
    ]
    for tried in itertools.islice(itertools.product(*options), _MOST_TRIALS):
        outputs = outputs_of(tried)
        if outputs is not None:
            return tried, outputs
    return None


def _tried(
    run: Callable[[list[torch.Tensor]], Any],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    dims: Dims,
    name: str,
) -> Dims | None:
    """Return what `split_outputs` does, from tensors of ``shapes``; errors of the op propagate."""
    on_meta = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True)]
    if sum(tensor.numel() for tensor in [*on_meta, *tensors_in(run(on_meta))]) > _MOST_ELEMENTS:
        return None
    generator = torch.Generator().manual_seed(0)
    tensors = [_sample(shape, dtype, generator) for shape, dtype in zip(shapes, dtypes, strict=True)]
    if _scatters_by_samples(name, dims, shapes):
        tensors[1] = _mask_of_source(*tensors)
    with torch.device("cpu"):
        whole = tensors_in(run(list(tensors)))
        first, second = (
            tensors_in(
                run([t if d is None else t.narrow(d, start, _PIECE) for t, d in zip(tensors, dims, strict=True)])
            )
            for start in (0, _PIECE)
        )
    if not len(whole) == len(first) == len(second):
        return None
    found = [_joined_on(*parts) for parts in zip(whole, first, second, strict=True)]
    # An output that stays whole could have a gradient that all ranks have whole, where others add theirs up.
    return None if None in found else tuple(found)


def scatters_packed_rows(name: str, shapes: Sequence[Sequence[int]]) -> bool:
    """Return whether an op puts packed rows in the places of tokens, as those of images: they have no dim of samples.

    Args:
        name: name of the op.
        shapes: of its tensors.
    """
    return name == "masked_scatter" and len(shapes) == 3 and len(shapes[2]) < len(shapes[0])


def _scatters_by_samples(name: str, dims: Dims, shapes: Sequence[Sequence[int]]) -> bool:
    return scatters_packed_rows(name, shapes) and dims == (0, 0, 0)


def _mask_of_source(target: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return a mask like ``mask`` that selects, of each sample, as many elements as ``source`` has for it."""
    each = source.numel() // len(target) * mask.numel() // target.numel()
    selected = torch.arange(mask[0].numel()) < each
    return selected.view(1, *mask.shape[1:]).expand(mask.shape)


def check_selected(name: str, dims: Dims, tensors: Sequence[torch.Tensor]) -> None:
    """Check that this rank's samples select as many elements as there are for them, if the op is a `masked_scatter`.

    On a GPU the check waits for nothing: the error comes later.

    Raises:
        RuntimeError: they select more or fewer, so that those for other ranks' samples would be needed.
    """
    if _scatters_by_samples(name, dims, [tensor.shape for tensor in tensors]) and not tensors[0].is_meta:
        target, mask, source = tensors
        selected = mask.sum() * (target.numel() // mask.numel())
        message = "masked_scatter: a sample has another number of image tokens than there are image features for it"
        torch._assert_async(selected == source.numel(), message)


def _trial_shape(shape: tuple[int, ...], dim: int | None, kept: int | None) -> tuple[int, ...]:
    """Return ``shape`` with two pieces along ``dim``, and dims from ``kept`` on no longer than `_SHORT`; None: any."""
    if dim is None:
        return shape
    short = [size if kept is None or index < kept else min(size, _SHORT) for index, size in enumerate(shape)]
    short[dim] = 2 * _PIECE
    return tuple(short)


def without_chance(name: str, leaf: Any) -> Any:
    """Return an argument of op ``name`` for a trial: 0 in place of a fraction, such as a dropout, of a random op."""
    return 0.0 if isinstance(leaf, float) and may_be_random(name) else leaf


def check_recurrent(name: str, args: Sequence[Any]) -> None:
    """Check the sizes of what a recurrent op of this name is given: torch's kernels read beyond what is too small.

    Raises:
        ValueError: features, states or their number differ from those of the input and the weights.
    """
    if name not in ("lstm", "gru", "rnn_tanh", "rnn_relu") or not isinstance(args[3], bool):
        return  # another op, or one on packed sequences
    input, states, weights, _, layers, _, _, bidirectional, batch_first = args
    samples = input.shape[0 if batch_first else 1]
    count = layers * (2 if bidirectional else 1)
    given = states if isinstance(states, (list, tuple)) else [states]
    if input.shape[2] != weights[0].shape[1] or any(state.shape[:2] != (count, samples) for state in given):
        raise ValueError(f"{name} got sizes that do not go together")


@functools.cache
def may_be_random(name: str) -> bool:
    """Return whether an op of this name draws random numbers."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, each).tags for each in packet.overloads())


def _joined_on(whole: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> int | None:
    """Return the dim on which the pieces make the whole; None: they do not."""
    for dim in range(whole.dim()):
        half = (*whole.shape[:dim], whole.shape[dim] // 2, *whole.shape[dim + 1 :])
        if first.shape == second.shape == half and _equal(whole, torch.cat([first, second], dim)):
            return dim
    return None


def _sample(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return a random tensor; integers are 0 or 1, which most indices may be.

    Products with a matrix keep about the size of what it is multiplied by. A recurrent layer with larger weights would
    make of a rounding error, over time, a difference.
    """
    if dtype.is_floating_point or dtype.is_complex:
        scale = shape[-1] ** -0.5 if len(shape) > 1 and shape[-1] else 1.0
        kind = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, dtype=kind) * scale
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
