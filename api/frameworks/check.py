"""`check`: is a framework's configuration legal, does it fit, what does a step take, and what would be better?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from api.frameworks.as_plan import NotAPlan, difference, request_of
from api.frameworks.changes import Change, best_launch, helpful_changes, largest_micro_batch
from api.frameworks.launch import Framework, Launch
from api.frameworks.legality import faults_of
from api.frameworks.pricing import LaunchPricer
from api.frameworks.registry import framework_of
from api.frameworks.style_keys import unmatched_keys, whole_modules
from api.requests.model_configs import ModelConfig, find_config
from api.requests.model_registry import load_model
from api.requests.plan_request import plan_request, read_client_cluster
from api.requests.price_configuration import PricedConfiguration, transformer_of
from api.requests.schemas import PlanRequest
from cost_model.hardware.cluster import ClusterError, ClusterSpec
from planner.errors import ClusterInputError, InfeasibleError, JobError, ModelError
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What is found of a configuration.

    Attributes:
        framework: the framework whose configuration it is.
        model, cluster: the model's name, and the cluster.
        launch: what the configuration says, in shardplan's terms.
        seq: tokens of a sequence.
        faults: why it is illegal, as clauses; empty: it is legal, and the other fields are known.
        unpriced: keys that change time or memory and are not in the prices.
        assumed: what the configuration lacks, and what was taken.
        priced: the price by degrees; None for inference, and where there are faults.
        largest_micro_batch: the largest that would fit, all else equal; None: none does.
        changes: the smallest changes that help most, the most helpful first.
        best: the fastest configuration of the framework; None: it is the one that was checked.
        plan: the plan with the same layouts; None: not planned.
        no_plan: why there is none.
        plan_fits: whether the layouts fit, planned op by op; None: not planned.
        difference: why the prices by degrees and of the plan differ by 10 % or more; "": they do not.
        best_plan: the best plan of the same job; None: not planned.
    """

    framework: Framework
    model: str
    cluster: ClusterSpec
    launch: Launch
    seq: int
    faults: tuple[str, ...] = ()
    unpriced: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    priced: PricedConfiguration | None = None
    largest_micro_batch: int | None = None
    changes: tuple[Change, ...] = ()
    best: Change | None = None
    plan: ShardingPlan | None = None
    no_plan: str = ""
    plan_fits: bool | None = None
    difference: str = ""
    best_plan: ShardingPlan | None = None

    @property
    def fits(self) -> bool | None:
        """Whether a step fits the memory of a device; None: not known, as it is illegal or was not priced."""
        if self.priced is not None:
            return self.priced.fits
        return True if self.plan is not None else self.plan_fits

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data, in seconds and bytes."""
        launch = {name: value for name, value in dataclasses.asdict(self.launch).items() if value is not None}
        return {
            "framework": self.framework.name,
            "version": self.framework.version,
            "model": self.model,
            "cluster": self.cluster.name,
            "launch": launch,
            "legal": not self.faults,
            "faults": list(self.faults),
            "fits": self.fits,
            "unpriced": list(self.unpriced),
            "assumed": list(self.assumed),
            "by_degrees": None if self.priced is None else self.priced.to_dict(),
            "largest_micro_batch": self.largest_micro_batch,
            "changes": [_change_dict(change) for change in self.changes],
            "best": None if self.best is None else _change_dict(self.best),
            "plan": None if self.plan is None else _plan_dict(self.plan),
            "no_plan": self.no_plan,
            "difference": self.difference,
            "best_plan": None if self.best_plan is None else _plan_dict(self.best_plan),
        }


def _change_dict(change: Change) -> dict[str, object]:
    return {
        "texts": list(change.texts),
        "gain": change.gain,
        "step_time_s": change.priced.time.total_s,
        "memory_bytes": change.priced.memory.device,
    }


def _plan_dict(plan: ShardingPlan) -> dict[str, object]:
    estimate = plan.estimate
    return {
        "mesh": str(plan.mesh),
        "micro_batches": plan.micro_batches,
        "ac": plan.job.ac,
        "step_time_s": None if estimate is None else estimate.step_time_s,
        "peak_memory_bytes": None if estimate is None else estimate.peak_memory_bytes,
    }


def check(
    model: str | Mapping[str, Any],
    text: str,
    *,
    cluster: str | Mapping[str, Any],
    framework: str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    plans: bool = True,
    allow_local: bool = True,
    progress: Progress | None = None,
) -> Check:
    """Return what is found of a framework's configuration for a model on a cluster.

    Args:
        model: a preset, a config.json's path, or ``{"hf_config": {...}}``.
        text: the configuration: the contents of a file, or flags.
        cluster: as for `planner.build_plan`.
        framework: name of the framework; None: recognised by its text.
        batch: sequences of the global batch, where the configuration does not say it.
        seq: tokens of a sequence, where the configuration does not say it.
        plans: whether the layouts are planned too, and compared with the best plan, which takes from seconds to a
            minute.
        allow_local: whether model and cluster may be files of this machine.
        progress: called with each event of planning.

    Raises:
        JobError: the text cannot be read at all, or lacks what is needed. `ModelError`, `ClusterInputError`: the model
            or the cluster cannot be read.
    """
    config, where = _model_of(model, allow_local=allow_local), _cluster_of(cluster, allow_local=allow_local)
    spec, made = transformer_of(config), framework_of(framework, text)
    reading = made.read(text, where.size)
    launch = reading.launch
    launch = dataclasses.replace(launch, batch=batch if launch.batch is None and batch else launch.global_batch)
    tokens = launch.seq or seq
    if tokens is None:
        raise JobError("the configuration does not say the length of a sequence.", what_to_do="Give seq.", field="seq")
    launch = dataclasses.replace(launch, seq=tokens)
    pricer = LaunchPricer(
        framework=made,
        model=config.name,
        spec=spec,
        cluster=where,
        seq=tokens,
        stages=reading.stages,
        ulysses=bool(reading.ulysses),
    )
    faults = faults_of(made, dataclasses.replace(reading, launch=launch), spec, pricer.parallel(launch), where)
    unpriced = reading.unpriced
    if reading.styles:
        modules = load_model(model, seq=tokens, allow_local=allow_local).module
        faults += tuple(unmatched_keys(modules, reading.styles, config.name))
        unpriced += () if faults else tuple(whole_modules(modules, reading.styles))
    result = Check(
        framework=made,
        model=config.name,
        cluster=where,
        launch=launch,
        seq=tokens,
        faults=faults,
        unpriced=unpriced,
        assumed=reading.assumed,
    )
    if faults:
        return result
    if launch.phase == "training":
        result = _priced(result, pricer)
    if not plans:
        return result
    return _planned(result, lambda name: plan_request(name, allow_local=allow_local, progress=progress), model, cluster)


def _model_of(model: str | Mapping[str, Any], *, allow_local: bool) -> ModelConfig:
    config = find_config(model, allow_local=allow_local)
    if config is None:
        raise ModelError("a factory has no config to read dimensions from.", what_to_do="Give a preset or config.json.")
    return config


def _cluster_of(cluster: str | Mapping[str, Any], *, allow_local: bool) -> ClusterSpec:
    try:
        return ClusterSpec.parse(cluster) if allow_local else read_client_cluster(cluster)
    except ClusterError as error:
        raise ClusterInputError(str(error)) from error


def _priced(result: Check, pricer: LaunchPricer) -> Check:
    launch = result.launch
    priced = pricer.price(launch)
    if priced is None:
        raise JobError("a step of this configuration has no price.", what_to_do="Check the model's sizes.")
    return dataclasses.replace(
        result,
        priced=priced,
        largest_micro_batch=largest_micro_batch(pricer, launch),
        changes=helpful_changes(pricer, launch, priced),
        best=best_launch(pricer, launch, priced),
    )


def _planned(
    result: Check,
    plan: Callable[[PlanRequest], ShardingPlan],
    model: str | Mapping[str, Any],
    cluster: str | Mapping[str, Any],
) -> Check:
    """Return ``result`` with the plan of the same layouts, and with the best plan of the job."""
    launch = result.launch
    share = launch.gpu_memory_share
    memory_gb = None if share is None else share * result.cluster.memory_bytes / 1e9
    request = request_of(launch, model, cluster, result.seq, memory_gb)
    if isinstance(request, NotAPlan):
        result = dataclasses.replace(result, no_plan=request.reason)
    else:
        try:
            same = plan(request)
            result = dataclasses.replace(result, plan=same, plan_fits=True)
            if result.priced is not None:
                result = dataclasses.replace(result, difference=difference(same, result.priced))
        except InfeasibleError as error:
            result = dataclasses.replace(result, no_plan=error.detail, plan_fits=False)
    best = PlanRequest(
        model=model,
        cluster=cluster,
        batch=launch.global_batch,
        seq=result.seq,
        phase=launch.phase,
        optimizer=launch.optimizer,
        dtype=_dtype(launch),
        memory_gb=memory_gb,
    )
    try:
        return dataclasses.replace(result, best_plan=plan(best))
    except InfeasibleError:
        return result


def _dtype(launch: Launch) -> str:
    return launch.dtype if launch.dtype in ("bf16", "fp16", "fp32") else "bf16"
