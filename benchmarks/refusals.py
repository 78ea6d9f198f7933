"""Seconds that a refusal takes, and the least memory that it names: presets x device counts x memory caps.

    python benchmarks/refusals.py --list
    python benchmarks/refusals.py --jobs 20 --seed 1 --check
    python benchmarks/refusals.py --preset llama-3.1-8b --devices 8 --cap 2 --cap 6

Every job runs as ``shardplan plan`` in a fresh process, so seconds include imports. ``--check`` plans again within 1.02
times the least memory of a refusal: that has to succeed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from api.requests.model_configs import preset_names

CLUSTERS = {1: "1x1xh100-sxm-80gb", 8: "1x8xh100-sxm-80gb", 64: "8x8xh100-sxm-80gb"}
CAPS_GB = (1.0, 2.0, 4.0, 8.0, 16.0)
BATCH = 64
SEQS = {"gpt2": 1024, "bert-large": 512, "t5-large": 512}
"""Tokens of a sequence; 4,096 for a preset that is not here, none for one that takes no sequences."""

WITHOUT_SEQ = ("vit-large",)
LIMIT_S = 10.0
ROOM = 1.02
TIME_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job: a preset on a number of devices, within a cap in GB per device."""

    preset: str
    devices: int
    cap_gb: float

    def command(self, cap_gb: float) -> list[str]:
        """Return the command line that plans the job within a cap."""
        seq = [] if self.preset in WITHOUT_SEQ else ["--seq", str(SEQS.get(self.preset, 4096))]
        return [
            sys.executable, "-c", "from api.cli.main import main; main()", "plan", self.preset, "--cluster",
            CLUSTERS[self.devices], "--batch", str(BATCH), *seq, "--memory-gb", repr(cap_gb), "--json", "--no-cache",
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a job.

    Attributes:
        wall_s, cpu_s: seconds of the process, imports included.
        code: exit code; -1: it was stopped after `TIME_LIMIT_S`.
        least_bytes, bound_bytes: of a refusal; None where it names none.
        text: the plan's step time, or the error's detail.
    """

    wall_s: float
    cpu_s: float
    code: int
    least_bytes: int | None = None
    bound_bytes: int | None = None
    text: str = ""


def ask(case: Case, cap_gb: float) -> Answer:
    """Return the answer to a job within ``cap_gb``, from a fresh process."""
    started, before = time.perf_counter(), os.times()
    try:
        done = subprocess.run(case.command(cap_gb), capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Answer(wall_s=TIME_LIMIT_S, cpu_s=0.0, code=-1, text="no answer")
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    wall_s = time.perf_counter() - started
    try:
        document = json.loads(done.stdout)
    except ValueError:
        return Answer(wall_s=wall_s, cpu_s=cpu_s, code=done.returncode, text=done.stderr.strip()[-200:])
    error = document.get("error")
    if error is None:
        step_s = document["estimate"]["step_time_s"]
        return Answer(wall_s=wall_s, cpu_s=cpu_s, code=done.returncode, text=f"{step_s:.3f} s a step")
    return Answer(
        wall_s=wall_s,
        cpu_s=cpu_s,
        code=done.returncode,
        least_bytes=error.get("least_bytes"),
        bound_bytes=error.get("bound_bytes"),
        text=error["detail"],
    )


def row(case: Case, *, check: bool) -> tuple[list[str], bool]:
    """Return the cells of a job's row, and whether it is as it should be."""
    answer = ask(case, case.cap_gb)
    cells = [case.preset, str(case.devices), f"{case.cap_gb:g}", f"{answer.wall_s:.1f}", f"{answer.cpu_s:.1f}"]
    if answer.code == 0:
        return [*cells, "fits", "", "", answer.text], True
    if answer.code != 3 or answer.least_bytes is None:
        return [*cells, f"exit {answer.code}", "", "", answer.text], False
    bound = "" if answer.bound_bytes is None else f"{answer.bound_bytes / 1e9:.2f}"
    good, checked = answer.cpu_s <= LIMIT_S, ""
    if check:
        again = ask(case, answer.least_bytes * ROOM / 1e9)
        good &= again.code == 0
        checked = f"fits ({again.wall_s:.1f} s)" if again.code == 0 else f"exit {again.code}: {again.text}"
    return [*cells, "refused", f"{answer.least_bytes / 1e9:.2f}", bound, checked], good


def cases(presets: Sequence[str], devices: Sequence[int], caps: Sequence[float]) -> list[Case]:
    """Return every job of these presets, device counts and caps."""
    return [
        Case(preset=preset, devices=count, cap_gb=cap)
        for preset, count, cap in itertools.product(presets, devices, caps)
    ]


def main() -> int:
    """Print a table of the jobs that the command line asks for. Return 1 if a refusal is slow or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append", choices=preset_names())
    parser.add_argument("--devices", action="append", type=int, choices=list(CLUSTERS))
    parser.add_argument("--cap", action="append", type=float, metavar="GB")
    parser.add_argument("--jobs", type=int, help="draw so many jobs; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="plan again within 1.02 times the least memory")
    parser.add_argument("--list", action="store_true", help="print the jobs and stop")
    arguments = parser.parse_args()
    chosen = cases(
        arguments.preset or preset_names(), arguments.devices or list(CLUSTERS), arguments.cap or list(CAPS_GB)
    )
    if arguments.jobs is not None:
        chosen = random.Random(arguments.seed).sample(chosen, min(arguments.jobs, len(chosen)))
    if arguments.list:
        print("\n".join(f"{case.preset} on {case.devices} within {case.cap_gb:g} GB" for case in chosen))
        return 0
    names = ["preset", "devices", "cap GB", "wall s", "CPU s", "answer", "least GB", "at least GB"]
    print(f"| {' | '.join([*names, f'at {ROOM} x least' if arguments.check else 'plan'])} |")
    print("|" + " --- |" * (len(names) + 1))
    wrong = 0
    for case in chosen:
        cells, good = row(case, check=arguments.check)
        print(f"| {' | '.join(cells)} |" + ("" if good else " **wrong**"), flush=True)
        wrong += not good
    print(f"\n{len(chosen)} jobs, {wrong} slower than {LIMIT_S:g} CPU seconds or wrong.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
