"""`with_defaults`: a job's options with the cluster, batch and sequence length that its user left out, and why."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.defaults.cluster import default_cluster
from planner.defaults.device_mesh import mesh_spec_of
from planner.graph.example_inputs import takes_sequences
from planner.plan.former_names import with_current_names

LONGEST_SEQ = 8192
"""Tokens: most models are trained at up to so many, and extended to the context that their config states afterwards."""

USUAL_SEQ = 2048
"""Tokens in a sequence where a model's config states no context length."""

_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Keys of Hugging Face configs with the context length, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The Hugging Face config of a model.

    Attributes:
        values: the config.
        takes_seq: whether the model takes sequences, of tokens or samples of sound, not images alone.
    """

    values: Mapping[str, Any]
    takes_seq: bool = True


def config_of(module: nn.Module) -> ModelConfig | None:
    """Return the Hugging Face config of ``module``; None: it has none."""
    config, main_input = getattr(module, "config", None), getattr(module, "main_input_name", None)
    if main_input is None or config is None or not hasattr(config, "to_dict"):
        return None
    return ModelConfig(values=config.to_dict(), takes_seq=takes_sequences(module, config))


def with_defaults(options: Mapping[str, Any], config: ModelConfig | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return ``options`` with what they lack, and a line on each value that was assumed.

    Args:
        options: fields of `JobSpec`, except that ``mesh`` may be a `DeviceMesh`.
        config: the config from which example inputs are made; None: they are given, or the model has no config, and
            batch and sequence length are left as they are.

    Raises:
        ClusterError: the user's cluster cannot be read, or the catalogue lacks the GPU.
        PlannerError: the mesh has no names, or the nodes have different numbers of ranks.
    """
    options, assumed = with_current_names(options), []
    mesh = options.get("mesh")
    if isinstance(mesh, DeviceMesh):
        options["mesh"] = mesh = mesh_spec_of(mesh)
    if options.get("cluster") is None:
        spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
        found = default_cluster(size=None if spec is None else spec.size)
        options["cluster"] = found.cluster
        assumed.append(f"cluster {found.cluster.name}: {found.why}")
    if config is not None and options.get("batch") is None:
        options["batch"], why = _batch(options)
        assumed.append(f"batch {options['batch']:,}: {why}")
    if config is not None and config.takes_seq and options.get("seq") is None:
        options["seq"], why = _seq(config.values)
        assumed.append(f"seq {options['seq']:,}: {why}")
    return options, tuple(assumed)


def report(lines: Iterable[str]) -> None:
    """Write ``lines`` to standard error, as those of shardplan."""
    for line in lines:
        print(f"shardplan: {line}", file=sys.stderr, flush=True)


def _batch(options: Mapping[str, Any]) -> tuple[int, str]:
    cluster, micro_batches = options["cluster"], options.get("micro_batches") or 1
    size = (cluster if isinstance(cluster, ClusterSpec) else ClusterSpec.parse(cluster)).size
    if micro_batches == 1:
        return size, "one sample for each device"
    return size * micro_batches, "one sample for each device and micro-batch"


def _seq(config: Mapping[str, Any]) -> tuple[int, str]:
    context = context_length(config)
    if context is None:
        return USUAL_SEQ, "the model's config states no context length"
    if context > LONGEST_SEQ:
        return LONGEST_SEQ, f"the usual length in training; the model's context is {context:,}"
    seq = 2 ** (context.bit_length() - 1)
    return seq, "the model's context" + ("" if seq == context else f" of {context:,}, down to a power of two")


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the context length in tokens that a Hugging Face config states; None: it states none."""
    parts = [config, *(part for name in ("text_config", "decoder") if isinstance(part := config.get(name), Mapping))]
    lengths = (part.get(key) for part in parts for key in _CONTEXT)
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)
