"""Prices of the optimizer's update: bytes of states, seconds of the update, and Muon's orthogonalization.

Muon multiplies whole matrices: each rank all-gathers the update of a matrix in the stored dtype and orthogonalizes it
in bf16 by itself, as the executor runs it (`executor.torch_internals.optim.mend_muon`). The all-gathers are part of the
optimizer's seconds, and no collectives of the plan, which lists those of forward and backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from cost_model import OPTIMIZERS, gemm_time_s, optimizer_update_s, parameter_state_bytes
from cost_model.kernels.optimizers import NEWTON_SCHULZ_STEPS
from cost_model.layouts.layout import Layout, replicated, split_factor
from planner.graph.op_graph import OpGraph, Value
from planner.ilp.quantities import EXPOSED, Charge, persistent
from planner.liveness.peak_candidates import UPDATE
from planner.plan.job import BYTES_PER_ELEMENT, Job
from planner.pricing.price import Price
from planner.pricing.redistribution_costs import RedistributionPricer
from planner.pricing.run_spec import Run
from planner.regions.regions import block_of

_COMPUTE_NBYTES = 2
"""Bytes of an element of the matrices that are multiplied: Muon computes in bf16."""


class OptimizerPricer:
    """Prices of the update of parameters in one `Run`.

    Args:
        parameters: parameter value -> its FQNs.
    """

    def __init__(
        self, run: Run, redistribution_pricer: RedistributionPricer, parameters: Mapping[str, tuple[str, ...]]
    ) -> None:
        self._run = run
        self._redistribution_pricer = redistribution_pricer
        self._optimizer = OPTIMIZERS[run.job.optimizer]
        self._in_blocks = values_in_blocks(parameters)

    def price(self, value: Value, stored: Layout, count: int) -> Price:
        """Return the price of ``count`` stored parameters and their optimizer states, and of their update.

        One fused kernel updates all parameters, so that no parameter pays for its launch.
        """
        job, numel = self._run.job, numel_of(value) // split_factor(stored, self._run.mesh.shape)
        in_block, dtype = value.name in self._in_blocks, job.stored_dtype
        seconds = optimizer_update_s(
            numel,
            device=self._run.cluster.device,
            optimizer=job.optimizer,
            dtype=dtype,
            master_dtype=dtype,
            gradient_dtype=dtype,
            shape=value.shape,
            in_block=in_block,
        )
        if self._optimizer.orthogonalizes(value.shape, in_block):
            seconds += self._orthogonalization_s(value, stored)
        charge = {
            persistent(role): nbytes * count for role, nbytes in state_nbytes(value, job, numel, in_block).items()
        }
        return Price(charge={**charge, EXPOSED: seconds * count})

    def workspace(self, values: Iterable[Value]) -> Charge:
        """Return the charge of the buffers of the largest matrix of ``values`` that is orthogonalized."""
        matrices = [v.shape for v in values if self._optimizer.orthogonalizes(v.shape, v.name in self._in_blocks)]
        if not self._run.job.training or not matrices:
            return {}
        gathered = BYTES_PER_ELEMENT[self._run.job.stored_dtype]
        return {UPDATE.quantity("transient"): max(_workspace_nbytes(shape, gathered) for shape in matrices)}

    def _orthogonalization_s(self, value: Value, stored: Layout) -> float:
        """Return the seconds of gathering and orthogonalizing one matrix.

        A step of Newton and Schulz is three GEMMs: ``X X^T``, its square, and the product with ``X``.
        """
        itemsize, whole = BYTES_PER_ELEMENT[self._run.job.stored_dtype], replicated(len(stored))
        path = self._redistribution_pricer.path(value.shape, itemsize, stored, whole)
        assert path is not None  # an all-gather leads from any stored layout to the whole
        short, long = sorted(value.shape)
        device = self._run.cluster.device
        dtype = "bf16" if "bf16" in device.peak_flops else "fp32"
        products = ((short, short, long), (short, short, short), (short, long, short))
        step_s = sum(gemm_time_s(m=m, n=n, k=k, device=device, dtype=dtype) for m, n, k in products)
        return path.time_s + NEWTON_SCHULZ_STEPS * step_s


def values_in_blocks(parameters: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """Return the parameter values that are inside a block, by their first FQN."""
    return frozenset(name for name, fqns in parameters.items() if block_of(fqns[0]) is not None)


def numel_of(value: Value) -> int:
    """Return the elements of the unsharded tensor."""
    return value.nbytes // value.dtype.itemsize


def state_nbytes(value: Value, job: Job, numel: int, in_block: bool) -> dict[str, float]:
    """Return the bytes of one trained parameter and of its states by role, without its gradient.

    Gradients are priced by layout and lifetime (`planner.pricing.parameter_costs`).

    Args:
        numel: elements on one device.
    """
    dtype = job.stored_dtype
    nbytes = parameter_state_bytes(
        numel, optimizer=job.optimizer, dtype=dtype, master_dtype=dtype, shape=value.shape, in_block=in_block
    )
    return nbytes | {"gradients": 0.0}


def least_state_nbytes(graph: OpGraph, values: Collection[Value], job: Job) -> float:
    """Return a lower bound on the bytes of ``values`` and their optimizer states, summed over all devices."""
    in_blocks = values_in_blocks(graph.parameters)
    total = 0.0
    for value in values:
        if job.training and value.requires_grad:
            total += sum(state_nbytes(value, job, numel_of(value), value.name in in_blocks).values())
        else:
            total += value.nbytes
    return total


def _workspace_nbytes(shape: Sequence[int], gathered: int) -> float:
    """Return the bytes of the gathered update, two copies of it in bf16, and two square matrices."""
    short, long = sorted(shape)
    return float(short * long * (gathered + 2 * _COMPUTE_NBYTES) + 2 * short * short * _COMPUTE_NBYTES)
