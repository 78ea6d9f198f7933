"""Texts of errors for clients: they name fields of requests and routes, not the command line's options and commands.

Advice is written once, where a fault is found, and names options: `--micro-batches`. A client of the server, or of
Python, knows these by the names of the request's fields.
"""

from __future__ import annotations

import functools
import re

from planner.plan.job_spec import spec_fields

_OPTIONS_OF_COMMANDS = {
    "--micro-batch": "micro_batch",
    "--sp": "sequence_parallel",
    "--virtual-stages": "virtual_stages",
    "--schedule": "schedule",
    "--from": "framework",
    "--quick": "plans: false",
}
"""Options of commands that are no fields of `JobSpec` -> the members of requests that say the same."""

_PHRASES = {
    r"`?shardplan plan\b`?": "POST /v1/plans",
    r"`?shardplan estimate( MODEL PLAN)?\b`?": "planner.estimate_plan, in Python",
    r"`?shardplan verify\b`?": "executor.verify, in Python,",
    r"`?shardplan calibrate\b`?": "a calibration on the cluster",
    r"the path of a \.yaml or \.json file": "an object with its figures",
    r"the path of a config\.json or of its folder, or package\.module:factory": 'or {"hf_config": {...}}',
    r"use package\.module:factory": "trace the module and send its graph",
    r"Leave (\S+) out, or let the factory take a batch argument": r"Leave \1 out",
}
"""Patterns of texts for somebody at the command line -> what a client can do instead."""


def for_client(text: str) -> str:
    """Return a text of an error with the names that a client uses."""
    for pattern, words in _PHRASES.items():
        text = re.sub(pattern, words, text)
    return _flag_pattern().sub(lambda match: _names()[match[1]], text)


@functools.cache
def _names() -> dict[str, str]:
    """Return option -> its name in a request."""
    names = dict(_OPTIONS_OF_COMMANDS)
    for item in spec_fields():
        if item.type is bool:
            names[item.flag] = f"{item.name}: true"
            names[f"--no-{item.flag.removeprefix('--')}"] = f"{item.name}: false"
        else:
            names[item.flag] = item.name
    return names


@functools.cache
def _flag_pattern() -> re.Pattern[str]:
    """Return the pattern of an option, and of its Python form in brackets behind it."""
    flags = "|".join(sorted(map(re.escape, _names()), key=len, reverse=True))
    return re.compile(rf"(?<![\w-])({flags})(?![\w-])(?: \(\w+=\w+\))?")
