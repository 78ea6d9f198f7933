"""The optimizers that a job may name: bytes of their states for one parameter, by the rules of the class that runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cost_model.hardware.reading import ClusterError, close_matches

QUANTIZED_FROM = 4096
"""Elements of the smallest tensor whose states are quantized, in bitsandbytes and torchao alike."""

NEWTON_SCHULZ_STEPS = 5
"""Steps of Muon's orthogonalization: DEFAULT_NS_STEPS of torch.optim._muon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """The states of an optimizer.

    Attributes:
        title: its name in a printed plan.
        states: number of state values per parameter, each in the master dtype.
        source: the names of the states, and the class that defines them.
        bits: bits of a quantized state value; 0: states are not quantized.
        block: elements of a quantized state that share a float32 scale.
        whole_blocks: whether a tensor that is no multiple of ``block`` keeps its states in the master dtype.
        own_tables: whether each state has a float32 table of its ``2 ** bits`` values.
        matrices: how matrices differ: "factored", a sum for each row and each column, whole on every device;
            "momentum", one state for matrices inside blocks, which are orthogonalized. None: they do not.
        not_on_dtensor: why the executor does not run it on the parameters of a plan; None: it does.
    """

    name: str
    title: str
    states: int
    source: str
    bits: int = 0
    block: int = 0
    whole_blocks: bool = False
    own_tables: bool = False
    matrices: Literal["factored", "momentum"] | None = None
    not_on_dtensor: str | None = None

    def state_nbytes(
        self, numel_local: int, master_nbytes: int, *, shape: Sequence[int] | None = None, in_block: bool = False
    ) -> float:
        """Return the bytes of the states of one parameter on one device, without the master copy.

        Args:
            numel_local: elements of the parameter on this device.
            master_nbytes: bytes of a value in the master dtype.
            shape: global shape of the parameter; None: a vector.
            in_block: whether the parameter is inside a block, as Muon's matrices are.
        """
        if shape is not None and self.matrices == "factored" and len(shape) >= 2:
            numel = math.prod(shape)
            return float(master_nbytes * (numel // shape[-1] + numel // shape[-2]))
        states = 1 if self.orthogonalizes(shape, in_block) else self.states
        if not self.bits or numel_local < QUANTIZED_FROM or (self.whole_blocks and numel_local % self.block):
            return float(states * master_nbytes * numel_local)
        scales = 4 * math.ceil(numel_local / self.block)
        table = 4 * 2**self.bits if self.own_tables else 0
        return states * (numel_local * self.bits / 8 + scales + table)

    def orthogonalizes(self, shape: Sequence[int] | None, in_block: bool) -> bool:
        """Return whether the update of a parameter is orthogonalized, as Muon's is for the matrices inside blocks."""
        return self.matrices == "momentum" and in_block and shape is not None and len(shape) == 2


OPTIMIZERS = {
    spec.name: spec
    for spec in (
        OptimizerSpec(name="adamw", title="AdamW", states=2, source="exp_avg, exp_avg_sq: torch.optim.AdamW"),
        OptimizerSpec(name="adam", title="Adam", states=2, source="exp_avg, exp_avg_sq: torch.optim.Adam"),
        OptimizerSpec(
            name="adamw-8bit",
            title="8-bit AdamW of torchao",
            states=2,
            source="codes, scale, qmap of exp_avg and exp_avg_sq: torchao.optim.AdamW8bit 0.18, on each rank's shard",
            bits=8,
            block=256,
            whole_blocks=True,
            own_tables=True,
        ),
        OptimizerSpec(
            name="adamw-8bit-bnb",
            title="8-bit AdamW of bitsandbytes",
            states=2,
            source="state1, state2, absmax1, absmax2: bitsandbytes.optim.AdamW8bit 0.50; all tensors share a qmap",
            bits=8,
            block=256,
            not_on_dtensor="its kernels take plain tensors; adamw-8bit is torchao's, with the same states",
        ),
        OptimizerSpec(
            name="muon",
            title="Muon, AdamW outside of blocks",
            states=2,
            source="momentum_buffer: torch.optim.Muon for matrices inside blocks; AdamW for the rest",
            matrices="momentum",
        ),
        OptimizerSpec(
            name="adafactor",
            title="Adafactor",
            states=1,
            source="row_var and col_var of matrices, variance of vectors: torch.optim.Adafactor",
            matrices="factored",
            not_on_dtensor="it needs means over whole rows and columns of shards",
        ),
        OptimizerSpec(name="adagrad", title="Adagrad", states=1, source="sum: torch.optim.Adagrad"),
        OptimizerSpec(name="sgd", title="SGD", states=0, source="torch.optim.SGD, momentum=0"),
        OptimizerSpec(
            name="sgd-momentum", title="SGD with momentum", states=1, source="momentum_buffer: torch.optim.SGD"
        ),
    )
}


def find_optimizer(name: str) -> OptimizerSpec:
    """Return the optimizer called ``name``, whose case does not matter.

    Raises:
        ClusterError: no optimizer has this name; the message lists all names.
    """
    if name.lower() not in OPTIMIZERS:
        near = close_matches(name.lower(), OPTIMIZERS)
        question = f"did you mean {' or '.join(near)}? " if near else ""
        raise ClusterError(f"unknown optimizer {name!r}; {question}known: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name.lower()]
