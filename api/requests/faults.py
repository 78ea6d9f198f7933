"""Several faults of one request, reported together."""

from __future__ import annotations

from collections.abc import Callable

from api.requests.errors import UserError
from cost_model.hardware.cluster import ClusterError
from cost_model.layouts.errors import LayoutError
from planner.errors import JobError, MeshError, ModelError, PlannerError


class ManyFaultsError(PlannerError):
    """A request with more than one fault; ``errors`` lists them, each with ``where`` and ``what``."""

    title = "The request has several faults"

    def __init__(self, errors: list[Exception]) -> None:
        super().__init__(" ".join(f"{_where(error)}: {str(error).rstrip('.')}." for error in errors))
        self.errors = [{"where": _where(error), "what": str(error)} for error in errors]


def check_all(*checks: Callable[[], object]) -> None:
    """Call all ``checks``.

    Raises:
        PlannerError, ClusterError, LayoutError: of the only check that raised one. `ManyFaultsError`: several did.
    """
    errors: list[Exception] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            errors.append(error)
    if len(errors) > 1:
        raise ManyFaultsError(errors)
    if errors:
        raise errors[0]


def _where(error: Exception) -> str:
    """Return the field of a request that an error is about; "job" where it is about no single one."""
    if isinstance(error, JobError) and error.field is not None:
        return error.field
    kinds = {ClusterError: "cluster", ModelError: "model", MeshError: "mesh", LayoutError: "mesh"}
    return next((field for kind, field in kinds.items() if isinstance(error, kind)), "job")
