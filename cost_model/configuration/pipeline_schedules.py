"""Pipeline schedules: the idle time of a rank in a step, and the micro-batches whose activations a rank holds.

With p ranks, v model chunks per rank, m micro-batches, and f, b the forward and backward seconds of one micro-batch on
one rank:

    gpipe        idle (p-1)(f+b);            m in flight
    1f1b         idle (p-1)(f+b);            min(m, p - rank) in flight (Narayanan et al., arXiv 2006.09503)
    interleaved  idle (p-1)(f+b)/v;          (p v + p - 1 - 2 rank)/v in flight (arXiv 2104.04473, section 2.2)
    zero-bubble  idle (p-1)(f+b-2w)/v;       w = the weights' part of backward; in flight as 1f1b (ZB-H1, arXiv
                                             2401.10241, where v = 1)

The formulas are exact for stages of equal time without sends.
"""

from __future__ import annotations

from cost_model.configuration.parallelism import ParallelSpec

WEIGHT_PART = 1 / 3
"""Share of f + b that computes gradients of weights. In a transformer with short sequences this is one of three equal
GEMMs."""


def idle_passes(ranks: int, chunks: int = 1) -> float:
    """Return the idle time of a rank in a step of 1F1B (interleaved for ``chunks`` > 1 per rank), in units of f + b."""
    return (ranks - 1) / chunks


def held_micro_batches(ranks: int, chunks: int, micro_batches: int, rank: int, *, end_alone: bool = False) -> float:
    """Return the most micro-batches for which a rank of 1F1B holds the activations of all its layers at once.

    Args:
        ranks: pipeline ranks.
        chunks: model chunks per rank; 1F1B is interleaved for more than one.
        micro_batches: micro-batches per step.
        rank: the pipeline rank, counted from 0.
        end_alone: whether the first chunk of the first rank, or the last chunk of the last rank, has no layers. Each
            other chunk of the rank then holds p micro-batches, and on the last rank one chunk holds one more.
    """
    if chunks == 1:
        in_flight = float(ranks - rank)
    elif end_alone:
        in_flight = ranks + (rank > 0) / (chunks - 1)
    else:
        in_flight = (ranks * chunks + ranks - 1 - 2 * rank) / chunks
    return min(float(micro_batches), in_flight)


def idle_share(parallel: ParallelSpec) -> float:
    """Return the idle time of a rank in a step, in units of f + b, the time of one micro-batch."""
    ranks = parallel.pipeline
    if ranks == 1:
        return 0.0
    if parallel.schedule == "zero-bubble":
        return (ranks - 1) * (1.0 - 2.0 * WEIGHT_PART) / parallel.virtual_stages
    return idle_passes(ranks, parallel.virtual_stages if parallel.schedule == "interleaved" else 1)


def micro_batches_in_flight(parallel: ParallelSpec, rank: int = 0) -> float:
    """Return the most micro-batches for which pipeline rank ``rank`` holds activations of all its layers at once."""
    ranks, count = parallel.pipeline, parallel.micro_batches
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}; the pipeline has {ranks} ranks, numbered from 0")
    if ranks == 1:
        return 1.0
    if parallel.schedule == "gpipe":
        return float(count)
    chunks = parallel.virtual_stages if parallel.schedule == "interleaved" else 1
    return held_micro_batches(ranks, chunks, count, rank)
