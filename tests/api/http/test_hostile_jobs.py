"""Hostile requests that are accepted fail as jobs, with a reason, and nothing of them runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from support.hostile import (
    BAIT,
    DIGITS,
    JSON,
    LAUGHS,
    Document,
    changed,
    check,
    config,
    graph_body,
    made_by_relu,
    plan,
)
from support.serving import Server, start_server

FAILING_CONFIGS: dict[str, dict[str, Any]] = {
    "layers as a text": {"num_hidden_layers": "2"},
    "layers of 1e308": {"num_hidden_layers": 1e308},
    "layers as a boolean": {"num_hidden_layers": True},
    "layers as a list": {"num_hidden_layers": [2]},
    "width 0": {"hidden_size": 0},
    "negative width": {"hidden_size": -64},
    "width of 2^62": {"hidden_size": 2**62},
    "width of 400 digits": {"hidden_size": 10**400},
    "no heads": {"num_attention_heads": 0},
    "heads that do not divide": {"num_attention_heads": 3},
    "vocabulary of 2^62": {"vocab_size": 2**62},
    "function of code": {"hidden_act": "os.system"},
    "rope of code": {"rope_scaling": {"rope_type": "__import__", "factor": 1e308}},
    "type of a module": {"model_type": BAIT},
    "type of a path": {"model_type": "../llama"},
    "type of an attribute": {"model_type": "__class__"},
    "methods as values": {"forward": "os.system", "__init__": "x", "to_dict": 1},
    "config in the config": {"text_config": {"model_type": BAIT}},
    "100,000 types of layers": {"layer_types": ["os"] * 100_000},
}
HARMLESS_CONFIGS: dict[str, dict[str, Any]] = {
    "code of its own": {
        "auto_map": {"AutoModelForCausalLM": f"{BAIT}.Model"},
        "trust_remote_code": True,
        "architectures": [f"{BAIT}.Model"],
        "quantization_config": {"quant_method": BAIT},
        "torch_dtype": BAIT,
        "_attn_implementation": f"{BAIT}/kernel",
        "attn_implementation": f"{BAIT}/kernel",
    },
}
"""Code that is named and never looked at."""
FAILING_PLANS: dict[str, bytes] = {
    "pin of 400 stars": plan(pins=["*a" * 400 + "=R"]),
    "pin of a regular expression": plan(pins=["(a+)+$=R"]),
    "pin of 900 digits": plan(pins=[f"lm_head.weight=S({'9' * 900})"]),
}
FAILING_CHECKS: dict[str, bytes] = {
    "YAML that calls": check(f"a: !!python/object/apply:{BAIT}.run []\n", framework="accelerate"),
    "YAML of 10^12 texts": check(LAUGHS, framework="megatron-bridge"),
    "YAML of 5000 digits": check("num_machines: " + DIGITS, framework="accelerate"),
    "deep JSON": check('{"a":' * 10_000, framework="deepspeed"),
    "deep YAML": check("[" * 1_000, framework="accelerate"),
    "deep TOML": check("a = " + "[" * 10_000, framework="torchtitan"),
}
WRONG_WHEN_RUN: dict[str, Callable[[Document], object]] = {
    "shape that the op does not make": lambda d: made_by_relu(d).update(shape=[99991, 3]),
    "dtype that the op does not make": lambda d: made_by_relu(d).update(dtype="int8"),
    "shapes that do not go together": lambda d: d["values"][0].update(shape=[3, 3]),
    "weight of 2^58 bytes": lambda d: d["values"][0].update(shape=[2**28, 2**28]),
}


@pytest.fixture(scope="module")
def planning(bait: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that plans what it accepts."""
    server = start_server(tmp_path_factory.mktemp("data"), **bait, SHARDPLAN_WORKERS="2")
    yield server
    server.stop()


def ended(server: Server, path: str, bodies: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    """Return the jobs of the bodies, once all have ended."""
    jobs = {}
    for name, body in bodies.items():
        answer = httpx2.post(f"{server.url}{path}", content=body, headers=JSON, timeout=60)
        assert answer.status_code == 202, f"{name}: {answer.text[:500]}"
        jobs[name] = answer.json()["id"]
    return {name: until_ended(f"{server.url}{path}/{job}") for name, job in jobs.items()}


def until_ended(address: str) -> dict[str, Any]:
    end = time.monotonic() + 120
    while (job := httpx2.get(address, timeout=60).json())["status"] in {"queued", "running"}:
        assert time.monotonic() < end, address
        time.sleep(0.1)
    found: dict[str, Any] = job
    return found


def assert_all_failed(jobs: dict[str, dict[str, Any]]) -> None:
    outcomes = {name: (job["status"], (job["error"] or {}).get("status")) for name, job in jobs.items()}
    assert outcomes == dict.fromkeys(jobs, ("failed", 422))
    assert all(job["error"]["detail"] for job in jobs.values())


@pytest.mark.slow
def test_hostile_jobs_fail_with_a_reason(planning: Server) -> None:
    bodies = {name: config(**change) for name, change in FAILING_CONFIGS.items()}
    assert_all_failed(ended(planning, "/v1/plans", bodies | FAILING_PLANS))


@pytest.mark.slow
def test_hostile_graphs_fail_when_they_are_run(planning: Server, document: Document) -> None:
    bodies = {name: graph_body(changed(document, change)) for name, change in WRONG_WHEN_RUN.items()}
    assert_all_failed(ended(planning, "/v1/plans", bodies))


@pytest.mark.slow
def test_hostile_configurations_fail_with_a_reason(planning: Server) -> None:
    assert_all_failed(ended(planning, "/v1/checks", FAILING_CHECKS))


@pytest.mark.slow
def test_code_that_a_config_names_is_never_looked_at(planning: Server) -> None:
    bodies = {name: config(**change) for name, change in HARMLESS_CONFIGS.items()}
    assert [job["status"] for job in ended(planning, "/v1/plans", bodies).values()] == ["succeeded"] * len(bodies)
