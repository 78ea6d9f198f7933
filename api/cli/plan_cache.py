"""A cache of plans: files in the user's cache folder, by the fingerprint of the request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import platformdirs

from planner.errors import PlanFormatError
from planner.plan.sharding_plan import ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCache:
    """Plans by the fingerprint of their request, one file each in ``folder``."""

    folder: Path

    @classmethod
    def of_user(cls) -> PlanCache:
        """Return the user's cache (``$XDG_CACHE_HOME/shardplan/plans`` on Linux)."""
        return cls(folder=Path(platformdirs.user_cache_dir("shardplan")) / "plans")

    def get(self, fingerprint: str) -> ShardingPlan | None:
        """Return the cached plan of the request with this fingerprint; None where no readable plan is cached."""
        file = self.folder / f"{fingerprint}.json"
        if not file.exists():
            return None
        try:
            return ShardingPlan.load(file)
        except PlanFormatError:
            return None

    def put(self, fingerprint: str, plan: ShardingPlan) -> None:
        """Cache ``plan`` under the fingerprint of its request.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        plan.save(self.folder / f"{fingerprint}.json")
