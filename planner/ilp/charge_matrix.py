"""The amounts that variables of a program add to quantities, as a sparse matrix of quantities by variables."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from planner.ilp.linear_program import Expression
from planner.ilp.quantities import Charge, Quantity


class ChargeMatrix:
    """Row i holds the coefficients of quantity i: ``amounts[i] @ variables + constant[i]`` is its total.

    It is filled by `charge`, sorted once by `compress`, and read by `total` and `largest` from then on.

    Attributes:
        constant: the part of each quantity that depends on no variable.
        quantities: every quantity in ``constant`` or in a charge, sorted by name.
    """

    def __init__(self, constant: Charge) -> None:
        self.constant = constant
        self.quantities: list[Quantity] = []
        self._charged: list[Quantity] = []
        self._amounts = array("d")
        self._variables: list[int] = []
        self._lengths: list[int] = []

    def charge(self, variable: int, charge: Charge) -> None:
        """Add ``charge`` to the amounts of a variable."""
        self._charged.extend(charge)
        self._amounts.extend(charge.values())
        self._variables.append(variable)
        self._lengths.append(len(charge))

    def compress(self, columns: int) -> None:
        """Sort the amounts by quantity, in a program of ``columns`` variables."""
        self.quantities = sorted({*self.constant, *self._charged})
        number = {quantity: i for i, quantity in enumerate(self.quantities)}
        row = np.fromiter(map(number.__getitem__, self._charged), np.int64, len(self._charged))
        variable = np.repeat(np.asarray(self._variables, np.int64), self._lengths)
        amount = np.array(self._amounts, np.float64)
        largest = np.zeros(len(self.quantities))
        np.maximum.at(largest, row, amount)
        # One entry per quantity and variable, sorted by both: repeated charges are summed.
        order = np.lexsort((_small(variable, columns), _small(row, len(self.quantities))))
        keys = (row * columns + variable)[order]
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        keys, self._summed = keys[first], np.add.reduceat(amount[order], first) if len(first) else amount
        self._indices = (keys % columns).astype(np.int32) if columns else keys.astype(np.int32)
        starts = np.searchsorted(keys, np.arange(len(self.quantities) + 1) * columns)
        self._span = {quantity: slice(starts[i], starts[i + 1]) for i, quantity in enumerate(self.quantities)}
        self._columns = columns
        self._largest = {
            quantity: max(float(amount), self.constant.get(quantity, 0.0))
            for quantity, amount in zip(self.quantities, largest, strict=True)
        }

    def largest(self, quantities: Iterable[Quantity]) -> float:
        """Return the largest single amount of any of ``quantities``."""
        return max((self._largest.get(quantity, 0.0) for quantity in quantities), default=0.0)

    def total(self, quantities: Iterable[Quantity], scale: float) -> Expression:
        """Return the sum of quantities, times ``scale``, as an expression of the variables."""
        return self.weighted_total(dict.fromkeys(quantities, scale))

    def weighted_total(self, scales: Mapping[Quantity, float]) -> Expression:
        """Return the sum of quantities, each times its scale, as an expression of the variables."""
        spans = [(self._span[quantity], scale) for quantity, scale in scales.items() if quantity in self._span]
        indices = np.concatenate([np.empty(0, np.int32), *(self._indices[span] for span, _ in spans)])
        values = np.concatenate([np.empty(0), *(self._summed[span] * scale for span, scale in spans)])
        if len(spans) > 1:
            dense = np.bincount(indices, weights=values, minlength=self._columns)
            indices = np.flatnonzero(dense).astype(np.int32)
            values = dense[indices]
        constant = sum(self.constant.get(quantity, 0.0) * scale for quantity, scale in scales.items())
        return Expression(indices=indices, values=values, constant=constant)


def _small(numbers: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64] | npt.NDArray[np.uint16]:
    """Return ``numbers``, all below ``count``, in 16 bits where they fit: numpy sorts 16 bits five times as fast."""
    return numbers.astype(np.uint16) if count <= 2**16 else numbers
