"""What the uses of a parameter cost under every choice of how it rests: thousands of pairs, made of few parts.

A price is that of gathering, which knows the layouts at rest and in use, and that of reducing the gradient, which knows
where it comes from and where it goes. Each part is priced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cost_model.layout import Layout
from planner.communication import Port, Price
from planner.parameter_costs import ParameterPricer, ParameterUse, StoredChoice
from planner.problem import Charge

_Key = tuple[int, ...]


class UsePrices:
    """Prices one use of parameters that are gathered by themselves, at each of ``ports``."""

    def __init__(self, pricer: ParameterPricer, use: ParameterUse, ports: Sequence[Port]) -> None:
        self._pricer = pricer
        self._use = use
        self._numbers: dict[Layout | None, int] = {}
        self._ports = [(port, self._number(port.layout), self._number(port.gradient)) for port in ports]
        self._gathering: dict[_Key, Charge | None] = {}
        self._reducing: dict[_Key, Charge | None] = {}

    def charges(self, choice: StoredChoice) -> Iterator[Charge | None]:
        """Yield what the pricer's `use` charges for ``choice`` at each port, None where nothing leads there."""
        pricer, use = self._pricer, self._use
        stored, accumulated = self._number(choice.stored), self._number(choice.accumulated)
        for port, layout, gradient in self._ports:
            gathering = _known(
                self._gathering,
                (stored, layout),
                lambda port=port: pricer.gathering(use, choice.stored, port.layout),  # type: ignore[misc]
            )
            if gathering is None:
                yield None
                continue
            reducing = _known(
                self._reducing,
                (stored, accumulated, gradient),
                lambda port=port: pricer.reducing(use, choice, port.gradient),  # type: ignore[misc]
            )
            yield None if reducing is None else _sum(gathering, reducing)

    def _number(self, layout: Layout | None) -> int:
        return self._numbers.setdefault(layout, len(self._numbers))


def _known(known: dict[_Key, Charge | None], key: _Key, price: Callable[[], Price | None]) -> Charge | None:
    if key not in known:
        found = price()
        known[key] = None if found is None else found.charge
    return known[key]


def _sum(a: Charge, b: Charge) -> Charge:
    if not a or not b:
        return a or b
    found = dict(a)
    for name, amount in b.items():
        found[name] = found.get(name, 0.0) + amount
    return found
