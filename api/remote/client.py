"""`RemoteShardingPlanner`: plans, comparisons and explanations of a shardplan server, from the graph of a module."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Mapping
from typing import Any

import httpx2
from torch import nn

from api.remote.retrying_http import Connection, RemotePlanningError, error_from_problem
from api.render.tradeoff_rows import TradeoffRow
from api.requests.comparison_options import ComparisonKind
from planner.errors import JobError, ModelError
from planner.graph.example_inputs import GivenInputs
from planner.plan.planner_interface import ShardingPlanner
from planner.plan.sharding_plan import ShardingPlan
from planner.plan.techniques import technique_names, with_technique_list
from planner.progress import (
    ASKING_SERVER,
    RUNNING_ON_FAKE_PROCESSES,
    TRACING,
    Progress,
    ProgressEvent,
    SweepProgress,
    event_from_dict,
)

__all__ = ["RemotePlanningError", "RemoteShardingPlanner"]

_FIRST_POLL_S = 0.05
_LONGEST_POLL_S = 2.0


class RemoteShardingPlanner(ShardingPlanner):
    """A planner that traces a module locally, sends the graph to the server at ``url``, and waits for the plan.

    The server receives names, shapes and ops of the module, no code and no weights. Lost requests are repeated; an
    idempotency key makes them one job.

    Args:
        url: address of the server, such as ``http://127.0.0.1:8000``.
        token: API token; None where the server needs none.
        cluster: ``2x8xh100-sxm-80gb``, or an object with its figures.
        model: name of a preset, or ``{"hf_config": {...}}``. The server plans it in place of the module, which is then
            not traced. None: the module is planned.
        example_inputs: arguments of one call with the global batch; None: made from the module's Hugging Face config.
        tp_plan: the expert plan for "tensor-parallel"; None takes the module's own.
        timeout_s: seconds for all requests of a plan together; None: no limit.
        retries: how often a request is repeated when the server is unreachable or busy.
        progress: called with each event of planning, here and at the server.
        refresh: whether the server searches again where a time limit cut the search of an earlier result short.
        transport: httpx transport of the requests; None: the network.
        options: the request's other members: mesh, batch, seq, micro_batches, ac, memory_gb, optimizer, dtype,
            reduce_dtype, planner, pins, data_axes, axes, executable_only, tolerance, headroom, time_limit_s (seconds
            for the search, at most the server's limit), techniques. With the techniques "auto", a module that is traced
            here gets zigzag and reallgather only where they pay: fused ops and projections are in its graph, so they
            have to be named.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        cluster: str | dict[str, Any],
        model: str | dict[str, Any] | None = None,
        example_inputs: GivenInputs = None,
        tp_plan: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        retries: int = 6,
        progress: Progress | None = None,
        refresh: bool = False,
        transport: httpx2.BaseTransport | None = None,
        **options: Any,
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._request = {
            "cluster": cluster,
            **{name: value for name, value in with_technique_list(options).items() if value is not None},
        }
        self._model = model
        self._example_inputs = example_inputs
        self._tp_plan = tp_plan
        self._timeout_s = timeout_s
        self._retries = retries
        self._progress = progress
        self._refresh = refresh
        self._transport = transport

    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return the server's plan for ``module``, which is not changed and may be on the meta device.

        Raises:
            ModelError: the module cannot be traced, or its graph cannot be sent; the message says why.
            InfeasibleError: no plan fits.
            RemotePlanningError: the server gave no plan for another reason; the message says which.
            RunError: the server's plan does not run as planned here.
        """
        request = {"model": self._model_or_graph(module), **self._request}
        plan = ShardingPlan.from_dict(self._result("/v1/plans", request, "plan"))
        # The server had the graph alone; of a preset it has the module, and has verified the plan.
        return plan if self._model is not None else self._verified(module, plan)

    def compare(self, module: nn.Module, kind: ComparisonKind, **options: Any) -> list[TradeoffRow]:
        """Return the rows of a comparison of plans for ``module``, each with its plan.

        Args:
            module: as for `build_plan`; for "batches" a Hugging Face model, whose config is sent. No plan is run here.
            kind: "alternatives", "pareto", "sweep" or "batches", as the commands of the command line.
            options: members of the kind: ``count`` of alternatives; ``objective``, ``within_s``, ``devices`` and
                ``price`` of a sweep; ``within_s`` and ``most`` of batches.

        Raises:
            PlannerError: as `build_plan`. `ModelError`: the module has no config, and batches are compared.
        """
        model = self._model_or_config(module) if kind == "batches" else self._model_or_graph(module)
        request = {"model": model, **self._request}
        rows = self._result("/v1/comparisons", {"kind": kind, "request": request, **options}, "result")
        return [_row(row) for row in rows]

    def explain(self, module: nn.Module, plan: ShardingPlan, parameter: str) -> dict[str, Any]:
        """Return the price of every layout of ``parameter``, as ``shardplan explain --json`` prints it.

        Args:
            module: a Hugging Face model, whose config is sent. Not used where the planner has a ``model``.
            plan: a plan for it.
            parameter: FQN, such as ``lm_head.weight``.

        Raises:
            ModelError: the module has no config to send.
            RemotePlanningError: the server gave no explanation; the message says why.
        """
        request = {"plan": plan.to_dict(), "model": self._model_or_config(module), "parameter": parameter}
        result: dict[str, Any] = self._result("/v1/explanations", request, "result")
        return result

    def check(self, configuration: str, *, framework: str | None = None, plans: bool = True) -> dict[str, Any]:
        """Return what is found of a framework's configuration, as ``shardplan check --json`` prints it.

        Args:
            configuration: the contents of its file, or its flags.
            framework: name of the framework; None: recognised by the text.
            plans: whether its layouts are planned too, and compared with the best plan.

        Raises:
            JobError: the planner has no ``model``, or the text cannot be read.
            RemotePlanningError: the server gave no answer; the message says why.
        """
        if self._model is None:
            advice = "Give RemoteShardingPlanner a model: a preset, or a Hugging Face config."
            raise JobError("a configuration is checked for a model.", what_to_do=advice, field="model")
        asked = {name: self._request[name] for name in ("cluster", "batch", "seq") if self._request.get(name)}
        request = {"model": self._model, "configuration": configuration, "plans": plans, **asked}
        if framework is not None:
            request["framework"] = framework
        result: dict[str, Any] = self._result("/v1/checks", request, "result")
        return result

    def _result(self, path: str, request: dict[str, Any], member: str) -> Any:
        """Return the result of the job that ``request`` makes under ``path``: the member of its answer.

        Raises:
            PlannerError: there is none; the message says why.
        """
        with Connection(
            self._url,
            token=self._token,
            timeout_s=self._timeout_s,
            retries=self._retries,
            transport=self._transport,
        ) as server:
            self._report(ASKING_SERVER)
            key = {"Idempotency-Key": str(uuid.uuid4())}
            again = {"params": {"refresh": "true"}} if self._refresh else {}
            job = server.ask("POST", path, headers=key, json=request, **again)
            job = self._until_ended(server, f"{path}/{job['id']}", job)
        if job["status"] != "succeeded":
            raise error_from_problem(job["error"] or {"title": f"The job was {job['status']}."}, job["id"])
        return job[member]

    def _verified(self, module: nn.Module, plan: ShardingPlan) -> ShardingPlan:
        """Return ``plan`` with the result of running it here, on fake processes."""
        from planner.graph.trace_module import resolve_inputs
        from planner.verification.verify_plan import verified

        self._report(RUNNING_ON_FAKE_PROCESSES)
        job = plan.job
        inputs = resolve_inputs(module, self._example_inputs, batch=job.batch, seq=job.seq, phase=job.phase)
        # The host's time stays that of the server, which could not look for local modules.
        return verified(module, plan, inputs, lambda plan, local: dataclasses.replace(plan, local_modules=local))

    def _model_or_graph(self, module: nn.Module) -> str | dict[str, Any]:
        """Return the planner's model, or the graph of ``module``."""
        return self._model if self._model is not None else {"graph": self._graph(module)}

    def _model_or_config(self, module: nn.Module) -> str | dict[str, Any]:
        """Return the planner's model, or the Hugging Face config of ``module``.

        Raises:
            ModelError: there is neither.
        """
        if self._model is not None:
            return self._model
        config: Any = getattr(module, "config", None)
        if not hasattr(config, "to_json_string"):
            detail = f"{type(module).__name__} has no Hugging Face config to send."
            advice = "Name the model, or call planner.tradeoffs.batches or planner.explain here."
            raise ModelError(detail, what_to_do=advice)
        return {"hf_config": json.loads(config.to_json_string(use_diff=False))}

    def _graph(self, module: nn.Module) -> dict[str, str]:
        from planner.graph.trace_module import trace_module
        from planner.run.baselines import micro_batches_for
        from planner.wire.codec import write_graph

        self._report(TRACING)
        options = self._request
        micro_batches = micro_batches_for(str(options.get("planner", "ilp")), options.get("micro_batches"))
        techniques = technique_names(options.get("techniques"))
        traced = trace_module(
            module,
            example_inputs=self._example_inputs,
            batch=options.get("batch"),
            seq=options.get("seq"),
            micro_batches=micro_batches,
            dtype=str(options.get("dtype", "bf16")),
            fused_ops="fused-ops" in techniques,
            fused_projections="fused-projections" in techniques,
            opaque_modules=options.get("opaque_modules") or (),
        )
        if self._tp_plan is not None:
            traced = dataclasses.replace(traced, tp_plan=self._tp_plan)
        return write_graph(traced)

    def _until_ended(self, server: Connection, path: str, job: dict[str, Any]) -> dict[str, Any]:
        if self._progress is not None and job["status"] in {"queued", "running"}:
            for event in server.events(f"{path}/events"):
                self._report(_event(event))
            job = server.ask("GET", path)
        poll_s = _FIRST_POLL_S
        while job["status"] in {"queued", "running"}:
            server.pause(poll_s, f"it is {job['status']}")
            poll_s = min(_LONGEST_POLL_S, poll_s * 1.5)
            job = server.ask("GET", path)
        return job

    def _report(self, event: ProgressEvent) -> None:
        if self._progress is not None:
            self._progress(event)


def _event(document: Mapping[str, Any]) -> ProgressEvent:
    """Return a server's event; those of a sweep and of batches have the subject that they plan for."""
    event = event_from_dict(document)
    return SweepProgress(subject=str(document["subject"]), event=event) if "subject" in document else event


def _row(row: Mapping[str, Any]) -> TradeoffRow:
    """Return a row of the server's comparison."""
    return TradeoffRow(
        cluster=row["cluster"],
        devices=row["devices"],
        plan=None if row["plan"] is None else ShardingPlan.from_dict(row["plan"]),
        in_time=row["fits"] is not None,
        is_best=row["best"],
        price=row["price"],
        batch=row.get("batch"),
    )
