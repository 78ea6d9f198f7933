"""Errors that shardplan raises for reasons that its user can act on. The CLI maps them to exit codes, without torch.

PlannerError                    exit code 2, HTTP 422
├── ModelError                  a config or module that cannot be built or traced
│   └── UnsupportedOpError      ops that cannot be run on DTensors, whatever their layouts
├── GraphFormatError            a document that is not a valid traced graph, or is of another version
├── ClusterInputError           a cluster that is not in the catalogue, or a description that contradicts itself
├── MeshError                   a mesh with a wrong number of devices, or one that does not divide the batch
├── JobError                    an invalid job: unknown optimizer or dtype, negative batch
├── BaselineError               a baseline that does not exist for this model
├── PlanError                   a plan that cannot be used
│   ├── PlanFormatError         a file that is not a valid plan, or is of another version
│   ├── PlanMismatchError       a plan for another model, mesh or torch (stale fingerprint)
│   ├── PlanTypeError           a value of a wrong type (also a TypeError, as in torch)
│   ├── PlanLayoutError         a layout that the mesh or the tensor's shape does not allow (also a ValueError)
│   ├── RanksError              ranks that hold different things, failed, or did not come
│   ├── RunError                exit code 4: a step of the plan that fails when it is run, or runs other collectives
│   └── PlanKeyError            an invalid key
│       ├── EmptyPathError      a Sharder for the root module (also a KeyError, as in torch)
│       ├── UnmatchedKeyError   a key that matches nothing in the module (also an AttributeError, as in torch)
│       └── KeyConflictError    two keys that contradict each other (also a RuntimeError, as in torch)
├── LoopError                   a loop (Trainer, accelerate, peft) that does what a sharded module does not allow
├── WeightsError                weights that cannot be loaded into a module, or saved
├── UnsupportedTorchError       a torch version whose DTensor rules this version of shardplan does not know
├── SolverError                 exit code 1, HTTP 500: the solver ended without an answer
└── InfeasibleError             exit code 3: no plan fits the memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class PlannerError(Exception):
    """Base class of all errors: what happened (``detail``) and what to do about it (``what_to_do``).

    ``title`` is the same for every error of a class, as RFC 9457 asks of problem details. ``str(error)`` is the detail
    followed by the advice. Pickling keeps all data of an error, because the solver runs in other processes.
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
    """A model that cannot be read, built or traced.

    Attributes:
        module: FQN of the module at fault; None where it is not known.
        cause: what it does, in a few words; "" where they would say no more than the error.
    """

    title = "The model cannot be used"

    def __init__(self, detail: str, *, what_to_do: str = "", module: str | None = None, cause: str = "") -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.module = module
        self.cause = cause


class UnsupportedOpError(ModelError):
    """Ops that cannot be run on DTensors in any layout, not even on replicated ones.

    Attributes:
        ops: (name of the op, FQN pattern of the modules that call it, "forward" or "backward": what cannot be run).
    """

    title = "The model has ops that are not supported"

    def __init__(self, ops: Sequence[tuple[str, str, str]]) -> None:
        listed = [f"{op} in {module or 'the root module'} ({direction})" for op, module, direction in ops]
        super().__init__(
            f"{'an op of this model' if len(listed) == 1 else f'{len(listed)} ops of this model'} cannot be run on "
            f"DTensors, not even on replicated ones: {'; '.join(listed)}.",
            what_to_do="Write the module with other ops, or plan the model without it.",
            module=ops[0][1] if ops else None,
        )
        self.ops = tuple(ops)


class GraphFormatError(PlannerError):
    """A document that is not a valid traced graph; ``where`` is the invalid place, "" for the whole document."""

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
    """A job with an invalid value; ``field`` is the name of its field, None where no single field is at fault."""

    title = "The job cannot be used"

    def __init__(self, detail: str, *, what_to_do: str = "", field: str | None = None) -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.field = field


class BaselineError(PlannerError):
    """A baseline that does not exist for this model, such as tensor parallelism where the config carries no plan."""

    title = "The baseline does not exist for this model"


class PlanError(PlannerError):
    """A plan that cannot be used."""

    title = "The plan cannot be used"


class PlanFormatError(PlanError):
    """A file or document that is not a valid plan.

    ``where`` is the invalid place, "" for the whole document. ``file`` is the path; None: the plan is not from a file.
    """

    title = "Not a sharding plan"

    def __init__(self, detail: str, *, what_to_do: str = "", file: str | None = None, where: str = "") -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.file = file
        self.where = where


class PlanMismatchError(PlanError):
    """A plan that does not match what it is used for.

    The plan needs ``expected`` as its ``subject`` ("model", "mesh", "layouts", ...), and the actual one is ``found``.
    """

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
    """A layout at ``field[key]`` that the mesh or the tensor's shape does not allow."""

    title = "A layout in the plan is not possible"

    def __init__(self, detail: str, *, what_to_do: str = "", field: str = "", key: str = "") -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.field = field
        self.key = key


class PlanKeyError(PlanError):
    """An invalid ``key`` in the ``field`` of a plan."""

    title = "A key in the plan is not possible"

    def __init__(self, detail: str, *, field: str, key: str, what_to_do: str = "") -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.field = field
        self.key = key


class EmptyPathError(PlanKeyError, KeyError):
    """A Sharder for the root module: the module that a Sharder returns needs a parent, and the root has none."""

    title = "A Sharder needs a module path"


class UnmatchedKeyError(PlanKeyError, AttributeError):
    """A key that matches nothing in the module."""

    title = "A key in the plan matches nothing"


