"""``PerModule``: objects that belong to one module each, and end with it though they refer to it.

A `weakref.WeakKeyDictionary` would keep such a module for ever: its values are not weak.
"""

from __future__ import annotations

import copy
from typing import Any, Generic, TypeVar, cast

from torch import nn

Item = TypeVar("Item")

_ATTRIBUTE = "_shardplan_objects"


class _Objects(dict[str, Any]):
    """The objects of one module, by kind. A copy of the module has copies of them, and a pickled module has none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Objects:
        return _Objects(copy.deepcopy(dict(self), memo))

    def __reduce__(self) -> tuple[type[_Objects], tuple[()]]:
        return _Objects, ()


class PerModule(Generic[Item]):
    """A mapping from modules to objects of one kind."""

    def __init__(self, kind: str) -> None:
        """Name the kind of objects, apart from all others."""
        self._kind = kind

    def __setitem__(self, module: nn.Module, item: Item) -> None:
        # Not by setattr, which may be the module's own.
        module.__dict__.setdefault(_ATTRIBUTE, _Objects())[self._kind] = item

    def get(self, module: nn.Module) -> Item | None:
        """Return the object of ``module``; None: it has none."""
        return cast("Item | None", module.__dict__.get(_ATTRIBUTE, {}).get(self._kind))
