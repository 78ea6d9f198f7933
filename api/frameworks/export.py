"""`export`: a plan as a framework's configuration, and what of the plan that says: all, nearly all, or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from api.frameworks.as_plan import NotAPlan, request_of
from api.frameworks.expressed import FSDP_GROUPS, Row
from api.frameworks.launch import Framework, Launch
from api.frameworks.plan_launch import FIELD_NAMES, launch_of, rows_of
from api.frameworks.registry import find_framework
from api.requests.model_configs import find_config
from api.requests.plan_request import plan_request
from planner.errors import InfeasibleError, ModelError, PlanError, PlannerError
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import Progress
from planner.run.baselines import KEEP_GATHERED

TORCH = "torch"
"""Name of the export that is a script of torch alone."""

TORCH_PLANNERS = ("ddp", "fsdp", "hsdp", "fsdp-tp", KEEP_GATHERED)
"""Baselines that such a script says of most models (`plan_within`), and that FSDP groups may stay gathered."""

_MOST_SIMPLIFICATIONS = 3
"""Most simplifications at once by which a configuration may differ from a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan as a framework's configuration.

    Attributes:
        framework, title: its name, and as people write it.
        file: name that such files have.
        text: the configuration.
        rows: what of the plan it says.
        launch: what the configuration says, in shardplan's terms; None: it is a script, which says layouts themselves.
    """

    framework: str
    title: str
    file: str
    text: str
    rows: tuple[Row, ...]
    launch: Launch | None = None

    @property
    def loses_nothing(self) -> bool:
        """Whether all of the plan is expressed."""
        return all(row.outcome == "expressed" for row in self.rows)

    @property
    def has_loss(self) -> bool:
        """Whether some of the plan is lost, not expressed or approximated."""
        return any(row.outcome == "lost" for row in self.rows)

    @property
    def groups_otherwise(self) -> bool:
        """Whether nothing differs from the plan but what is gathered together, and when."""
        return all(row.outcome == "expressed" or row.field == FSDP_GROUPS for row in self.rows)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {"framework": self.framework, "file": self.file, "text": self.text, "rows": rows}


def planners_of(name: str) -> tuple[str, ...]:
    """Return the baselines whose plans a framework says in full, or a torch script (`TORCH_PLANNERS`); "+" joins them.

    Raises:
        JobError: there is no such framework.
    """
    if name == TORCH:
        return TORCH_PLANNERS
    framework = find_framework(name)
    kept = Launch(shard=8, zero=3, micro_batch=1, batch=8, seq=8, reshard_after_forward=False)
    keeps = framework.can_say(kept, "reshard_after_forward") and framework.can_write(kept)
    return (*framework.planners, *((KEEP_GATHERED,) if keeps else ()))


def plan_within(name: str, plan_of: Callable[[str], ShardingPlan]) -> ShardingPlan:
    """Return the best plan that a framework's configuration says; ``plan_of`` plans with the planners that it is given.

    Which plans a torch script says depends on the model: where it loses some of one, another baseline is planned. Where
    it loses some of all that fit, the best of all is returned.

    Raises:
        JobError: there is no such framework.
        InfeasibleError: no plan fits.
    """
    planners = planners_of(name)
    plan = best = plan_of("+".join(planners))
    while name == TORCH and plan.solver is not None and export_plan(plan, name).has_loss:
        planners = tuple(planner for planner in planners if planner != plan.solver.name)
        if set(planners) <= {KEEP_GATHERED}:
            return best
        try:
            plan = plan_of("+".join(planners))
        except InfeasibleError:
            return best
    return plan


def export_plan(plan: ShardingPlan, name: str, *, allow_local: bool = True) -> Exported:
    """Return ``plan`` as a configuration of the framework ``name``, or as a torch script ("torch").

    Args:
        plan: the plan.
        name: name of the framework.
        allow_local: whether the plan's model may be a file of this machine.

    Raises:
        JobError: there is no such framework. `PlanError`: it has no configuration that is near the plan.
    """
    if name != TORCH:
        return export(plan, find_framework(name))
    from api.frameworks.torch_script import torch_script

    script = torch_script(plan, config=_config_of(plan, allow_local=allow_local))
    return Exported(framework=TORCH, title=TORCH, file="train.py", text=script.text, rows=script.rows)


def _config_of(plan: ShardingPlan, *, allow_local: bool) -> dict[str, Any] | None:
    """Return the Hugging Face config of the plan's model; None: it has none, or none is found."""
    try:
        config = None if plan.model is None else find_config(plan.model, allow_local=allow_local)
    except ModelError:
        return None
    return None if config is None else dict(config.values)


