"""Prices of decisions about activations: redistributions, saved tensors, and the strategies of regions.

The integer program and the estimator both take their prices here, so that they agree. Parameters are priced in
`parameter_costs` and `fsdp_group_costs`.
"""

from __future__ import annotations

from cost_model.layouts.layout import Layout
from planner.graph.op_graph import Value
from planner.ilp.quantities import BACKWARD, Lifetime
from planner.liveness.multiplicity import Multiplicity
from planner.pricing.op_times import OpTimes
from planner.pricing.overlap import AdjacentGemms
from planner.pricing.port_layouts import PortLayouts
from planner.pricing.price import Price, add_prices
from planner.pricing.redistribution_costs import RedistributedTensor, RedistributionPricer
from planner.pricing.region_costs import RegionPricer
from planner.pricing.region_memory import RegionMemory
from planner.pricing.run_spec import Run
from planner.profile.op_profile import GraphProfile


class ActivationPricer:
    """Prices of activations in one `Run`.

    Attributes:
        regions: prices of the strategies of regions.
    """

    def __init__(
        self, run: Run, profile: GraphProfile, redistribution_pricer: RedistributionPricer, op_times: OpTimes
    ) -> None:
        """Price on the mesh of ``redistribution_pricer`` and the devices of ``op_times``; runs may share both."""
        self.run = run
        self.redistribution_pricer = redistribution_pricer
        self._memory = RegionMemory(run, profile)
        self.regions = RegionPricer(run, profile, self._memory, redistribution_pricer, op_times)

    def redistributed_tensor(self, value: Value, gemms: AdjacentGemms | None = None) -> RedistributedTensor:
        """Return ``value`` as an activation that is redistributed once per micro-batch.

        Args:
            gemms: the GEMMs that the communication overlaps with in async tensor parallelism; None: it is blocking.
        """
        has_backward = value.requires_grad and self.run.job.training
        return RedistributedTensor(value.shape, value.dtype.itemsize, self.run.passes, has_backward, gemms)

    def redistribution(
        self, value: Value, source: PortLayouts, target: PortLayouts, count: int, gemms: AdjacentGemms | None = None
    ) -> Price | None:
        """Return the price of ``count`` redistributions per micro-batch, forward and backward, in seconds.

        None where `RedistributionPricer.both_ways` has none.
        """
        ports = self.redistribution_pricer.ports
        tensor = self.redistributed_tensor(value, gemms)._replace(calls=count * self.run.passes)
        return self.redistribution_pricer.both_ways(tensor, ports.number(source), ports.number(target))

    def recomputed_redistribution(
        self, value: Value, source: PortLayouts, target: PortLayouts, count: int, gemms: AdjacentGemms | None = None
    ) -> Price:
        """Return the price of ``count`` redistributions per micro-batch in the recompute of blocks, in seconds."""
        assert source.layout is not None
        assert target.layout is not None
        price = self.redistribution_pricer.one_way(
            value.shape,
            value.dtype.itemsize,
            source.layout,
            target.layout,
            phase="recompute",
            calls=count * self.run.passes,
            quantities=BACKWARD.blocking,
        )
        assert price is not None
        if gemms is None:
            return price
        path = self.redistribution_pricer.path(value.shape, value.dtype.itemsize, source.layout, target.layout)
        return self.redistribution_pricer.overlap_with_gemms(
            price, path, BACKWARD, gemms.consumers.forward, gemms.producer.forward
        )

    def live_bytes(
        self,
        value: Value,
        layout: Layout,
        multiplicity: Multiplicity,
        throughout: Lifetime,
        *,
        reallgather: bool = False,
    ) -> Price:
        """Return the price of saved tensors like ``value`` in ``layout``, in bytes by lifetime.

        Args:
            multiplicity: number of the tensors at each peak candidate.
            throughout: lifetime of tensors of other micro-batches in flight.
            reallgather: whether the tensors are not saved, but all-gathered again in the backward.
        """
        nbytes = self._memory.local_nbytes(value, layout)
        if reallgather:
            return Price(charge=multiplicity.reallgathered_lifetime.charge(nbytes))
        other_count = multiplicity.live_after_forward * (self.run.in_flight - 1)
        return add_prices([
            Price(charge=multiplicity.lifetime.charge(nbytes)), Price(charge=throughout.charge(other_count * nbytes))
        ])  # fmt: skip
