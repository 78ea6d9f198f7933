"""The view, the trace, the report and the notebook's picture of a plan: right numbers, and no markup from names."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate
from support.drawn_plans import PIPELINES, VIEWED, drawn_plan
from typer.testing import CliRunner

from api.cli.main import app
from api.view.plan_view import plan_view
from api.view.report import report_html
from api.view.static_files import content_security_policy, modules_of, read
from api.view.trace import chrome_trace
from planner.plan.sharding_plan import PlanMesh, ShardingPlan

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"

TRACE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "ph", "pid"],
                "properties": {
                    "name": {"type": "string"},
                    "ph": {"enum": ["X", "C", "M"]},
                    "pid": {"type": "integer"},
                    "tid": {"type": "integer"},
                    "ts": {"type": "number", "minimum": 0},
                    "dur": {"type": "number", "minimum": 0},
                    "args": {"type": "object"},
                },
                "allOf": [
                    {
                        "if": {"properties": {"ph": {"const": "X"}}},
                        "then": {"required": ["ts", "dur", "tid", "cat"]},
                    },
                    {
                        "if": {"properties": {"ph": {"const": "C"}}},
                        "then": {
                            "required": ["ts", "args"],
                            "properties": {"args": {"additionalProperties": {"type": "number"}}},
                        },
                    },
                ],
            },
        },
    },
}
"""The parts of the Trace Event Format that we write (Chromium's document of that name)."""


def hostile(plan: ShardingPlan) -> ShardingPlan:
    return dataclasses.replace(plan, model=HOSTILE, notes=(HOSTILE,), assumed=(HOSTILE,))


@pytest.mark.parametrize("kind", VIEWED)
def test_the_view_is_json_with_the_plans_numbers(kind: str) -> None:
    plan = drawn_plan(kind)
    view = json.loads(json.dumps(plan_view(plan), allow_nan=False))
    assert plan.estimate is not None
    assert sum(part["seconds"] for part in view["time"]["parts"]) == pytest.approx(plan.estimate.step_time_s)
    assert sum(role["bytes"] for role in view["memory"]["roles"]) == plan.estimate.peak_memory_bytes
    assert {row["name"] for row in view["parameters"]} == set(plan.plan)
    assert [row["time_s"] for row in view["collectives"]] == [each.time_s for each in plan.estimate.collectives]
    assert all(len(row["stored"]) == len(view["layout_axes"]) for row in view["parameters"])


def test_the_view_of_a_plan_without_price_and_of_one_by_hand(hand_written_plan: ShardingPlan) -> None:
    view = plan_view(hand_written_plan)
    assert view["timeline"] is None
    assert view["memory"]["curve"] == []
    bare = plan_view(ShardingPlan(mesh=PlanMesh.parse("dp=2")))
    assert bare["headline"] == []
    assert bare["time"] is None


@pytest.mark.parametrize("kind", VIEWED)
def test_the_trace_is_in_the_format_and_its_lanes_add_up(kind: str) -> None:
    plan = drawn_plan(kind)
    assert plan.estimate is not None
    trace = json.loads(json.dumps(chrome_trace(plan), allow_nan=False))
    validate(trace, TRACE_SCHEMA)
    names = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in trace["traceEvents"]
        if each["name"] == "thread_name"
    }
    seconds = dict.fromkeys(names.values(), 0.0)
    for each in trace["traceEvents"]:
        if each["ph"] == "X" and not each["cat"].endswith(" op"):
            seconds[names[each["pid"], each["tid"]]] += each["dur"] / 1e6
    assert seconds["compute"] == pytest.approx(plan.estimate.step_time_s)
    communication = sum(amount for name, amount in seconds.items() if name.startswith("communication"))
    assert communication == pytest.approx(plan.estimate.communication_s)
    counters = [sum(each["args"].values()) for each in trace["traceEvents"] if each["ph"] == "C"]
    assert max(counters) == pytest.approx(plan.estimate.peak_memory_bytes, rel=1e-3)


