"""The changes of a launch that help most, each in the framework's own flags, and the best launch of all.

A change is one decision (a degree with the data-parallel ranks that follow from it, a micro-batch, a checkpointing
mode, ...) or two of them together. The global batch stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from api.frameworks.launch import FIELDS, Framework, Launch
from api.frameworks.pricing import LaunchPricer
from api.requests.price_configuration import PricedConfiguration
from cost_model.configuration.parallelism import Checkpointing, Schedule
from planner.plan.job_spec import spec_fields

LEAST_GAIN = 0.01
"""Fraction of the step time that a change has to give to be shown; two decisions give this much more than one."""

MOST_CHANGES = 3

HEADROOM: float = next(item.default for item in spec_fields() if item.name == "headroom")
"""Fraction of a device's memory that a proposed launch leaves free, as plans do."""

_ROUNDS = 6
"""Most times that the best launch is sought around the best that is known."""

_DERIVED = ("replicate", "shard", "batch")
"""Fields that follow from other decisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Another launch of the same framework.

    Attributes:
        texts: what differs, as the framework says it.
        gain: fraction of the step time that it saves; None where the launch that it changes does not fit.
    """

    launch: Launch
    texts: tuple[str, ...]
    priced: PricedConfiguration
    gain: float | None


def helpful_changes(pricer: LaunchPricer, launch: Launch, priced: PricedConfiguration) -> tuple[Change, ...]:
    """Return the smallest changes that help most: at most `MOST_CHANGES`, those that save most a decision first.

    Where ``launch`` does not fit, they are those that do: of the fewest decisions, and then the fastest.
    """
    step_s = priced.time.total_s if priced.fits else math.inf
    found: list[tuple[frozenset[str], Change]] = []
    best_of_one = step_s
    for decisions in (1, 2):
        around = _around(pricer, launch, decisions)
        # Of the launches that make the same decisions otherwise, the fastest.
        fastest: dict[frozenset[str], tuple[Launch, PricedConfiguration]] = {}
        for other, price in around.items():
            key = decisions_in(launch, other)
            if key not in fastest or price.time.total_s < fastest[key][1].time.total_s:
                fastest[key] = other, price
        for key, (other, price) in fastest.items():
            if price.time.total_s < (1 - LEAST_GAIN) * (step_s if decisions == 1 else best_of_one):
                found.append((key, _change(pricer.framework, launch, other, price, priced)))
        best_of_one = min([best_of_one, *(change.priced.time.total_s for _, change in found)])

    def order(item: tuple[frozenset[str], Change]) -> tuple[float, float]:
        decisions, change = len(item[0]), item[1]
        seconds = change.priced.time.total_s
        return (decisions, seconds) if change.gain is None else (-change.gain / decisions, seconds)

    return tuple(_unlike(sorted(found, key=order)))


def best_launch(pricer: LaunchPricer, launch: Launch, priced: PricedConfiguration) -> Change | None:
    """Return the fastest launch that fits and that a climb from ``launch`` finds; None: it is ``launch`` itself."""
    best, best_price = launch, priced
    for _ in range(_ROUNDS):
        around = _around(pricer, best, 2)
        if not around:
            break
        found = min(around, key=lambda other: around[other].time.total_s)
        price = around[found]
        if best_price.fits and price.time.total_s >= best_price.time.total_s * (1 - 1e-6):
            break
        best, best_price = found, price
    best, best_price = _with_fewest_decisions(pricer, launch, best, best_price)
    return None if best == launch else _change(pricer.framework, launch, best, best_price, priced)


def _with_fewest_decisions(
    pricer: LaunchPricer, launch: Launch, best: Launch, price: PricedConfiguration
) -> tuple[Launch, PricedConfiguration]:
    """Return ``best`` without the decisions that save nothing over ``launch``."""
    for name in sorted(decisions_in(launch, best)):
        for other in _with(pricer, best, name, getattr(launch, name)):
            found = pricer.price(other) if pricer.is_legal(other) else None
            if found is not None and _leaves_headroom(found) and found.time.total_s <= price.time.total_s * (1 + 1e-6):
                best, price = other, found
    return best, price


def largest_micro_batch(pricer: LaunchPricer, launch: Launch) -> int | None:
    """Return the largest micro-batch that divides the batch of a rank and fits, all else equal; None: none does."""
    per_rank = launch.global_batch // max(launch.data, 1)
    for size in _divisors(per_rank)[::-1]:
        price = pricer.price(dataclasses.replace(launch, micro_batch=size, batch=launch.global_batch))
        if price is not None and price.fits:
            return size
    return None


