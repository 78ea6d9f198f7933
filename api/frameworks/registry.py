"""The frameworks by name, and the one that a text is for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from api.frameworks.launch import Framework
from cost_model.hardware.reading import close_matches
from planner.errors import JobError

_PLACES: Mapping[str, str] = {
    "torchtitan": "torchtitan:TORCHTITAN",
    "megatron": "megatron:MEGATRON_LM",
    "megatron-bridge": "bridge:MEGATRON_BRIDGE",
    "accelerate": "accelerate:ACCELERATE",
    "deepspeed": "deepspeed:DEEPSPEED",
    "transformers": "transformers:TRANSFORMERS",
    "vllm": "vllm:VLLM",
    "torch": "pytorch:PYTORCH",
}
"""Name -> module and constant; modules are imported when they are needed."""

NAMES = tuple(_PLACES)
"""Names of the frameworks. Plans are exported to torch as a script, not by its `Framework.write`."""


def find_framework(name: str) -> Framework:
    """Return the framework of this name.

    Raises:
        JobError: there is none.
    """
    if name not in _PLACES:
        near = close_matches(name, NAMES)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise JobError(f"there is no framework {name!r}.", what_to_do=f"{hint}Choose one of {', '.join(NAMES)}.")
    module, _, constant = _PLACES[name].partition(":")
    framework: Framework = getattr(import_module(f"api.frameworks.configurations.{module}"), constant)
    return framework


def framework_of(name: str | None, text: str) -> Framework:
    """Return the framework of this name, or the one whose configurations look like ``text``.

    Raises:
        JobError: there is no framework of this name; or none, or several, have such configurations.
    """
    if name is not None:
        return find_framework(name)
    found = [framework for framework in map(find_framework, NAMES) if framework.recognises(text)]
    if len(found) == 1:
        return found[0]
    what = (
        "no framework's configuration looks like this" if not found else "several frameworks have such configurations"
    )
    advice = f"Name the framework: {', '.join(each.name for each in found) or ', '.join(NAMES)}."
    raise JobError(f"{what}.", what_to_do=advice, field="from")