def test_ops_of_a_trace_lie_in_their_block_and_have_their_work() -> None:
    trace = chrome_trace(drawn_plan("tensor parallel, checkpointed"))
    slices = [each for each in trace["traceEvents"] if each["ph"] == "X" and each["tid"] == 1]
    blocks = [each for each in slices if not each["cat"].endswith(" op")]
    ops = [each for each in slices if each["cat"].endswith(" op")]
    assert {"module", "flops_of_the_forward", "bytes_of_the_forward"} <= ops[0]["args"].keys()
    assert any(each["args"]["module"] == "model.layers.1.mlp.up_proj" for each in ops)
    for op in ops:
        assert any(
            block["ts"] - 1e-6 <= op["ts"] and op["ts"] + op["dur"] <= block["ts"] + block["dur"] + 1e-6
            for block in blocks
        )


def test_ranks_choose_the_stages_of_a_trace() -> None:
    plan = drawn_plan(next(iter(PIPELINES)))
    names = [
        each["args"]["name"]
        for each in chrome_trace(plan, ranks=[2, 3])["traceEvents"]
        if each["name"] == "thread_name" and each["args"]["name"].startswith("stage")
    ]
    assert names == ["stage 1"]


@pytest.mark.parametrize("kind", ["decode", "interleaved"])
def test_the_report_is_one_file_that_asks_nobody(kind: str) -> None:
    text = report_html(drawn_plan(kind))
    assert len(text) < 3_000_000
    # The vendored library names the SVG namespace, and other addresses in comments; the document itself names none.
    outside = re.sub(r"data:text/javascript;base64,[A-Za-z0-9+/=]+", "", text)
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", outside)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    scripts = next(part for part in html.unescape(policy[1]).split("; ") if part.startswith("script-src"))
    assert "unsafe-inline" not in scripts
    assert scripts.count("sha256") == 2


def test_hostile_names_are_text_in_the_report_and_the_notebook() -> None:
    plan = hostile(drawn_plan("tensor parallel, checkpointed"))
    for text in (report_html(plan), plan._repr_html_()):
        assert "<script>alert" not in text
        assert "<img" not in text
    inside = re.search(r'<script type="application/json" id="view">(.*?)</script>', report_html(plan), re.DOTALL)
    assert inside is not None
    assert json.loads(inside[1])["notes"] == [HOSTILE]


def test_modules_of_the_report_are_found_and_need_no_server() -> None:
    modules = modules_of("shardplan/report.js")
    assert "echarts" in modules
    assert not {"shardplan/main.js", "shardplan/api.js"} & modules.keys()


def test_the_pages_policy_allows_its_own_scripts_alone() -> None:
    policy = content_security_policy(read("index.html"))
    assert "unsafe-inline" not in next(part for part in policy.split(";") if "script-src" in part)
    assert policy.count("sha256") == 1, "the import map"


@pytest.mark.parametrize("kind", ["decode", "1f1b"])
def test_report_figures_and_trace_from_the_command_line(kind: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    drawn_plan(kind).save(plan)
    for command, file in (
        (["report", str(plan), "-o", str(tmp_path / "plan.html")], "plan.html"),
        (["trace", str(plan), "-o", str(tmp_path / "trace.json")], "trace.json"),
        (["report", str(plan), "--format", "svg", "-o", str(tmp_path / "figures")], "figures/timeline.svg"),
        (["report", str(plan), "--format", "png", "-o", str(tmp_path / "figures")], "figures/memory.png"),
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        assert (tmp_path / file).stat().st_size > 1000


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["report", "{plan}", "-o", "{folder}/none/x.html"], "no folder"),
        (["report", "{plan}", "--format", "pdf", "-o", "{folder}/x"], "html, png, svg"),
        (["trace", "{plan}", "-o", "{folder}/x.json"], "Plan again"),
        (["trace", "{plan}", "--ranks", "one", "-o", "{folder}/x.json"], "0,8"),
        (["trace", "{folder}/none.json", "-o", "{folder}/x.json"], "none.json"),
    ],
)
def test_what_cannot_be_drawn_is_said(
    command: list[str], said: str, tmp_path: Path, hand_written_plan: ShardingPlan
) -> None:
    plan = tmp_path / "plan.json"
    hand_written_plan.save(plan)
    done = CliRunner().invoke(app, [part.format(plan=plan, folder=tmp_path) for part in command])
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert "Traceback" not in done.output


def test_a_rank_that_is_not_there_is_named(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    drawn_plan("tensor parallel, checkpointed").save(plan)
    done = CliRunner().invoke(app, ["trace", str(plan), "--ranks", "0,9", "-o", str(tmp_path / "x.json")])
    assert done.exit_code == 2
    assert "no rank 9" in done.output
