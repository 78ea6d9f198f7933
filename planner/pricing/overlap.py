"""Where communication is charged that compute can hide, and what it takes of that compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from cost_model import AxisGroup, DeviceSpec
from cost_model.kernels.in_step import in_step
from planner.ilp import problem as quantity


def link_of(group: AxisGroup) -> str:
    """Name the wires that a group of ranks communicates over."""
    return "between-nodes" if group.nodes > 1 else "inside-node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How a device runs communication beside compute.

    Attributes:
        forward, backward: prefix of the quantity of what each phase hides; where nothing is hidden, of what it waits
            for.
        once_forward, once_backward: likewise, of what runs once a step, in the first forward or the last backward.
        taken_share: by how much of such communication's seconds compute takes longer.
        message_share: the same of messages between nodes.
    """

    forward: str
    backward: str
    once_forward: str
    once_backward: str
    taken_share: float = 0.0
    message_share: float = 0.0

    @classmethod
    def of(cls, device: DeviceSpec) -> Self:
        """Return how ``device`` does."""
        if not device.overlaps:
            forward, backward = quantity.BLOCKING_FORWARD, quantity.BLOCKING_BACKWARD
            return cls(forward=forward, backward=backward, once_forward=forward, once_backward=backward)
        alone = in_step(device)
        return cls(
            forward=quantity.PREFETCH_FORWARD,
            backward=quantity.PREFETCH_BACKWARD,
            once_forward=quantity.ONCE_FORWARD,
            once_backward=quantity.ONCE_BACKWARD,
            taken_share=alone.taken_share,
            message_share=alone.message_share,
        )

    @staticmethod
    def waiting(phase: Literal["forward", "backward"], link: str, seconds: float) -> dict[str, float]:
        """Return what ``seconds`` of communication add to a phase that waits for them."""
        if not seconds:
            return {}
        return {(quantity.BLOCKING_FORWARD if phase == "forward" else quantity.BLOCKING_BACKWARD) + link: seconds}

    def messages_beside(
        self, phase: Literal["forward", "backward"], group: AxisGroup, seconds: float
    ) -> dict[str, float]:
        """Return what ``seconds`` of messages add to a phase whose compute they run beside, if they can."""
        if not seconds:
            return {}
        slowdown = quantity.SLOWDOWN_FORWARD if phase == "forward" else quantity.SLOWDOWN_BACKWARD
        share = self.message_share if group.nodes > 1 else self.taken_share
        return {
            (self.forward if phase == "forward" else self.backward) + link_of(group): seconds,
            slowdown: share * seconds,
        }

    def slowdown_s(self, hidden_s: float) -> float:
        """Return by how much compute takes longer where so many seconds of communication run beside it."""
        return hidden_s * self.taken_share


class Products(NamedTuple):
    """Seconds, or FLOPs, of matrix products, forward and backward."""

    forward: float
    backward: float

    def times(self, factor: float) -> Products:
        """Return both times ``factor``."""
        return Products(self.forward * factor, self.backward * factor)


class Beside(NamedTuple):
    """The seconds of products beside a redistribution: of those that read the tensor, and of the one that makes it."""

    reading: Products
    making: Products
