"""The Prometheus metrics of one process, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_SOLVE_SECONDS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 1800.0, 3600.0)


class Metrics:
    """Counters and histograms. No label has a value that a client chose, so the number of time series is bounded."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Histogram(
            "shardplan_request_seconds",
            "Seconds to answer an HTTP request",
            ["method", "route", "status"],
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
        self._solves = Histogram(
            "shardplan_solve_seconds",
            "Seconds from the start of a job to its end, in this process",
            ["outcome"],
            buckets=_SOLVE_SECONDS,
            registry=self.registry,
        )
        self._submitted = Counter(
            "shardplan_submissions", "Requests for a plan, by how they were met", ["answer"], registry=self.registry
        )
        self._refused = Counter("shardplan_refusals", "Requests refused by a guard", ["guard"], registry=self.registry)
        self._statuses = Counter(
            "shardplan_solver_status",
            "Plans, by the status of their solver",
            ["status"],
            registry=self.registry,
        )

    def requested(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered HTTP request; ``route`` is the template of its path."""
        self._requests.labels(method, route, str(status)).observe(seconds)

    def solved(self, outcome: str, seconds: float) -> None:
        """Record the seconds of a job: ``outcome`` is how it ended, or "died" where its solver process died."""
        self._solves.labels(outcome).observe(seconds)

    def planned(self, solver_status: str) -> None:
        """Count a plan by its solver's status."""
        self._statuses.labels(solver_status).inc()

    def submitted(self, answer: str) -> None:
        """Count a request for a plan.

        Args:
            answer: "cached" where the request's job has ended; "known" where the job waits or runs, or where the
                idempotency key was used before; "new" where the job was queued.
        """
        self._submitted.labels(answer).inc()

    def refused(self, guard: str) -> None:
        """Count a refused request; ``guard`` is the reason: "token", "rate", "scope" or "host"."""
        self._refused.labels(guard).inc()

    def watch_jobs(self, counts: Callable[[], dict[str, int]]) -> None:
        """Export the number of jobs by status; ``counts`` returns these numbers at each scrape."""
        self.registry.register(_Jobs(counts))

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class _Jobs(Collector):
    def __init__(self, counts: Callable[[], dict[str, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[GaugeMetricFamily]:
        jobs = GaugeMetricFamily("shardplan_jobs", "Jobs in the database", labels=["status"])
        counts = self._counts()
        for status in ("queued", "running", "succeeded", "failed", "cancelled"):
            jobs.add_metric([status], counts.get(status, 0))
        yield jobs

    def describe(self) -> Iterator[GaugeMetricFamily]:
        # Without `describe`, registering would call `collect`, which queries the database.
        yield GaugeMetricFamily("shardplan_jobs", "Jobs in the database", labels=["status"])
