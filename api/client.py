"""A planner that asks a shardplan server."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
from torch import nn

from planner.base import ShardingPlanner
from planner.errors import InfeasibleError, ModelError, PlannerError
from planner.plan import ShardingPlan


class RemotePlanningError(PlannerError):
    """The server refused, failed, or did not answer; ``problem`` holds its problem details where it sent some."""

    title = "The server gave no plan"

    def __init__(self, detail: str, *, what_to_do: str = "", problem: dict[str, Any] | None = None) -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.problem = problem or {}


class RemoteShardingPlanner(ShardingPlanner):
    """Asks the server at ``url`` and waits.

    Args:
        url: of the server, such as ``http://127.0.0.1:8000``.
        cluster: ``2x8xh100-sxm-80gb``, or an object with its figures.
        model: a preset that the server has; without it the module's own Hugging Face config is sent, as data.
        timeout_s: for the whole of it; None waits as long as it takes.
        options: the request's other members: mesh, batch, seq, micro_batches, ac, memory_gb, optimizer, dtype, planner.
    """

    def __init__(
        self,
        url: str,
        *,
        cluster: str | dict[str, Any],
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        self._url = url.rstrip("/")
        self._request = {"cluster": cluster, **{name: value for name, value in options.items() if value is not None}}
        self._model = model
        self._timeout_s = timeout_s

    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return the server's plan for ``module``.

        Raises:
            ModelError: no model name was given, and ``module`` has no Hugging Face config.
            InfeasibleError: no plan fits.
            RemotePlanningError: the server gave no plan for another reason, which the message says.
        """
        model = self._model or {"hf_config": _config_of(module)}
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        with httpx.Client(base_url=self._url, timeout=30.0) as client:
            job = self._ask(client, "POST", "/v1/plans", json={"model": model, **self._request})
            pause_s = 0.05
            while job["status"] in {"queued", "running"}:
                if deadline is not None and time.monotonic() > deadline:
                    detail = (
                        f"{self._url} had no plan after {self._timeout_s:.0f} s (job {job['id']} is {job['status']})."
                    )
                    raise RemotePlanningError(detail, what_to_do="Ask again later: the job goes on.")
                time.sleep(pause_s)
                pause_s = min(2.0, pause_s * 1.5)
                job = self._ask(client, "GET", f"/v1/plans/{job['id']}")
        if job["status"] != "succeeded":
            raise _refused(job["error"] or {"title": f"The job was {job['status']}"})
        return ShardingPlan.from_dict(job["plan"])

    def _ask(self, client: httpx.Client, method: str, path: str, **content: Any) -> dict[str, Any]:
        try:
            response = client.request(method, path, **content)
            answer = response.json()
        except httpx.HTTPError as error:
            advice = "Check the address, and that `shardplan serve` runs there."
            raise RemotePlanningError(f"cannot reach {self._url}: {error}.", what_to_do=advice) from error
        except ValueError as error:
            detail = f"{self._url} answered {response.status_code} with something else than JSON."
            raise RemotePlanningError(detail, what_to_do="Check that a shardplan server is there.") from error
        if response.is_error:
            raise _refused(answer if isinstance(answer, dict) else {})
        if not isinstance(answer, dict) or not {"id", "status", "plan", "error"} <= set(answer):
            detail = f"{self._url} answered with something else than a job."
            raise RemotePlanningError(detail, what_to_do="Check that a shardplan server is there.")
        return answer


def _refused(problem: dict[str, Any]) -> PlannerError:
    if problem.get("type") == "urn:shardplan:infeasible-error":
        largest = tuple((str(name), int(nbytes)) for name, nbytes in problem.get("largest_tensors", ()))
        return InfeasibleError(
            budget_bytes=problem["budget_bytes"], least_bytes=problem.get("least_bytes"), largest_tensors=largest
        )
    said = problem.get("detail") or problem.get("title") or "the server gave no reason."
    return RemotePlanningError(str(said), what_to_do=str(problem.get("what_to_do", "")), problem=problem)


def _config_of(module: nn.Module) -> dict[str, Any]:
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        advice = "Give model= a preset's name, or a module with a Hugging Face config."
        raise ModelError(f"a {type(module).__name__} cannot be sent to a server: it has no config.", what_to_do=advice)
    # The class that the module has, not the one that a checkpoint's config once named.
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**values, "architectures": [type(module).__name__]}
