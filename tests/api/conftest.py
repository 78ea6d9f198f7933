"""A small model, a hand-written plan, and a real server in a process of its own."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import preload
from support.postgresql import PostgreSQL, start_postgresql
from support.serving import Server, start_server
from support.small_models import TINY_LLAMA, TINY_REQUEST

from api.jobs.database import Database
from cost_model.hardware.cluster import ClusterSpec
from cost_model.layouts.layout import MeshSpec, parse_layout
from planner.plan.sharding_plan import CollectiveEstimate, Estimate, Job, PlanMesh, ShardingPlan, SolverReport

preload()


@pytest.fixture
def tiny_llama() -> dict[str, Any]:
    return dict(TINY_LLAMA)


@pytest.fixture
def tiny_request() -> dict[str, Any]:
    """A request that a real planner answers within seconds."""
    return copy.deepcopy(TINY_REQUEST)


@pytest.fixture
def hand_written_plan() -> ShardingPlan:
    """FSDP on dp and Megatron's tensor parallelism with sequence parallelism on tp."""
    layer = "model.layers.*"
    column, row, sequence = (
        parse_layout(["S(0)", "S(0)"]),
        parse_layout(["S(0)", "S(1)"]),
        parse_layout(["S(0)", "S(1)"]),
    )
    return ShardingPlan(
        mesh=PlanMesh.from_mesh(MeshSpec.parse("dp=2,tp=2")),
        plan={
            f"{layer}.self_attn.q_proj.weight": column,
            f"{layer}.self_attn.o_proj.weight": row,
            "model.norm.weight": parse_layout(["S(0)", "R"]),
        },
        compute_plan={
            f"{layer}.self_attn.q_proj.weight": parse_layout(["R", "S(0)"]),
            f"{layer}.self_attn.o_proj.weight": parse_layout(["R", "S(1)"]),
            "model.norm.weight": parse_layout(["R", "R"]),
        },
        input_plan={"input": {"input_ids": parse_layout(["S(0)", "R"])}},  # type: ignore[dict-item]
        output_plan={f"{layer}.self_attn.o_proj": sequence},  # type: ignore[dict-item]
        activation_checkpointing={layer: "full"},
        estimate=Estimate(
            step_time_s=0.5,
            forward_s=0.1,
            backward_s=0.3,
            grad_reduce_s=0.04,
            optimizer_s=0.06,
            compute_s=0.3,
            communication_s=0.12,
            exposed_communication_s=0.1,
            peak_memory_bytes=40_000_000_000,
            memory={"parameters": 10_000_000_000, "activations": 30_000_000_000},
            collectives=(
                CollectiveEstimate(
                    kind="all_gather", axis="dp", phase="forward", count=32, bytes=2_000_000, time_s=0.002
                ),
            ),
        ),
        solver=SolverReport(name="HiGHS", status="optimal", objective_s=0.5, bound_s=0.4999, gap=0.0002, time_s=1.5),
        job=Job(batch=8, seq=32, memory_bytes=80_000_000_000),
        cluster=ClusterSpec.parse("1x4xh100-sxm-80gb").to_dict(),
        timings={"trace_s": 1.0, "solve_s": 1.5},
        notes=("a note for people",),
    )


@pytest.fixture
def run_server() -> Iterator[Callable[..., Server]]:
    """Start servers; what still runs at the end is ended."""
    servers: list[Server] = []

    def start(data_dir: Path, **environment: str) -> Server:
        servers.append(start_server(data_dir, **environment))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of a file."""
    running = start_server(tmp_path_factory.mktemp("data"))
    yield running
    if running.process.poll() is None:
        running.stop()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A real PostgreSQL; a test that needs it is skipped where it is not installed."""
    server = start_postgresql()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An empty database of this version, once of each kind."""
    if request.param == "sqlite":
        opened = Database(f"sqlite:///{tmp_path / 'jobs.sqlite3'}")
    else:
        opened = Database(request.getfixturevalue("postgresql").create(uuid.uuid4().hex))
    opened.migrate()
    yield opened
    opened.close()
