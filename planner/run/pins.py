"""Pins: placements that a person has fixed or forbidden, as restrictions of the search.

``lm_head.weight=S(0)@tp``                 the stored layout on ``tp`` is ``S(0)``
``model.layers.*.mlp.*.weight:used=R@dp``  the compute layout on ``dp`` is replicated
``model.embed_tokens.weight!=S(1)@tp``     the stored layout on ``tp`` is not ``S(1)``
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cost_model.layouts.layout import Layout, LayoutError, MeshSpec, parse_placement
from planner.errors import JobError
from planner.graph.op_graph import Value
from planner.liveness.parameter_classes import ParameterClass
from planner.plan.patterns import match_keys, unmatched
from planner.regions.regions import Region
from planner.run.baselines import Restriction, batch_only
from planner.strategies.enumerate import Strategy

_PIN = re.compile(r"(?P<pattern>[^:=!@]+?)(?P<used>:used)?(?P<sign>!?=)(?P<placement>[^@]+)@(?P<axis>[\w-]+)")
_ADVICE = (
    "Write PATTERN=PLACEMENT@AXIS, such as lm_head.weight=S(0)@tp; != forbids, PATTERN:used= is the compute layout."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One placement of some parameters on one mesh axis, required or forbidden.

    Attributes:
        text: the pin as written.
        pattern: FQN pattern of the parameters.
        placement: the placement that is required or forbidden.
        axis: name of the mesh axis.
        used: whether the pin is on the compute layout; otherwise it is on the stored layout.
        forbidden: whether the placement is forbidden; otherwise it is required.
    """

    text: str
    pattern: str
    placement: Placement
    axis: str
    used: bool
    forbidden: bool

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Return the pin that ``text`` stands for.

        Raises:
            JobError: it is not written as a pin.
        """
        match = _PIN.fullmatch(text.strip())
        if match is None:
            raise JobError(f"{text!r} is no pin.", what_to_do=_ADVICE, field="pins")
        try:
            placement = parse_placement(match["placement"].strip())
        except LayoutError as error:
            raise JobError(f"the pin {text!r}: {error}", what_to_do=_ADVICE, field="pins") from error
        if type(placement) not in (Replicate, Shard, _StridedShard):
            raise JobError(f"the pin {text!r} asks for partial sums.", what_to_do="Choose R or S(dim).", field="pins")
        return cls(
            text=text.strip(),
            pattern=match["pattern"].strip(),
            placement=placement,
            axis=match["axis"],
            used=match["used"] is not None,
            forbidden=match["sign"] == "!=",
        )

    def allows(self, layout: Layout, mesh: MeshSpec) -> bool:
        """Return whether a layout satisfies the pin. On an axis that the mesh does not have, tensors are replicated."""
        names = mesh.names
        placement = layout[names.index(self.axis)] if self.axis in names else Replicate()
        return (placement == self.placement) != self.forbidden

    def allows_replicated(self) -> bool:
        """Return whether a tensor that is replicated on the pin's axis satisfies the pin."""
        return (self.placement == Replicate()) != self.forbidden

    def contradicts(self, other: Pin) -> bool:
        """Return whether no placement satisfies both pins. Both are on stored or both on compute layouts."""
        if self.axis != other.axis or (self.forbidden and other.forbidden):
            return False
        return (self.placement == other.placement) == (self.forbidden or other.forbidden)


