"""How many elements a mask selects: a number that nobody knows, which a forward may only check.

``if x[mask].numel() != features.numel(): raise ...`` passes, as checks of values do (`replaced_calls.value_checks`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from planner.errors import ModelError
from planner.model_rewrites.replaced_calls.value_checks import value_that_passes


def counted() -> ModelError:
    """Return the error for a forward that uses the number of what a mask selects."""
    return ModelError(
        "The forward asks how many elements a mask selects.",
        what_to_do="Use the sum of the mask, as a tensor.",
        cause="it asks how many elements a mask selects (their number as a tensor is the sum of the mask)",
    )


class _Comparison:
    """The result of a comparison with a `Count`."""

    def __bool__(self) -> bool:
        passing = value_that_passes(sys._getframe(1))
        if passing is None:
            raise counted()
        return passing


class Count:
    """The number of selected elements, or a multiple of it."""

    __hash__ = None  # type: ignore[assignment]

    def _compare(self, other: object) -> Any:
        return _Comparison()

    def _multiple(self, other: object) -> Any:
        return self if isinstance(other, int) else NotImplemented

    def _refuse(self, *others: object) -> NoReturn:
        raise counted()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compare
    __mul__ = __rmul__ = __floordiv__ = _multiple
    __index__ = __int__ = __float__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __mod__ = __rfloordiv__ = _refuse

    def __repr__(self) -> str:
        return "as many as a mask selects"


def sizes(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the sizes of selected rows that the function ``name`` asks for."""
    if name == "shape" or (name == "size" and len(args) == 1 and not kwargs):
        return _Sizes(func(*args, **kwargs))
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if name == "size" and isinstance(dim, int) and dim % args[0].dim():
        return func(*args, **kwargs)
    if name == "__len__":
        raise counted()
    return Count()


class _Sizes(tuple[int, ...]):
    """The shape of selected rows, of which the first size is not known."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        taken = range(len(self))[index]
        if isinstance(index, slice):
            return tuple(self[each] for each in taken)
        return tuple.__getitem__(self, index) if taken else Count()

    def __iter__(self) -> Iterator[Any]:
        return iter([self[index] for index in range(len(self))])

    def numel(self) -> Any:
        """Return the number of elements, which is not known."""
        return Count()
