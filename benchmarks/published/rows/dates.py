"""The date of a row's measurement, since frameworks change from month to month."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PULLS = (
    (0, "2024-01-01"),
    (355, "2024-06-05"),
    (699, "2024-12-03"),
    (701, "2024-11-26"),
    (1033, "2025-04-02"),
    (1690, "2025-09-17"),
    (2095, "2025-12-01"),
    (2937, "2026-04-27"),
    (3659, "2026-06-13"),
    (4143, "2026-08-13"),
)
"""(number of a pull request to torchtitan, date of its merge), by git log @b5bcd76."""


STATED_DATES = (
    ("pytorch/ao docs/source/workflows/training.md", "H100", "2025-03-01"),
    ("pytorch/ao docs/source/workflows/training.md", "MI300X", "2025-08-08"),
    ("pytorch/ao docs/source/workflows/training.md", "B200", "2025-08-14"),
)
"""(source, device, date) of rows with the year only, whose page states the versions.

MI300X and B200: torchtitan 2c8b5947 and 6fc499f6, whose commits have these dates. H100: torch 2.7.0a0 with torchtitan
0.0.2, before torch's branch of 2.7 in March 2025. The day is a guess, but it is before #1033 (2025-04-02)."""


def date_of(row: Mapping[str, str]) -> str:
    """Return the row's date as YYYY-MM-DD; an empty text where it is not known.

    ``STATED_DATES`` precede the row's own date. A year stands for its 1 July, a version of an NVIDIA container for the
    first day of its month. A row of torchtitan without a date has that of a pull request in ``_PULLS``: the last one up
    to the pull request that its source names.
    """
    date = row.get("source_date", "")
    for start, device, day in STATED_DATES:
        if row.get("source", "").startswith(start) and row.get("gpu", "").startswith(device):
            return day
    if re.fullmatch(r"\d\d\.\d\d(\.\d\d)?", date):  # of an NVIDIA container
        return f"20{date[:2]}-{date[3:5]}-01"
    if not date:
        pull = re.search(r"torchtitan commit .*\(#(\d+)", row.get("source", ""))
        return next(day for number, day in reversed(_PULLS) if number <= int(pull[1])) if pull else ""
    return f"{date}-07-01" if len(date) == 4 else date
