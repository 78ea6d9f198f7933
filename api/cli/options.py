"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset (llama-3.1-8b, ...), a config.json or its folder, or package.module:factory; with "
        "+fused-projections behind it, projections of one tensor are one layer.",
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
Cluster = Annotated[str, typer.Option(help="NODESxDEVICESxDEVICE such as 4x8xh100-sxm-80gb, or a .yaml file.")]
Mesh = Annotated[
    str | None,
    typer.Option(help="Such as dp=2,tp=8, outermost axis first (pp: pipeline stages); without it, meshes are tried."),
]
Phase = Annotated[
    Literal["training", "prefill", "decode"],
    typer.Option(help="What a step is; decode: one more token of each sequence, with --seq of them in the cache."),
]
Batch = Annotated[int | None, typer.Option(help="Samples in the global batch.")]
Seq = Annotated[int | None, typer.Option(help="Tokens in a sequence.")]
MicroBatches = Annotated[int | None, typer.Option(help="Micro-batches per step; without it, several are tried.")]
Ac = Annotated[
    str | None,
    typer.Option(
        help="Activation checkpointing: none, selective or full, full:8 for the first 8 blocks alone; "
        "without it, it is chosen."
    ),
]
MemoryGb = Annotated[float | None, typer.Option(help="Cap on the peak per device, in GB of 1e9 bytes.")]
Optimizer = Annotated[str, typer.Option(help="Such as adamw or sgd.")]
Dtype = Annotated[str, typer.Option(help="Of parameters and activations: bf16, fp16 or fp32.")]
ReduceDtype = Annotated[
    str, typer.Option(help="In which gradients are reduced, and add up over micro-batches: bf16, fp16 or fp32.")
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        help="A layout decided already, such as 'lm_head.weight=S(0)@tp'; != forbids it, "
        "'NAME:used=R@dp' is the layout in computing. Again for more.",
    ),
]
DataAxes = Annotated[
    list[str] | None, typer.Option("--data-axis", help="A mesh axis that splits the batch alone. Again for more.")
]
Axes = Annotated[
    int,
    typer.Option(
        "--axes",
        min=1,
        max=3,
        help="The most axes of a mesh that is tried; of three the outermost splits the batch. With 2, "
        "interleaved stages have one mesh of three as well where devices outnumber samples.",
    ),
]
HeterogeneousBlocks = Annotated[
    bool,
    typer.Option(
        "--heterogeneous-blocks",
        help="Let the first of equal blocks differ from the rest where that pays; takes longer.",
    ),
]
ExecutableOnly = Annotated[
    bool,
    typer.Option(
        "--executable-only/--no-executable-only",
        help="Only plans that shard_module can run; --no-executable-only tries pipelines as well.",
    ),
]
AsyncTp = Annotated[
    bool,
    typer.Option(
        "--async-tp",
        help="Assume that tensor-parallel communication inside a node runs in pieces beside matrix products; "
        "needs --no-executable-only.",
    ),
]
Reallgather = Annotated[
    bool,
    typer.Option(
        "--reallgather",
        help="Let linear layers have what was gathered for them gathered again for their backward, where memory is "
        "short; seldom pays without --async-tp.",
    ),
]
FusedOps = Annotated[
    bool,
    typer.Option(
        "--fused-ops",
        help="Run RMSNorms, gated activations, rotary embeddings and the loss as one op each: large models of the "
        "Llama kind take less memory and time.",
    ),
]
ZigzagOrder = Annotated[
    bool,
    typer.Option(
        "--zigzag",
        help="Where attention's sequences are split over ranks, have the model's tokens in an order that makes their "
        "work even: no queries are exchanged; logits come in that order.",
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        "--attention-kernel",
        help="flash3: attention in FlashAttention-3 in place of the kernel that torch chooses, on Hopper.",
    ),
]
TimeLimit = Annotated[
    float | None, typer.Option(help="Seconds for the search; then the best plan so far is given, with its gap.")
]
Jobs = Annotated[
    int,
    typer.Option(help="Candidates looked at at once, each in a process of its own; -1: on all cores."),
]
Planner = Annotated[str, typer.Option(help="ilp, data-parallel, fully-sharded, tensor-parallel or random:SEED.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Plan again, though the same was planned before.")]
