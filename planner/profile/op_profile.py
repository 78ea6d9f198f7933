"""`OpProfile`: FLOPs, bytes and saved tensors of one unsplit op, as `planner.profile.profile` measures them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.counting.live_bytes import NOTHING, Dispatched


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProfile:
    """One op, unsplit.

    Attributes:
        flops: FLOPs of the forward, a multiply-add counted as two; 0 where no matrix multiplication runs.
        backward_flops: FLOPs of the backward.
        nbytes: bytes that the forward reads and writes; 0 for a view.
        backward_nbytes: bytes that the backward reads and writes.
        saved: values that autograd saves for this op's backward, each by the root of its storage.
        saved_extra_nbytes: bytes that autograd saves of tensors that exist only inside the op.
        cached_extra_nbytes: bytes of GEMM results that exist only inside the op; selective checkpointing saves them.
        forward_peak_nbytes: peak of live bytes in the forward beyond the inputs, if ``cached_extra_nbytes`` is not 0.
        backward_extra_nbytes: peak of live bytes in the backward beyond those at its start and the gradients that it
            returns. Negative where it frees saved tensors before it allocates the gradients.
        forward_dispatched, backward_dispatched: what torch dispatches op by op. An op of the executor's own runs on
            local tensors: its dispatched ops are the conversions from DTensor to local tensor and back.
        autograd_sums: positions of inputs that an earlier op reads too: autograd adds the two gradients.
        gemm_sums: positions of inputs whose gradient this op's GEMM adds to the gradient from later linear layers.
        in_place: the inputs in ``gemm_sums`` of which no other gradient exists then, so that the GEMM adds in place.
        cached_tokens: tokens of each sequence that an attention op with a key-value cache reads; 0 where there is no
            cache.
        kept_tokens: tokens of each sequence that the cache keeps after the op: fewer where it has a sliding window.
        kv_heads: heads of keys and values that it keeps, in whose place the op may read repeated ones.
        latents: widths of the latents and of the rotary keys that it keeps in their place; None: it keeps them.
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
    autograd_sums: tuple[int, ...] = ()
    gemm_sums: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()
    cached_tokens: int = 0
    kept_tokens: int = 0
    kv_heads: int = 0
    latents: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProfile:
    """The profiles of all ops of a graph.

    Attributes:
        ops: op name -> its profile.
        root: value -> the first value with the same storage.
        storage_nbytes: value -> bytes of its storage.
    """

    ops: Mapping[str, OpProfile]
    root: Mapping[str, str]
    storage_nbytes: Mapping[str, int]
