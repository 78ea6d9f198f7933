"""Device meshes and tensor layouts as plain values, without process group or device."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.errors import LayoutError as LayoutError

Layout = tuple[Placement, ...]
"""One placement per mesh axis, outermost axis first."""

_PLACEMENT = re.compile(r"^(?:(R)|S\((-?[0-9]{1,9})\)|P\((sum|avg)\)|SS\(([0-9]{1,9}),([0-9]{1,9})\))$")
_SIZE = re.compile(r"[0-9]{1,300}")  # str.isdigit accepts "²", and int() rejects text of thousands of digits


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """The devices as an n-dimensional grid: axis names and sizes, outermost (slowest varying rank) first."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if not names:
            raise LayoutError("a mesh needs at least one axis, for example dp=8")
        for name, size in self.axes:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise LayoutError(f"axis name {name!r} is not an identifier; write for example dp=2,tp=8")
            if size < 1:
                raise LayoutError(f"axis {name} has size {size}; give 1 or more")
        if len(set(names)) != len(names):
            raise LayoutError(f"axis names repeat in {','.join(names)}; give each axis its own name")

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Return the mesh that ``text`` describes, for example ``dp=2,tp=8``, outermost axis first.

        Raises:
            LayoutError: ``text`` does not have this form.
        """
        axes = []
        for part in text.split(","):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals or _SIZE.fullmatch(size) is None:
                raise LayoutError(
                    f"cannot read mesh {text!r} at {part!r}; write axes as name=size, for example dp=2,tp=8"
                )
            axes.append((name, int(size)))
        return cls(axes=tuple(axes))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    def axis_size(self, name: str) -> int:
        """Return the number of ranks along the axis ``name``."""
        return dict(self.axes)[name]

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)


def format_placement(placement: Placement) -> str:
    """Return the text form of a placement: ``S(0)``, ``R``, ``P(sum)``, ``P(avg)`` or ``SS(0,8)``."""
    split_factor = getattr(placement, "split_factor", None)
    if split_factor is not None:
        return f"SS({placement.dim},{split_factor})"  # type: ignore[attr-defined]
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    if isinstance(placement, Replicate):
        return "R"
    raise LayoutError(f"placement {placement} has no text form; use Shard, Replicate or Partial")


def parse_placement(text: str, *, from_last: bool = False) -> Placement:
    """Return the placement whose text form, as ``format_placement`` writes it, is ``text``.

    Args:
        text: the form.
        from_last: whether ``S(-1)``, which counts from the last dim, is a form.

    Raises:
        LayoutError: ``text`` has none of the forms.
    """
    match = _PLACEMENT.match(text)
    if match is None or (text.startswith("S(-") and not from_last):
        raise LayoutError(f"cannot read placement {text!r}; write S(0), R, P(sum), P(avg) or SS(0,8)")
    if match[1]:
        return Replicate()
    if match[2]:
        return Shard(int(match[2]))
    if match[3]:
        return Partial(match[3])
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(int(match[4]), split_factor=int(match[5]))


def format_layout(layout: Layout) -> tuple[str, ...]:
    """Return the text form of each placement, outermost axis first."""
    return tuple(format_placement(placement) for placement in layout)


def parse_layout(texts: Iterable[str], *, from_last: bool = False) -> Layout:
    """Return the layout whose text form, as ``format_layout`` writes it, is ``texts``."""
    return tuple(parse_placement(text, from_last=from_last) for text in texts)


def counted_from_first(layout: Layout, ndim: int) -> Layout:
    """Return ``layout`` of a tensor of ``ndim`` dims, with shards of negative dims counted from the first dim."""
    return tuple(Shard(place.dim + ndim) if isinstance(place, Shard) and place.dim < 0 else place for place in layout)


def replicated(axes: int) -> Layout:
    """Return the layout that replicates on each of ``axes`` mesh axes."""
    return (Replicate(),) * axes


def sharded_dim(placement: Placement) -> int | None:
    """Return the tensor dim that a placement shards; None if it shards no dim."""
    dim = getattr(placement, "dim", None)
    return dim if isinstance(dim, int) else None


def shard_counts(layout: Layout, mesh_shape: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Return the number of shards along each dim of an ``ndim``-dimensional tensor in ``layout``."""
    return _shard_counts(layout, tuple(mesh_shape), ndim)


@functools.lru_cache(maxsize=1 << 16)
def _shard_counts(layout: Layout, mesh_shape: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    counts = [1] * ndim
    for placement, size in zip(layout, mesh_shape, strict=True):
        dim = sharded_dim(placement)
        if dim is not None:
            counts[dim] *= size
    return tuple(counts)


def divides(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int]) -> bool:
    """Return whether ``layout`` shards every dim of ``shape`` evenly."""
    return _divides(tuple(shape), layout, tuple(mesh_shape))


@functools.lru_cache(maxsize=1 << 16)
def _divides(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> bool:
    if any(dim is not None and dim >= len(shape) for dim in map(sharded_dim, layout)):
        return False
    return all(
        length % count == 0 for length, count in zip(shape, shard_counts(layout, mesh_shape, len(shape)), strict=True)
    )


def local_shape(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one rank's shard of a tensor of ``shape``.

    Raises:
        LayoutError: a dim does not divide evenly.
    """
    if not divides(shape, layout, mesh_shape):
        raise LayoutError(
            f"shape {tuple(shape)} does not divide evenly under {format_layout(layout)} on mesh {tuple(mesh_shape)}; "
            "shard a dim that is a multiple of the ranks"
        )
    return tuple(
        length // count for length, count in zip(shape, shard_counts(layout, mesh_shape, len(shape)), strict=True)
    )


def split_factor(layout: Layout, mesh_shape: Sequence[int]) -> int:
    """Return the number of different shards of a tensor: the product of the sizes of the axes that shard it."""
    return math.prod(
        size for placement, size in zip(layout, mesh_shape, strict=True) if sharded_dim(placement) is not None
    )
