"""Errors over HTTP advise in words of HTTP: they name no option and no command of the command line, and no files."""

from __future__ import annotations

import ast
import copy
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.small_models import TINY_LLAMA, TINY_REQUEST

from api.http.app import create_app
from api.jobs.settings import ServerSettings
from api.jobs.solve import solve
from api.requests.client_texts import for_client

ROOT = Path(__file__).parents[3]
OF_THE_COMMAND_LINE = re.compile(
    r"(?<![\w-])--[a-z]|package\.module|the path of a (config|\.yaml)"
    r"|\bshardplan (plan|estimate|verify|show|diff|explain|check|report|export|calibrate|serve|sweep)\b"
)
ANY_MESH = {name: value for name, value in TINY_REQUEST.items() if name != "mesh"}
ESTIMATE = {"model": "gpt2", "cluster": "1x8xtoy", "mesh": "dp=8"}
CHECK = {"model": {"hf_config": TINY_LLAMA}, "cluster": "1x4xtoy", "configuration": "{}", "framework": "deepspeed"}
UNPRICED = {"format_version": 1, "mesh": {"names": ["dp"], "shape": [4], "device": "cuda"}}
EXPLAINED = {"plan": UNPRICED, "model": "gpt2", "parameter": "lm_head.weight"}

PLANS: list[dict[str, Any]] = [
    {"model": "gpt-17"},
    {"model": "os:system"},
    {"model": "/etc/passwd"},
    {"model": {"hf_config": {}}},
    {"model": "gpt2", "batch": None, "seq": None},
    {"model": {"hf_config": {"model_type": "nope"}}, "seq": None},
    {"model": {"graph": {}}},
    {"cluster": "4 h100"},
    {"cluster": "cluster.yaml"},
    {"cluster": {"device": "toy"}},
    {"cluster": {"device": "toi", "devices_per_node": 4}},
    {"cluster": {"device": {"memory_bytes": 1}, "devices_per_node": 4}},
    {"cluster": "99999x99999xtoy"},
    {"mesh": "dp=3"},
    {"mesh": "dp"},
    {"mesh": "dp=2,dp=2"},
    {"batch": 7, "micro_batches": 3},
    {"batch": 0},
    {"planner": "best"},
    {"optimizer": "magic"},
    {"optimizer": "adafactor"},
    {"ac": "some"},
    {"dtype": "int8"},
    {"phase": "decode", "micro_batches": 4},
    {"phase": "prefill", "ac": "full"},
    {"techniques": "async-tp"},
    {"techniques": "nope"},
    {"techniques": "flash3"},
    {"memory_gb": 0},
    {"time_limit_s": -1},
    {"surprise": 1},
    {"model": "gpt-17", "cluster": "4 h100", "mesh": "dp", "optimizer": "magic"},
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("comparisons", {"kind": "best", "request": ANY_MESH}),
    ("comparisons", {"kind": "sweep", "request": TINY_REQUEST}),
    ("comparisons", {"kind": "sweep", "request": ANY_MESH, "devices": [99]}),
    ("comparisons", {"kind": "alternatives", "request": {**ANY_MESH, "techniques": "auto"}}),
    ("comparisons", {"kind": "pareto", "request": {**TINY_REQUEST, "techniques": "async-tp"}}),
    ("comparisons", {"kind": "pareto", "request": {**TINY_REQUEST, "planner": "fsdp"}}),
    ("comparisons", {"kind": "batches", "request": ANY_MESH}),
    ("comparisons", {"kind": "batches", "request": {"model": "gpt2", "cluster": "1x4xtoy"}}),
    ("explanations", {**EXPLAINED, "plan": {}}),
    ("explanations", EXPLAINED),
    ("explanations", {**EXPLAINED, "model": None}),
    ("plans/diff", {"left": {}, "right": {}}),
    ("estimates", {**ESTIMATE, "model": "gpt-17"}),
    ("estimates", {**ESTIMATE, "model": "vit-large"}),
    ("estimates", {**ESTIMATE, "mesh": "dp=3"}),
    ("estimates", {**ESTIMATE, "mesh": "tp=8", "sequence_parallel": True, "seq": 3}),
    ("estimates", {**ESTIMATE, "mesh": "pp=8", "virtual_stages": 7}),
    ("estimates", {**ESTIMATE, "batch": 3}),
    ("estimates", {**ESTIMATE, "ac": "some"}),
    ("estimates", {**ESTIMATE, "schedule": "best"}),
    ("estimates", {**ESTIMATE, "optimizer": "magic"}),
    ("checks", {**CHECK, "model": "gpt-17"}),
    ("checks", {**CHECK, "cluster": "4 h100"}),
    ("checks", {**CHECK, "framework": "jax"}),
    ("checks", {**CHECK, "configuration": "hello", "framework": None}),
]
REQUESTS = [*(("plans", {**TINY_REQUEST, **change}) for change in PLANS), *OTHERS]
FAIL_LATER: list[dict[str, Any]] = [
    {"memory_gb": 1e-6},
    {"model": "gpt2", "seq": 5000},
    {"batch": 6, "planner": "data-parallel"},
    {"pins": ["x"]},
    {"data_axes": ["xx"]},
    {"opaque_modules": ["nope"]},
    {"mesh": "pp=4"},
    {"model": {"hf_config": {"model_type": "nope"}}},
    {"model": {"hf_config": {**TINY_LLAMA, "num_attention_heads": 0}}},
    {"model": {"hf_config": {"model_type": "gpt2", "n_layer": 1}}, "techniques": "fused-projections"},
]
"""Changes to a request that are seen only where the model is."""

