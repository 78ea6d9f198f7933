"""`masks_keep_all`: selected rows in a trace, where masks are compared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner.errors import ModelError
from planner.model_rewrites.independent_dims import may_be_random
from planner.model_rewrites.selected_rows.calls import SelectedRows, name_of
from planner.model_rewrites.selected_rows.each_row import RESHAPES
from planner.model_rewrites.selected_rows.selection import Selection, selection_of
from planner.model_rewrites.tree_paths import tensors_in

_MOST_MASKS = 4
"""The most masks that a forward selects by; experts in a loop would each compute all tokens."""

_RESULT = "output|0|"
"""How the marker of a result of the root begins (`planner.graph.capture`)."""


class _Origin(NamedTuple):
    """How a tensor was computed, at its version; the tensor is kept, so that no other has its ``id``."""

    origin: Hashable
    tensor: torch.Tensor
    version: int


class _TracedRows(SelectedRows):
    """Selected rows in a trace, where it is known which masks are computed alike."""

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self._names = names
        self._origins: dict[int, _Origin] = {}
        self._masks: set[Hashable] = set()

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_own: bool = False
    ) -> Any:
        is_result = name_of(func) == "boundary" and str(args[1]).startswith(_RESULT)
        if is_result and selection_of(args[0]) is not None:
            raise ModelError(
                "The forward returns elements that a mask selects.", cause="it returns elements that a mask selects"
            )
        return super().run(func, args, kwargs, is_own=is_own)

    def select(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        selected = super().select(func, args, kwargs)
        if selected is not NotImplemented:
            name = self._running_module()
            if name is not None and is_in_list(name):
                raise ModelError(
                    f"{name} selects elements by a mask.", module=name, cause="it selects elements by a mask"
                )
            chosen = next(each for each in map(selection_of, tensors_in(selected)) if each is not None)
            self._masks.add(self._origin(chosen.mask))
            if len(self._masks) > _MOST_MASKS:
                raise ModelError(
                    f"The forward selects elements by more than {_MOST_MASKS} masks.",
                    cause=f"it selects elements by more than {_MOST_MASKS} masks",
                )
        return selected

    def _running_module(self) -> str | None:
        """Return the FQN of the innermost module whose forward runs."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            code = frame.f_code
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
            if code.co_name == "forward" and isinstance(owner, nn.Module) and owner in self._names:
                return self._names[owner]
            frame = frame.f_back
        return None

    def computed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remember how ``result`` was computed, if it may become a mask."""
        name = name_of(func)
        if not isinstance(result, torch.Tensor) or result.is_floating_point() or may_be_random(name):
            return
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if any(leaf is result for leaf in leaves):
            return
        if name == "boundary" or (name in RESHAPES and result.numel() == args[0].numel()):
            origin = self._origin(args[0])  # the same elements, in the same order
        else:
            origin = name, str(structure), tuple(map(self._origin, leaves))
        self._origins[id(result)] = _Origin(origin, result, result._version)

    def _origin(self, leaf: Any) -> Hashable:
        """Return a value that is the same for numbers that are equal, and tensors that are computed alike."""
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        known = self._origins.get(id(leaf))
        if known is None or known.version != leaf._version:
            known = self._origins[id(leaf)] = _Origin((id(leaf), leaf._version), leaf, leaf._version)
        return known.origin

    def check(self, selections: Sequence[Selection]) -> None:
        if any(selection.mask._version != selection.version for selection in selections):
            raise ModelError(
                "The forward changes a mask after it has selected elements by it.",
                cause="it changes a mask after it has selected elements by it",
            )
        if len({self._origin(selection.mask) for selection in selections}) > 1:
            raise ModelError(
                "The forward reads elements that two masks select as if they were the same elements.",
                cause="it reads elements that two masks select as if they were the same",
            )


class _Mode(TorchFunctionMode):
    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._rows = _TracedRows({part: name for name, part in root.named_modules()})

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = self._rows.run(func, args, kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        self._rows.computed(func, args, kwargs, result)
        return result


@contextmanager
def masks_keep_all(root: nn.Module) -> Iterator[None]:
    """Within this context, a trace of ``root`` has all elements in place of those that a mask selects.

    In a module that is in a list they are an error: an expert would compute all tokens, not those that choose it.
    """
    with _Mode(root):
        yield


def is_in_list(name: str) -> bool:
    """Return whether a module is in a list, as blocks and experts are."""
    return any(part.isdigit() for part in name.split("."))