def _contradiction(one: str, other: str, parameter: str) -> JobError:
    return JobError(
        f"the pins {one!r} and {other!r} contradict each other: {parameter} cannot keep both.",
        what_to_do="Leave one of them out.",
        field="pins",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """All pins of a job.

    Attributes:
        pins: each pin with the FQNs of its parameters.
        data_axes: names of mesh axes that split only the batch: compute layouts are replicated on them.
    """

    pins: tuple[tuple[Pin, frozenset[str]], ...]
    data_axes: tuple[str, ...]

    @classmethod
    def parse(
        cls,
        texts: Iterable[str],
        data_axes: Iterable[str],
        names: Sequence[str],
        meshes: Sequence[MeshSpec],
    ) -> Pins:
        """Return the pins of a job.

        Args:
            texts: the pins as written.
            data_axes: names of mesh axes that split only the batch.
            names: FQNs of the model's parameters.
            meshes: the meshes that are searched.

        Raises:
            JobError: a text is no pin, or an axis is in no mesh.
            UnmatchedKeyError: a pin matches no parameter.
        """
        pins = [Pin.parse(text) for text in texts]
        axes = {axis for mesh in meshes for axis in mesh.names}
        for axis in [*(pin.axis for pin in pins), *data_axes]:
            if axis not in axes:
                raise JobError(
                    f"there is no mesh axis {axis!r}.",
                    what_to_do=f"Choose among {', '.join(sorted(axes))}.",
                    field="pins",
                )
        matched = match_keys([pin.pattern for pin in pins], names)
        for pin in pins:
            if not matched[pin.pattern]:
                raise unmatched(pin.pattern, names, field="pins", what="parameter")
        return cls(
            pins=tuple((pin, frozenset(matched[pin.pattern])) for pin in pins),
            data_axes=tuple(dict.fromkeys(data_axes)),
        )

    def __bool__(self) -> bool:
        return bool(self.pins or self.data_axes)

    def __str__(self) -> str:
        return ", ".join([pin.text for pin, _ in self.pins] + [f"{axis} for data alone" for axis in self.data_axes])

    def check(self, classes: Sequence[ParameterClass], names_of: dict[str, tuple[str, ...]]) -> None:
        """Check that no two pins contradict each other, and that every pin is on all or none of a class's parameters.

        Args:
            classes: the parameter classes of the model.
            names_of: parameter value -> its FQNs.

        Raises:
            JobError: a check fails. It names both pins, or a parameter of the class with the pin and one without.
        """
        self._check_contradictions([names_of[value] for parameter in classes for value in parameter.values])
        for parameter in classes:
            for pin, names in self.pins:
                inside = [any(name in names for name in names_of[value]) for value in parameter.values]
                if any(inside) and not all(inside):
                    has, lacks = (names_of[parameter.values[inside.index(flag)]][0] for flag in (True, False))
                    raise JobError(
                        f"the pin {pin.text!r} is for {has} and not for {lacks}, but equal parameters of equal blocks "
                        "share their layouts.",
                        what_to_do="Pin all of them, with * for the block's number.",
                        field="pins",
                    )

    def _check_contradictions(self, tensors: Iterable[tuple[str, ...]]) -> None:
        """Check that every tensor has a layout that satisfies all its pins and the data axes.

        Args:
            tensors: the FQNs of each tensor, several if it is tied.
        """
        for pin, names in self.pins:
            if pin.axis in self.data_axes and pin.used and not pin.allows_replicated():
                raise _contradiction(pin.text, f"{pin.axis} for data alone", min(names))
        for tied in tensors:
            # A tied parameter has one stored layout for all its FQNs, and one compute layout for each FQN.
            for used, group in ((False, tied), *((True, (name,)) for name in tied)):
                own = [pin for pin, names in self.pins if pin.used is used and not names.isdisjoint(group)]
                for a, b in itertools.combinations(own, 2):
                    if a.contradicts(b):
                        raise _contradiction(a.text, b.text, " = ".join(group))

    def on(self, mesh: MeshSpec) -> Restriction | None:
        """Return the choices that the pins allow on a mesh; None: all choices."""
        return self.restrict(mesh, None)

    def restrict(self, mesh: MeshSpec, other: Restriction | None) -> Restriction | None:
        """Return the choices that both ``other`` and the pins allow on ``mesh``; None: all choices."""
        if not self:
            return other
        axes = [mesh.names.index(axis) for axis in self.data_axes if axis in mesh.names]

        def accepts(region: Region, strategy: Strategy) -> bool:
            if other is not None and not other.accepts(region, strategy):
                return False
            if axes and not batch_only(region, strategy, axes, mesh):
                return False
            return all(
                pin.allows(layout, mesh)
                for slot, layout in zip(region.slots, strategy.forward, strict=True)
                if slot.parameter is not None and layout is not None
                for pin, names in self.pins
                if pin.used and slot.parameter in names
            )

        def accepts_stored(value: Value, names: Sequence[str], layout: Layout) -> bool:
            if other is not None and not other.accepts_stored(value, names, layout):
                return False
            return all(
                pin.allows(layout, mesh)
                for pin, pinned in self.pins
                if not pin.used and any(name in pinned for name in names)
            )

        return Restriction(accepts=accepts, accepts_stored=accepts_stored)


NO_PINS = Pins(pins=(), data_axes=())
