"""The parallel configuration of a row, and its measured seconds."""

from __future__ import annotations

from collections.abc import Mapping

from cost_model.configuration.parallelism import Checkpointing, ParallelSpec, Schedule, TrainingDtype
from cost_model.configuration.transformer import TransformerSpec
from published.frameworks.assumptions import torchtune_step
from published.frameworks.defaults import Assumptions
from published.rows.corrections import doubted
from published.rows.priced_row import number


class UnknownConfigurationError(ValueError):
    """The configuration of a row is not stated well enough; tables print the message as the reason."""


def configuration_of(row: Mapping[str, str], assumed: Assumptions) -> ParallelSpec:
    """Return the configuration of a row of training_runs.csv or memory.csv.

    Raises:
        UnknownConfigurationError: the sequence, the micro-batch or a degree is not known, or is doubtful.
    """
    doubt = doubted(row)
    if doubt is not None:
        raise UnknownConfigurationError(doubt)
    stated = number(row, "n_gpus")
    if stated is None:
        raise UnknownConfigurationError("number of devices not stated")
    ranks = int(stated)
    if torchtune_step(row) == -1:
        raise UnknownConfigurationError("a step of torchtune's table that is not modelled")
    tensor, pipeline, context = (int(number(row, key) or 1) for key in ("tp", "pp", "cp"))
    data, left = divmod(ranks, tensor * pipeline * context)
    if left or data < 1:
        raise UnknownConfigurationError(
            f"{ranks} devices are no multiple of tp {tensor} x pp {pipeline} x cp {context}"
        )
    seq = number(row, "seq_len") or assumed.seq
    micro = number(row, "mbs") or assumed.micro_batch
    if not row.get("mbs") and pipeline == 1 and row["model"] in assumed.model_batches:
        micro = assumed.model_batches[row["model"]]
    if (
        not number(row, "mbs")
        and micro
        and pipeline > 1
        and (row.get("source_date") or "2025") < "2025-04-07"
        and number(row, "gbs")
    ):
        local = (number(row, "gbs") or 1) / data  # torchtitan split the local batch into as many micro-batches as ranks
        micro = max(1, local // pipeline)
    if not seq:
        raise UnknownConfigurationError("sequence length not stated")
    if not micro:
        raise UnknownConfigurationError("micro-batch not stated")
    stated_zero = number(row, "zero_stage")
    zero = assumed.zero if stated_zero is None else int(stated_zero)
    if not assumed.implementation.data_parallel.reshard_after_forward:
        zero = 3  # parameters are stored sharded, and are not resharded after forward
    replicate = int(number(row, "dp_replicate") or 1) if row.get("fsdp") else 1
    if zero == 3 and data % replicate == 0:
        shard = data // replicate
    else:
        replicate, shard = (1, data) if zero else (data, 1)
    virtual = int(number(row, "vp") or _virtual_stages(row, assumed, pipeline))
    batch = number(row, "gbs")
    count = batch / (micro * data) if batch else (number(row, "grad_accum") or 1)
    if count < 1:
        raise UnknownConfigurationError(
            f"global batch {batch:.0f} is less than {data} data ranks x micro-batch {micro:.0f}"
        )
    sequence_parallel = row["sp"] == "Y" if row.get("sp") else assumed.sequence_parallel
    return ParallelSpec(
        micro_batch=int(micro),
        micro_batches=max(1, round(count)),
        seq=int(seq),
        document=assumed.packed_document if "(SFT)" in row["model"] or "(LoRA)" in row["model"] else 0,
        replicate=replicate,
        shard=shard,
        zero=zero,
        tensor=tensor,
        sequence_parallel=sequence_parallel and tensor > 1,
        pipeline=pipeline,
        virtual_stages=virtual if pipeline > 1 else 1,
        schedule=_schedule(row, virtual, pipeline),
        context=context,
        expert=int(number(row, "ep") or assumed.model_experts.get(row["model"], 1)),
        expert_tensor=int(number(row, "etp") or (1 if row.get("ep") and not assumed.experts_split else tensor)),
        checkpointing=_checkpointing(row.get("act_ckpt", ""), assumed),
        dtype=_dtype(row.get("precision", "")),
        implementation=assumed.implementation,
    )


def _virtual_stages(row: Mapping[str, str], assumed: Assumptions, pipeline: int) -> int:
    layers = number(row, "layers")
    if "interleaved" in row.get("config_notes", "").lower():
        return assumed.interleaved_chunks
    if pipeline == 1 or not assumed.layers_per_chunk or not layers:
        return 1
    return max(1, int(layers) // pipeline // assumed.layers_per_chunk)


def _schedule(row: Mapping[str, str], virtual: int, pipeline: int) -> Schedule:
    notes = row.get("config_notes", "").lower()
    if "zero-bubble" in notes or "zbv" in notes:
        return "zero-bubble"
    if pipeline > 1 and (virtual > 1 or "interleaved" in notes):
        return "interleaved"
    return "1f1b"


def _checkpointing(text: str, assumed: Assumptions) -> Checkpointing:
    if not text:
        return assumed.checkpointing
    if text.startswith("full"):
        return "full"
    if "attention core" in text or "core_attn" in text:
        return "attention"
    if text.startswith("selective") or "SAC" in text:
        return "selective"
    return "none"


def _dtype(text: str) -> TrainingDtype:
    lower = text.lower()
    if "fp4" in lower:
        return "fp4"
    if "fp8" in lower:
        return "fp8"
    return "fp16" if lower.startswith("fp16") else "bf16"


def precision_class(text: str) -> str:
    """Return ``16-bit``, ``fp8`` or ``fp4``: the class of a row's precision."""
    kind = _dtype(text)
    return kind if kind in ("fp8", "fp4") else "16-bit"


def measured_step_s(row: Mapping[str, str], spec: TransformerSpec, parallel: ParallelSpec) -> float | None:
    """Return the measured seconds of a step; None where the row has no measurement.

    The row states the seconds, or tokens per second, or FLOP/s by the row's convention.
    """
    for column in ("step_time_s", "step_time_s_derived"):
        seconds = number(row, column)
        if seconds:
            return seconds
    tokens = float(parallel.global_batch * parallel.seq)
    rate = number(row, "tokens_per_s_per_gpu")
    if rate:
        return tokens / rate / parallel.ranks
    tflops = number(row, "tflops_per_gpu")
    convention = row.get("flop_convention", "")
    if not tflops:
        return None
    if convention.startswith("SC21"):
        square = spec.layers * spec.hidden**2
        flops = (
            96 * tokens * square * (1 + parallel.seq / 6 / spec.hidden + spec.vocab / 16 / spec.layers / spec.hidden)
        )
    elif "causal" in convention.lower() or "megatron" in convention.lower():
        flops = spec.model_flops(tokens, parallel.seq)
    else:
        return None
    return flops / (tflops * 1e12) / parallel.ranks
