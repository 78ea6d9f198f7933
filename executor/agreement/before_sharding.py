"""``ShardingAgreement``: all ranks agree that they shard the same module in the same way, or all of them raise."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from executor.agreement.exchange import Exchange, Judge
from executor.agreement.statement import (
    Rows,
    difference_text,
    digest,
    meta_names,
    minority,
    rank_list,
    rows_of,
    values_by_rank,
)
from planner.errors import RanksError
from planner.imported.torch_shard import Sharder
from planner.plan.sharding_plan import ShardingPlan

T = TypeVar("T")

_CHECKS, _DETAILS, _SHARDERS = "the agreement before sharding", "naming differences", "applying Sharders"
_UNTOUCHED = "No module has been changed."
_SLOW = "See their own output. If they are only slow, for instance in reading weights, raise agreement_timeout_s."


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks have agreed on.

    Attributes:
        values_from_source: whether ranks whose parameters are on meta get values from the source rank.
        seed: the first rank's seed of the module's random ops.
    """

    values_from_source: bool
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingAgreement:
    """The exchanges of one call of ``shard_module``.

    Attributes:
        exchange: exchange of the mesh's ranks; None: there are no other ranks.
        timeout_s: how long a rank waits for the others before anything is changed.
    """

    exchange: Exchange | None
    timeout_s: float

    def checked(self, checks: Callable[[], T]) -> T:
        """Return the result of ``checks``; if they fail on this rank, the others hear of it in ``agree``."""
        try:
            return checks()
        except Exception as error:  # whatever it is, the others must not wait
            self._publish(_CHECKS, error)
            raise

    def agree(
        self,
        module: nn.Module,
        device_mesh: DeviceMesh,
        plan: ShardingPlan,
        *,
        sharders: Mapping[str, Sharder],
        src_data_rank: int | None,
        seed: int,
    ) -> Agreed:
        """Return what the ranks agree on. All ranks call this.

        Args:
            module: the module, not yet changed.
            device_mesh: mesh of the ranks.
            plan: the plan.
            sharders: name -> Sharder.
            src_data_rank: index along each axis of the source rank; None: each rank uses its own values.
            seed: a seed that this rank has drawn.

        Raises:
            RanksError: the ranks differ, one has failed its checks, or one has not come. All ranks raise it.
        """
        if self.exchange is None:
            return Agreed(values_from_source=False, seed=seed)
        rows = rows_of(module, device_mesh, plan, sharders=sharders, src_data_rank=src_data_rank)
        on_meta = meta_names(module)
        statement = {
            "digests": {subject: digest(values) for subject, values in rows.items()},
            "on_meta": digest(on_meta),
            "meta_count": f"{len(on_meta)} tensors",
            "has_values": not on_meta,
            "seed": seed,
        }
        source = None if src_data_rank is None else int(device_mesh.mesh[(src_data_rank,) * device_mesh.ndim])
        verdict = json.loads(self._verdict(_CHECKS, {"source": source} | statement, _judge_statements, self.timeout_s))
        if verdict["failed"] is not None:
            _raise_failure(verdict["failed"], _UNTOUCHED)
        if verdict["differing"]:
            self._raise_differences(verdict["differing"], rows)
        if verdict["meta_counts"]:
            raise _meta_error({int(rank): count for rank, count in verdict["meta_counts"].items()}, source)
        return Agreed(values_from_source=bool(verdict["from_source"]), seed=int(verdict["seed"]))

    def sharders_applied(self, apply: Callable[[], T]) -> T:
        """Return the result of ``apply``, which calls Sharders; if they fail on one rank, all ranks raise an error."""
        try:
            result = apply()
        except Exception as error:  # whatever it is, the others must not wait
            self._publish(_SHARDERS, error)
            raise
        if self.exchange is not None:
            # A Sharder may read weights, so that ranks may be far apart.
            verdict = json.loads(self._verdict(_SHARDERS, {}, _judge_failures, self.exchange.group_timeout_s))
            if verdict["failed"] is not None:
                _raise_failure(
                    verdict["failed"],
                    "The module is as it was before, but for values that Sharders have changed in place.",
                )
        return result

    def _publish(self, purpose: str, error: Exception) -> None:
        if self.exchange is None:
            return
        judge = _judge_statements if purpose == _CHECKS else _judge_failures
        try:
            self.exchange.publish(purpose, json.dumps({"error": f"{type(error).__name__}: {error}"}), judge)
        except RuntimeError as failure:
            error.add_note(f"The other ranks could not be told: {failure}.")

    def _verdict(self, purpose: str, statement: Any, judge: Judge, timeout_s: float) -> str:
        assert self.exchange is not None
        return self.exchange.verdict(
            purpose, json.dumps({"error": None} | statement), judge, timeout_s=timeout_s, what_to_do=_SLOW
        )

    def _raise_differences(self, differing: Mapping[str, Mapping[str, str]], rows: Rows) -> None:
        """Exchange the rows of the subjects that differ, and raise an error that names the rows."""
        assert self.exchange is not None
        own: dict[str, Any] = {}
        for subject, digests in differing.items():
            alike = [rank for rank, value in _by_rank(digests).items() if value == digests[str(self.exchange.rank)]]
            if self.exchange.rank == alike[0]:  # the others have the same rows
                own[subject] = {"ranks": alike, "rows": rows[subject]}
        timeout_s = max(self.timeout_s, 1.0)
        text = self.exchange.verdict(_DETAILS, json.dumps(own), _judge_rows, timeout_s=timeout_s, what_to_do=_SLOW)
        ranks = sorted({rank for digests in differing.values() for rank in minority(_by_rank(digests))})
        raise RanksError(
            f"The ranks do not shard the same: {text}. {_UNTOUCHED}",
            ranks=ranks,
            what_to_do="Give all ranks the same plan file, module and arguments.",
        )


