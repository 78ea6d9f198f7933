"""Overlap of communication with compute: the quantities that communication is charged to, and the slowdown of compute.

Communication that a device overlaps with compute is charged to a prefetch quantity of its phase and link
(`planner.ilp.step_cost`). The kernels of collectives take processors and memory bandwidth from compute. A fraction of
the seconds is therefore charged to the slowdown quantity of the phase as well. On a device that overlaps nothing, all
communication is blocking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from cost_model import AxisGroup, DeviceSpec
from cost_model.kernels.in_step import in_step
from planner.ilp.quantities import BACKWARD, FORWARD, LinkQuantities, Quantity


def link_of(group: AxisGroup) -> str:
    """Return the name of the link that a group of ranks communicates over."""
    return "between-nodes" if group.nodes > 1 else "inside-node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How a device overlaps communication with compute.

    Attributes:
        forward, backward: quantities of overlapped communication. If the device overlaps nothing, the quantities of
            blocking communication.
        once_forward, once_backward: likewise, for communication that runs once a step, in the first forward or the last
            backward.
        taken_share: seconds that compute takes longer, per second of overlapped communication.
        message_share: seconds that compute takes longer, per second of overlapped pipeline messages between nodes.
    """

    forward: LinkQuantities
    backward: LinkQuantities
    once_forward: LinkQuantities
    once_backward: LinkQuantities
    taken_share: float = 0.0
    message_share: float = 0.0

    @classmethod
    def of(cls, device: DeviceSpec) -> Self:
        """Return how ``device`` overlaps communication."""
        if not device.overlaps:
            forward, backward = FORWARD.blocking, BACKWARD.blocking
            return cls(forward=forward, backward=backward, once_forward=forward, once_backward=backward)
        constants = in_step(device)
        return cls(
            forward=FORWARD.prefetch,
            backward=BACKWARD.prefetch,
            once_forward=FORWARD.once,
            once_backward=BACKWARD.once,
            taken_share=constants.taken_share,
            message_share=constants.message_share,
        )

    @staticmethod
    def blocking(phase: Literal["forward", "backward"], link: str, seconds: float) -> dict[Quantity, float]:
        """Return the charge of ``seconds`` of communication that the phase waits for."""
        if not seconds:
            return {}
        return {(FORWARD if phase == "forward" else BACKWARD).blocking[link]: seconds}

    def overlapped_messages(
        self, phase: Literal["forward", "backward"], group: AxisGroup, seconds: float
    ) -> dict[Quantity, float]:
        """Return the charge of ``seconds`` of overlapped pipeline messages; blocking if the device overlaps nothing."""
        if not seconds:
            return {}
        slowdown = (FORWARD if phase == "forward" else BACKWARD).slowdown
        share = self.message_share if group.nodes > 1 else self.taken_share
        return {
            (self.forward if phase == "forward" else self.backward)[link_of(group)]: seconds,
            slowdown: share * seconds,
        }

    def slowdown_s(self, overlapped_s: float) -> float:
        """Return the seconds that compute takes longer because of ``overlapped_s`` seconds of communication."""
        return overlapped_s * self.taken_share


class GemmWork(NamedTuple):
    """FLOPs, or seconds, of GEMMs in the forward and in the backward."""

    forward: float
    backward: float

    def times(self, factor: float) -> GemmWork:
        """Return both passes times ``factor``."""
        return GemmWork(self.forward * factor, self.backward * factor)


class AdjacentGemms(NamedTuple):
    """Seconds of the GEMMs before and after a redistribution.

    Attributes:
        consumers: the GEMMs that read the redistributed tensor.
        producer: the GEMM that computes it.
    """

    consumers: GemmWork
    producer: GemmWork
