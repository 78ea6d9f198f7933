"""`LocalModule`: how a module that runs on local tensors is entered and left, in a plan as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cost_model.layouts.layout import Layout, format_layout, parse_layout

_RANDOM = "random"
_PLAIN = "-"


class LocalModule(NamedTuple):
    """The layouts of the tensors that enter and leave a module, between which nothing is redistributed or reduced.

    Each rank then runs the module's own forward on its local tensors.

    Attributes:
        inputs: path of an argument (`planner.model_rewrites.tree_paths`) -> its layout; plain tensors are left out.
        outputs: for each tensor among the results its layout; None: it is a plain tensor.
        is_random: whether the module draws random numbers.
    """

    inputs: Mapping[str, Layout]
    outputs: tuple[Layout | None, ...]
    is_random: bool

    @property
    def text(self) -> str:
        """The module as text, such as ``hidden_states=S(0),R;S(0),R``, with ``;random`` at the end if it is."""
        inputs = " ".join(f"{path}={_layout_text(layout)}" for path, layout in self.inputs.items())
        outputs = " ".join(map(_layout_text, self.outputs))
        return ";".join((inputs, outputs, *((_RANDOM,) if self.is_random else ())))

    @classmethod
    def parse(cls, text: str) -> LocalModule:
        """Return the module of ``text``.

        Raises:
            LayoutError: a layout is none.
        """
        inputs, outputs, *random = text.split(";")
        pairs = [each.rpartition("=") for each in inputs.split()]
        return cls(
            {path: parse_layout(layout.split(",")) for path, _, layout in pairs},
            tuple(None if layout == _PLAIN else parse_layout(layout.split(",")) for layout in outputs.split()),
            random == [_RANDOM],
        )


def _layout_text(layout: Layout | None) -> str:
    return _PLAIN if layout is None else ",".join(format_layout(layout))
