"""The planners as objects: which cluster and job is said once, then `build_plan(module)` for any module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.build import build_plan
from planner.graph.example_inputs import GivenInputs
from planner.plan.job import AttentionKernel
from planner.plan.planner_interface import ShardingPlanner
from planner.plan.sharding_plan import ShardingPlan


@dataclass(frozen=True, kw_only=True)
class _LocalPlanner(ShardingPlanner):
    """Plans in this process; see `planner.build.build_plan` for what each field means."""

    cluster: str | ClusterSpec | Mapping[str, Any]
    example_inputs: GivenInputs = None
    mesh: str | MeshSpec | None = None
    batch: int | None = None
    seq: int | None = None
    micro_batches: int | None = None
    ac: str | None = None
    memory_gb: float | None = None
    optimizer: str = "adamw"
    dtype: str = "bf16"
    reduce_dtype: str = "fp32"
    pins: Sequence[str] = ()
    data_axes: Sequence[str] = ()
    reallgather: bool = False
    fused_ops: bool = False
    zigzag: bool = False
    attention_kernel: AttentionKernel | None = None
    axes: int = 2

    kind: ClassVar[str]

    def _planner(self) -> str:
        return self.kind

    def _tp_plan(self) -> Mapping[str, str] | None:
        return None

    def _executable_only(self) -> bool:
        return True

    def _async_tp(self) -> bool:
        return False

    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return the plan for ``module``.

        Raises:
            PlannerError: there is none; `InfeasibleError` where nothing fits the memory.
        """
        return build_plan(
            module,
            cluster=self.cluster,
            example_inputs=self.example_inputs,
            mesh=self.mesh,
            batch=self.batch,
            seq=self.seq,
            micro_batches=self.micro_batches,
            ac=self.ac,
            memory_gb=self.memory_gb,
            optimizer=self.optimizer,
            dtype=self.dtype,
            reduce_dtype=self.reduce_dtype,
            planner=self._planner(),
            tp_plan=self._tp_plan(),
            pins=self.pins,
            data_axes=self.data_axes,
            reallgather=self.reallgather,
            fused_ops=self.fused_ops,
            zigzag=self.zigzag,
            attention_kernel=self.attention_kernel,
            axes=self.axes,
            executable_only=self._executable_only(),
            async_tp=self._async_tp(),
        )


@dataclass(frozen=True, kw_only=True)
class ILPShardingPlanner(_LocalPlanner):
    """The main planner: the fastest plan that fits, by integer programming.

    Attributes:
        executable_only: whether only plans are wanted that `executor.shard_module` can run; False tries pipelines too.
        async_tp: see `planner.build.build_plan`.
    """

    executable_only: bool = True
    async_tp: bool = False
    kind = "ilp"

    def _executable_only(self) -> bool:
        return self.executable_only

    def _async_tp(self) -> bool:
        return self.async_tp


@dataclass(frozen=True, kw_only=True)
class DataParallelPlanner(_LocalPlanner):
    """Whole parameters everywhere, the batch split."""

    kind = "data-parallel"


@dataclass(frozen=True, kw_only=True)
class FullyShardedPlanner(_LocalPlanner):
    """Parameters, gradients and optimizer state split over all devices, the batch split (FSDP; ZeRO-3 or ZeRO-2)."""

    kind = "fully-sharded"


@dataclass(frozen=True, kw_only=True)
class TensorParallelPlanner(_LocalPlanner):
    """The expert's tensor-parallel plan that a Hugging Face config carries, on the innermost axis.

    Attributes:
        tp_plan: FQN pattern of modules -> style; None takes the model's own.
    """

    tp_plan: Mapping[str, str] | None = None
    kind = "tensor-parallel"

    def _tp_plan(self) -> Mapping[str, str] | None:
        return self.tp_plan


@dataclass(frozen=True, kw_only=True)
class RandomPlanner(_LocalPlanner):
    """A random feasible assignment: to test the executor and the estimator with, never to run."""

    seed: int = 0
    kind = "random"

    def _planner(self) -> str:
        return f"random:{self.seed}"
