"""What one token's attacks take from another's work. Prints JSON; the table goes to standard error.

    cd benchmarks && python -m served.unkind [--only a,b] [--seconds 30] [--workers 2]

For each attack of `served.attacks` a server is started. One token attacks. Another reads its jobs every 50 ms, submits
a small job half a second after the attack began, and follows it to its end; ``/healthz`` and ``/readyz`` are requested
every 50 ms. An attack ends after ``--seconds`` at the latest. Then the attacker's jobs are cancelled, and the server
rests for ``--rest`` seconds. All clients run in the script's own process; ``client_lag_ms`` is how long they kept each
other waiting, which is part of every latency. Memory is resident, in MB of 1e6 bytes; what processes share is counted
for each of them. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from served.attacks import ATTACKS, ENDED, RUNNING, Answers, Client
from served.cached import Seconds, request_of, running_server
from served.memory import memory_mb

EVERY_S = 0.05
SUBMITTED_AFTER_S = 0.5
WATCHED_S = 10.0
"""An attack that is over sooner is watched for so long, to have enough reads."""
SMALL_JOB_S = 120.0
"""After so long the small job is given up."""
QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
TARGETS = {
    "reads_p99_ms": 200.0,
    "healthz_max_ms": 500.0,
    "readyz_max_ms": 500.0,
    "job_started_s": 5.0,
    "server_kept_mb": 100.0,
}


@dataclass
class Watch:
    """What the other token met while the attack went on."""

    reads: Seconds = field(default_factory=Seconds)
    healthz: Seconds = field(default_factory=Seconds)
    readyz: Seconds = field(default_factory=Seconds)
    lag: Seconds = field(default_factory=Seconds)
    answers: Answers = field(default_factory=Counter)
    """Of the reads and probes."""
    server_mb: float = 0.0
    children_mb: float = 0.0
    job_started_s: float | None = None
    job_ended_s: float | None = None

    async def ask_again_and_again(self, client: Client, path: str, times: Seconds) -> None:
        """Request ``path`` every 50 ms."""
        while True:
            started = time.perf_counter()
            status, _ = await client.ask("GET", path)
            times.values.append(time.perf_counter() - started)
            self.answers[status] += 1
            await asyncio.sleep(EVERY_S)

    async def measure_lag(self) -> None:
        """Note how much later than asked for this process's own clients are woken."""
        while True:
            started = time.perf_counter()
            await asyncio.sleep(EVERY_S)
            self.lag.values.append(time.perf_counter() - started - EVERY_S)

    async def measure_memory(self, pid: int) -> None:
        """Note the most memory, seen five times a second."""
        while True:
            server, children = memory_mb(pid)
            self.server_mb, self.children_mb = max(self.server_mb, server), max(self.children_mb, children)
            await asyncio.sleep(0.2)

    async def follow_small_job(self, client: Client, number: int) -> None:
        """Submit a small job, again where it is refused, and note when it starts and ends."""
        await asyncio.sleep(SUBMITTED_AFTER_S)
        submitted = time.perf_counter()
        while (answer := await client.ask("POST", "/v1/plans", request_of(number)))[0] not in {"200", "202"}:
            self.answers[f"job {answer[0]}"] += 1
            await asyncio.sleep(1.0)
        job = json.loads(answer[1])["id"]
        await client.until(job, RUNNING)
        self.job_started_s = time.perf_counter() - submitted
        await client.until(job, ENDED)
        self.job_ended_s = time.perf_counter() - submitted


def create_token(name: str, data: Path) -> str:
    """Return a new token that may plan."""
    command = [str(Path(sys.executable).with_name("shardplan")), "token", "create", name, "--scope", "plan"]
    made = subprocess.run([*command, "--data-dir", str(data)], check=True, capture_output=True, text=True)
    return next(word for word in made.stdout.split() if word.startswith("sp_"))


async def cancel_all(client: Client) -> None:
    """Cancel the token's jobs that wait or run."""
    for status in ("queued", "running"):
        _, body = await client.ask("GET", f"/v1/plans?limit=200&status={status}")
        for job in json.loads(body)["jobs"]:
            await client.ask("DELETE", f"/v1/plans/{job['id']}")


