"""The sizes of a model, a sequence and a batch that the degrees of a configuration do not divide, with legal values.

Frameworks split heads, widths, experts, layers and sequences evenly, or refuse. The vocabulary is not checked, because
frameworks pad it. Key-value heads are not checked either: `TransformerSpec.on_tensor_ranks` counts them where they are
replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.transformer import TransformerSpec

Say = Callable[[str, int], str]
"""(axis, degree) -> how the user said it, such as "tp=8"."""

Stages = Literal["even", "ends", "free"]
"""How layers split into pipeline stages: evenly, evenly with embedding and loss as a layer each, or in any way."""


def uneven_splits(
    spec: TransformerSpec,
    parallel: ParallelSpec,
    *,
    batch: int,
    devices: int,
    say: Say = "{}={}".format,
    stages: Stages = "ends",
    ulysses: bool = False,
) -> list[str]:
    """Return a clause for each size that a degree does not divide: "tp=8 does not divide 14 heads (1, 2 would do)".

    Args:
        spec: the dimensions of the model.
        parallel: the configuration.
        batch: sequences of the global batch.
        devices: devices of the cluster; the degrees that divide them and are legal are listed.
        say: how a clause names a degree.
        stages: how layers may split; "ends" is either of the first two.
        ulysses: whether context parallelism splits heads inside attention; else each rank holds two chunks of a
            sequence.
    """
    degrees = [degree for degree in range(1, devices + 1) if devices % degree == 0]
    texts = [*_tensor(spec, parallel, degrees, say), *_sequence(spec, parallel, degrees, say, ulysses)]
    texts += [*_experts(spec, parallel, degrees, say), *_layers(spec, parallel, degrees, say, stages)]
    return texts + list(_batch(parallel, batch))


def alternatives(values: Sequence[int]) -> str:
    """Return values as text: "1, 2 or 4"."""
    texts = [f"{value:,}" for value in values]
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _unless(
    fits: Callable[[int], bool], axis: str, degree: int, what: str, degrees: Sequence[int], say: Say, note: str = ""
) -> Iterator[str]:
    """Yield that ``degree`` does not divide ``what``, with the degrees that would do; nothing where it fits."""
    if not fits(degree):
        legal = alternatives([d for d in degrees if fits(d)])
        yield f"{say(axis, degree)} does not divide {what} ({legal} would do{note})"


def _divides(size: int) -> Callable[[int], bool]:
    return lambda degree: size % degree == 0


def _tensor(spec: TransformerSpec, parallel: ParallelSpec, degrees: Sequence[int], say: Say) -> Iterator[str]:
    note = ""
    if spec.kv_heads not in (1, spec.heads):
        both = alternatives([d for d in degrees if spec.heads % d == 0 and spec.kv_heads % d == 0])
        note = f"; with {both} the {spec.kv_heads} key-value heads are split too, and not copied"
    yield from _unless(_divides(spec.heads), "tp", parallel.tensor, f"{spec.heads} heads", degrees, say, note)
    if spec.dense_layers:
        what = f"an MLP of width {spec.ffn:,}"
        yield from _unless(_divides(spec.ffn), "tp", parallel.tensor, what, degrees, say)
    if spec.experts is not None:
        what = f"shared experts of width {spec.experts.shared_ffn:,}"
        yield from _unless(_divides(spec.experts.shared_ffn), "tp", parallel.tensor, what, degrees, say)


def _sequence(
    spec: TransformerSpec, parallel: ParallelSpec, degrees: Sequence[int], say: Say, ulysses: bool
) -> Iterator[str]:
    # Under a causal mask a rank holds two chunks, one early and one late; Ulysses has whole sequences in attention.
    chunks = 2 if spec.causal and not ulysses else 1

    def splits(context: int) -> bool:
        return context == 1 or parallel.seq % (chunks * context) == 0

    what = f"a sequence of {parallel.seq:,} tokens" + (" into two chunks a rank" if chunks == 2 else "")
    yield from _unless(splits, "cp", parallel.context, what, degrees, say)
    if ulysses:
        yield from _unless(_divides(spec.heads), "cp", parallel.context, f"{spec.heads} heads", degrees, say)
    if parallel.sequence_parallel and splits(parallel.context):
        local = parallel.seq // parallel.context
        what = f"the {local:,} tokens of a sequence on a rank, which sequence parallelism splits"
        yield from _unless(_divides(local), "tp", parallel.tensor, what, degrees, say)


def _experts(spec: TransformerSpec, parallel: ParallelSpec, degrees: Sequence[int], say: Say) -> Iterator[str]:
    if spec.experts is None:
        if parallel.expert > 1:
            yield f"{say('ep', parallel.expert)} splits experts, and the model has none (1 would do)"
        return
    count, ranks = spec.experts.count, parallel.data * parallel.context * parallel.tensor

    def splits(expert: int) -> bool:
        return count % expert == 0 and ranks % expert == 0

    what = f"{count} experts" if count % parallel.expert else f"the {ranks} ranks of dp, fsdp, cp and tp"
    yield from _unless(splits, "ep", parallel.expert, what, degrees, say)


def _layers(
    spec: TransformerSpec, parallel: ParallelSpec, degrees: Sequence[int], say: Say, kind: Stages
) -> Iterator[str]:
    chunks = parallel.virtual_stages

    def splits(stages: int) -> bool:
        # Embedding and loss may count as a layer each (`step.stage_layers`), as in Llama 3.1 405B: 126 layers on pp=16.
        counts = (spec.layers, spec.layers + 2) if kind == "ends" else (spec.layers,)
        if stages == 1 or stages * chunks > spec.layers:
            return stages == 1
        return kind == "free" or any(count % (stages * chunks) == 0 for count in counts)

    what = f"{spec.layers} layers" + (f" into {chunks} virtual stages a rank" if chunks > 1 else "")
    yield from _unless(splits, "pp", parallel.pipeline, what, degrees, say)


def _batch(parallel: ParallelSpec, batch: int) -> Iterator[str]:
    together = parallel.data * parallel.micro_batch
    if batch % together:
        below = batch // together * together
        legal = alternatives([each for each in (below, below + together) if each])
        yield (
            f"{parallel.data} data-parallel ranks with micro-batches of {parallel.micro_batch} do not divide a batch "
            f"of {batch:,} ({legal} would do)"
        )
