"""Every error that shardplan raises for a reason its user can act on. No torch here: the CLI maps them to exit codes.

PlannerError                    exit code 2, HTTP 422
├── ModelError                  a config or module that cannot be built or traced
├── GraphFormatError            a document that is no traced graph: truncated, foreign, of another version, impossible
├── ClusterInputError           a cluster that the catalogue does not know, or that contradicts itself
├── MeshError                   a mesh that does not divide the cluster, or a batch that it does not divide
├── JobError                    a job that cannot be: unknown optimizer, dtype, negative batch
├── BaselineError               a baseline that does not exist for this model
├── PlanError                   something about a plan
│   ├── PlanFormatError         a file that is no plan: truncated, foreign, of another version
│   ├── PlanMismatchError       a plan for another model, mesh or torch (stale fingerprint)
│   ├── PlanTypeError           a value of a type that a plan cannot hold (also a TypeError, as in torch)
│   ├── PlanLayoutError         a layout that mesh or shape rule out      (also a ValueError)
│   └── PlanKeyError            something about one key
│       ├── EmptyPathError      a Sharder for the root                 (also a KeyError, as in torch)
│       ├── UnmatchedKeyError   a key that names nothing in the module (also an AttributeError, as in torch)
│       └── KeyConflictError    two keys that cannot both hold         (also a RuntimeError, as in torch)
├── UnsupportedTorchError       a torch whose DTensor rules this version does not know
├── SolverError                 exit code 1, HTTP 500: the solver broke off without an answer
└── InfeasibleError             exit code 3: no plan fits the memory
"""

from __future__ import annotations

from typing import Any, ClassVar


