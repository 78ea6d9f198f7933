"""Plans that were made before, as files in the user's cache folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import platformdirs

from planner.errors import PlanFormatError
from planner.plan.sharding_plan import ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCache:
    """Plans by the fingerprint of the request that they answer, one file each in ``folder``."""

    folder: Path

    @classmethod
    def of_user(cls) -> PlanCache:
        """Return the user's cache (``$XDG_CACHE_HOME/shardplan/plans`` on Linux)."""
        return cls(folder=Path(platformdirs.user_cache_dir("shardplan")) / "plans")

    def get(self, fingerprint: str) -> ShardingPlan | None:
        """Return the plan that answers the request, or None; a file that cannot be read counts as none."""
        file = self.folder / f"{fingerprint}.json"
        if not file.exists():
            return None
        try:
            return ShardingPlan.load(file)
        except PlanFormatError:
            return None

    def put(self, fingerprint: str, plan: ShardingPlan) -> None:
        """Keep ``plan`` as the answer to the request.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        plan.save(self.folder / f"{fingerprint}.json")
