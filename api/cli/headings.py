"""Plain-text help with options under headings. With rich, drawing the help takes longer than all its other work."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class CommandWithHeadings(TyperCommand):
    """A command whose help lists options under their ``rich_help_panel``; options without a panel come first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # typer has its own click from some version on
        """Write arguments, options without a panel, then the panels in order of their first option, "Output" last."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                heading = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
                sections.setdefault(heading, []).append(record)
        # Output options come last.
        for heading in sorted(sections, key="Output".__eq__):
            if sections[heading]:
                with formatter.section(heading):
                    formatter.write_dl(sections[heading])
