"""`AssumedValues`: runs a forward on the meta device whose shapes or branches depend on the values of tensors.

Integers and booleans get values: those that the forward computes from sizes, and random ones where they depend on
what a meta tensor does not have. A router so chooses random experts, and a comparison is true as often as of random
numbers.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Self
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from planner.model_rewrites.image_sizes.values import values_of
from planner.model_rewrites.tree_paths import leaves_in, tensors_in

aten = torch.ops.aten

_MOST_RANDOM = 1 << 24
"""Random elements that are drawn for one tensor; a larger one repeats its first row."""
_MOST_KNOWN = 1 << 22
"""Elements of the largest tensor that follows from sizes alone whose values are kept."""
_INDEXING = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
)


class AssumedNumbers:
    """Numbers that Python reads from tensors without values: 1 and nearly 0 in turns.

    A loop until something is small so ends after one turn, and each forward reads the same.
    """

    def __init__(self) -> None:
        self._read = 0

    def restart(self) -> None:
        """Begin again."""
        self._read = 0

    def next(self, dtype: torch.dtype) -> bool | int | float:
        """Return the next number of a tensor of ``dtype``."""
        self._read += 1
        is_one = self._read % 2 == 1
        if dtype.is_floating_point:
            return 1.0 if is_one else 1e-9
        return is_one if dtype == torch.bool else int(is_one)


class _Pending(NamedTuple):
    """An op whose results have values that nobody has asked for yet."""

    func: Any
    args: Any
    kwargs: Any
    results: list[torch.Tensor]


def _changed_by(func: Any, args: Any) -> list[torch.Tensor]:
    """Return the tensors that an op writes to."""
    if not func._schema.is_mutable:
        return []
    pairs = zip(func._schema.arguments, args, strict=False)
    written = [arg for schema, arg in pairs if schema.alias_info is not None and schema.alias_info.is_write]
    return tensors_in(written)


def _is_chance(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _number_of(parts: Any) -> int:
    """Return a number that is the same for equal ``parts`` in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


