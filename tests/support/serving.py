"""A real ``shardplan serve`` in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil


@dataclass(frozen=True)
class Child:
    """A process of a server's."""

    pid: int

    def until_gone(self, timeout_s: float = 30.0) -> bool:
        """Return whether it ended in that time."""
        pause = threading.Event()
        for _ in range(int(timeout_s / 0.1)):
            status = Path(f"/proc/{self.pid}/status")
            if not status.exists() or "State:\tZ" in status.read_text():
                return True
            pause.wait(0.1)
        return False


@dataclass
class Running:
    """A process of ``shardplan``; its log is in ``log``."""

    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """End it without a chance to tidy up."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=60)

    def stop(self) -> int:
        """Ask it to end; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@dataclass
class Server(Running):
    """A running server."""

    url: str

    def children(self) -> list[Child]:
        """Return the processes that it has started, and those that these have started."""
        return [Child(process.pid) for process in psutil.Process(self.process.pid).children(recursive=True)]

    def until_ended(self, job_id: str, timeout_s: float = 300.0) -> dict[str, Any]:
        """Return the job once it has ended."""
        pause = threading.Event()
        for _ in range(int(timeout_s / 0.1)):
            job: dict[str, Any] = httpx2.get(f"{self.url}/v1/plans/{job_id}").raise_for_status().json()
            if job["status"] not in {"queued", "running"}:
                return job
            pause.wait(0.1)
        raise AssertionError(f"job {job_id} is still {job['status']} after {timeout_s} s:\n{self.log.read_text()}")


def start_server(data_dir: Path, **environment: str) -> Server:
    """Return a server on a free port of the loopback address, once it is ready."""
    log = data_dir.with_name(f"{data_dir.name}.log")
    process = _start(["serve", "--port", "0", "--data-dir", str(data_dir)], log, environment)
    url = _until(process, log, "listening")["url"]
    pause = threading.Event()
    for _ in range(600):
        if process.poll() is not None or httpx2.get(f"{url}/readyz", timeout=30).status_code == httpx2.codes.OK:
            break
        pause.wait(0.1)
    return Server(process, log, url)


class Worker(Running):
    """A running ``shardplan worker``."""

    def jobs(self, event: str) -> list[str]:
        """Return the jobs of the log lines of an event, such as ``job started``."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line["job"] for line in lines if line["event"] == event]


def start_worker(log: Path, **environment: str) -> Worker:
    """Return a worker, once it answers calls."""
    process = _start(["worker"], log, environment)
    _until(process, log, "worker started")
    return Worker(process, log)


def _start(arguments: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [Path(sys.executable).with_name("shardplan"), *arguments]
    with log.open("wb") as stream:
        return subprocess.Popen(command, stderr=stream, env={**os.environ, **environment})


def _until(process: subprocess.Popen[bytes], log: Path, event: str) -> dict[str, Any]:
    """Return the log line of ``event`` once it is there."""
    pause = threading.Event()
    for _ in range(900):
        for line in log.read_text().splitlines():
            if f'"event": "{event}"' in line:
                found: dict[str, Any] = json.loads(line)
                return found
        if process.poll() is not None:
            break
        pause.wait(0.1)
    process.kill()
    raise AssertionError(f"it did not start:\n{log.read_text()}")
