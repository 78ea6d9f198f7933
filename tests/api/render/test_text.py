"""Numbers with three significant digits, and lines that fit."""

from __future__ import annotations

import pytest

from api.render.text import bars, duration, fold, labelled, percent, significant, size, table, with_band


@pytest.mark.parametrize(
    ("value", "text"),
    [(7.3444, "7.34"), (99.96, "100"), (142_934, "143,000"), (0.0183, "0.0183"), (0, "0"), (9.999, "10.0")],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (7.3444, "7.34 s"),
        (0.0183, "18.3 ms"),
        (4.2e-5, "42.0 µs"),
        (0, "0 s"),
        (0.99999, "1.00 s"),
        (1234.5, "1,230 s"),
    ],
)
def test_a_duration_has_one_number_and_one_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_and_shares() -> None:
    assert [size(n) for n in (0, 512, 2_000_000, 79_490_000_000)] == ["0 B", "512 B", "2.00 MB", "79.5 GB"]
    assert [percent(x) for x in (0.004, 0.0996, 0.95, 1)] == ["0.4 %", "10 %", "95 %", "100 %"]


def test_a_band_has_the_unit_of_its_figure() -> None:
    assert with_band(7.34, 0.1) == "7.34 s   (6.61 to 8.07)"
    assert with_band(0.95, 0.1) == "950 ms   (855 to 1,040)"
    assert with_band(7.34, None) == "7.34 s"


def test_words_that_are_longer_than_a_line_break_at_dots() -> None:
    name = ".".join(["transformer", "layers"] * 12) + ".weight"
    lines = fold(name, "Note: ")
    assert len(lines) > 1
    assert all(len(line) <= 80 for line in lines)
    assert "".join(line.removeprefix("Note: ").strip() for line in lines) == name


def test_a_table_folds_its_widest_column() -> None:
    rows = [("name", "bytes"), (", ".join(f"weight_{n}" for n in range(30)), "1.00 GB")]
    lines = table(rows, "<>")
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].endswith("  bytes")
    assert lines[1].endswith("1.00 GB")
    assert len({line.rindex(end) + len(end) for line, end in zip(lines, ("bytes", "1.00 GB"), strict=False)}) == 1
    assert " ".join(" ".join(lines[1:]).replace("1.00 GB", "").split()) == rows[1][0]


def test_a_remark_that_does_not_fit_has_a_line_of_its_own() -> None:
    assert labelled("memory", "1 GB", "x") == [f"{'  memory':<17}{'1 GB':<26}x"]
    assert labelled("memory", "1 GB", "x" * 40) == [f"{'  memory':<17}1 GB", " " * 17 + "x" * 40]


def test_bars_are_in_proportion_and_share_a_unit() -> None:
    lines = bars(
        "Memory per GPU", {"activations": 57.1e9, "optimizer": 4e9, "nothing": 0.0}, "GB", 1e9, {"optimizer": "x"}
    )
    assert lines == [
        "Memory per GPU    GB",
        "  activations   57.1  ##############################",
        "  optimizer      4.0  ##  x",
        "  nothing        0.0",
    ]
