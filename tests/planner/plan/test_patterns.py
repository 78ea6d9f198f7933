"""Keys match component by component; nothing matches by accident, and nothing is dropped in silence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import KeyConflictError, PlanKeyError, UnmatchedKeyError
from planner.plan.patterns import check_pattern, match_keys, resolve_keys

FQNS = ["", "emb", "emb2", "emb.weight", "emb2.weight", "layers", "layers.0", "layers.1", "layers.10", "layers.0.mlp",
        "layers.1.mlp", "layers.10.mlp", "layers.0.mlp.fc1", "layers.0.mlp.fc2"]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", [""]),
        ("*", ["emb", "emb2", "layers"]),
        ("emb", ["emb"]),
        ("emb*", ["emb", "emb2"]),
        ("emb.*", ["emb.weight"]),
        ("layers.*", ["layers.0", "layers.1", "layers.10"]),
        ("layers.1*", ["layers.1", "layers.10"]),
        ("layers.*.mlp", ["layers.0.mlp", "layers.1.mlp", "layers.10.mlp"]),
        ("*.*.mlp.fc*", ["layers.0.mlp.fc1", "layers.0.mlp.fc2"]),
        ("layers.mlp", []),
        ("layers.[01]", []),
        ("layers.{0-1}", ["layers.0", "layers.1"]),
        ("layers.{1-10}.mlp", ["layers.1.mlp", "layers.10.mlp"]),
        ("layers.{2-9}", []),
        ("layers.{1-0}", []),
        ("layers.{0-}", []),
        ("layers.?", []),
        ("mlp", []),
    ],
)
def test_match(pattern: str, expected: list[str]) -> None:
    assert match_keys([pattern], FQNS)[pattern] == tuple(expected)


COMPONENTS = st.text(alphabet="ab0[?+", min_size=1, max_size=3)


@given(st.lists(COMPONENTS, min_size=1, max_size=4), st.data())
def test_stars_in_place_of_components_still_match_and_never_change_the_depth(
    parts: list[str], data: st.DataObject
) -> None:
    fqn = ".".join(parts)
    starred = ".".join(data.draw(st.sampled_from([part, "*", part[0] + "*", "*" + part])) for part in parts)
    assert match_keys([starred], [fqn, fqn + ".x", "x." + fqn])[starred] == (fqn,)
    assert match_keys([fqn], [fqn, fqn + "0"])[fqn] == (fqn,)


def test_resolve_gives_each_name_its_value() -> None:
    entries = {"layers.*.mlp": "full", "layers.10.mlp": "full", "emb": "selective"}
    resolved = resolve_keys(entries, FQNS, field="activation_checkpointing", what="module")
    assert resolved == {"layers.0.mlp": "full", "layers.1.mlp": "full", "layers.10.mlp": "full", "emb": "selective"}


def test_a_key_that_matches_nothing_is_an_error_with_the_closest_names() -> None:
    with pytest.raises(UnmatchedKeyError, match="has no attribute") as caught:
        resolve_keys({"layers.0.mpl": 1}, FQNS, field="plan", what="parameter")
    assert caught.value.key == "layers.0.mpl"
    assert "'layers.0.mlp'" in str(caught.value)


def test_two_keys_that_disagree_are_an_error() -> None:
    with pytest.raises(KeyConflictError, match="disagree") as caught:
        resolve_keys({"layers.*": 1, "layers.1": 2}, FQNS, field="plan", what="module")
    assert (caught.value.key, caught.value.other) == ("layers.1", "layers.*")


@pytest.mark.parametrize("pattern", [".", "a..b", ".a", "a."])
def test_empty_components_are_errors(pattern: str) -> None:
    with pytest.raises(PlanKeyError, match="empty component"):
        check_pattern(pattern, field="plan")