def decisions_in(before: Launch, after: Launch) -> frozenset[str]:
    """Return the names of the fields that were decided otherwise; those that follow from others only if alone."""
    differing = frozenset(name for name in FIELDS if getattr(before, name) != getattr(after, name))
    return differing - frozenset(_DERIVED) or differing


def _change(
    framework: Framework, before: Launch, after: Launch, price: PricedConfiguration, priced: PricedConfiguration
) -> Change:
    gain = 1 - price.time.total_s / priced.time.total_s if priced.fits else None
    return Change(launch=after, texts=framework.changes(before, after), priced=price, gain=gain)


def _unlike(found: list[tuple[frozenset[str], Change]]) -> Iterator[Change]:
    """Yield the first changes; one that only adds a decision to a better one is left out."""
    kept: list[frozenset[str]] = []
    for decisions, change in found:
        if len(kept) < MOST_CHANGES and not any(decisions >= each for each in kept):
            kept.append(decisions)
            yield change


def _around(pricer: LaunchPricer, launch: Launch, decisions: int) -> dict[Launch, PricedConfiguration]:
    """Return the legal launches that fit and differ from ``launch`` in some decisions, with their prices."""
    near = {launch: None}  # a set in the order in which it is filled, so that of equal launches the same one is found
    for _ in range(decisions):
        near |= {other: None for each in tuple(near) for other in _variants(pricer, each)}
    del near[launch]
    result: dict[Launch, PricedConfiguration] = {}
    for other in near:
        if not pricer.is_legal(other) or not pricer.framework.can_write(other):
            continue
        price = pricer.price(other)
        if price is not None and _leaves_headroom(price):
            result[other] = price
    return result


def _variants(pricer: LaunchPricer, launch: Launch) -> Iterator[Launch]:
    """Yield the launches that differ from ``launch`` in one decision that the framework can say."""
    framework, says = pricer.framework, pricer.framework.says
    for name, values in _choices(pricer, launch).items():
        for value in values:
            if name in says and value != getattr(launch, name):
                yield from (other for other in _with(pricer, launch, name, value) if framework.can_say(other, name))
    if "shard" in says and "replicate" in says:
        for shard in _divisors(launch.data):
            if shard != launch.shard and launch.zero:
                yield dataclasses.replace(launch, shard=shard, replicate=launch.data // shard)


def _choices(pricer: LaunchPricer, launch: Launch) -> dict[str, tuple[Any, ...]]:
    """Return field of `Launch` -> the values to try."""
    devices = pricer.cluster.size
    spec = pricer.spec
    degrees = _divisors(devices)
    per_rank = launch.global_batch // max(launch.data, 1)
    return {
        "tensor": tuple(degree for degree in degrees if degree <= pricer.cluster.devices_per_node),
        "pipeline": tuple(degree for degree in degrees if degree <= spec.layers),
        "context": degrees if pricer.seq >= 2 * devices else (),
        "expert": degrees if spec.experts is not None else (),
        "virtual_stages": (1, 2, 4) if launch.pipeline > 1 else (),
        "schedule": get_args(Schedule)[:1] if launch.pipeline > 1 else (),
        "sequence_parallel": (True,) if launch.tensor > 1 else (),
        "micro_batch": _divisors(per_rank),
        "checkpointing": get_args(Checkpointing),
        "zero": (0, 1, 2, 3) if launch.data * launch.context > 1 else (),
        "compiled": (True,),
        "reshard_after_forward": (True, False) if launch.zero == 3 and launch.pipeline == 1 else (),
    }


def _with(pricer: LaunchPricer, launch: Launch, name: str, value: Any) -> Iterator[Launch]:
    """Yield ``launch`` with a decision, and with the data-parallel ranks and the micro-batch that follow from it."""
    changed = dataclasses.replace(launch, **{name: value}, batch=launch.global_batch)
    if name == "pipeline" and value == 1:
        changed = dataclasses.replace(changed, virtual_stages=1)
    if name == "tensor" and launch.expert_tensor == launch.tensor:
        changed = dataclasses.replace(changed, expert_tensor=value)
    others = changed.tensor * changed.pipeline * changed.context
    if pricer.cluster.size % others:
        return
    data = pricer.cluster.size // others
    replicate = math.gcd(launch.replicate if launch.zero else 1, data) if changed.zero else data
    changed = dataclasses.replace(changed, replicate=replicate, shard=data // replicate)
    per_rank = changed.global_batch // data
    if per_rank and changed.global_batch % data == 0 and per_rank % changed.micro_batch:
        smaller = max(size for size in _divisors(per_rank) if size <= changed.micro_batch)
        changed = dataclasses.replace(changed, micro_batch=smaller)
    yield changed


def _leaves_headroom(price: PricedConfiguration) -> bool:
    return price.memory.device <= (1 - HEADROOM) * price.cluster.memory_bytes


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)
