"""What one token does to a server that others use too: floods of large bodies, half-open requests, long jobs."""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from served.cached import TINY

FLOOD = 60
OPS = 49_000
"""Ops of the large graph; a document may have 50,000."""
PLAN_ENTRIES = 8_300
"""Parameters of each plan of a diff, such that both plans together nearly fill a body."""
LONG_JOB_LAYERS = 9_990
"""Layers of a job that runs for minutes at least; a config may have 10,000."""

Answers = Counter[str]
"""How often each status came; ``none`` where nothing did."""
Attack = Callable[[Answers], Awaitable[None]]

BIG_PLAN = {
    "model": "llama-3.1-405b",
    "cluster": "64x8xh100-sxm-80gb",
    "mesh": "pp=16,dp=4,tp=8",
    "batch": 2048,
    "seq": 8192,
    "micro_batches": 128,
    "executable_only": False,
    "heterogeneous_blocks": True,
}


@dataclass(frozen=True)
class Client:
    """One token's requests, each on a connection of its own; plain sockets make them cheap."""

    url: str
    token: str | None = None

    def message(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request."""
        who = f"Authorization: Bearer {self.token}\r\n" if self.token else ""
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: {urlsplit(self.url).netloc}\r\n{who}{kind}Connection: close\r\n\r\n"
        return head.encode() + body

    async def open(self, message: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection on which ``message`` was sent."""
        address = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(message)
        await writer.drain()
        return reader, writer

    async def send(self, message: bytes) -> tuple[str, bytes]:
        """Return status and body of the answer to ``message``: ``none`` where the connection ends without one."""
        try:
            reader, writer = await self.open(message)
            try:
                answer = await reader.read(-1)
            finally:
                writer.transport.abort()
        except OSError:
            return "none", b""
        head, _, body = answer.partition(b"\r\n\r\n")
        return (head.split(b" ", 2)[1].decode() if head else "none"), body

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[str, bytes]:
        """Return status and body of the answer to a request with the JSON value ``body``."""
        return await self.send(self.message(method, path, b"" if body is None else json.dumps(body).encode()))

    async def submit(self, request: dict[str, Any]) -> str:
        """Return the id of a new job."""
        status, body = await self.ask("POST", "/v1/plans", request)
        if status not in {"200", "202"}:
            raise SystemExit(f"the job was answered {status}: {body[:500]!r}")
        return str(json.loads(body)["id"])

    async def until(self, job: str, statuses: set[str], every_s: float = 0.1) -> str:
        """Return the status of a job once it is one of ``statuses``."""
        while True:
            status, body = await self.ask("GET", f"/v1/plans/{job}")
            if status == "200" and (state := str(json.loads(body)["status"])) in statuses:
                return state
            await asyncio.sleep(every_s)


RUNNING = {"running", "succeeded", "failed"}
ENDED = {"succeeded", "failed", "cancelled"}


async def _send(client: Client, message: bytes, answers: Answers) -> None:
    status = "none"
    try:
        status, _ = await client.send(message)
    finally:  # also where the attack's time is over
        answers[status] += 1


async def _flood(client: Client, messages: Iterable[bytes], answers: Answers) -> None:
    await asyncio.gather(*(_send(client, message, answers) for message in messages))


async def _leave(client: Client, messages: Iterable[bytes], answers: Answers) -> None:
    async def leave(message: bytes) -> None:
        _, writer = await client.open(message)
        writer.transport.abort()
        answers["left"] += 1

    await asyncio.gather(*(leave(message) for message in messages))


# --- what is sent ----------------------------------------------------------------------------------------------------


def large_graph(ops: int = OPS) -> dict[str, str]:
    """Return a valid traced graph of so many ops: a linear layer and a chain of activations."""
    import torch
    from torch import nn

    from planner.graph.trace_module import trace_module
    from planner.wire.codec import write_graph
    from planner.wire.document import FORMAT, text_of

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.relu(self.linear(x))).sum()

    with torch.device("meta"):
        traced = trace_module(Chain(), example_inputs=(torch.zeros(8, 8),), dtype="fp32")
    document = json.loads(text_of(write_graph(traced)))
    *start, link, end = document["ops"]
    value = next(value for value in document["values"] if value["name"] == link["outputs"][0])
    names = [f"chain_{number}" for number in range(ops - len(document["ops"]))]
    before = [link["name"], *names]
    document["values"] += [{**value, "name": name} for name in names]
    links = [
        {**link, "name": name, "outputs": [name], "args": [{"value": previous}]}
        for previous, name in zip(before, names, strict=False)
    ]
    document["ops"] = [*start, link, *links, {**end, "args": [{"value": before[-1]}]}]
    packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode())
    return {"format": FORMAT, "zlib": base64.b64encode(packed).decode()}


