"""Throughput and latency of the service: cached plans, 1,000 clients, and 200 jobs submitted at once. Prints JSON.

    cd benchmarks && python -m served.cached [--seconds 10] [--clients 1000] [--jobs 200] [--page] [--database-url postgresql://...]

The script starts a ``shardplan serve`` (with a database URL also a ``shardplan worker``). All clients run in the
script's own process, and so use at most one core. First, clients request a cached plan again and again. Then 1,000
clients, each on its connection, read a job every two seconds, as `RemoteShardingPlanner` does while it waits. Then 20
clients submit 200 jobs at once and wait for all of them, while ``/healthz`` is requested every 20 ms. With
``--page``, Chromium has the plan's page open all the while.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from served.memory import memory_mb

CLIENTS = 20
CONNECTIONS = 8
HEALTH_EVERY_S = 0.02
READ_EVERY_S = 2.0
PAGE_OPENS_S = 5.0
TARGETS = {"requests_per_s": 500.0, "p99_ms": 50.0, "healthz_p99_ms": 100.0, "server_grows_mb": 20.0}
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}


def request_of(number: int, batch: int = 8) -> dict[str, Any]:
    """Return a request for a small plan on 4 devices, different for each ``number``; a ``batch`` of 6 is infeasible."""
    settings = {
        "cluster": "1x4xtoy",
        "batch": batch,
        "seq": 64,
        "mesh": "dp=4",
        "planner": "data-parallel",
        "micro_batches": 1,
        "ac": "none",
        "dtype": "fp32",
    }
    return {"model": {"hf_config": {**TINY, "max_position_embeddings": 4096 + number}}, **settings}


@dataclass
class Seconds:
    """Seconds of many requests."""

    values: list[float] = field(default_factory=list)

    def quantile_ms(self, share: float) -> float:
        """Return the quantile at ``share`` (0 to 1) in milliseconds."""
        ordered = sorted(self.values)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Started:
    """A server that listens."""

    url: str
    pid: int


@contextmanager
def running_server(folder: Path, database_url: str | None, workers: int) -> Iterator[Started]:
    """Yield a server, with its workers, on a free port; its data are in ``folder / "data"``."""
    environment = {**os.environ, "SHARDPLAN_MAX_UNFINISHED_PER_TOKEN": "100"}
    if database_url is not None:
        environment["SHARDPLAN_DATABASE_URL"] = database_url
    command = [str(Path(sys.executable).with_name("shardplan"))]
    log = folder / "serve.log"
    serve = [*command, "serve", "--port", "0", "--data-dir", str(folder / "data"), "--workers", str(workers)]
    processes = []
    with log.open("wb") as stream:
        processes.append(subprocess.Popen(serve, stderr=stream, env=environment))
        if database_url is not None:
            processes.append(subprocess.Popen([*command, "worker", "--workers", str(workers)], env=environment))
        try:
            while '"listening"' not in log.read_text():
                if processes[0].poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.1)
            first = next(line for line in log.read_text().splitlines() if '"listening"' in line)
            yield Started(url=json.loads(first)["url"], pid=processes[0].pid)
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)


@contextmanager
def open_page(url: str, folder: Path) -> Iterator[None]:
    """Keep a page open in Chromium, without a window, during the block."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("there is no Chromium: apt-get install chromium")
    options = ("--headless", "--no-sandbox", "--remote-debugging-port=0", f"--user-data-dir={folder / 'chromium'}")
    process = subprocess.Popen([chromium, *options, url], stderr=subprocess.DEVNULL)
    try:
        time.sleep(PAGE_OPENS_S)
        if process.poll() is not None:
            raise SystemExit(f"Chromium ended with {process.returncode}")
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


def until_ended(url: str, job: str) -> dict[str, Any]:
    """Return the document of a job when it has ended."""
    while True:
        answer: dict[str, Any] = httpx2.get(f"{url}/v1/plans/{job}").raise_for_status().json()
        if answer["status"] not in {"queued", "running"}:
            return answer
        time.sleep(0.2)


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes) -> bytes:
    """Return the head of the answer to ``message``, in small letters, once its body has come as well.

    Plain sockets make the client cheap.
    """
    writer.write(message)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    await reader.readexactly(length)
    return head


async def ask_repeatedly(url: str, message: bytes, seconds: float, times: Seconds, *, every_s: float = 0.0) -> None:
    """Send ``message`` on one connection for ``seconds`` s, and append the seconds of each answer to ``times``.

    With ``every_s`` the first is sent at a random time within it, and the next ones so much later each.
    """
    address = urlsplit(url)
    end = time.perf_counter() + seconds
    await asyncio.sleep(random.uniform(0.0, every_s))
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    while (started := time.perf_counter()) < end:
        head = await answered(reader, writer, message)
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(f"not answered with 200: {head[:200]!r}")
        times.values.append(time.perf_counter() - started)
        await asyncio.sleep(max(0.0, started + every_s - time.perf_counter()))
    writer.close()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has taken, its children's left out."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def asked(
    server: Started, head: str, body: bytes, *, seconds: float, connections: int, every_s: float = 0.0
) -> dict[str, float]:
    """Return requests per second, latencies, and CPU time of the server, of one request that many connections send."""
    url, used_s = server.url, cpu_s(server.pid)
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
    message = f"{head} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n{kind}\r\n".encode() + body
    times = Seconds()

    async def run_clients() -> None:
        clients = (ask_repeatedly(url, message, seconds, times, every_s=every_s) for _ in range(connections))
        await asyncio.gather(*clients)

    asyncio.run(run_clients())
    return {
        "connections": connections,
        "requests_per_s": len(times.values) / seconds,
        "cpu_ms_per_request": 1e3 * (cpu_s(server.pid) - used_s) / len(times.values),
        "p50_ms": times.quantile_ms(0.5),
        "p99_ms": times.quantile_ms(0.99),
        "worst_ms": times.quantile_ms(1.0),
    }


