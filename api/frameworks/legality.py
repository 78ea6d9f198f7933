"""What makes a configuration illegal for a model and a cluster: every fault, in the framework's own words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from api.frameworks.launch import Framework, Launch, Reading
from cost_model.configuration.divisibility import alternatives, uneven_splits
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.transformer import TransformerSpec
from cost_model.hardware.cluster import ClusterSpec

_FIELDS = {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline"}
"""Axis, as `uneven_splits` names it -> field of `Launch`."""


def faults_of(
    framework: Framework, reading: Reading, spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec
) -> tuple[str, ...]:
    """Return every fault of a configuration as a clause: those of its text, then those with the model and cluster."""
    launch = reading.launch

    def say(axis: str, degree: int) -> str:
        if axis == "cp" and reading.ulysses:
            return reading.ulysses
        return said(framework, launch, _FIELDS[axis]) or f"{axis}={degree}"

    # Where the text contradicts itself, its faults say what is wrong with the ranks and the batch.
    batch = launch.global_batch if not reading.faults else parallel.global_batch
    faults = [
        *reading.faults,
        *_other_sizes(reading, spec),
        *uneven_splits(
            spec,
            parallel,
            batch=batch,
            devices=cluster.size,
            say=say,
            stages=reading.stages or framework.stages,
            ulysses=bool(reading.ulysses),
        ),
        *_tensor_splits(framework, launch, spec, cluster, say("tp", launch.tensor)),
        *(() if reading.faults else _ranks(launch, cluster)),
    ]
    return tuple(dict.fromkeys(faults))


def said(framework: Framework, launch: Launch, name: str) -> str:
    """Return how the framework says a field of ``launch``; "" where it does not, or where it follows from others.

    Of several texts, the first says the field; the others say what has to change with it.
    """
    return next(iter(framework.says[name](launch)), "") if name in framework.says else ""


def _other_sizes(reading: Reading, spec: TransformerSpec) -> Iterator[str]:
    for name, (value, key) in reading.sizes.items():
        own = spec.experts.count if name == "experts" and spec.experts is not None else getattr(spec, name, None)
        padded = name == "vocab" and own is not None and value >= own
        if own is not None and own != value and not padded:
            yield f"{key} {value:,} is not the model's, which is {own:,}"


def _tensor_splits(
    framework: Framework, launch: Launch, spec: TransformerSpec, cluster: ClusterSpec, text: str
) -> Iterator[str]:
    """Yield that tensor parallelism does not split key-value heads, or the vocabulary, as the framework requires."""
    if launch.tp_plan == {}:
        return  # no module is split, as where the ranks hold experts alone
    sizes = range(1, cluster.size + 1)
    degrees = [degree for degree in sizes if spec.heads % degree == 0 and cluster.size % degree == 0]
    if spec.mla is None and spec.kv_heads != spec.heads:
        copies = framework.key_value_heads == "copied"

        def splits(degree: int) -> bool:
            return spec.kv_heads % degree == 0 or (copies and degree % spec.kv_heads == 0)

        if not splits(launch.tensor) and spec.heads % launch.tensor == 0:
            legal = alternatives([degree for degree in degrees if splits(degree)])
            yield f"{text} does not divide {spec.kv_heads} key-value heads ({legal} would do)"
    vocab = vocabulary_to_split(framework, spec)
    if vocab % launch.tensor:
        legal = alternatives([degree for degree in degrees if vocab % degree == 0])
        padded = f", padded to {vocab:,}" if vocab != spec.vocab else ""
        yield f"{text} does not divide a vocabulary of {spec.vocab:,}{padded} ({legal} would do)"
    needs = framework.experts_need_sequence_parallel and spec.experts is not None and not launch.sequence_parallel
    if needs and launch.tensor > 1:
        sequences = said(framework, dataclasses.replace(launch, sequence_parallel=True), "sequence_parallel")
        yield f"{text} for a model with experts needs {sequences}"


def vocabulary_to_split(framework: Framework, spec: TransformerSpec) -> int:
    """Return the vocabulary that tensor parallelism has to divide; 0 where it divides any."""
    if framework.vocabulary == "divided":
        return spec.vocab
    return -(-spec.vocab // 64) * 64 if framework.vocabulary == "padded to 64" else 0


def _ranks(launch: Launch, cluster: ClusterSpec) -> Iterator[str]:
    if launch.ranks == cluster.size:
        return
    degrees = {
        "data": launch.data,
        "context": launch.context,
        "tensor": launch.tensor,
        "pipeline": launch.pipeline,
    }
    product = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "1 rank"
    yield f"{product} is {launch.ranks:,} ranks, and {cluster.name} has {cluster.size:,} devices"