class PlannerError(Exception):
    """What happened (``detail``) and what to do about it (``what_to_do``).

    ``title`` is the same for every error of a class, as RFC 9457 asks of problem details; ``str(error)`` is the detail
    followed by the advice. Errors survive pickling with all their data, because solves run in other processes.
    """

    exit_code: ClassVar[int] = 2
    http_status: ClassVar[int] = 422
    title: ClassVar[str] = "The request cannot be planned"

    def __init__(self, detail: str, *, what_to_do: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.what_to_do = what_to_do

    def __str__(self) -> str:
        return f"{self.detail} {self.what_to_do}".rstrip()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(cls: type[PlannerError], args: tuple[object, ...], data: dict[str, object]) -> PlannerError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(data)
    return error


class ModelError(PlannerError):
    """A model that cannot be read, built or traced; ``module`` is the FQN at fault, where one is known."""

    title = "The model cannot be used"

    def __init__(self, detail: str, *, what_to_do: str = "", module: str | None = None) -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.module = module


class GraphFormatError(PlannerError):
    """A document that is no traced graph; ``where`` is the place in it that is wrong, "" for the whole."""

    title = "Not a traced graph"

    def __init__(self, detail: str, *, what_to_do: str = "", where: str = "") -> None:
        super().__init__(detail, what_to_do=what_to_do or "Trace the model again with this version of shardplan.")
        self.where = where

    @classmethod
    def at(cls, where: str, what: str, *, what_to_do: str = "") -> GraphFormatError:
        """Return the error of a graph document that is invalid at ``where`` ("": as a whole); ``what`` says why."""
        place = f" at {where}" if where else ""
        return cls(f"the graph is not valid{place}: {what.rstrip('.')}.", what_to_do=what_to_do, where=where)


class ClusterInputError(PlannerError):
    """A cluster description that cannot be read."""

    title = "The cluster cannot be used"


class MeshError(PlannerError):
    """A mesh that does not fit the cluster or the batch."""

    title = "The mesh cannot be used"


class JobError(PlannerError):
    """A job whose values cannot be; ``field`` is the one at fault."""

    title = "The job cannot be used"

    def __init__(self, detail: str, *, what_to_do: str = "", field: str | None = None) -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.field = field


class BaselineError(PlannerError):
    """A baseline that does not exist for this model, such as tensor parallelism where the config carries no plan."""

    title = "The baseline does not exist for this model"


class PlanError(PlannerError):
    """Something about a plan."""

    title = "The plan cannot be used"


class PlanFormatError(PlanError):
    """A file or document that is no plan; ``where`` is the place in it, ``file`` its path where it has one."""

    title = "Not a sharding plan"

    def __init__(self, detail: str, *, what_to_do: str = "", file: str | None = None, where: str = "") -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.file = file
        self.where = where


class PlanMismatchError(PlanError):
    """A plan for something else: ``subject`` ("model", "mesh", ...) is ``found`` where the plan says ``expected``."""

    title = "The plan was made for something else"

    def __init__(self, detail: str, *, subject: str, expected: str, found: str, what_to_do: str = "") -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.subject = subject
        self.expected = expected
        self.found = found


class PlanTypeError(PlanError, TypeError):
    """A value of a type that a plan cannot hold at ``field[key]``."""

    title = "A plan entry has the wrong type"

    def __init__(self, detail: str, *, what_to_do: str = "", field: str = "", key: str = "") -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.field = field
        self.key = key


class PlanLayoutError(PlanError, ValueError):
    """A layout at ``field[key]`` that the mesh or a tensor's shape rules out."""

    title = "A layout in the plan is not possible"

    def __init__(self, detail: str, *, what_to_do: str = "", field: str = "", key: str = "") -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.field = field
        self.key = key


class PlanKeyError(PlanError):
    """Something about one ``key`` of one ``field`` of a plan."""

    title = "A key in the plan is not possible"

    def __init__(self, detail: str, *, field: str, key: str, what_to_do: str = "") -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.field = field
        self.key = key


class EmptyPathError(PlanKeyError, KeyError):
    """A Sharder for the root: the module that it returns has no parent to be put into."""

    title = "A Sharder needs a module path"


class UnmatchedKeyError(PlanKeyError, AttributeError):
    """A key that names nothing in the module."""

    title = "A key in the plan matches nothing"


class KeyConflictError(PlanKeyError, RuntimeError):
    """Two keys that cannot both hold; ``other`` is the second one."""

    title = "Two keys in the plan conflict"

    def __init__(self, detail: str, *, field: str, key: str, other: str, what_to_do: str = "") -> None:
        super().__init__(detail, field=field, key=key, what_to_do=what_to_do)
        self.other = other


class UnsupportedTorchError(PlannerError):
    """The installed torch is not one whose DTensor rules this version of shardplan knows."""

    title = "This torch is not supported"


class SolverError(PlannerError):
    """The solver ended without a solution and without a proof that there is none."""

    exit_code = 1
    http_status = 500
    title = "The solver failed"


class InfeasibleError(PlannerError):
    """No plan fits: ``budget_bytes`` per device were allowed, ``least_bytes`` per device would do, of which
    at most 1 % could be spared.

    ``least_bytes`` is None where even unlimited memory gives no plan. ``largest_tensors`` are (name, bytes per device),
    largest first. ``enough`` is the smallest cluster of the same nodes, their number doubled again and again, on which
    a plan was seen to fit; None where none was.
    """

    exit_code = 3
    title = "No plan fits the memory"

    def __init__(
        self,
        detail: str | None = None,
        *,
        budget_bytes: int,
        least_bytes: int | None,
        largest_tensors: tuple[tuple[str, int], ...] = (),
        enough: str | None = None,
        what_to_do: str | None = None,
    ) -> None:
        super().__init__(
            _infeasible_detail(budget_bytes, least_bytes, largest_tensors, enough) if detail is None else detail,
            what_to_do=_infeasible_advice(least_bytes, enough) if what_to_do is None else what_to_do,
        )
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.largest_tensors = largest_tensors
        self.enough = enough


def _gigabytes(nbytes: int) -> str:
    # Small budgets (toy devices) would all read 0.00 GB.
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3f} MB"


def _infeasible_detail(
    budget_bytes: int, least_bytes: int | None, largest: tuple[tuple[str, int], ...], enough: str | None
) -> str:
    detail = f"No plan fits {_gigabytes(budget_bytes)} per device"
    if least_bytes is not None:
        detail += f"; the least that would do is {_gigabytes(least_bytes)} ({least_bytes} bytes) per device"
    if enough is not None:
        detail += f"; a cluster of {enough} would hold it as it is"
    if largest:
        detail += "; the largest tensors are " + ", ".join(f"{name} ({_gigabytes(nbytes)})" for name, nbytes in largest)
    return detail + "."


def _infeasible_advice(least_bytes: int | None, enough: str | None) -> str:
    start = "Use" if least_bytes is None else "Allow that much memory, or use"
    devices = "more devices" if enough is None else f"a cluster of {enough}"
    return f"{start} {devices}, more micro-batches (--micro-batches) or activation checkpointing (--ac full)."
