"""Faulty configurations that users of the frameworks reported: `check` finds all of their faults, and no other."""

from __future__ import annotations

import re

import pytest
from support.reported_faults import DEEPSPEED, TORCHTITAN, Fault, Report
from support.reported_faults_hugging_face import ACCELERATE, TRANSFORMERS
from support.reported_faults_megatron import BRIDGE, MEGATRON
from support.reported_faults_together import TOGETHER
from support.reported_faults_torch import TORCH
from support.reported_faults_vllm import VLLM

from api.frameworks.check import check
from api.frameworks.registry import NAMES

REPORTS = (*TORCHTITAN, *MEGATRON, *BRIDGE, *ACCELERATE, *TRANSFORMERS, *DEEPSPEED, *VLLM, *TORCH, *TOGETHER)


KINDS = {
    *("heads", "key-value heads", "experts", "vocabulary", "batch", "unknown key", "degrees", "sizes of another model"),
    *("sequence by context ranks", "sequence by tensor ranks", "layers by stages", "layers by virtual stages"),
    *("ZeRO-3 with a pipeline", "DDP with tensor parallelism"),
}


def says(clause: str, fault: Fault) -> bool:
    """Return whether a clause names the key and what it contradicts, and lists the legal value as its advice."""
    advice = re.split(r"[(:] ?", clause)[-1]
    listed = not fault.legal or re.search(rf"(?<![\w.-]){re.escape(fault.legal)}(?![\w.-])", advice) is not None
    return fault.key in clause and fault.about in clause and listed


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: f"{report.source} {report.kind}")
def test_a_reported_configuration_has_exactly_its_faults(report: Report) -> None:
    clauses = check(
        report.model, report.text, cluster=report.cluster, framework=report.framework, seq=report.seq, plans=False
    ).faults
    found = [[clause for clause in clauses if says(clause, fault)] for fault in report.faults]
    missing = [fault for fault, matches in zip(report.faults, found, strict=True) if not matches]
    assert not missing, clauses
    assert {clause for matches in found for clause in matches} == set(clauses)
    assert len(report.faults) == len(clauses)


def test_every_framework_and_every_kind_has_a_report() -> None:
    assert {report.framework for report in REPORTS} == set(NAMES)
    assert {report.kind for report in REPORTS} >= KINDS
    assert len({report.source for report in REPORTS}) == len(REPORTS)
    assert all(len(report.faults) >= 4 for report in TOGETHER)