def step_time_of(exported: Exported, plan: ShardingPlan, progress: Progress | None = None) -> float | None:
    """Return the seconds of a step under an exported configuration, planned and priced op by op.

    None where its layouts are no plan of ours, or the model or cluster of ``plan`` is not known.
    """
    if exported.launch is None or plan.model is None or not plan.cluster:
        return None
    request = request_of(exported.launch, plan.model, dict(plan.cluster), plan.job.seq or 1, None)
    if isinstance(request, NotAPlan):
        return None
    try:
        estimate = plan_request(request, allow_local=True, progress=progress).estimate
    except PlannerError:
        return None
    return None if estimate is None else estimate.step_time_s


def export(plan: ShardingPlan, framework: Framework) -> Exported:
    """Return ``plan`` as a configuration of ``framework``, the nearest where it cannot say all of it.

    Raises:
        PlanError: the framework has no configuration that is near the plan.
    """
    wanted = launch_of(plan)
    rows = rows_of(plan, framework, wanted)
    launch = _with_sayable_fields(framework, wanted)
    model = plan.model or "the model"
    if not framework.can_write(launch, model):
        other = next((each for each in _nearby(launch) if framework.can_write(each, model)), None)
        if other is None:
            raise PlanError(
                f"{framework.title} has no configuration that is near this plan. {framework.refusal(launch)}".rstrip(),
                what_to_do=f"Export it for another framework, or plan within what {framework.title} can say.",
            )
        rows += tuple(_changed_rows(launch, other))
        launch = other
    return Exported(
        framework=framework.name,
        title=framework.title,
        file=framework.file,
        text=framework.write(launch, model),
        rows=_worst_of_each((*rows, *_checkpointing_rows(plan, launch))),
        launch=launch,
    )


def _checkpointing_rows(plan: ShardingPlan, launch: Launch) -> Iterator[Row]:
    said = plan.job.ac or "none"
    if said != launch.checkpointing:
        detail = f"{said} becomes {launch.checkpointing} for all blocks"
        yield Row(field=FIELD_NAMES["checkpointing"], outcome="approximated", detail=detail)


def _changed_rows(wanted: Launch, launch: Launch) -> Iterator[Row]:
    for name, title in FIELD_NAMES.items():
        before, after = getattr(wanted, name), getattr(launch, name)
        if before != after and name != "checkpointing":
            yield Row(field=title, outcome="approximated", detail=f"{before} becomes {after}")


def _worst_of_each(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return ``rows`` without those that say a field is expressed where another row says it is not."""
    unsaid = {row.field for row in rows if row.outcome != "expressed"}
    return tuple(row for row in rows if row.outcome != "expressed" or row.field not in unsaid)


def _with_sayable_fields(framework: Framework, launch: Launch) -> Launch:
    """Return ``launch`` with the default in each field that the framework cannot say.

    Ranks of a degree that cannot be said become shards. Checkpointing that cannot be said becomes full.
    """
    plain, data = Launch(), 1
    changed: dict[str, Any] = {}
    for name in FIELD_NAMES:
        if not framework.can_say(launch, name):
            changed[name] = "full" if name == "checkpointing" else getattr(plain, name)
            data *= getattr(launch, name) if name in ("tensor", "pipeline", "context") else 1
    result = dataclasses.replace(launch, **changed)
    if data > 1:
        result = dataclasses.replace(result, shard=result.shard * data, zero=result.zero or 3)
    return result if framework.can_say(result, "checkpointing") else dataclasses.replace(result, checkpointing="none")


def _nearby(launch: Launch) -> Iterator[Launch]:
    """Yield launches on as many ranks that say less, those with the fewest simplifications first."""
    seen, frontier = {launch}, [launch]
    for _ in range(_MOST_SIMPLIFICATIONS):
        found = [other for each in frontier for other in _simplified(each)]
        frontier = [other for other in dict.fromkeys(found) if other not in seen]
        seen.update(frontier)
        yield from frontier


def _simplified(launch: Launch) -> Iterator[Launch]:
    """Yield what differs from ``launch`` by one simplification."""
    data, batch = launch.data, launch.global_batch
    yield dataclasses.replace(launch, reshard_after_forward=True)
    if launch.checkpointing != "none":
        yield dataclasses.replace(launch, checkpointing="full")
    yield dataclasses.replace(launch, sequence_parallel=not launch.sequence_parallel)
    yield dataclasses.replace(launch, expert=1, expert_tensor=1)
    yield dataclasses.replace(launch, replicate=1, shard=data, zero=launch.zero or 3, batch=batch)
    yield dataclasses.replace(launch, replicate=data, shard=1, zero=0, batch=batch)
    if launch.zero == 3:
        yield dataclasses.replace(launch, zero=1)
