"""The rows of the planner's speed benchmark: the requests, and the outcome of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

GPU, PER_NODE = "h100-sxm-80gb", 8
LAYERS, DEVICES = (2, 8, 32, 80, 126), (1, 8, 64, 512, 4096, 16384)
STAGES = ("trace_s", "costs_s", "solve_s", "check_s", "write_s", "verify_s")
LIMITS_S = (1.0, 5.0, 30.0)
WITH_EXPERTS = ("mixtral-8x7b", "deepseek-v3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request to the planner.

    Attributes:
        group: "layers", "devices", "axes" or "check-N".
        layers: number of layers in place of the preset's; None for the preset's.
        mesh, micro_batches, ac: given, or None where the search chooses.
        pipelines: whether pipelines are searched, too.
        target_s: most seconds that the row may take; None for no target.
        time_limit_s: seconds for the search, which then returns its incumbent; None for no limit.
        jobs: processes that search. Memory and CPU seconds are those of the first process.
    """

    name: str
    group: str
    preset: str
    devices: int
    batch: int
    seq: int = 8192
    layers: int | None = None
    mesh: str | None = None
    micro_batches: int | None = None
    ac: str | None = None
    pipelines: bool = False
    target_s: float | None = None
    time_limit_s: float | None = None
    jobs: int = 1

    @property
    def cluster(self) -> str:
        """The cluster: whole nodes where there is more than one."""
        nodes, inside = max(self.devices // PER_NODE, 1), min(self.devices, PER_NODE)
        return f"{nodes}x{inside}x{GPU}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The measurements of one row.

    Attributes:
        seconds: wall time from the module to the plan, or to the infeasibility report.
        cpu_s: processor time; less than ``seconds`` where other processes had the processor.
        model_s: wall time of building the module.
        stages: seconds by stage, from the plan; empty without a plan.
        peak_mb: peak resident set of the process, in MB.
        imports_mb: peak resident set before planning, in MB.
        answer: the plan in a few words, or why there is none.
        objective_s: seconds per step of the plan; None without a plan.
        gap: bound on the relative distance from the optimum; None where it is not known.
    """

    row: Row
    seconds: float
    cpu_s: float
    model_s: float
    stages: Mapping[str, float]
    peak_mb: float
    imports_mb: float
    answer: str
    objective_s: float | None = None
    gap: float | None = None


def rows() -> Iterator[Row]:
    """Yield all rows of the benchmark."""
    for layers in LAYERS:
        yield Row(
            name=f"layers-{layers}", group="layers", preset="llama-3.1-405b", layers=layers, devices=512, batch=128,
            mesh="dp=64,tp=8", micro_batches=1, ac="full", target_s=5.0 if layers == 126 else None,
        )  # fmt: skip
    for devices in DEVICES:
        yield Row(name=f"devices-{devices}", group="devices", preset="llama-3.1-8b", devices=devices, batch=2 * devices)
    for mesh in ("dp=64", "dp=8,tp=8"):
        axes = mesh.count("=")
        yield Row(
            name=f"axes-{axes}", group="axes", preset="llama-3.1-8b", devices=64, batch=128, mesh=mesh,
            micro_batches=1, ac="full",
        )  # fmt: skip
    given = Row(
        name="check-1-given", group="check-1", preset="llama-3.1-8b", devices=256, batch=64, mesh="dp=32,tp=8",
        micro_batches=1, ac="full", target_s=3.0,
    )  # fmt: skip
    yield given
    yield dataclasses.replace(given, name="check-1-free", micro_batches=None, ac=None)
    for pipelines in (False, True):
        name = "check-3-pipelines" if pipelines else "check-3"
        yield Row(
            name=name, group="check-3", preset="llama-3.1-405b", devices=16384, batch=2048, pipelines=pipelines,
            target_s=60.0,
        )  # fmt: skip
    for preset, sizes in (
        ("llama-3.1-8b", (1, 8, 64, 512)),
        ("llama-3.1-70b", (64, 512)),
        ("llama-3.1-405b", (512, 1024, 2048, 4096, 8192, 16384)),
        ("mixtral-8x7b", (64,)),
        ("deepseek-v3", (256,)),
    ):
        for devices in sizes:
            yield Row(
                name=f"check-4-{preset.removeprefix('llama-3.1-')}-{devices}", group="check-4", preset=preset,
                devices=devices, batch=max(128, devices), seq=4096 if preset in WITH_EXPERTS else 8192,
                pipelines=True, target_s=30.0, jobs=2,
            )  # fmt: skip
    for limit_s in (*LIMITS_S, None):
        yield Row(
            name=f"check-8-{'none' if limit_s is None else f'{limit_s:g}'}", group="check-8", preset="llama-3.1-405b",
            devices=16384, batch=2048, time_limit_s=limit_s,
        )  # fmt: skip


def outcome_of(document: Mapping[str, Any]) -> Outcome:
    """Return the outcome that `dataclasses.asdict` turned into ``document``."""
    return Outcome(**{**document, "row": Row(**document["row"])})
