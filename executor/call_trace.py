"""`CallTrace`: the module call that is running, so that a run that fails is reported by module, op and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from planner.errors import PlannerError, RunError
from planner.model_rewrites.tree_paths import tensors_in

_LONGEST = 240
"""Most characters of a cause in a message."""

Call = tuple[Any, tuple[Any, ...]]
"""An op and its positional arguments."""


class CallTrace:
    """The calls of a module's submodules that are running, and the errors of a run that fails."""

    def __init__(self, last_op: Callable[[], Call | None]) -> None:
        """Start without a call.

        Args:
            last_op: returns the op that was dispatched last; None if there was none.
        """
        self._last_op = last_op
        self._running: list[tuple[str, nn.Module]] = []

    def attach(self, module: nn.Module) -> None:
        """Hook all submodules. Call this after all other hooks, so that their errors are those of the module, too."""
        for fqn, submodule in module.named_modules():
            submodule.register_forward_pre_hook(self._entering(fqn), prepend=True)
            submodule.register_forward_hook(self._leave)

    def _entering(self, fqn: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, args: self._running.append((fqn, module))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # A recomputation may be broken off inside of calls, which then stay on the stack.
        while self._running and self._running.pop()[1] is not module:
            pass

    @contextmanager
    def reported(self, where: str) -> Iterator[None]:
        """Return a context that turns an exception into a `RunError`; errors of the planner pass.

        Args:
            where: what runs, for a failure outside of all modules: "the backward".
        """
        self._running.clear()
        try:
            yield
        except PlannerError:
            raise
        except Exception as error:
            fqn, place = None, where
            if self._running:
                fqn, module = self._running[-1]
                place = f"{fqn or 'the root'} ({type(module).__name__})"
            raise run_error(error, place, module=fqn, call=self._last_op()) from error


def run_error(error: Exception, place: str, *, module: str | None = None, call: Call | None = None) -> RunError:
    """Return the error of a run that failed with ``error`` in ``place``, in the op ``call`` where that is known."""
    op = None if call is None else _call_text(call)
    after = "" if op is None else f", at {op}"
    return RunError(
        f"the plan does not run: {place} fails{after}: {_first_line(error)}",
        what_to_do="Plan again, or plan for another mesh. If shardplan wrote the plan, please report this.",
        module=module,
        op=op,
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _call_text(call: Call) -> str:
    """Return a call as ``aten.view.default([4, 16], [4, 4, 4])``: tensors by their shapes."""
    func, args = call
    shapes = [str(list(tensor.shape)) for tensor in tensors_in(args)]
    return f"{func}({', '.join(shapes)})"
