"""Equal quantities are one object, also after a copy, and sort alike in every process."""

from __future__ import annotations

import copy
import pickle

from planner.ilp.quantities import BACKWARD, FORWARD, NEVER_ALIVE, Lifetime, live, persistent, transient


def test_equal_quantities_are_one_object() -> None:
    assert persistent("parameters") is persistent("parameters")
    assert live("3", "gradients") is live("3", "gradients")
    assert FORWARD.blocking["inside-node"] is FORWARD.blocking["inside-node"]
    different = {
        FORWARD.blocking["a"],
        FORWARD.prefetch["a"],
        BACKWARD.blocking["a"],
        FORWARD.blocking["b"],
        transient(0),
    }
    assert len({quantity.name for quantity in different}) == len(different) == 5


def test_copies_are_the_same_object() -> None:
    lifetime = Lifetime.of({live("0", "a"): 1, live("1", "a"): 2})
    charge = {FORWARD.compute: 1.0, BACKWARD.once["a"]: 2.0, persistent("a"): 3.0, live("0", "a"): 4.0, lifetime: 5.0}
    assert pickle.loads(pickle.dumps(charge)) == charge  # noqa: S301 (it is ours)
    assert copy.deepcopy(charge) == charge


def test_quantities_sort_by_name() -> None:
    unsorted = [transient(10), transient(2), persistent("b"), persistent("a"), live("1", "a")]
    assert sorted(unsorted) == [live("1", "a"), persistent("a"), persistent("b"), transient(10), transient(2)]


def test_lifetimes_with_equal_counts_are_one_quantity() -> None:
    counts = {live("0", "a"): 1, live("1", "a"): 2}
    lifetime = Lifetime.of(counts)
    assert lifetime is Lifetime.of(dict(reversed(counts.items())) | {live("2", "a"): 0})
    assert lifetime is not Lifetime.of(counts | {live("1", "a"): 3})
    assert lifetime.without(live("1", "a")) is Lifetime.of({live("0", "a"): 1})
    assert copy.deepcopy(lifetime).counts == counts
    assert lifetime.charge(5.0) == {lifetime: 5.0}
    assert lifetime.charge(0.0) == NEVER_ALIVE.charge(5.0) == {}