# texts of nothing that a request reaches: the command line's own, the operator's, files that are written
_ELSEWHERE = ("api/cli", "api/render", "api/jobs", "api/http/serve.py", "api/requests/run_cost.py", "api/remote")
_ELSEWHERE += ("api/requests/client_texts.py", "executor", "cost_model/calibrate.py", "api/frameworks/configurations")
_ELSEWHERE += ("planner/plan/job_spec.py",)
_FOREIGN = re.compile(r"--(nproc|nnodes|[a-z]+-model-parallel-size)\b")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a server that plans nothing."""
    app = create_app(ServerSettings(data_dir=tmp_path_factory.mktemp("data"), workers=0))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as opened:
        while opened.get("/readyz").status_code != 200:  # the processes that check requests start
            time.sleep(0.2)
        yield opened


def texts(problem: dict[str, Any]) -> list[str]:
    """Return what a problem says to people."""
    faults = [fault["what"] for fault in problem.get("errors", ())]
    return [problem["title"], problem["detail"], problem.get("what_to_do", ""), *faults]


def named(problem: dict[str, Any]) -> list[str]:
    """Return the texts that name something of the command line."""
    return [text for text in texts(problem) if OF_THE_COMMAND_LINE.search(text)]


def test_what_a_client_gets_wrong_is_told_in_its_own_words(client: TestClient) -> None:
    for path, body in REQUESTS:
        answer = client.post(f"/v1/{path}", json=copy.deepcopy(body))
        assert answer.status_code == 422, (path, body, answer.text)
        assert named(answer.json()) == [], (path, body)
    assert client.get("/v1/plans").json()["jobs"] == [], "none of them was queued"


def test_a_missing_batch_is_422_at_once(client: TestClient) -> None:
    answer = client.post("/v1/plans", json={"model": "gpt2", "cluster": "1x8xh100-sxm-80gb"})
    problem = answer.json()
    assert (answer.status_code, problem["detail"]) == (422, "batch and seq are missing.")
    assert problem["what_to_do"] == "Give batch and seq."


@pytest.mark.parametrize("change", FAIL_LATER, ids=lambda change: str(next(iter(change.items())))[:30])
def test_what_is_seen_in_a_job_is_told_in_its_own_words_too(change: dict[str, Any]) -> None:
    outcome = solve({**copy.deepcopy(TINY_REQUEST), **change}, lambda event: None, 60.0)
    assert named(outcome["error"]) == []
    assert outcome["error"]["status"] == 422


def spoken() -> Iterator[tuple[str, str]]:
    """Yield (file, text) of every text in the code that a request may meet, without docstrings."""
    for package in ("api", "cost_model", "planner"):
        for file in sorted((ROOT / package).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            if name.startswith(_ELSEWHERE):
                continue
            tree = ast.parse(file.read_text(encoding="utf-8"))
            silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
                    yield name, node.value


def test_every_text_in_the_code_is_told_in_words_of_http() -> None:
    found = [(name, text) for name, text in spoken() if OF_THE_COMMAND_LINE.search(_FOREIGN.sub("", text))]
    assert len(found) > 10, "the rule finds them"
    left = [
        (name, told) for name, text in found if OF_THE_COMMAND_LINE.search(_FOREIGN.sub("", told := for_client(text)))
    ]
    assert left == []
