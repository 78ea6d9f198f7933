"""Code and documents use the field's words: those that were coined here before are gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = ("api", "cost_model", "docs", "executor", "planner", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
COINED = {
    "lane": r"\b_?[Ll]anes?\b",
    "walk over lanes": r"\bwalks? over\b|\bwalk_together\b",
    "look": r"\b(run|stage)_looks\b|\blook_at\b|\bLook\(",
    "best so far, want less": r"\bbest so far\b|\bwant_less\b",
    "bench": r"\b[Bb]ench\b",
    "tally": r"[Tt]all(y|ies)\b",
    "moment (of memory)": r"\bmoments?\b of\b",
    "handed on": r"\bhanded on\b",
    "polish": r"\bpolish",
    "order writing": r"\border[_ ]writing\b",
    "runner-ups": r"\brunner[-_ ]ups?\b",
    "even order": r"\beven[-_ ]order\b",
    "tensor overlap": r"\btensor[-_ ]overlap\b",
    "regather": r"\b_?regather",
    "joined linears": r"\bjoined[-_ ]linears?\b",
    "packed projections": r"\bpack(ed)?[-_ ]projections\b",
    "vary blocks": r"\bvary[-_ ]blocks\b",
    "latent attention": r"(?<!head )\blatent[-_ ]attention\b",
}
FORMER = {"planner/plan/former_names.py", "api/cli/former_names.py", "planner/__init__.py"}
"""Modules that read what was written under former public names."""


def files() -> list[Path]:
    found = [ROOT / place for place in PLACES if (ROOT / place).is_file()]
    for place in PLACES:
        found += [file for suffix in ("py", "md") for file in (ROOT / place).rglob(f"*.{suffix}")]
    return [file for file in found if str(file.relative_to(ROOT)) not in FORMER]


@pytest.mark.parametrize("word", COINED)
def test_no_coined_word_is_left(word: str) -> None:
    pattern = re.compile(COINED[word], re.IGNORECASE)
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found
