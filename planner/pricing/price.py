"""`Price`: the seconds and bytes that one decision adds to the quantities of a step, and its collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cost_model.hardware.collective_kinds import CollectiveKind
from planner.ilp.quantities import Charge, Quantity
from planner.plan.estimate import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Equal calls of one collective in a step.

    Attributes:
        axis: name of the mesh axis; names joined by commas where several axes act as one.
        nbytes: bytes of the full buffer of one call.
        count: calls per step. In a pipeline stage, idle time counts as additional micro-batches
            (`planner.pricing.run_spec.Run.passes`), so the number may be fractional.
        time_s: seconds of one call.
    """

    kind: CollectiveKind
    axis: str
    phase: Phase
    nbytes: int
    count: float
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Seconds and bytes that one decision adds to a step.

    Attributes:
        charge: quantity -> seconds or bytes.
        collectives: the collectives that the charge pays for.
    """

    charge: Charge = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()


FREE = Price()


def add_prices(prices: Sequence[Price]) -> Price:
    """Return the sum of ``prices``."""
    if len(prices) == 1:
        return prices[0]
    charge: dict[Quantity, float] = defaultdict(float)
    collectives: list[Collective] = []
    for price in prices:
        for name, amount in price.charge.items():
            charge[name] += amount
        collectives += price.collectives
    return Price(charge=charge, collectives=tuple(collectives))
