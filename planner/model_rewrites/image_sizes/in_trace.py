"""`sizes_known`: in a trace, tables of sizes are plain numbers, of which the graph sees nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from planner.model_rewrites.image_sizes.tables import size_tables
from planner.model_rewrites.image_sizes.values import as_numbers, is_numbers
from planner.model_rewrites.replaced_calls.split_and_cat import parts_together
from planner.model_rewrites.tree_paths import path_text, tensors_in


class _Numbers(TorchFunctionMode):
    """Runs what is computed from tables alone on their values, outside of the trace."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        read = tensors_in((args, dict(kwargs)))
        if not read or not all(map(is_numbers, read)):
            return func(*args, **kwargs)
        with _disable_current_modes():
            result = func(*args, **kwargs)
            parts = list(result) if isinstance(result, Iterator) else None
        for tensor in tensors_in(result if parts is None else parts):
            as_numbers(tensor)
        return result if parts is None else iter(parts)


@contextmanager
def sizes_known(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Within this context, the root ``module``, called with these arguments, has its tables of sizes as numbers.

    Enter it after other hooks are registered on the root, which then get the numbers.
    """
    leaves = pytree.tree_leaves_with_path((tuple(args), dict(kwargs)))
    tables = {id(table.tensor): table.values for table in size_tables(tensors_in((args, kwargs)))}
    values = {path_text(path): as_numbers(tables[id(leaf)].clone()) for path, leaf in leaves if id(leaf) in tables}
    if not values:
        yield
        return

    def give(each: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_with_path(
            lambda path, leaf: values.get(path_text(path), leaf), (given, named)
        )
        return changed

    hook = module.register_forward_pre_hook(give, with_kwargs=True, prepend=True)
    try:
        with parts_together(lambda tensor: not is_numbers(tensor)), _Numbers():
            yield
    finally:
        hook.remove()