def graph_bodies(count: int) -> list[bytes]:
    """Return bodies that ask for plans of one large graph, each for another memory, so that none is known before."""
    settings = {"cluster": "1x4xtoy", "mesh": "dp=4", "planner": "data-parallel", "micro_batches": 1, "dtype": "fp32"}
    start = json.dumps({"model": {"graph": large_graph()}, **settings})[:-1]
    return [f'{start}, "memory_gb": {10 + number}}}'.encode() for number in range(count)]


def diff_body(entries: int = PLAN_ENTRIES) -> bytes:
    """Return a body that compares two plans in which every layout differs."""

    def plan(*layout: str) -> dict[str, Any]:
        names = [f"model.layers.{number}.self_attn.q_proj.weight" for number in range(entries)]
        layouts = {name: list(layout) for name in names}
        mesh = {"names": ["dp", "tp"], "shape": [2, 2], "device": "cuda"}
        return {"format_version": 1, "mesh": mesh, "plan": layouts}

    body = {"left": plan("S(0)", "R"), "right": plan("R", "S(1)")}
    return json.dumps(body, separators=(",", ":")).encode()


def long_job(number: int) -> dict[str, Any]:
    """Return a request that keeps a solver process busy, different for each ``number``."""
    config = {**TINY, "num_hidden_layers": LONG_JOB_LAYERS - number}
    return {"model": {"hf_config": config}, "cluster": "1x8xh100-sxm-80gb", "batch": 64, "seq": 64}


# --- the attacks: each prepares what it needs, and returns what it then does -----------------------------------------


async def graphs(client: Client) -> Attack:
    """60 large graphs at once."""
    messages = [client.message("POST", "/v1/plans", body) for body in graph_bodies(FLOOD)]
    return lambda answers: _flood(client, messages, answers)


async def graphs_and_leave(client: Client) -> Attack:
    """60 large graphs at once, whose clients hang up when they have sent them."""
    messages = [client.message("POST", "/v1/plans", body) for body in graph_bodies(FLOOD)]
    return lambda answers: _leave(client, messages, answers)


async def diffs(client: Client) -> Attack:
    """60 comparisons at once of two plans of half a body each."""
    message = client.message("POST", "/v1/plans/diff", diff_body())
    return lambda answers: _flood(client, [message] * FLOOD, answers)


async def half_open(client: Client) -> Attack:
    """200 requests of which half the body comes, and then nothing."""
    message = client.message("POST", "/v1/plans", b" " * 100_000)[:-50_000]
    return lambda answers: _flood(client, [message] * 200, answers)


async def streams(client: Client) -> Attack:
    """150 event streams of one running job."""
    job = await client.submit(long_job(0))
    await client.until(job, RUNNING)
    message = client.message("GET", f"/v1/plans/{job}/events")

    async def stream(answers: Answers) -> None:
        status = "none"
        reader, writer = await client.open(message)
        try:
            status = (await reader.readline()).split(b" ", 2)[1].decode()
            while await reader.read(2**16):
                pass
        finally:
            answers[status] += 1
            writer.transport.abort()

    async def attack(answers: Answers) -> None:
        await asyncio.gather(*(stream(answers) for _ in range(150)))

    return attack


async def long_jobs(client: Client) -> Attack:
    """Two jobs of 9,990 layers, which keep two solver processes busy."""

    async def attack(answers: Answers) -> None:
        await _flood(
            client, [client.message("POST", "/v1/plans", json.dumps(long_job(n)).encode()) for n in (0, 1)], answers
        )
        await asyncio.Event().wait()  # until the attack's time is over

    return attack


async def leave_amid_bodies(client: Client) -> Attack:
    """200 clients that hang up amid their body."""
    message = client.message("POST", "/v1/plans", b" " * 500_000)[:-250_000]
    return lambda answers: _leave(client, [message] * 200, answers)


async def views(client: Client) -> Attack:
    """60 views and 60 reports at once of the plan of a large model in a pipeline."""
    job = await client.submit(BIG_PLAN)
    if (status := await client.until(job, ENDED)) != "succeeded":
        raise SystemExit(f"the large plan {status}")
    paths = [f"/v1/plans/{job}/{what}" for _ in range(FLOOD) for what in ("view", "report")]
    return lambda answers: _flood(client, [client.message("GET", path) for path in paths], answers)


ATTACKS: dict[str, Callable[[Client], Awaitable[Attack]]] = {
    "a": graphs,
    "b": graphs_and_leave,
    "c": diffs,
    "d": half_open,
    "e": streams,
    "f": long_jobs,
    "g": leave_amid_bodies,
    "h": views,
}
"""The attacks by their letters."""
