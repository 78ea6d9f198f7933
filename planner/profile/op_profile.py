"""What an op costs before it is split, as `planner.profile.profile` finds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.profile.dispatch_peak import NOTHING, Dispatched


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProfile:
    """One op, unsplit.

    Attributes:
        flops: of the forward, multiply-add counted as two; 0 where no matrix product runs.
        backward_flops: of the backward.
        nbytes: read and written by the forward; 0 for a view.
        backward_nbytes: read and written by the backward.
        saved: values (roots of their storage) that autograd keeps for this op.
        saved_extra_nbytes: bytes kept beside them, of tensors that exist only inside the op.
        cached_extra_nbytes: bytes of products inside the op that are not its results; selective checkpointing keeps
            them.
        forward_peak_nbytes: most that its forward has alive beside its inputs, where there are such products.
        backward_extra_nbytes: by how much the backward's bytes rise above what was there before and the gradients that
            it leaves; below 0 where it frees what was kept before it makes those.
        forward_dispatched, backward_dispatched: what torch dispatches one by one; of an op of ours, which runs on
            local pieces, the ops are the tensors that become plain and DTensors again.
        summed: which of its inputs have an earlier use: autograd adds the gradients of both.
        joined: which of its inputs have a gradient that its product adds to what later linear layers have left.
        in_place: which of those have no other gradient meanwhile, so that there is one tensor in all.
        cached_tokens: of each sequence, in the key-value cache behind an op of attention; 0 where there is none.
    """

    flops: float
    backward_flops: float
    nbytes: int
    backward_nbytes: int
    saved: tuple[str, ...]
    saved_extra_nbytes: int
    cached_extra_nbytes: int
    forward_peak_nbytes: int
    backward_extra_nbytes: int
    forward_dispatched: Dispatched = NOTHING
    backward_dispatched: Dispatched = NOTHING
    summed: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProfile:
    """Every op's profile by name, and for every value the value whose storage it shares, and that storage's bytes."""

    ops: Mapping[str, OpProfile]
    root: Mapping[str, str]
    storage_nbytes: Mapping[str, int]
