"""What the uses of a parameter cost under every choice of how it rests: thousands of pairs, made of few parts.

A price is that of gathering, which knows the layouts at rest and in use, and that of reducing the gradient, which knows
where it comes from and where it goes. Each part is priced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cost_model.layouts.layout import Layout
from planner.ilp.quantities import Charge
from planner.ilp.shared_charges import sum_charges
from planner.pricing.parameter_costs import ParameterClassUse, ParameterPricer, StorageOption
from planner.pricing.port_layouts import PortLayouts
from planner.pricing.price import Price


class ParameterUsePrices:
    """Prices one use of parameters that are gathered by themselves, at each of ``ports``."""

    def __init__(self, pricer: ParameterPricer, use: ParameterClassUse, ports: Sequence[PortLayouts]) -> None:
        self._pricer = pricer
        self._use = use
        self._numbers: dict[Layout | None, int] = {}
        self._ports = [(port, self._number(port.layout), self._number(port.gradient)) for port in ports]
        self._known: dict[tuple[int, ...], Charge | None] = {}

    def charges(self, choice: StorageOption) -> Iterator[Charge | None]:
        """Yield what the pricer's `use` charges for ``choice`` at each port, None where nothing leads there."""
        pricer, use = self._pricer, self._use
        stored, accumulated = self._number(choice.stored), self._number(choice.accumulated)
        for port, layout, gradient in self._ports:
            gathering = self._once((stored, layout), pricer.gathering, use, choice.stored, port.layout)
            if gathering is None:
                yield None
                continue
            reducing = self._once((stored, accumulated, gradient), pricer.reducing, use, choice, port.gradient)
            yield None if reducing is None else sum_charges(gathering, reducing)

    def _number(self, layout: Layout | None) -> int:
        return self._numbers.setdefault(layout, len(self._numbers))

    def _once(self, key: tuple[int, ...], price: Callable[..., Price | None], *given: object) -> Charge | None:
        """Return the charge of a part: its ``key`` is of two numbers where it gathers, of three where it reduces."""
        if key not in self._known:
            found = price(*given)
            self._known[key] = None if found is None else found.charge
        return self._known[key]
