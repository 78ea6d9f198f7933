"""`Units`: the modules that torch's ``fully_shard`` is called on for the FSDP groups of a plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from api.frameworks.expressed import FSDP_GROUPS, Row
from api.frameworks.pytorch.axes import AxisRoles, ParameterLayouts, by_name
from api.frameworks.pytorch.names import collapsed, names_of, tied_parameters
from planner.plan.job import BYTES_PER_ELEMENT
from planner.plan.sharding_plan import ShardingPlan

R = Replicate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One module, by FQN pattern, that is an FSDP group.

    Attributes:
        reshard_after_forward: whether parameters are gathered again in backward.
        is_lookup: whether it is an embedding, whose backward does not read the weight.
        gathers_once: whether parameters stay gathered for the whole step.
        reduces_once: whether gradients are reduced once a step, not in every micro-batch.
        all_reduces_once: whether they are all-reduced over replicas once a step.
    """

    pattern: str
    reshard_after_forward: bool = True
    is_lookup: bool = False
    gathers_once: bool = False
    reduces_once: bool = False
    all_reduces_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The units of a model, innermost modules first, and what they say of the plan's groups.

    Attributes:
        units: without the root, which is a unit of the parameters that are in no other.
        root_reduces_once: as for a unit.
        first_even_dim: whether FSDP shards the first dim that its ranks divide, not always the first dim.
        rows: for the user.
    """

    units: tuple[Unit, ...] = ()
    root_reduces_once: bool = False
    first_even_dim: bool = False
    rows: tuple[Row, ...] = ()


def fsdp_units(
    plan: ShardingPlan, module: nn.Module | None, layouts: Mapping[str, ParameterLayouts], roles: AxisRoles
) -> Units:
    """Return the units for ``plan``; none where no axis shards parameters.

    Args:
        plan: the plan.
        module: the model; None: not known, and FQN patterns stand for FQNs.
        layouts: layouts of its parameters.
        roles: roles of the mesh axes.
    """
    if not roles.shard:
        return Units()
    return _Grouping(plan, module, layouts, roles).units()


@dataclass(frozen=True, slots=True)
class _Grouping:
    plan: ShardingPlan
    module: nn.Module | None
    layouts: Mapping[str, ParameterLayouts]
    roles: AxisRoles

    def units(self) -> Units:
        groups = by_name(self.plan.fully_shard, self._modules())
        in_root = self._root_parameters()
        members: dict[str, list[str]] = {fqn: [] for fqn in groups}
        for name in self.layouts:
            around = [fqn for fqn in groups if name.startswith(f"{fqn}.") or fqn == ""]
            owner = max(around, key=len) if around else name.rpartition(".")[0]
            if around or (name not in in_root and owner):
                members.setdefault(owner, []).append(name)
        root = [name for name in self.layouts if not any(name in names for names in members.values())]
        units = self._collapsed({fqn: self._unit(fqn, names, fqn in groups) for fqn, names in members.items() if names})
        return Units(
            units=tuple(sorted(units, key=lambda unit: -unit.pattern.count("."))),
            root_reduces_once=any(map(self._reduces_once, root)),
            first_even_dim=any(map(self._dim, self.layouts)) and not self._other_dims(),
            rows=tuple(self._rows(groups, members, root)),
        )

    def _modules(self) -> list[str] | None:
        return None if self.module is None else [name for name, _ in self.module.named_modules()]

    def _root_parameters(self) -> set[str]:
        """Return the parameters that belong to the root's unit: tied ones, and those that another module reads."""
        tied = () if self.module is None else tied_parameters(self.module)
        names = None if self.module is None else self.layouts
        return {name for pair in tied for name in pair} | set(by_name(self.plan.read_above, names))

    def _unit(self, fqn: str, names: list[str], is_group: bool) -> Unit:
        part = None if self.module is None else self.module.get_submodule(fqn)
        keeps, keeps_for_step = (
            fqn in by_name(dict.fromkeys(keys), self._modules())
            for keys in (self.plan.keep_gathered, self.plan.keep_gathered_for_step)
        )
        return Unit(
            pattern=fqn,
            reshard_after_forward=not (is_group and (keeps or keeps_for_step)),
            is_lookup=isinstance(part, nn.Embedding),
            gathers_once=is_group and keeps_for_step,
            reduces_once=(is_group and keeps_for_step) or all(map(self._reduces_once, names)),
            all_reduces_once=bool(self.roles.replicate) and all(map(self._all_reduces_once, names)),
        )

    def _dim(self, name: str) -> int:
        placements = (self.layouts[name].stored[axis] for axis in self.roles.shard)
        return next((item.dim for item in placements if isinstance(item, Shard)), 0)

    def _other_dims(self) -> list[str]:
        """Return the parameters of which the plan shards another dim than the first that the ranks divide."""
        if self.module is None or self.roles.tensor is not None:
            return []
        ranks = math.prod(self.roles.sizes[axis] for axis in self.roles.shard)
        shapes = {name: item.shape for name, item in self.module.named_parameters(remove_duplicate=False)}
        even = {name: next((dim for dim, size in enumerate(shapes[name]) if size % ranks == 0), 0) for name in shapes}
        return [name for name in self.layouts if self._dim(name) != even[name]]

    def _reduces_once(self, name: str) -> bool:
        gradient = self.layouts[name].gradient
        return gradient is None or not any(isinstance(gradient[axis], Shard) for axis in self.roles.shard)

    def _all_reduces_once(self, name: str) -> bool:
        gradient = self.layouts[name].gradient
        return gradient is None or any(gradient[axis].is_partial() for axis in self.roles.replicate)

    def _collapsed(self, units: Mapping[str, Unit]) -> Iterator[Unit]:
        if self.module is None:
            yield from units.values()
            return
        options = {fqn: repr(_without_pattern(unit)) for fqn, unit in units.items()}
        by_options = {text: units[fqn] for fqn, text in options.items()}
        for pattern, text in collapsed(options, self._modules() or ()).items():
            yield _with_pattern(by_options[text], pattern)

    def _rows(
        self, groups: Mapping[str, tuple[str, ...]], members: Mapping[str, list[str]], root: list[str]
    ) -> Iterator[Row]:
        names = list(self.layouts)
        joined = [
            name
            for fqn, of_unit in members.items()
            if fqn in groups
            for name in of_unit
            if name.removeprefix(f"{fqn}.") not in groups[fqn]
        ]
        in_one_call = [n for fqn, of_unit in members.items() if fqn not in groups and len(of_unit) > 1 for n in of_unit]
        said = f"fully_shard on {self._text(members) or 'the root'}"
        if in_one_call:
            said += f"; parameters of one module are gathered in one call, not each: {names_of(in_one_call, names)}"
        yield Row(field=FSDP_GROUPS, outcome="expressed", detail=said)
        if joined:
            detail = f"gathered in one call with the rest of their module: {names_of(joined, names)}"
            yield Row(field=FSDP_GROUPS, outcome="approximated", detail=detail)
        if root:
            detail = (
                f"gathered once a forward by the root, and kept for the backward{self._size(root)}: "
                f"{names_of(root, names)}"
            )
            yield Row(field=FSDP_GROUPS, outcome="approximated", detail=detail)
        others = self._other_dims() if any(map(self._dim, names)) else []
        if others:
            detail = f"sharded on their first dim: {names_of(others, names)}"
            yield Row(field="parameters", outcome="approximated", detail=detail)
        whole = [n for n in names if all(self.layouts[n].stored[axis] == R for axis in self.roles.shard)]
        uneven = [name for name in whole if self._is_uneven(name)]
        for field, of_field in ((FSDP_GROUPS, uneven), ("parameters", [name for name in whole if name not in uneven])):
            if of_field:
                detail = f"sharded by FSDP, and replicated in the plan: {names_of(of_field, names)}"
                yield Row(field=field, outcome="approximated", detail=detail)

    def _is_uneven(self, name: str) -> bool:
        """Return whether a parameter is a vector that the ranks do not divide, so that plans have it whole."""
        if self.module is None:
            return False
        parameter = self.module.get_parameter(name)
        return parameter.dim() == 1 and parameter.numel() % math.prod(self.roles.sizes[a] for a in self.roles.shard) > 0

    def _size(self, names: list[str]) -> str:
        """Return the bytes that parameters take when they are gathered, as text; "" where the model is not known."""
        if self.module is None:
            return ""
        parameters = {self.module.get_parameter(name) for name in names}
        itemsize = BYTES_PER_ELEMENT[self.plan.job.dtype]
        return f" ({sum(parameter.numel() for parameter in parameters) * itemsize / 1e6:,.3g} MB)"

    def _text(self, fqns: Iterable[str]) -> str:
        return ", ".join(collapsed(dict.fromkeys(fqns, ""), self._modules() or fqns))


def _without_pattern(unit: Unit) -> Unit:
    return _with_pattern(unit, "")


def _with_pattern(unit: Unit, pattern: str) -> Unit:
    return dataclasses.replace(unit, pattern=pattern)
