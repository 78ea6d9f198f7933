"""Requests to check a configuration over HTTP, and the checks of them that take milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.requests.cluster_schema import ClusterObject, ClusterText
from api.requests.model_configs import find_config
from api.requests.plan_request import digest_of, read_client_cluster
from api.requests.schemas import HuggingFaceModel, JobAnswer, Problem
from planner.progress import Progress

if TYPE_CHECKING:
    from api.frameworks.check import Check

_MOST_CHARACTERS = 100_000
_COUNT = Field(default=None, strict=True, ge=1, le=2**31)


class CheckRequest(BaseModel):
    """A framework's configuration as text, the model and the cluster that it is for.

    ``batch`` and ``seq`` are taken where the configuration does not say them. Without ``plans`` it is priced by its
    degrees only.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["check"] = "check"
    model: Annotated[str, Field(min_length=1, max_length=1000)] | HuggingFaceModel
    cluster: ClusterText | ClusterObject
    configuration: Annotated[str, Field(min_length=1, max_length=_MOST_CHARACTERS)]
    framework: Annotated[str, Field(min_length=1, max_length=50)] | None = None
    batch: Annotated[int | None, _COUNT] = None
    seq: Annotated[int | None, _COUNT] = None
    plans: bool = True

    @property
    def model_spec(self) -> str | dict[str, Any]:
        """The model in the form that ``load_model`` takes."""
        return self.model if isinstance(self.model, str) else self.model.spec

    def checked(self, progress: Progress | None = None) -> Check:
        """Return what is found; see `api.frameworks.check.check`."""
        from api.frameworks.check import check  # imports torch, which a server that has the schemas need not

        return check(
            self.model_spec,
            self.configuration,
            cluster=self.cluster,
            framework=self.framework,
            batch=self.batch,
            seq=self.seq,
            plans=self.plans,
            allow_local=False,
            progress=progress,
        )


class CheckJob(JobAnswer):
    """A request to check a configuration, with its status and result, as ``shardplan check --json`` prints it."""

    kind: Literal["check"]
    result: dict[str, Any] | None = None
    error: Problem | None = None


def check_check(request: CheckRequest) -> None:
    """Check a client's request: that model, cluster and framework can be read.

    Raises:
        PlannerError, ClusterError: one of them cannot; the message says why.
    """
    from api.frameworks.registry import framework_of  # imports torch

    find_config(request.model_spec, allow_local=False)
    read_client_cluster(request.cluster)
    framework_of(request.framework, request.configuration)


def check_fingerprint(request: CheckRequest) -> str:
    """Return a hash that is equal only for requests that get the same answer."""
    return digest_of(**request.model_dump(mode="json"))
