"""Modules that take, hand on and return objects: dataclasses, of which torch knows none, and classes it was told of."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree


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


class Output(OrderedDict[str, Tensor]):
    """A dict that is read by attribute, and that torch knows without its keys, as the outputs of diffusers."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


class Pair:
    """Two tensors, which torch knows without names."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: Output(zip(keys, values, strict=True)),
    serialized_type_name="support.Output",
)
pytree.register_pytree_node(
    Pair,
    lambda pair: ([pair.first, pair.second], None),
    lambda values, _: Pair(*values),
    serialized_type_name="support.Pair",
)


class ToldOf(nn.Module):
    """Hands on `Pair` and returns an `Output`."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, pair: Pair) -> Pair:
            return Pair(self.down(F.gelu(self.up(pair.first))), pair.second + pair.first)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.Part(), self.Part()

    def forward(self, x: Tensor) -> Output:
        pair = self.second(self.first(Pair(x, x)))
        output = Output(sample=pair.second)
        output["loss"] = (pair.first * pair.second).square().mean()
        return output
