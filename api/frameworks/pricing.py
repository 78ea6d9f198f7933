"""The price of a launch by its degrees: training only, from the model's dimensions, without a trace."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from api.frameworks.launch import Framework, Launch
from api.frameworks.legality import vocabulary_to_split
from api.requests.price_configuration import PricedConfiguration
from cost_model.configuration.divisibility import Stages, uneven_splits
from cost_model.configuration.memory import step_memory
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.step import step_time
from cost_model.configuration.transformer import TransformerSpec
from cost_model.hardware.cluster import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPricer:
    """Prices launches of one framework, for one model, cluster and sequence length.

    Attributes:
        model: its name, for people.
        seq: tokens of a sequence.
        stages, ulysses: as in a `Reading`.
    """

    framework: Framework
    model: str
    spec: TransformerSpec
    cluster: ClusterSpec
    seq: int
    stages: Stages | None = None
    ulysses: bool = False
    _prices: dict[Launch, PricedConfiguration | None] = field(default_factory=dict, repr=False, compare=False)

    def parallel(self, launch: Launch) -> ParallelSpec:
        """Return ``launch`` as the cost model has it.

        Where a framework has no key for it, tensor ranks split experts that are not spread over ranks.
        """
        if self.spec.experts is not None and launch.expert == 1 and "expert_tensor" not in self.framework.says:
            launch = dataclasses.replace(launch, expert_tensor=launch.tensor)
        return launch.parallel(self.seq, self.framework.implementation(launch, self.cluster.device.architecture))

    def is_legal(self, launch: Launch) -> bool:
        """Return whether the degrees have the cluster's devices, and divide the model, the sequence and the batch."""
        if launch.ranks != self.cluster.size or not self._splits_heads(launch.tensor):
            return False
        experts_alone = self.spec.experts is not None and self.framework.experts_need_sequence_parallel
        if experts_alone and launch.tensor > 1 and not launch.sequence_parallel:
            return False
        stages = self.stages or self.framework.stages
        parallel, batch = self.parallel(launch), launch.global_batch
        return not uneven_splits(self.spec, parallel, batch=batch, devices=1, stages=stages, ulysses=self.ulysses)

    def price(self, launch: Launch) -> PricedConfiguration | None:
        """Return the price of ``launch``; None where it is so illegal that it has none."""
        if launch not in self._prices:
            self._prices[launch] = self._priced(launch)
        return self._prices[launch]

    def _priced(self, launch: Launch) -> PricedConfiguration | None:
        try:
            parallel = self.parallel(launch)
            time = step_time(self.spec, parallel, self.cluster)
            memory = step_memory(self.spec, parallel, self.cluster)
        except (ValueError, ArithmeticError):
            return None
        if not math.isfinite(time.total_s):
            return None
        return PricedConfiguration(
            model=self.model, spec=self.spec, parallel=parallel, cluster=self.cluster, time=time, memory=memory
        )

    def _splits_heads(self, tensor: int) -> bool:
        kv_heads = self.spec.heads if self.spec.mla is not None else self.spec.kv_heads
        copies = self.framework.key_value_heads == "copied" and tensor % kv_heads == 0
        divides = vocabulary_to_split(self.framework, self.spec) % tensor == 0
        return divides and (kv_heads % tensor == 0 or copies)