async def suffer(
    letter: str, pid: int, attacker: Client, victim: Client, *, seconds: float, rest: float
) -> dict[str, Any]:
    """Return what happened during one attack."""
    number = 2 * list(ATTACKS).index(letter)
    await victim.until(await victim.submit(request_of(number)), ENDED)  # loads what is loaded once
    attack = await ATTACKS[letter](attacker)
    watch, answers = Watch(), Counter[str]()
    before = memory_mb(pid)
    nobody = Client(victim.url)
    watching = [
        asyncio.create_task(watcher)
        for watcher in (
            watch.ask_again_and_again(victim, "/v1/plans", watch.reads),
            watch.ask_again_and_again(nobody, "/healthz", watch.healthz),
            watch.ask_again_and_again(nobody, "/readyz", watch.readyz),
            watch.measure_lag(),
            watch.measure_memory(pid),
        )
    ]
    started = time.perf_counter()
    small_job = asyncio.create_task(watch.follow_small_job(victim, number + 1))
    with suppress(TimeoutError):
        await asyncio.wait_for(attack(answers), seconds)
    attack_s = time.perf_counter() - started
    await asyncio.sleep(max(0.0, WATCHED_S - attack_s))
    with suppress(TimeoutError):
        await asyncio.wait_for(small_job, SMALL_JOB_S)
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    await cancel_all(attacker)
    await asyncio.sleep(rest)
    after = memory_mb(pid)
    return {
        "attack": ATTACKS[letter].__doc__,
        "attack_s": attack_s,
        "attacker": dict(answers),
        "victim": dict(watch.answers),
        **{f"reads_{name}_ms": watch.reads.quantile_ms(share) for name, share in QUANTILES.items()},
        "healthz_max_ms": watch.healthz.quantile_ms(1.0),
        "readyz_max_ms": watch.readyz.quantile_ms(1.0),
        "client_lag_ms": watch.lag.quantile_ms(1.0),
        "job_started_s": watch.job_started_s,
        "job_ended_s": watch.job_ended_s,
        "server_mb": [before[0], watch.server_mb, after[0]],
        "children_mb": [before[1], watch.children_mb, after[1]],
        "server_kept_mb": after[0] - before[0],
    }


def missed(row: dict[str, Any]) -> list[str]:
    """Return the names of the targets that a row misses; what never came misses."""
    return [name for name, most in TARGETS.items() if row[name] is None or row[name] > most]


def table_of(rows: dict[str, dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    table = Table(
        "attack",
        "reads p50/p99/max ms",
        "probes ms",
        "lag ms",
        "job starts/ends s",
        "attacker",
        "server MB",
        "children MB",
        "missed",
    )

    def many(values: list[float | None], digits: int = 0) -> str:
        return " / ".join("never" if value is None else f"{value:.{digits}f}" for value in values)

    for letter, row in rows.items():
        table.add_row(
            f"{letter}: {row['attack']}",
            many([row[f"reads_{name}_ms"] for name in QUANTILES]),
            many([row["healthz_max_ms"], row["readyz_max_ms"]]),
            many([row["client_lag_ms"]]),
            many([row["job_started_s"], row["job_ended_s"]], 1),
            ", ".join(f"{count} x {status}" for status, count in sorted(row["attacker"].items())),
            many(row["server_mb"]),
            many(row["children_mb"]),
            ", ".join(row["missed"]),
        )
    return table


def main() -> int:
    """Measure and print; return 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ATTACKS), help="letters of the attacks, with commas")
    parser.add_argument("--seconds", type=float, default=30.0, help="most seconds of an attack")
    parser.add_argument("--rest", type=float, default=30.0, help="seconds after an attack until memory is read again")
    parser.add_argument("--workers", type=int, default=2, help="jobs that the server plans at once")
    options = parser.parse_args()
    letters = options.only.split(",")
    if unknown := set(letters) - set(ATTACKS):
        parser.error(f"there is no attack {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        tokens = [create_token(name, data) for name in ("attacker", "victim")]
        for letter in letters:
            with running_server(Path(folder), None, options.workers) as server:
                attacker, victim = (Client(server.url, token) for token in tokens)
                row = asyncio.run(
                    suffer(letter, server.pid, attacker, victim, seconds=options.seconds, rest=options.rest)
                )
            rows[letter] = {**row, "missed": missed(row)}
            print(f"{letter}: {json.dumps(rows[letter])}", file=sys.stderr)
    print(json.dumps({"attacks": rows, "targets": TARGETS}, indent=2))
    Console(stderr=True, width=200).print(table_of(rows))
    return 1 if any(row["missed"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
