"""`RunCost`: a training run of a number of tokens, whose days and price are asked for beside a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """A training run that is to be priced.

    Attributes:
        tokens: tokens of the whole run.
        price: price of a device for an hour, in any currency; None: only the days are of interest.
    """

    tokens: float
    price: float | None = None

    @classmethod
    def of(cls, tokens: float | None, price: float | None) -> RunCost | None:
        """Return the run that ``--tokens`` and ``--price`` describe; None where neither is given.

        Raises:
            JobError: a number is not above 0, or a price has no tokens.
        """
        for name, value in (("tokens", tokens), ("price", price)):
            if value is not None and not 0 < value < math.inf:
                raise JobError(f"--{name} is {value}.", what_to_do="Give a number above 0.", field=name)
        if tokens is None and price is not None:
            advice = "Add the tokens of the whole run, such as --tokens 1e12."
            raise JobError("--price is for a run of --tokens.", what_to_do=advice, field="price")
        return None if tokens is None else cls(tokens=tokens, price=price)
