"""What the client does when the server is away, busy, slow or no server of ours: no network, and time as it is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx2
import pytest
from torch import nn

from api.remote.client import RemotePlanningError, RemoteShardingPlanner
from api.remote.retrying_http import LONGEST_WAIT_S, Connection
from planner.errors import InfeasibleError, ModelError
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import ProgressEvent

Answer = httpx2.Response | Exception


def job(status: str = "queued", **fields: Any) -> httpx2.Response:
    return httpx2.Response(202, json={"id": "j1", "status": status, "plan": None, "error": None, **fields})


class Server:
    """Answers what it is told to, in order, the last one for ever; remembers what it was asked."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = list(answers)
        self.asked: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Time:
    """A clock that goes on when somebody waits, and at no other time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waits_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        self.now_s += seconds


def connect(server: Server, time: Time, **options: Any) -> Connection:
    given: dict[str, Any] = {"token": None, "timeout_s": None, "retries": 4} | options
    transport = httpx2.MockTransport(server)
    return Connection("http://planner/", transport=transport, clock=time.clock, wait=time.wait, **given)


def planner(server: Callable[[httpx2.Request], httpx2.Response], **options: Any) -> RemoteShardingPlanner:
    given: dict[str, Any] = {"cluster": "1x4xtoy", "model": "gpt2"} | options
    return RemoteShardingPlanner("http://planner", transport=httpx2.MockTransport(server), **given)


LOST = [httpx2.ConnectError("refused"), httpx2.ReadTimeout("no answer"), httpx2.RemoteProtocolError("gone")]


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
def test_request_that_is_lost_is_sent_again(lost: Exception) -> None:
    server, time = Server([lost, lost, job()]), Time()
    assert connect(server, time).ask("POST", "/v1/plans", json={})["id"] == "j1"
    assert len(server.asked) == 3
    assert len(time.waits_s) == 2
    assert 0 < time.waits_s[0] < time.waits_s[1] * 2 + 1e-9


def test_lost_request_is_the_same_job_when_it_arrives_twice(hand_written_plan: ShardingPlan) -> None:
    done = job("succeeded", plan=hand_written_plan.to_dict())
    server = Server(
        [httpx2.Response(503, headers={"Retry-After": "0"}), httpx2.Response(429, headers={"Retry-After": "0"}), done]
    )
    assert planner(server).build_plan(nn.Identity()) == hand_written_plan
    keys = [request.headers["Idempotency-Key"] for request in server.asked]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    planner(server).build_plan(nn.Identity())
    assert server.asked[-1].headers["Idempotency-Key"] != keys[0]


@pytest.mark.parametrize("status", [429, 503])
def test_busy_server_is_asked_again_when_it_says(status: int) -> None:
    then = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    asks = [
        httpx2.Response(status, headers={"Retry-After": "7"}),
        httpx2.Response(status, headers={"Retry-After": then}),
        httpx2.Response(status, headers={"Retry-After": "soon"}),
        httpx2.Response(status),
        job(),
    ]
    server, time = Server(asks), Time()
    connect(server, time).ask("POST", "/v1/plans", json={})
    assert time.waits_s[:2] == [7.0, LONGEST_WAIT_S]
    assert all(0 < wait_s <= 8 for wait_s in time.waits_s[2:])


def test_tries_come_to_an_end() -> None:
    server, time = Server([httpx2.ConnectError("refused")]), Time()
    with pytest.raises(RemotePlanningError, match=r"cannot reach http://planner: refused"):
        connect(server, time, retries=2).ask("POST", "/v1/plans", json={})
    assert len(server.asked) == 3
    busy = Server([httpx2.Response(429, json={"title": "Too many requests", "status": 429, "detail": "Wait."})])
    with pytest.raises(RemotePlanningError, match="Wait"):
        connect(busy, time, retries=2).ask("GET", "/v1/plans/j1")
    assert len(busy.asked) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 500])
def test_refusal_is_not_asked_again(status: int) -> None:
    server, time = Server([httpx2.Response(status, json={"detail": "No.", "what_to_do": "Ask else."})]), Time()
    with pytest.raises(RemotePlanningError, match=r"No\. Ask else\.") as caught:
        connect(server, time).ask("POST", "/v1/plans", json={})
    assert caught.value.problem["detail"] == "No."
    assert len(server.asked) == 1


def test_timeout_names_the_job_that_goes_on() -> None:
    server, time = Server([job(), httpx2.ConnectError("refused")]), Time()
    connection = connect(server, time, timeout_s=2.0, retries=50)
    connection.ask("POST", "/v1/plans", json={})
    with pytest.raises(RemotePlanningError, match=r"had no answer after 2 s \(job j1; refused\)") as caught:
        connection.ask("GET", "/v1/plans/j1")
    assert caught.value.job_id == "j1"
    assert "http://planner/v1/plans/j1" in caught.value.what_to_do
    assert time.now_s <= 1002.0


def test_timeout_without_a_job_says_so() -> None:
    server, time = Server([httpx2.Response(503, headers={"Retry-After": "60"})]), Time()
    with pytest.raises(RemotePlanningError, match=r"no job was made; it answers 503") as caught:
        connect(server, time, timeout_s=5.0).ask("POST", "/v1/plans", json={})
    assert caught.value.job_id is None
    assert time.waits_s == [], "the server would not be asked again in time"


def test_job_that_never_ends_is_left_after_the_timeout() -> None:
    server = Server([job("running")])
    with pytest.raises(RemotePlanningError, match=r"job j1; it is running"):
        planner(server, timeout_s=0.02).build_plan(nn.Identity())


def test_token_and_options_are_sent() -> None:
    server = Server([job("cancelled")])
    with pytest.raises(RemotePlanningError, match="The job was cancelled") as caught:
        planner(server, token="secret", mesh="dp=4", pins=("a=R@dp",), batch=None).build_plan(nn.Identity())
    assert caught.value.job_id == "j1"
    assert server.asked[0].headers["Authorization"] == "Bearer secret"
    request = json.loads(server.asked[0].content)
    assert request == {"model": "gpt2", "cluster": "1x4xtoy", "mesh": "dp=4", "pins": ["a=R@dp"]}
    assert "secret" not in repr(caught.value.args)


def test_refresh_and_a_time_limit_are_sent() -> None:
    server = Server([job("cancelled")])
    with pytest.raises(RemotePlanningError):
        planner(server, refresh=True, time_limit_s=5).build_plan(nn.Identity())
    assert dict(server.asked[0].url.params) == {"refresh": "true"}
    assert json.loads(server.asked[0].content)["time_limit_s"] == 5
    with pytest.raises(RemotePlanningError):
        planner(server).build_plan(nn.Identity())
    assert not server.asked[1].url.params


def test_infeasible_job_is_the_planners_own_error() -> None:
    problem = {"type": "urn:shardplan:infeasible-error", "detail": "No plan fits.", "budget_bytes": 5, "least_bytes": 9}
    with pytest.raises(InfeasibleError, match="No plan fits") as caught:
        planner(Server([job("failed", error={**problem, "largest_tensors": [["a", 4]]})])).build_plan(nn.Identity())
    assert (caught.value.least_bytes, caught.value.largest_tensors) == (9, (("a", 4),))


@pytest.mark.parametrize(
    "answer",
    [httpx2.Response(200, text="<html>"), httpx2.Response(200, json=[]), httpx2.Response(200, json={"id": "j1"})],
    ids=["page", "list", "half a job"],
)
def test_other_server_is_told_from_ours(answer: httpx2.Response) -> None:
    with pytest.raises(RemotePlanningError, match="something else than"):
        planner(Server([answer])).build_plan(nn.Identity())


def test_progress_is_followed_by_events_and_without_them(hand_written_plan: ShardingPlan) -> None:
    done = job("succeeded", plan=hand_written_plan.to_dict())
    lines = [
        'id: 1\ndata: {"stage": "tracing"}',
        ": still there",
        "data: no JSON",
        'data: {"stage": "best", "mesh": "dp=4", "step_time_s": 2.0, "bound_s": 1.0, "gap": 0.5}',
    ]
    stream = httpx2.Response(200, text="\n\n".join([*lines, ""]))
    for events in (stream, httpx2.Response(404), httpx2.ReadError("gone")):
        said: list[ProgressEvent] = []
        server = Server([job(), events, done])
        assert planner(server, progress=said.append).build_plan(nn.Identity()) == hand_written_plan
        assert server.asked[1].url.path == "/v1/plans/j1/events"
        told = ["tracing", "found a faster plan on mesh dp=4; best 2 s, gap 50.00%"] if events is stream else []
        assert list(map(str, said)) == ["asking the server", *told]


def test_graph_is_traced_here_for_the_request() -> None:
    server = Server([job("cancelled")])
    module = nn.Linear(4, 4)
    inputs = (module.weight.new_zeros(8, 4),)
    with pytest.raises(RemotePlanningError):
        planner(server, model=None, example_inputs=inputs, dtype="fp32", micro_batches=2).build_plan(module)
    request = json.loads(server.asked[0].content)
    from planner.wire.codec import read_graph

    sent = read_graph(request["model"]["graph"])
    assert (sent.dtype, sent.samples, sent.traced_batch, sent.any_batch) == ("fp32", 8, 4, False)
    assert "example_inputs" not in request


def test_module_that_cannot_be_traced_is_not_sent() -> None:
    server = Server([job()])
    with pytest.raises(ModelError, match="has no config that describes its inputs"):
        planner(server, model=None).build_plan(nn.Linear(2, 2))
    assert server.asked == []


def test_a_comparison_sends_its_kind_and_gives_rows(hand_written_plan: ShardingPlan) -> None:
    row = {"cluster": "1x4xtoy", "devices": 4, "fits": True, "best": True, "price": 0.5, "step_time_s": 0.5}
    rows = [{**row, "plan": hand_written_plan.to_dict()}, {**row, "fits": None, "best": False, "plan": None}]
    done = httpx2.Response(200, json={"id": "j1", "status": "succeeded", "result": rows, "error": None})
    server = Server([done])
    found = planner(server, mesh=None).compare(nn.Identity(), "sweep", devices=[2, 4], price=3.6)
    assert [(row.plan, row.in_time, row.is_best) for row in found] == [
        (hand_written_plan, True, True),
        (None, False, False),
    ]
    assert server.asked[0].url.path == "/v1/comparisons"
    request = {"model": "gpt2", "cluster": "1x4xtoy"}
    assert json.loads(server.asked[0].content) == {
        "kind": "sweep",
        "request": request,
        "devices": [2, 4],
        "price": 3.6,
    }


def test_timeout_of_a_comparison_names_where_it_is_read() -> None:
    server = Server([httpx2.Response(202, json={"id": "j1", "status": "running", "result": None, "error": None})])
    with pytest.raises(RemotePlanningError) as caught:
        planner(server, timeout_s=0.02).compare(nn.Identity(), "pareto")
    assert "GET http://planner/v1/comparisons/j1" in caught.value.what_to_do


def test_events_of_a_sweep_name_their_subject() -> None:
    lines = ['data: {"stage": "tracing"}', 'data: {"stage": "relaxing", "subject": "1x2xtoy"}']
    ended = httpx2.Response(200, json={"id": "j1", "status": "cancelled", "result": None, "error": None})
    running = httpx2.Response(202, json={"id": "j1", "status": "running", "result": None, "error": None})
    said: list[ProgressEvent] = []
    server = Server([running, httpx2.Response(200, text="\n\n".join([*lines, ""])), ended])
    with pytest.raises(RemotePlanningError, match="was cancelled"):
        planner(server, progress=said.append).compare(nn.Identity(), "sweep")
    assert list(map(str, said)) == ["asking the server", "tracing", "1x2xtoy: relaxing"]


def test_a_module_without_a_config_is_explained_where_it_is(hand_written_plan: ShardingPlan) -> None:
    server = Server([job()])
    with pytest.raises(ModelError, match=r"Linear has no Hugging Face config to send"):
        planner(server, model=None).explain(nn.Linear(2, 2), hand_written_plan, "weight")
    assert server.asked == []
