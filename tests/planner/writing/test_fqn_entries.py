"""Keys of a plan that stand for many names."""

from __future__ import annotations

from planner.plan.patterns import match_keys
from planner.writing.fqn_entries import fold_names


def expanded(folded: dict[str, str], names: list[str]) -> dict[str, list[str]]:
    """Return name -> the entries of all keys that match it."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for key, matched in match_keys(folded, names).items():
        for name in matched:
            found[name].append(folded[key])
    return found


def test_a_pattern_that_matches_a_word_with_another_entry_is_not_used() -> None:
    entries = {"0.body.0.1.weight": "S(0)", "1.body.0.1.weight": "S(0)", "1.body.0.reduce.weight": "R"}
    folded = fold_names(entries, entries)
    assert expanded(folded, list(entries)) == {name: [entry] for name, entry in entries.items()}


def test_names_that_differ_in_numbers_share_a_key() -> None:
    entries = {f"layers.{index}.experts.{expert}.up": "S(0)" for index in range(3) for expert in range(2)}
    assert fold_names(entries, entries) == {"layers.*.experts.*.up": "S(0)"}