class KeyConflictError(PlanKeyError, RuntimeError):
    """Two keys that contradict each other, ``key`` and ``other``."""

    title = "Two keys in the plan conflict"

    def __init__(self, detail: str, *, field: str, key: str, other: str, what_to_do: str = "") -> None:
        super().__init__(detail, field=field, key=key, what_to_do=what_to_do)
        self.other = other


class RanksError(PlanError):
    """Ranks that hold different things where the plan needs equal ones, that failed, or that did not come.

    Attributes:
        ranks: the ranks at fault; empty if they are not known.
    """

    title = "The ranks do not agree"

    def __init__(self, detail: str, *, ranks: Sequence[int], what_to_do: str = "") -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.ranks = tuple(ranks)


class RunError(PlanError):
    """A step of a plan that fails when it is run, or that does not run the collectives of the plan.

    Attributes:
        module: FQN of the module whose call failed; None where it is not known.
        op: op and argument shapes that failed, as text; None where they are not known.
    """

    exit_code = 4
    title = "The plan does not run"

    def __init__(self, detail: str, *, what_to_do: str = "", module: str | None = None, op: str | None = None) -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.module = module
        self.op = op


class LoopError(PlannerError):
    """Something that a training loop does, or is told to do, which a sharded module does not allow."""

    title = "The loop cannot run a sharded module"


class WeightsError(PlannerError):
    """Weights that cannot be loaded into a module, or that cannot be saved.

    Attributes:
        missing: names of the module that the source does not have.
        unexpected: names of the source that the module does not have.
        mismatched: name -> (shape in the source, shape in the module), where they differ.
    """

    title = "The weights cannot be used"

    def __init__(
        self,
        detail: str,
        *,
        what_to_do: str = "",
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
    ) -> None:
        super().__init__(detail, what_to_do=what_to_do)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = dict(mismatched or {})


class UnsupportedTorchError(PlannerError):
    """This version of shardplan does not know the DTensor rules of the installed torch."""

    title = "This torch is not supported"


class SolverError(PlannerError):
    """The solver ended without a solution and without a proof that there is none."""

    exit_code = 1
    http_status = 500
    title = "The solver failed"


class InfeasibleError(PlannerError):
    """No plan fits the memory.

    Attributes:
        budget_bytes: cap on the peak per device.
        least_bytes: peak per device of the smallest plan that was found. None: no plan was found, whatever its memory.
        bound_bytes: lower bound on the peak per device of every plan. None: it is within 1 % of ``least_bytes``. Below
            ``budget_bytes``: it is not proved that no plan fits.
        largest_tensors: (name, bytes per device), the largest first.
        enough: name of the smallest cluster on which a plan was found to fit. The clusters tried have 2, 4, 8, ...
            times the nodes. None: no plan was found on any of them.
    """

    exit_code = 3
    title = "No plan fits the memory"

    def __init__(
        self,
        detail: str | None = None,
        *,
        budget_bytes: int,
        least_bytes: int | None,
        bound_bytes: int | None = None,
        largest_tensors: tuple[tuple[str, int], ...] = (),
        enough: str | None = None,
        remedies: Sequence[str] = (),
        what_to_do: str | None = None,
    ) -> None:
        """Take the figures, and write the message from them.

        Args:
            detail: what happened; None: it is written from the figures.
            budget_bytes: as in the class.
            least_bytes: as in the class.
            bound_bytes: as in the class.
            largest_tensors: as in the class.
            enough: as in the class.
            remedies: what else may help, such as "more micro-batches (--micro-batches)"; nothing that the job has.
            what_to_do: the advice; None: it is written from ``least_bytes``, ``enough`` and ``remedies``.
        """
        if detail is None:
            detail = _infeasible_detail(budget_bytes, least_bytes, bound_bytes, largest_tensors, enough)
        if what_to_do is None:
            what_to_do = _infeasible_advice(least_bytes, enough, remedies)
        super().__init__(detail, what_to_do=what_to_do)
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.bound_bytes = bound_bytes
        self.largest_tensors = largest_tensors
        self.enough = enough


def _gigabytes(nbytes: int) -> str:
    # In GB, the small budgets of toy devices would all be 0.00.
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3f} MB"


def _infeasible_detail(
    budget_bytes: int,
    least_bytes: int | None,
    bound_bytes: int | None,
    largest: tuple[tuple[str, int], ...],
    enough: str | None,
) -> str:
    is_proved = bound_bytes is None or bound_bytes >= budget_bytes
    detail = f"No plan {'fits' if is_proved else 'was found that fits'} {_gigabytes(budget_bytes)} per device"
    if least_bytes is not None and bound_bytes is not None:
        detail += (
            f"; at least {_gigabytes(bound_bytes)} per device are needed, and {_gigabytes(least_bytes)} "
            f"({least_bytes} bytes) would do"
        )
    elif least_bytes is not None:
        detail += f"; the least that would do is {_gigabytes(least_bytes)} ({least_bytes} bytes) per device"
    elif bound_bytes is not None:
        detail += f"; at least {_gigabytes(bound_bytes)} per device are needed"
    if enough is not None:
        detail += f"; a cluster of {enough} would hold it as it is"
    if largest:
        detail += "; the largest tensors are " + ", ".join(f"{name} ({_gigabytes(nbytes)})" for name, nbytes in largest)
    return detail + "."


def _infeasible_advice(least_bytes: int | None, enough: str | None, remedies: Sequence[str]) -> str:
    options = [*([] if enough is None else [f"a cluster of {enough}"]), *remedies]
    use = " or ".join([", ".join(options[:-1]), options[-1]] if len(options) > 1 else options)
    first_words = "Use" if least_bytes is None else "Allow that much memory, or use"
    advice = f"{first_words} {use}." if use else ("" if least_bytes is None else "Allow that much memory.")
    return f"{advice} Offloading to host memory is not planned here.".lstrip()
