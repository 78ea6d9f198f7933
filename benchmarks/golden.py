"""Plans of all presets, written and compared, for changes of the code that should change no plan and no price.

    python benchmarks/golden.py write before/                 # half an hour on two cores
    python benchmarks/golden.py write after/ --preset gpt2
    python benchmarks/golden.py compare before/ after/        # exit code 1 where they differ

Every preset is planned on 1x8, 8x8 and 64x8 H100s, for training and for decoding (if it can decode), by the integer
program and by each baseline; one case searches pipelines. A file holds the plan, without what differs from run to run
(seconds of planning, notes and fingerprint), and a new estimate of that plan. All values are compared exactly, seconds
and bytes to the last bit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRESETS = (
    "bert-large", "deepseek-v3", "gpt2", "llama-3.1-405b", "llama-3.1-70b", "llama-3.1-8b", "mistral-7b",
    "mixtral-8x7b", "qwen3-8b", "t5-large", "vit-large",
)  # fmt: skip
CLUSTERS = ("1x8xh100-sxm-80gb", "8x8xh100-sxm-80gb", "64x8xh100-sxm-80gb")
PLANNERS = ("ilp", "data-parallel", "fully-sharded", "tensor-parallel")
SEQ = {"gpt2": 1024, "bert-large": 512, "t5-large": 512}
DEFAULT_SEQ = 4096
NOT_DECODED = frozenset({"bert-large", "deepseek-v3", "t5-large", "vit-large"})
PIPELINED = ("llama-3.1-70b", "8x8xh100-sxm-80gb")
RUN_TIME_FIELDS = ("timings", "notes", "fingerprint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan to be written."""

    preset: str
    cluster: str
    phase: str
    planner: str
    pipelines: bool = False

    @property
    def file_name(self) -> str:
        """The file that the plan is written to."""
        kind = "pipelines" if self.pipelines else self.planner
        return f"{self.preset}-{self.cluster.partition('xh')[0]}-{self.phase}-{kind}.json"


def cases_of(preset: str) -> Iterator[Case]:
    """Yield the cases of ``preset``; cases of one `PlanningSession` follow each other."""
    for cluster in CLUSTERS:
        for phase in ("training", "decode"):
            if phase == "decode" and preset in NOT_DECODED:
                continue
            for planner in PLANNERS:
                yield Case(preset=preset, cluster=cluster, phase=phase, planner=planner)
            if phase == "training" and (preset, cluster) == PIPELINED:
                yield Case(preset=preset, cluster=cluster, phase=phase, planner="ilp", pipelines=True)


def without_run_times(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's document without what differs from run to run."""
    document = {key: value for key, value in plan.items() if key not in RUN_TIME_FIELDS}
    if document.get("solver"):
        document["solver"] = {key: value for key, value in document["solver"].items() if key != "time_s"}
    return document


def write_preset(preset: str, folder: Path) -> None:
    """Write the plans of one preset, planned in this process."""
    from api.requests.model_registry import load_model, quiet_libraries
    from planner import PlanningSession, estimate_plan
    from planner.errors import PlannerError

    sessions: dict[tuple[str, str, bool], PlanningSession] = {}
    with quiet_libraries():
        source = load_model(preset, seq=SEQ.get(preset, DEFAULT_SEQ))
        for case in cases_of(preset):
            key = (case.cluster, case.phase, case.pipelines)
            nodes, per_node, _ = case.cluster.split("x", 2)
            if key not in sessions:
                sessions.clear()
                sessions[key] = PlanningSession(
                    source.module, cluster=case.cluster, phase=case.phase,  # type: ignore[arg-type]
                    example_inputs=source.example_inputs, batch=2 * int(nodes) * int(per_node), seq=source.seq,
                    tp_plan=source.tp_plan, executable_only=not case.pipelines,
                )  # fmt: skip
            try:
                plan = sessions[key].plan(planner=case.planner)
            except PlannerError as error:
                document: dict[str, Any] = {"refused": type(error).__name__}
            else:
                document = without_run_times(plan.to_dict())
                if plan.pipeline is None:
                    priced = estimate_plan(source.module, plan, example_inputs=source.example_inputs)
                    document["price"] = priced.to_dict()["estimate"]
            (folder / case.file_name).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
            print(case.file_name, document.get("refused", document.get("mesh")), flush=True)


def write(folder: Path, presets: Sequence[str], at_once: int) -> int:
    """Write the plans of ``presets``, each preset in a process of its own; return how many processes failed."""
    folder.mkdir(parents=True, exist_ok=True)

    def run(preset: str) -> int:
        command = [sys.executable, __file__, "write", str(folder), "--preset", preset, "--here"]
        return subprocess.run(command, check=False).returncode

    with ThreadPoolExecutor(at_once) as pool:
        return sum(code != 0 for code in pool.map(run, presets))


def as_written_today(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a golden document as today's code writes it, with current names in place of former ones."""
    from planner import ShardingPlan

    if "refused" in document:
        return dict(document)
    price = document.get("price")
    plan = ShardingPlan.from_dict({key: value for key, value in document.items() if key != "price"})
    return {**without_run_times(plan.to_dict()), "price": price}


def differences(before: object, after: object, where: str = "") -> Iterator[str]:
    """Yield a line for each difference of two documents; ``where`` is the path to them."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key), after.get(key), f"{where}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif before != after:
        yield f"{where}: {before!r} -> {after!r}"


def compare(before: Path, after: Path) -> int:
    """Print the differences of two folders' documents; return the number of files that differ."""
    names = {file.name for folder in (before, after) for file in folder.glob("*.json")}
    different = 0
    for name in sorted(names):
        if not ((before / name).exists() and (after / name).exists()):
            print(f"{name}: only in {before if (before / name).exists() else after}")
            different += 1
            continue
        documents = [as_written_today(json.loads((folder / name).read_text())) for folder in (before, after)]
        found = list(differences(*documents))
        different += bool(found)
        for line in found[:10]:
            print(f"{name}{line}")
    print(f"{len(names)} plans, {different} differ")
    return different


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writes = commands.add_parser("write", help="plan, and write the plans to a folder")
    writes.add_argument("folder", type=Path)
    writes.add_argument("--preset", action="append", choices=PRESETS, help="again for more; all where left out")
    writes.add_argument("--at-once", type=int, default=2, help="processes at a time")
    writes.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    compares = commands.add_parser("compare", help="compare two folders")
    compares.add_argument("before", type=Path)
    compares.add_argument("after", type=Path)
    return parser.parse_args(argv)


def main() -> int:
    """Write or compare; 1 where a process failed or plans differ."""
    arguments = parse_arguments()
    if arguments.command == "compare":
        return min(compare(arguments.before, arguments.after), 1)
    presets = arguments.preset or PRESETS
    if arguments.here:
        write_preset(presets[0], arguments.folder)
        return 0
    return min(write(arguments.folder, presets, arguments.at_once), 1)


if __name__ == "__main__":
    sys.exit(main())
