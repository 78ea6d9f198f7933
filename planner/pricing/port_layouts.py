"""Ports: the layouts of a tensor and of its gradient at one end of an edge between regions."""

from __future__ import annotations

from typing import NamedTuple

from cost_model.layouts.layout import Layout
from planner.strategies.enumerate import Strategy


class PortLayouts(NamedTuple):
    """The layouts of one tensor at the producer's or at the consumer's end of an edge.

    Attributes:
        layout: layout of the tensor; None for a plain tensor.
        gradient: layout of the gradient; None if there is no gradient.
        reallgather: whether the consumer all-gathers the tensor again in the backward instead of saving the
            all-gathered copy. False at the producer's end.
    """

    layout: Layout | None
    gradient: Layout | None
    reallgather: bool = False


def producer_port(strategy: Strategy, slot: int) -> PortLayouts:
    """Return the port at which a region that runs ``strategy`` produces the tensor of ``slot``."""
    return PortLayouts(strategy.forward[slot], strategy.gradient[slot])


def consumer_port(strategy: Strategy, slot: int) -> PortLayouts:
    """Return the port at which a region that runs ``strategy`` consumes the tensor of ``slot``."""
    return PortLayouts(strategy.forward[slot], strategy.gradient[slot], slot in strategy.reallgathered)


class PortNumbers:
    """A number for each `PortLayouts`: pairs of small integers are cheaper to look up than pairs of layouts."""

    def __init__(self) -> None:
        self._numbers: dict[PortLayouts, int] = {}
        self._ports: list[PortLayouts] = []

    def number(self, port: PortLayouts) -> int:
        """Return the number of ``port``; a new port gets the next number."""
        number = self._numbers.get(port)
        if number is None:
            number = self._numbers[port] = len(self._ports)
            self._ports.append(port)
        return number

    def port(self, number: int) -> PortLayouts:
        """Return the port that has this number."""
        return self._ports[number]

    def agree(self, a: int, b: int) -> bool:
        """Return whether one key of a plan can state both ports, numbers ``a`` and ``b``.

        The layouts and ``reallgather`` have to be equal. The gradients' layouts have to be equal unless one port has no
        gradient: the key then states the gradient's layout of the other port.
        """
        (layout, gradient, reallgather), (other_layout, other_gradient, other_reallgather) = (
            self._ports[a],
            self._ports[b],
        )
        gradients_agree = gradient == other_gradient or gradient is None or other_gradient is None
        return layout == other_layout and reallgather == other_reallgather and gradients_agree