def _judge_statements(texts: Mapping[int, str]) -> str:
    statements = {rank: json.loads(text) for rank, text in texts.items()}
    verdict: dict[str, Any] = {"failed": _failure(statements), "differing": {}, "meta_counts": {}, "from_source": False}
    if verdict["failed"] is not None:
        return json.dumps(verdict)
    verdict["seed"] = statements[min(statements)]["seed"]
    for subject in next(iter(statements.values()))["digests"]:
        digests = {rank: statement["digests"][subject] for rank, statement in statements.items()}
        if len(set(digests.values())) > 1:
            verdict["differing"][subject] = digests
    if len({statement["on_meta"] for statement in statements.values()}) > 1:
        # Sources differ where src_data_rank does, which is a difference already.
        source = next(iter(statements.values()))["source"]
        if source is not None and statements[source]["has_values"]:
            verdict["from_source"] = True
        else:
            verdict["meta_counts"] = {rank: statement["meta_count"] for rank, statement in statements.items()}
    return json.dumps(verdict)


def _judge_failures(texts: Mapping[int, str]) -> str:
    return json.dumps({"failed": _failure({rank: json.loads(text) for rank, text in texts.items()})})


def _judge_rows(texts: Mapping[int, str]) -> str:
    rows_by_subject: dict[str, dict[int, Mapping[str, str]]] = {}
    for text in texts.values():
        for subject, own in json.loads(text).items():
            rows_by_subject.setdefault(subject, {}).update(dict.fromkeys(own["ranks"], own["rows"]))
    return "; ".join(difference_text(subject, dict(sorted(rows.items()))) for subject, rows in rows_by_subject.items())


def _failure(statements: Mapping[int, Any]) -> dict[str, str] | None:
    failed = {str(rank): item["error"] for rank, item in statements.items() if item["error"] is not None}
    return failed or None


def _raise_failure(failed: Mapping[str, str], state: str) -> None:
    ranks = list(_by_rank(failed))
    text = failed[str(ranks[0])]
    raise RanksError(
        f"Sharding failed on {rank_list(ranks)}: {text} {state}",
        ranks=ranks,
        what_to_do=f"See the error of rank {ranks[0]}.",
    )


def _meta_error(counts: Mapping[int, str], source: int | None) -> RanksError:
    where = f"rank {source} is to send them"
    if source is None:
        where = "src_data_rank is None, so that each rank needs its own"
    return RanksError(
        f"Some ranks have no values to shard: on meta are {values_by_rank(counts)}, and {where}. {_UNTOUCHED}",
        ranks=minority(counts),
        what_to_do="Put all parameters on meta on every rank and call load_weights afterwards, or read the weights on "
        "the rank that src_data_rank names.",
    )


def _by_rank(values: Mapping[str, str]) -> dict[int, str]:
    return {int(rank): value for rank, value in values.items()}
