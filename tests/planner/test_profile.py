"""FLOPs of the traced ops against torch's own counter on the module itself."""

from __future__ import annotations

import families
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from planner.capture import to_meta
from planner.inputs import as_inputs
from planner.profile import FLASH_BACKWARD_FLOPS, profile
from planner.trace import trace


@pytest.mark.parametrize("family", families.FAMILIES)
def test_flops_equal_torchs_own_count(family: str) -> None:
    module, kwargs = families.make(family, 4, "cpu")
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            output = module(**kwargs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    found = profile(trace(to_meta(module, None), as_inputs(kwargs)), flash_attention=False)
    assert sum(op.flops for op in found.ops.values()) == forward.get_total_flops() > 0
    assert sum(op.backward_flops for op in found.ops.values()) == backward.get_total_flops() > 0


def test_attention_kept_whole_or_recomputed() -> None:
    """Flash attention keeps inputs, output and one float per row; math attention keeps its scores."""
    module, kwargs = families.make("llama", 4)
    graph = trace(to_meta(module, None), as_inputs(kwargs))
    math, flash = (profile(graph, flash_attention=flag) for flag in (False, True))
    name = next(op.name for op in graph.ops if "scaled_dot_product" in op.target_name)
    scores = 4 * 8 * 16 * 16 * 4
    assert math.ops[name].saved_extra_nbytes >= scores
    assert flash.ops[name].saved_extra_nbytes == 4 * 8 * 16 * 4
    assert flash.ops[name].flops == math.ops[name].flops == 4 * 4 * 8 * 16 * 16 * 8
    assert flash.ops[name].backward_flops == FLASH_BACKWARD_FLOPS * flash.ops[name].flops
    assert math.ops[name].backward_flops == 2 * math.ops[name].flops


def test_a_linear_keeps_its_input_and_a_view_moves_nothing() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False), torch.nn.Flatten(0))
    graph = trace(to_meta(module, None), as_inputs((torch.zeros(6, 8),)))
    found = profile(graph, flash_attention=False)
    linear, view = (found.ops[op.name] for op in graph.ops)
    assert linear.flops == linear.backward_flops == 2 * 6 * 8 * 4  # the input needs no gradient: one product
    assert linear.nbytes == 4 * (6 * 8 + 8 * 4 + 6 * 4)
    assert linear.saved == (graph.ops[0].inputs[0],)
    assert (view.flops, view.nbytes, view.backward_nbytes) == (0, 0, 0)
    assert found.root[graph.ops[1].outputs[0]] == graph.ops[0].outputs[0]
