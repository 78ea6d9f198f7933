"""Models that a client traced and sent as graphs: the check of a graph, its model, and its identity."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from api.requests.schemas import PlanRequest

if TYPE_CHECKING:
    from planner.graph.trace_module import TracedModule

_ONE_AT_A_TIME: Final = threading.Lock()
"""Lock around the check of a graph: the largest graph takes some 250 MB, and a server has many threads."""


def check_graph(request: PlanRequest, graph: dict[str, Any]) -> None:
    """Check a graph without running its ops, and that it was traced for the request's job.

    Raises:
        GraphFormatError: the document is no graph.
        JobError: the graph was traced for another dtype, phase or batch, or with other ops.
    """
    from planner.graph.trace_module import check_traced_for, micro_batch_counts
    from planner.plan.job import Job
    from planner.run.baselines import micro_batches_for
    from planner.wire.codec import read_graph

    with _ONE_AT_A_TIME:
        module = read_graph(graph, run=False)
    batch = request.spec.batch or module.samples
    counts = micro_batch_counts(batch, micro_batches_for(request.spec.planner, request.spec.micro_batches))
    spec = request.spec
    job = Job(
        batch=batch,
        phase=spec.phase,
        dtype=spec.dtype,
        fused_ops=spec.fused_ops,
        fused_projections=spec.fused_projections,
    )
    check_traced_for(module, batch, counts, job)


def load_graph(graph: dict[str, Any]) -> TracedModule:
    """Return the model in ``graph``, checked by running its ops on meta tensors.

    Raises:
        GraphFormatError: the document is no graph; the message names the place.
    """
    from planner.wire.codec import read_graph

    return read_graph(graph)


def graph_identity(graph: dict[str, Any]) -> dict[str, str]:
    """Return the data that identify a graph in a request's fingerprint: its digest.

    Raises:
        GraphFormatError: the document is no graph.
    """
    from planner.wire.codec import graph_digest

    return {"graph": graph_digest(graph)}
