"""Prices of one use of a parameter class under every storage option and port, with each part priced once.

There are thousands of (option, port) pairs. The price of a pair is a sum of two parts. The price of the all-gather
depends on the stored and the compute layout. The price of the reduction depends on the gradient's layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cost_model.layouts.layout import Layout
from planner.ilp.quantities import Charge
from planner.ilp.shared_charges import sum_charges
from planner.pricing.parameter_costs import ParameterClassUse, ParameterPricer
from planner.pricing.port_layouts import PortLayouts
from planner.pricing.price import Price
from planner.pricing.storage_options import StorageOption


class ParameterUsePrices:
    """Prices of one use of parameters in no FSDP group, at each of ``ports``."""

    def __init__(self, pricer: ParameterPricer, use: ParameterClassUse, ports: Sequence[PortLayouts]) -> None:
        self._pricer = pricer
        self._use = use
        self._numbers: dict[Layout | None, int] = {}
        self._ports = [(port, self._number(port.layout), self._number(port.gradient)) for port in ports]
        self._charges: dict[tuple[int, ...], Charge | None] = {}

    def charges(self, option: StorageOption) -> Iterator[Charge | None]:
        """Yield the charge of `ParameterPricer.use` at each port; None if there is no price."""
        pricer, use = self._pricer, self._use
        stored, accumulated = self._number(option.stored), self._number(option.accumulated)
        for port, layout, gradient in self._ports:
            gather = self._once((stored, layout), pricer.gather, use, option.stored, port.layout)
            if gather is None:
                yield None
                continue
            reduce = self._once((stored, accumulated, gradient), pricer.reduce, use, option, port.gradient)
            yield None if reduce is None else sum_charges(gather, reduce)

    def _number(self, layout: Layout | None) -> int:
        return self._numbers.setdefault(layout, len(self._numbers))

    def _once(self, key: tuple[int, ...], price_part: Callable[..., Price | None], *args: object) -> Charge | None:
        """Return the charge of one part; a key of an all-gather has two numbers, of a reduction three."""
        if key not in self._charges:
            price = price_part(*args)
            self._charges[key] = None if price is None else price.charge
        return self._charges[key]
