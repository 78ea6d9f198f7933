"""The model of a row: its dimensions from the row's file, completed from the models' published configs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from cost_model.configuration.transformer import Experts, MultiHeadLatentAttention, TransformerSpec
from published.rows.priced_row import number

KNOWN: dict[str, dict[str, float]] = {
    # Grok-1's release (xai-org/grok-1 model.py); the file holds its expert count alone
    "Grok1": {
        "layers": 64, "hidden": 6144, "heads": 48, "kv_heads": 8, "ffn": 32768, "moe_ffn": 32768, "vocab": 131072,
    },
    "Mixtral-8x22B": {"vocab": 32768, "moe_ffn": 16384},
    "GPT3-175B": {"vocab": 51200},
}  # fmt: skip
"""Start of the model's name -> dimensions that the file leaves blank. Source: config files of the models' releases."""

VOCAB_NOTE = re.compile(r"vocab (\d+) in this run")
"""The text in a row's notes where its run had another vocabulary than the model."""

NOT_GATED = ("MPT", "GPT", "GPT3", "Nemotron4")
NOT_GATED_EXCEPT = ("GPT-OSS",)
HEAD_DIMS = {"Qwen3": 128, "GPT-OSS": 64, "Grok1": 128, "Llama4": 128}
"""Start of the model's name -> head dim, where it is not hidden / heads. Source: the models' config.json files."""

DEEPSEEK_V3 = MultiHeadLatentAttention(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
DEEPSEEK_V2_LITE = MultiHeadLatentAttention(query_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
"""Sources: arXiv 2412.19437 section 4.2; arXiv 2405.04434 appendix B, which torchtitan's 16B model follows."""


class UnknownModelError(ValueError):
    """The file does not describe the row's model well enough; tables print the message as the reason."""


def model_of(row: Mapping[str, str], *, old_dropout: bool = False) -> TransformerSpec:
    """Return the model of a row of training_runs.csv or memory.csv.

    Raises:
        UnknownModelError: a dimension is blank and not known, or the model is no plain transformer.
    """
    name = row["model"]
    if row.get("arch", "") in ("hybrid-mamba", "hybrid-moe", "hybrid", "t5", "bert"):
        raise UnknownModelError(f"{row['arch']}: not a stack of decoder layers")
    dims = {key: value for start, table in KNOWN.items() if name.startswith(start) for key, value in table.items()}
    for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "n_experts", "topk", "moe_ffn"):
        value = number(row, key)
        if value is not None:
            dims[key] = value
    stated = VOCAB_NOTE.search(row.get("notes", ""))
    if stated is not None:
        dims["vocab"] = float(stated[1])
    gated = not name.startswith(NOT_GATED) or name.startswith(NOT_GATED_EXCEPT)
    missing = [key for key in ("layers", "hidden", "heads") if key not in dims]
    if missing:
        raise UnknownModelError(f"dimensions not stated: {', '.join(missing)}")
    hidden, heads = int(dims["hidden"]), int(dims["heads"])
    mla = DEEPSEEK_V3 if name == "DeepSeek-V3" else DEEPSEEK_V2_LITE if name.startswith("DeepSeek-V3-16B") else None
    if mla is None and name.lower().startswith(("deepseek", "kimi", "glm")):
        raise UnknownModelError("multi-head latent attention whose dimensions the file does not give")
    spec = TransformerSpec(
        layers=int(dims["layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(dims.get("kv_heads", heads)),
        head_dim=next((dim for start, dim in HEAD_DIMS.items() if name.startswith(start)), hidden // heads),
        ffn=int(dims.get("ffn", 4 * hidden)),
        vocab=int(dims.get("vocab", 51200)),
        gated=gated,
        tied=name.startswith(("MPT", "GPT-", "GPT L", "GPT3", "Llama3.2")) and not name.startswith("GPT-OSS"),
        positions=int(number(row, "seq_len") or 2048) if not gated and not name.startswith("Nemotron4") else 0,
        layer_norm=not gated,
        query_norm=name.startswith("Qwen3"),
        squared_relu=name.startswith("Nemotron4"),
        dropout=old_dropout and not gated,
        window=128 if name.startswith("GPT-OSS") else 0,
        mla=mla,
    )
    return dataclasses.replace(spec, experts=_experts(name, dims, spec))


def _experts(name: str, dims: Mapping[str, float], spec: TransformerSpec) -> Experts | None:
    if not dims.get("n_experts"):
        return None
    count, ffn = int(dims["n_experts"]), int(dims.get("moe_ffn", spec.ffn))
    first_dense, shared, every = 0, 0, 1
    if name == "DeepSeek-V3":
        first_dense, shared = 3, ffn
    elif name.startswith("DeepSeek-V3-16B"):
        first_dense, shared = 1, 2 * ffn
    elif name.startswith("Llama4-Maverick"):
        shared, every = ffn, 2
    return Experts(
        count=count,
        top_k=int(dims.get("topk", 2)),
        ffn=ffn,
        shared_ffn=shared,
        bias=name.startswith("GPT-OSS"),
        first_dense=first_dense,
        every=every,
    )


def family_of(name: str) -> str:
    """Return the model family that tables group by."""
    for family in (
        "MPT",
        "Llama",
        "GPT-OSS",
        "GPT3",
        "GPT",
        "Qwen",
        "Nemotron",
        "DeepSeek",
        "Grok",
        "Mixtral",
        "nanotron",
    ):
        if name.lower().startswith(family.lower()):
            return family
    return name.split("-")[0] or "unknown"


def size_class(spec: TransformerSpec) -> str:
    """Return the size class of a model, by its number of parameters."""
    billions = spec.parameters / 1e9
    for limit, name in ((1, "< 1B"), (10, "1-10B"), (40, "10-40B"), (200, "40-200B")):
        if billions < limit:
            return name
    return ">= 200B"
