"""Models from a Python function ``package.module:factory``. The function is run, so the service does not accept it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.errors import JobError, ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoryResult:
    """The result of a factory.

    Attributes:
        module: the model, on the meta device.
        example_inputs: arguments of one call of the model; None where the factory returned none.
        took_batch, took_seq: whether the factory was called with ``batch`` and with ``seq``.
    """

    module: nn.Module
    example_inputs: tuple[Any, ...] | dict[str, Any] | None
    took_batch: bool
    took_seq: bool


def call_factory(text: str, *, batch: int | None, seq: int | None) -> FactoryResult:
    """Return the result of ``package.module:factory``, called on the meta device.

    Args:
        text: name of the factory.
        batch: samples in the global batch, for a factory with a parameter ``batch``; None: not given.
        seq: tokens in a sequence, for a factory with a parameter ``seq``; None: not given.

    Raises:
        ModelError: the factory cannot be imported, fails, or returns neither a module nor (module, example inputs).
        JobError: the factory needs a batch or seq that was not given.
    """
    factory = _find(text)
    takes = inspect.signature(factory).parameters
    options = {name: value for name, value in (("batch", batch), ("seq", seq)) if name in takes}
    for name, value in options.items():
        if value is None and takes[name].default is inspect.Parameter.empty:
            raise JobError(f"{text} needs a {name}.", what_to_do=f"Give --{name}.", field=name)
    arguments = {name: value for name, value in options.items() if value is not None}
    try:
        with torch.device("meta"):
            result = factory(**arguments)
    except Exception as error:  # a user's own code may raise anything; its place is named below
        raise ModelError(f"{text} failed: {_describe(error)}.", what_to_do="Mend the factory.") from error
    module, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(module, nn.Module):
        advice = "Let it return an nn.Module, or (module, example_inputs)."
        raise ModelError(f"{text} returned a {type(module).__name__}.", what_to_do=advice)
    return FactoryResult(
        module=module,
        example_inputs=_inputs(text, inputs),
        took_batch="batch" in arguments,
        took_seq="seq" in arguments,
    )


def needs_batch(text: str) -> bool:
    """Return whether the factory ``text`` has a parameter ``batch`` without a default.

    Raises:
        ModelError: the factory cannot be imported.
    """
    parameter = inspect.signature(_find(text)).parameters.get("batch")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _inputs(text: str, inputs: object) -> tuple[Any, ...] | dict[str, Any] | None:
    if inputs is None or isinstance(inputs, tuple):
        return inputs
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    advice = "Give a tuple of positional arguments, or a dict of keyword arguments."
    raise ModelError(f"{text} returned example inputs of type {type(inputs).__name__}.", what_to_do=advice)


def _find(text: str) -> Callable[..., Any]:
    module_name, _, attribute = text.partition(":")
    try:
        with _working_folder_importable():
            target: Any = importlib.import_module(module_name)
    except ImportError as error:
        advice = "Check its name; the current folder and installed packages are searched."
        raise ModelError(f"cannot import {module_name}: {error}.", what_to_do=advice) from error
    except Exception as error:  # importing runs a user's own code, which may raise anything
        raise ModelError(f"{module_name} failed while it was imported: {_describe(error)}.") from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ModelError(f"{module_name} has no {attribute}.", what_to_do="Name a function or class in it.")
        target = getattr(target, part)
    if not callable(target):
        raise ModelError(f"{text} is a {type(target).__name__}.", what_to_do="Name a function or class.")
    return target  # type: ignore[no-any-return]


def _describe(error: Exception) -> str:
    """Return the type and message of ``error``, and the file and line that raised it, as text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})" if trace is not None else ""
    return f"{type(error).__name__}: {error}{place}"


@contextmanager
def _working_folder_importable() -> Iterator[None]:
    # A console script does not have the current folder on its path, as `python -m` would.
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
