"""A module that takes, hands on and returns dataclasses, as people write them: torch knows none of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Sample:
    """What `Dataclasses` takes."""

    x: Tensor
    weight: Tensor
    name: str


@dataclass(frozen=True, slots=True)
class Hidden:
    """What its parts hand on."""

    value: Tensor
    earlier: tuple[Tensor, ...] = ()


@dataclass
class Predicted:
    """What it returns; ``extra`` is no argument of the class."""

    hidden: Hidden
    loss: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict, init=False)


class Dataclasses(nn.Module):
    """Takes, hands on and returns dataclasses, of which torch knows none."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, hidden: Hidden) -> Hidden:
            return Hidden(self.down(F.gelu(self.up(hidden.value))), (*hidden.earlier, hidden.value))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.Part(), self.Part()

    def forward(self, sample: Sample) -> Predicted:
        hidden = self.second(self.first(Hidden(sample.x)))
        predicted = Predicted(hidden, (hidden.value * sample.weight).square().mean())
        predicted.extra["sum"] = sum(hidden.earlier)
        return predicted
