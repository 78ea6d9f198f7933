"""A mixed-integer linear program as arrays: `planner.ilp.formulation` builds it and `planner.ilp.backends` solves it.

minimise cost . x + offset   with   lower <= x <= upper,   row_lower <= A x <= row_upper,   some x integral
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int32]


@dataclass(slots=True, kw_only=True)
class Expression:
    """A linear expression: the sum of ``values[i] * x[indices[i]]``, plus ``constant``. No index occurs twice."""

    indices: Indices
    values: Floats
    constant: float = 0.0

    def minus(self, variable: int, times: float = 1.0) -> Expression:
        """Return the expression minus ``times * x[variable]``; the expression must not contain ``variable``."""
        return Expression(
            indices=np.append(self.indices, np.int32(variable)),
            values=np.append(self.values, -times),
            constant=self.constant,
        )


@dataclass(slots=True)
class LinearProgram:
    """The program, built column by column and row by row.

    Attributes:
        cap_row: index of the row that caps memory; None: no cap.
    """

    lower: array[float] = field(default_factory=lambda: array("d"))
    upper: array[float] = field(default_factory=lambda: array("d"))
    integer: array[int] = field(default_factory=lambda: array("b"))
    row_lower: array[float] = field(default_factory=lambda: array("d"))
    row_upper: array[float] = field(default_factory=lambda: array("d"))
    row_start: array[int] = field(default_factory=lambda: array("i", [0]))
    objective: Expression = field(
        default_factory=lambda: Expression(indices=np.empty(0, np.int32), values=np.empty(0, np.float64))
    )
    cap_row: int | None = None
    _indices: array[int] = field(default_factory=lambda: array("i"))
    _values: array[float] = field(default_factory=lambda: array("d"))

    @property
    def columns(self) -> int:
        """The number of variables."""
        return len(self.lower)

    @property
    def rows(self) -> int:
        """The number of constraints."""
        return len(self.row_lower)

    def variable(self, *, binary: bool = False) -> int:
        """Add a variable, 0 or 1 if ``binary`` and otherwise any number from 0 up. Return its index."""
        self.lower.append(0.0)
        self.upper.append(1.0 if binary else math.inf)
        self.integer.append(binary)
        return len(self.lower) - 1

    def row(
        self,
        indices: Sequence[int] | Indices,
        values: Sequence[float] | Floats,
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
    ) -> None:
        """Add the constraint that the sum of ``values[i] * x[indices[i]]`` is within bounds. No index occurs twice."""
        if isinstance(indices, np.ndarray):
            self._indices.frombytes(indices.astype(np.int32, copy=False).tobytes())
        else:
            self._indices.extend(indices)
        if isinstance(values, np.ndarray):
            self._values.frombytes(values.astype(np.float64, copy=False).tobytes())
        else:
            self._values.extend(values)
        self.row_start.append(self.row_start[-1] + len(indices))
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    def constrain_below(self, expression: Expression, limit: float) -> None:
        """Add the constraint that ``expression`` is at most ``limit``."""
        self.row(expression.indices, expression.values, upper=limit - expression.constant)

    def matrix(self) -> tuple[Indices, Indices, Floats]:
        """Return the rows as compressed sparse rows: starts, column indices, values."""
        return (
            np.array(self.row_start, np.int32),
            np.array(self._indices, np.int32),
            np.array(self._values, np.float64),
        )

    def bounds(self) -> tuple[Floats, Floats]:
        """Return the lower and the upper bound of each variable."""
        return np.array(self.lower, np.float64), np.array(self.upper, np.float64)

    def row_bounds(self) -> tuple[Floats, Floats]:
        """Return the lower and the upper bound of each row."""
        return np.array(self.row_lower, np.float64), np.array(self.row_upper, np.float64)

    def is_whole(self) -> npt.NDArray[np.bool_]:
        """Return, by variable, whether it has to be integral."""
        return np.array(self.integer, np.bool_)

    def fixed(self, values: Mapping[int, float]) -> LinearProgram:
        """Return the program with some variables fixed; ``values`` maps a variable to its value."""
        lower, upper = self.lower[:], self.upper[:]
        for variable, value in values.items():
            lower[variable] = upper[variable] = value
        return dataclasses.replace(self, lower=lower, upper=upper)

    def possible(self, columns: npt.NDArray[np.bool_]) -> Indices:
        """Return the variables in ``columns``, a mask, that can be above 0 if all other variables are 0.

        No variable of the program is negative. A row with both bounds 0 says that two sums are equal. If no variable of
        one sum is left, the variables of the other sum are 0 as well. This is repeated until nothing changes.
        """
        starts, indices, values = self.matrix()
        row_lower, row_upper = self.row_bounds()
        balanced = (row_lower == 0.0) & (row_upper == 0.0)
        left = columns.copy()
        within = np.flatnonzero(np.repeat(balanced, np.diff(starts)) & left[indices])
        rows = (np.searchsorted(starts, within, side="right") - 1).astype(np.int32)
        column, side = indices[within], 2 * rows + (values[within] > 0)
        while True:
            count = np.bincount(side, minlength=2 * self.rows)
            alone = count[side ^ 1] == 0
            if not alone.any():
                return np.flatnonzero(left).astype(np.int32)
            left[column[alone]] = False
            is_left = left[column]
            column, side = column[is_left], side[is_left]

    def part(self, columns: Indices) -> LinearProgram:
        """Return the program with only the variables ``columns``, in their order. All other variables are 0."""
        starts, indices, values = self.matrix()
        new = np.full(self.columns, -1, np.int32)
        new[columns] = np.arange(len(columns), dtype=np.int32)
        renumbered = new[indices]
        left = renumbered >= 0
        lengths = np.diff(np.concatenate(([0], np.cumsum(left)))[starts])
        lower, upper = self.row_bounds()
        rows = np.flatnonzero((lengths > 0) | (lower > 0) | (upper < 0))
        cap_row = None if self.cap_row is None or self.cap_row not in rows else int(np.sum(rows < self.cap_row))
        least, largest = self.bounds()
        return LinearProgram(
            lower=array("d", least[columns].tobytes()),
            upper=array("d", largest[columns].tobytes()),
            integer=array("b", self.is_whole()[columns].tobytes()),
            row_lower=array("d", lower[rows].tobytes()),
            row_upper=array("d", upper[rows].tobytes()),
            row_start=array("i", [0, *np.cumsum(lengths[rows]).tolist()]),
            objective=Expression(
                indices=np.arange(len(columns), dtype=np.int32),
                values=self.cost()[columns],
                constant=self.objective.constant,
            ),
            cap_row=cap_row,
            _indices=array("i", renumbered[left].tobytes()),
            _values=array("d", values[left].tobytes()),
        )

    def cost(self) -> Floats:
        """Return, by variable, its coefficient in the objective."""
        cost = np.zeros(self.columns)
        cost[self.objective.indices] = self.objective.values
        return cost


Status = Literal["optimal", "limit", "infeasible", "cutoff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A solver's answer.

    Attributes:
        status: "limit": a limit came first, with or without an incumbent. "cutoff": no solution is below the cutoff,
            which the solver proved before it had the optimum.
        values: values of the variables; None: no solution.
        objective: objective of ``values``, offset included.
        bound: lower bound on the objective of every solution.
        reduced_costs: reduced costs of the variables; None: the answer is not that of a linear relaxation.
        root: objective of the linear relaxation of the whole program; NaN where it was not solved.
        excess: by how much ``values`` exceed the memory cap, as a fraction of the cap. It can be above 0 only in an
            answer of `planner.ilp.backends.Relaxations`.
    """

    status: Status
    values: Floats | None = None
    objective: float = math.nan
    bound: float = -math.inf
    reduced_costs: Floats | None = None
    root: float = math.nan
    excess: float = 0.0
