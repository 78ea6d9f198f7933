"""``Exchange``: some ranks exchange one text each through a store, and all of them get one verdict on the texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from executor.torch_internals.store import Store, default_store, timeout_s_of
from planner.errors import RanksError

Judge = Callable[[Mapping[int, str]], str]
"""rank -> its text; returns the verdict. It runs on one rank, and depends on the texts alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The ranks of a mesh, and the store through which they exchange texts.

    Every rank makes the same exchanges with the same ``purpose`` in the same order; exchanges of other ranks, or with
    another purpose, may come in between. The rank that comes last judges, so that nobody waits longer than for it.

    Attributes:
        store: store of the process group.
        rank: this process's rank in the default group.
        ranks: ranks that exchange texts, in ascending order.
    """

    store: Store
    rank: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Exchange | None:
        """Return the exchange of the ranks of ``mesh``; None where there are no others: one device, or fake ranks."""
        store = default_store()
        if store is None or mesh.size() == 1:
            return None
        return cls(store=store, rank=dist.get_rank(), ranks=tuple(sorted(mesh.mesh.flatten().tolist())))

    @property
    def group_timeout_s(self) -> float:
        """Time limit of the process group, in seconds."""
        return timeout_s_of(self.store)

    def publish(self, purpose: str, text: str, judge: Judge) -> str | None:
        """Hand in this rank's text without waiting for the others; return the verdict if this rank is the last."""
        return self._hand_in(purpose, text, judge)[1]

    def verdict(self, purpose: str, text: str, judge: Judge, *, timeout_s: float, what_to_do: str) -> str:
        """Return the verdict on the texts of all ranks, the same on every rank.

        Args:
            purpose: what the ranks agree on.
            text: this rank's text.
            judge: returns the verdict.
            timeout_s: how long to wait for the other ranks.
            what_to_do: advice of the error about absent ranks.

        Raises:
            RanksError: some ranks have not come within ``timeout_s``, or the store does not answer. Each rank that has
                come raises it, and each that comes later.
        """
        try:
            key, verdict = self._hand_in(purpose, text, judge)
            verdict = self._await(key, timeout_s) if verdict is None else verdict
        except RuntimeError as error:
            raise RanksError(
                f"The store of the process group does not answer (in {purpose}): {error}.",
                ranks=(),
                what_to_do="The process that hosts it, usually rank 0, has ended: see its own error.",
            ) from error
        absent: list[int] = json.loads(verdict)["absent"]
        if absent:
            raise RanksError(
                f"{_named(absent)} did not come to {purpose} within {timeout_s:g} s.",
                ranks=tuple(absent),
                what_to_do=what_to_do,
            )
        judged: str = json.loads(verdict)["judged"]
        return judged

    def _hand_in(self, purpose: str, text: str, judge: Judge) -> tuple[str, str | None]:
        """Return the key of this exchange, and its verdict if this rank was the last to come."""
        base = self._key(purpose)
        # Each rank counts its own exchanges, in the store, so that a new process group starts anew.
        key = f"{base}/{self.store.add(f'{base}/count/{self.rank}', 1)}"
        self.store.set(f"{key}/text/{self.rank}", text)
        if self.store.add(f"{key}/arrived", 1) < len(self.ranks):
            return key, None
        texts = self.store.multi_get([f"{key}/text/{rank}" for rank in self.ranks])
        judged = judge({rank: item.decode() for rank, item in zip(self.ranks, texts, strict=True)})
        return key, self._settle(key, absent=(), judged=judged)

    def _await(self, key: str, timeout_s: float) -> str:
        if self._wait(f"{key}/verdict", timeout_s):
            return str(self.store.get(f"{key}/verdict").decode())
        absent = [rank for rank in self.ranks if not self.store.check([f"{key}/text/{rank}"])]
        return self._settle(key, absent=absent or self.ranks, judged="")

    def _settle(self, key: str, *, absent: Sequence[int], judged: str) -> str:
        """Return the verdict: this one, or the one that another rank has settled first."""
        verdict = json.dumps({"absent": list(absent), "judged": judged})
        return str(self.store.compare_set(f"{key}/verdict", "", verdict).decode())

    def _wait(self, key: str, timeout_s: float) -> bool:
        """Return whether ``key`` is in the store, after at most ``timeout_s``."""
        try:
            self.store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError:
            # The time is over, for which each kind of store has another error; or the store is gone, which check tells.
            return bool(self.store.check([key]))
        return True

    def _key(self, purpose: str) -> str:
        members = hashlib.sha256(",".join(map(str, self.ranks)).encode()).hexdigest()[:16]
        return f"shardplan/{members}/{purpose}"


def _named(ranks: Sequence[int]) -> str:
    return f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))}"
