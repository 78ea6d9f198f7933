"""Options shared by several commands. The options of a job are generated from the fields of `JobSpec`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from planner.plan.job_spec import SpecField, spec_fields

OUTPUT = "Output"
"""Heading of ``--json`` and ``--no-cache`` in the help."""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset (llama-3.1-8b, ...), a config.json or its folder, or package.module:factory.",
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
PlanOutput = Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")]
Folder = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the plans into this folder, as 1.json, 2.json, ...")
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print JSON, and nothing else, on standard output.", rich_help_panel=OUTPUT),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Plan again, even if the same was planned before.", rich_help_panel=OUTPUT)
]

Details = Annotated[
    bool,
    typer.Option(
        "--details",
        "-v",
        help="Print collectives, other meshes, timings and all notes as well.",
        rich_help_panel=OUTPUT,
    ),
]
Tokens = Annotated[
    float | None,
    typer.Option(help="Tokens of a whole run, such as 1e12: its days are printed.", rich_help_panel=OUTPUT),
]
Price = Annotated[
    float | None,
    typer.Option(help="Of a device for an hour, in any currency, with --tokens.", rich_help_panel=OUTPUT),
]

Command = Callable[..., None]


def takes_job_options(
    *,
    without: Collection[str] = (),
    only: Collection[str] = (),
    optional: bool = False,
    defaults: Mapping[str, Any] = {},
) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of a job to a command, which receives their values as ``options``.

    Args:
        without: fields of `JobSpec` that become no option.
        only: fields of `JobSpec` that become options; empty: all that are not in ``without``.
        optional: whether every option may be left out; ``options`` then has no entry for it.
        defaults: field -> default of its option, where it differs from the field's, or where the field has none.
    """
    fields = [item for item in spec_fields() if item.name not in without and (not only or item.name in only)]

    def decorate(command: Command) -> Command:
        def run(**values: Any) -> None:
            options = {item.name: _value(item, values.pop(item.name)) for item in fields}
            if optional:
                options = {name: value for name, value in options.items() if value not in (None, ())}
            command(**values, options=options)

        signature = inspect.signature(command, eval_str=True)
        own = [item for name, item in signature.parameters.items() if name != "options"]
        first = [_parameter(item, optional, defaults or {}) for item in fields if item.option.heading is None]
        rest = [_parameter(item, optional, defaults or {}) for item in fields if item.option.heading is not None]
        parameters = [own[0], *first, *own[1:], *rest]
        keywords = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
        run.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        return run

    return decorate


def _parameter(item: SpecField, optional: bool, defaults: Mapping[str, Any]) -> inspect.Parameter:
    """Return the function parameter from which typer builds the option of a field."""
    type_, default = _text_type(item), defaults.get(item.name, item.default)
    flags = [item.flag]
    if item.type is bool and item.default is True:
        flags = [f"{item.flag}/--no-{item.flag.removeprefix('--')}"]
    if item.default == () or optional:
        type_, default = type_ | None, None
    if item.required and item.name in defaults:
        type_ = type_ | None
    elif item.required and not optional:
        default = inspect.Parameter.empty
    option = typer.Option(*flags, help=item.option.help, rich_help_panel=item.option.heading)
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type_, option]
    )


def _text_type(item: SpecField) -> Any:
    """Return the type of a field's option on the command line: text for parsed fields, a list in place of a tuple."""
    if item.option.text is not None:
        return str if item.required else str | None
    return list[str] if get_origin(item.type) is tuple else item.type


def _value(item: SpecField, value: Any) -> Any:
    """Return an option's value in the type of its `JobSpec` field: a tuple in place of a list."""
    return tuple(value or ()) if get_origin(item.type) is tuple else value