class AssumedValues(TorchDispatchMode):
    """Within this context, ops on meta tensors whose results depend on values have results.

    Args:
        seed: of the random values. The same ops on the same tensors have the same values.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._values: dict[Any, torch.Tensor] = {}
        self._pending: dict[Any, _Pending] = {}
        self._alive: list[torch.UntypedStorage] = []
        self._origins: dict[int, dict[Any, int]] = {}
        """Storage, as long as it lives -> origin of each tensor in it."""
        self._counted = itertools.count()
        self.numbers = AssumedNumbers()

    @staticmethod
    def _innermost() -> AssumedValues | None:
        stack = reversed(_get_current_dispatch_mode_stack())
        return next((mode for mode in stack if isinstance(mode, AssumedValues)), None)

    @staticmethod
    def restart_numbers() -> None:
        """Begin again with the numbers that Python reads, in the innermost context."""
        mode = AssumedValues._innermost()
        if mode is not None:
            mode.numbers.restart()

    @staticmethod
    def on_meta(tree: Any) -> Any:
        """Return ``tree`` with its tensors on meta; those that had values keep them in the innermost context."""
        mode = AssumedValues._innermost()
        if mode is None:
            return tree
        return pytree.tree_map_only(torch.Tensor, lambda t: t if t.is_meta else mode._on_meta(t), tree)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return self._number(args[0])
        if func in _INDEXING:
            args = (args[0], self._positions(args[1]), *args[2:])
        tensors = tensors_in((args, kwargs))
        if tensors and not any(tensor.is_meta for tensor in tensors):
            result = func(*args, **kwargs)
            if func is aten._to_copy.default and result.is_meta and not result.is_floating_point():
                self._keep(result, self._computed(func, args, kwargs))
            return result
        if func is aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type == "cpu":
            return self._computed(func, args, kwargs)
        is_known = all(map(self._is_known, tensors))
        changed = _changed_by(func, args)
        if any(map(self._is_known, changed)):
            self._compute_pending()  # from what is there before it changes
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            return pytree.tree_map_only(torch.Tensor, self._on_meta, self._computed(func, args, kwargs))
        results = tensors_in(result)
        self._note_origins(func, args, kwargs, results)
        if changed:
            self._values.update(self._computed_values(_Pending(func, args, kwargs, results), is_known))
        elif "empty" not in func.name():
            pending = _Pending(func, args, kwargs, results)
            # What is known already is a view of a whole tensor.
            having = (t for t in results if self._has_values(t, is_known) and not self._is_known(t))
            self._pending.update(dict.fromkeys(map(self._key, having), pending))
        return result

    def __enter__(self) -> Self:
        self._patch = mock.patch.object(torch, "tensor", functools.partial(self._tensor, torch.tensor))
        self._patch.start()
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _tensor(self, make: Callable[..., torch.Tensor], data: Any, **options: Any) -> torch.Tensor:
        """Return ``torch.tensor(data)``, which on meta is made without an op; integers have their values."""
        result = make(data, **options)
        if result.is_meta and not (result.is_floating_point() or result.is_complex()):
            self._keep(result, make(data, **{**options, "device": "cpu"}))
        return result

    def know(self, tree: Any) -> None:
        """Give the meta tensors in ``tree`` the values that are known of them (`image_sizes.values`)."""
        for tensor in tensors_in(tree):
            values = values_of(tensor) if type(tensor) is torch.Tensor and tensor.is_meta else None
            if values is not None:
                self._keep(tensor, values)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return self._key(tensor) in self._values or self._key(tensor) in self._pending

    def _compute(self, pending: _Pending) -> None:
        """Compute the values of the results of one op, which most often nobody asks for."""
        keys = [key for key in map(self._key, pending.results) if self._pending.get(key) is pending]
        for key in keys:
            del self._pending[key]
        values = self._computed_values(pending, is_known=True)
        self._values.update({key: values[key] for key in keys if key in values})

    def _computed_values(self, op: _Pending, is_known: bool) -> dict[Any, torch.Tensor]:
        """Return key -> values of those results of an op that have any."""
        if not any(self._has_values(tensor, is_known) for tensor in op.results):
            return {}
        try:
            values = tensors_in(self._computed(op.func, op.args, op.kwargs))
        except (NotImplementedError, RuntimeError, IndexError):
            return {}  # random indices may be out of range: the results stay without values
        self._alive += [tensor.untyped_storage() for tensor in op.results]
        pairs = zip(op.results, values, strict=True)
        return {self._key(tensor): value for tensor, value in pairs if self._has_values(tensor, is_known)}

    def _compute_pending(self) -> None:
        for pending in list(self._pending.values()):
            self._compute(pending)

    @staticmethod
    def _has_values(tensor: torch.Tensor, is_known: bool) -> bool:
        """Return whether a result gets values: integers do, and numbers that follow from sizes alone.

        A single unknown truth does not: see `AssumedNumbers`.
        """
        if is_known:
            return tensor.is_meta and tensor.numel() <= _MOST_KNOWN
        is_truth = tensor.dtype == torch.bool and not tensor.dim()
        return tensor.is_meta and not (tensor.is_floating_point() or tensor.is_complex() or is_truth)

    @staticmethod
    def _key(tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()._cdata
        return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype

    def _keep(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self._values[self._key(tensor)] = value
        self._alive.append(tensor.untyped_storage())  # so that no other storage gets its address

    def _on_meta(self, value: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if not (value.is_floating_point() or value.is_complex()):
            self._keep(tensor, value)
        return tensor

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor: those that are kept, or random ones."""
        if not tensor.is_meta:
            return tensor
        key = self._key(tensor)
        if key in self._pending:
            self._compute(self._pending[key])
        kept = self._values.get(key)
        if kept is not None:
            return kept
        shape = tuple(tensor.shape)
        drawn = (1, *shape[1:]) if tensor.numel() > _MOST_RANDOM else shape
        if tensor.is_floating_point() or tensor.is_complex():
            return torch.randn(drawn, generator=self._generator(tensor)).to(tensor.dtype).expand(shape)
        value = torch.randint(0, 2, drawn, generator=self._generator(tensor)).to(tensor.dtype).expand(shape)
        self._keep(tensor, value)
        return value

    def _note_origins(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        """Note what each result comes of, so that one that is computed twice has the same values."""
        is_new = _is_chance(func) or func._schema.is_mutable or "empty" in func.name()
        leaves = leaves_in((args, kwargs))
        parts = tuple(self._origin(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
        for index, tensor in enumerate(results):
            origin = next(self._counted) if is_new else _number_of((func.name(), parts, index))
            self._origins_in(tensor)[self._key(tensor)] = origin

    def _origin(self, tensor: torch.Tensor) -> int:
        origins, key = self._origins_in(tensor), self._key(tensor)
        if key not in origins:
            origins[key] = next(self._counted)
        return origins[key]

    def _origins_in(self, tensor: torch.Tensor) -> dict[Any, int]:
        """Return the origins of the tensors in the storage of ``tensor``, which is not kept: its memory is measured."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._origins:
            self._origins[address] = {}
            weakref.finalize(storage, self._origins.pop, address, None)
        return self._origins[address]

    def _generator(self, tensor: torch.Tensor) -> torch.Generator:
        """Return a generator that draws the same numbers each time for tensors of one origin."""
        return torch.Generator().manual_seed(_number_of((self._seed, self._origin(tensor))))

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of ``func`` on the values of its arguments, unseen by what counts ops."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._value, (args, dict(kwargs)))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        # A random op leaves the caller's random state as it is.
        with _disable_current_modes(), torch.random.fork_rng(devices=(), enabled=_is_chance(func)):
            if _is_chance(func):
                torch.manual_seed(self._seed)
            return func(*args, **kwargs)

    def _positions(self, indices: Any) -> list[Any]:
        """Return the indices of an indexing op, with those that a mask selects in place of the mask."""
        given: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) and index.is_meta:
                mask = self._value(index)
                with _disable_current_modes():
                    positions = mask.nonzero().unbind(1)
                given += [self._on_meta(position) for position in positions]
            else:
                given.append(index)
        return given

    def _number(self, tensor: torch.Tensor) -> Any:
        """Return a number that Python reads."""
        if not tensor.is_meta or self._is_known(tensor):
            return self._value(tensor).item()
        return self.numbers.next(tensor.dtype)
