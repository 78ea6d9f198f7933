"""Step time and peak memory of totals worked out by hand."""

from __future__ import annotations

from planner.ilp.quantities import BACKWARD, EXPOSED, FORWARD, PASSES, Lifetime, live, persistent, transient
from planner.ilp.step_cost import exposed_once_s, live_bytes, peak_bytes, phase_time_s, step_time_s


def test_time_of_hand_worked_totals() -> None:
    total = {
        FORWARD.compute: 2.5,
        FORWARD.slowdown: 0.5,
        FORWARD.blocking["a"]: 1.0,
        FORWARD.blocking["b"]: 0.5,
        FORWARD.prefetch["a"]: 2.0,  # 3 + 1.5 > 1 + 2: overlapped
        BACKWARD.compute: 1.0,
        BACKWARD.blocking["a"]: 0.5,
        BACKWARD.prefetch["a"]: 4.0,  # 1 + 0.5 < 0.5 + 4: the link is the bottleneck
        EXPOSED: 0.25,
    }
    assert phase_time_s(total, FORWARD) == 4.5
    assert step_time_s(total) == 4.5 + 4.5 + 0.25
    assert step_time_s({}) == 0.0


def test_communication_of_once_a_step_overlaps_one_micro_batch() -> None:
    total = {
        PASSES: 4.0,
        FORWARD.compute: 6.0,
        FORWARD.blocking["a"]: 2.0,
        FORWARD.prefetch["a"]: 4.0,
        FORWARD.prefetch["b"]: 2.0,
        # A micro-batch's forward takes (6 + 2) / 4 = 2, in which a carries (2 + 4) / 4 = 1.5 and b 0.5.
        FORWARD.once["a"]: 0.75,
        FORWARD.once["b"]: 1.5,
        BACKWARD.compute: 4.0,
        BACKWARD.once["b"]: 5.0,
    }
    assert phase_time_s(total, FORWARD) == 8.0
    assert exposed_once_s(total, FORWARD) == 0.25
    assert exposed_once_s(total | {FORWARD.once["b"]: 2.0}, FORWARD) == 0.5
    assert exposed_once_s(total | {FORWARD.once["a"]: 0.5}, FORWARD) == 0.0
    assert exposed_once_s(total, BACKWARD) == 4.0
    assert step_time_s(total) == 8.25 + 8.0
    # With one micro-batch it is as if it were prefetched.
    one = total | {PASSES: 1.0, FORWARD.once["a"]: 3.0}
    assert step_time_s(one) == max(8.0, 2.0 + 4.0 + 3.0) + max(4.0, 5.0)


def test_peak_of_hand_worked_totals() -> None:
    total = {
        persistent("a"): 10.0,
        persistent("b"): 5.0,
        transient(0): 3.0,
        transient(1): 4.0,
        live("0", "a"): 2.0,
        live("0", "b"): 1.0,
    }
    assert peak_bytes(total) == 10 + 5 + 4 + 2 + 1
    assert peak_bytes(total | {live("1", "a"): 6.0}) == 10 + 5 + 4 + 6
    assert peak_bytes({persistent("a"): 1.0}) == 1.0


def test_peak_of_hand_worked_lifetimes() -> None:
    lasting = Lifetime.of({live("0", "a"): 1, live("1", "a"): 3, live("1", "b"): 2, live("2", "a"): 0})
    total = {persistent("a"): 10.0, live("0", "a"): 12.0, live("1", "a"): 1.0, lasting: 2.0}
    assert live_bytes(total) == {"0": {"a": 14.0}, "1": {"a": 7.0, "b": 4.0}}
    assert peak_bytes(total) == 10 + 14
    assert peak_bytes(total | {lasting: 3.0}) == 10 + 1 + 3 * (3 + 2)
