"""The fast trace and the full one give one graph: on every preset, and on many architectures of Hugging Face."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from support.architectures import ARCHITECTURES, SEQ
from support.graphs import canonical
from torch import nn

from api.requests.model_configs import preset_names
from api.requests.model_registry import load_model
from planner.graph import from_fx as tracing
from planner.graph.capture import ExampleInputs, quiet_export, to_meta
from planner.graph.example_inputs import inputs_from_config, with_dtype
from planner.graph.fold import find_repeated_blocks
from planner.graph.op_graph import OpGraph

IN_CI = (
    "qwen3",
    "mistral, sliding window",
    "gpt_neo, alternating attention",
    "gemma2, alternating attention",
    "deepseek_v3, dense blocks first",
    "roberta",
    "deit",
)
LISTS_OF_BLOCKS = {"t5-large": 2}
"""Of presets with more than one."""


def slow_unless(fast: bool, *values: Any) -> Any:
    return pytest.param(*values, marks=() if fast else pytest.mark.slow)


def fully_traced(module: nn.Module, inputs: ExampleInputs) -> OpGraph:
    """Return the graph of a trace of every block."""
    with mock.patch.object(tracing, "_trace_folded", return_value=None):
        return tracing.trace(module, inputs)


def check(module: nn.Module, seq: int, repeats: int) -> None:
    """Trace both ways and compare; at least so many lists of blocks have to be folded."""
    meta = to_meta(module, torch.bfloat16)
    inputs = with_dtype(inputs_from_config(meta, batch=2, seq=seq), torch.bfloat16)
    with quiet_export():
        assert len(find_repeated_blocks(meta, inputs)) >= repeats
        assert repeats == 0 or tracing._trace_folded(meta, inputs) is not None, "traced in full: the test shows nothing"
        fast, full = canonical(tracing.trace(meta, inputs)), canonical(fully_traced(meta, inputs))
    for part, wanted in full.items():
        assert fast[part] == wanted, part


@pytest.mark.parametrize("name", [slow_unless(name in IN_CI, name) for name in ARCHITECTURES])
def test_architectures(name: str) -> None:
    """Where no block may stand for another, the trace is the full one, and this holds until it is not."""
    architecture = ARCHITECTURES[name]
    check(architecture.build(), SEQ, architecture.repeats)


@pytest.mark.parametrize("preset", [slow_unless(preset == "gpt2", preset) for preset in preset_names()])
def test_presets(preset: str) -> None:
    check(load_model(preset, seq=64).module, 64, LISTS_OF_BLOCKS.get(preset, 1))