async def submit(client: httpx2.AsyncClient, requests: list[dict[str, Any]], counts: dict[str, int]) -> list[str]:
    """Return the job ids of one client's requests; a request is sent again after a 429."""
    jobs = []
    for request in requests:
        while True:
            answer = await client.post("/v1/plans", json=request)
            counts[str(answer.status_code)] = counts.get(str(answer.status_code), 0) + 1
            if answer.status_code != 429:
                break
            await asyncio.sleep(float(answer.headers["retry-after"]))
        jobs.append(answer.raise_for_status().json()["id"])
    return jobs


async def watch_health(client: httpx2.AsyncClient, done: asyncio.Event, times: Seconds) -> None:
    """Request /healthz until ``done`` is set."""
    while not done.is_set():
        started = time.perf_counter()
        (await client.get("/healthz")).raise_for_status()
        times.values.append(time.perf_counter() - started)
        await asyncio.sleep(HEALTH_EVERY_S)


async def watch_memory(pid: int, done: asyncio.Event, samples: list[tuple[float, float]]) -> None:
    """Note the memory of a server and of its processes each second, until ``done`` is set."""
    while not done.is_set():
        samples.append(memory_mb(pid))
        await asyncio.sleep(1.0)


async def storm(server: Started, jobs: int, solves: int) -> dict[str, Any]:
    """Return the outcome of ``jobs`` jobs that many clients submit at once; ``solves`` of the jobs are feasible."""
    counts: dict[str, int] = {}
    memory: list[tuple[float, float]] = []
    health, done = Seconds(), asyncio.Event()
    requests = [request_of(number, batch=8 if number <= solves else 6) for number in range(1, jobs + 1)]
    started = time.perf_counter()
    async with httpx2.AsyncClient(base_url=server.url, timeout=60.0) as client:
        watching = asyncio.gather(watch_health(client, done, health), watch_memory(server.pid, done, memory))
        shares = [requests[number::CLIENTS] for number in range(CLIENTS)]
        job_ids = [
            job for part in await asyncio.gather(*(submit(client, share, counts) for share in shares)) for job in part
        ]
        submitted_s = time.perf_counter() - started
        ended: dict[str, int] = {}
        runs: dict[int, int] = {}
        for job in job_ids:
            while (answer := (await client.get(f"/v1/plans/{job}")).json())["status"] in {"queued", "running"}:
                await asyncio.sleep(0.5)
            ended[answer["status"]] = ended.get(answer["status"], 0) + 1
            stages = (await client.get(f"/v1/plans/{job}/events")).text.count('{"stage": "running"}')
            runs[stages] = runs.get(stages, 0) + 1
        done.set()
        await watching
    return {
        "jobs": len(set(job_ids)),
        "answers": counts,
        "ended": ended,
        "runs_per_job": runs,
        "submitted_s": submitted_s,
        "ended_s": time.perf_counter() - started,
        "healthz_p99_ms": health.quantile_ms(0.99),
        "healthz_worst_ms": health.quantile_ms(1.0),
        "server_mb": [memory[0][0], max(own for own, _ in memory), memory[-1][0]],
        "processes_mb": [memory[0][1], max(others for _, others in memory), memory[-1][1]],
    }


def main() -> int:
    """Measure and print; return 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=1000, help="clients that read a job every two seconds")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument(
        "--solves", type=int, help="feasible jobs; the others end infeasible (default: all are feasible)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--page", action="store_true", help="keep the page of the plan open in Chromium")
    parser.add_argument("--database-url")
    options = parser.parse_args()
    solves = options.jobs if options.solves is None else options.solves
    expected = {"succeeded": solves, "failed": options.jobs - solves}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder), options.database_url, options.workers) as server,
    ):
        url = server.url
        job = httpx2.post(f"{url}/v1/plans", json=request_of(0), timeout=60).json()["id"]
        assert until_ended(url, job)["status"] == "succeeded"
        body = json.dumps(request_of(0)).encode()
        page = open_page(f"{url}/plans/{job}", Path(folder)) if options.page else nullcontext()
        with page:
            fast = asked(server, "POST /v1/plans", body, seconds=options.seconds, connections=CONNECTIONS)
            reading = {"seconds": options.seconds, "connections": options.clients, "every_s": READ_EVERY_S}
            waiting = asked(server, f"GET /v1/plans/{job}", b"", **reading)
            stormy = asyncio.run(storm(server, options.jobs, solves))
    met = {
        "requests_per_s": fast["requests_per_s"] >= TARGETS["requests_per_s"],
        "p99_ms": fast["p99_ms"] < TARGETS["p99_ms"],
        "healthz_p99_ms": stormy["healthz_p99_ms"] < TARGETS["healthz_p99_ms"],
        "only_429": set(stormy["answers"]) <= {"200", "202", "429"},
        "every_job_ends": stormy["ended"] == {status: jobs for status, jobs in expected.items() if jobs},
        "none_twice": set(stormy["runs_per_job"]) == {1},
        "server_grows_mb": stormy["server_mb"][-1] - stormy["server_mb"][0] < TARGETS["server_grows_mb"],
    }
    print(json.dumps({"cached": fast, "waiting": waiting, "storm": stormy, "met": met, "targets": TARGETS}, indent=2))
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
