"""Predicted peaks against torch's MemTracker on a few combinations; `benchmarks/memory.py` has the whole table."""

from __future__ import annotations

import pytest
from memory import CASES, TARGET, outcome

COMBINATIONS = [
    ("llama", "DP", "none", "fp32"),
    ("llama", "FSDP", "selective", "fp32"),
    ("llama", "NO-RESHARD", "none", "bf16"),
    pytest.param("t5", "NO-RESHARD", "full", "fp32", marks=pytest.mark.slow),
    ("llama", "DP", "full", "bf16"),
    ("opt", "TP", "selective", "fp32"),
    ("t5", "TP", "full", "fp32"),
    ("bert", "FSDP", "full", "fp32"),
    ("lora", "FSDP", "none", "fp32"),
    ("lora-qv", "DP", "full", "bf16"),
]
"""BERT's embedding is tied, and its blocks end in a norm; T5's hand on a tensor that one of them has redistributed; of
OPT's step the peak is inside attention that runs again; bf16 is computed in casts of the parameters. Adapters are the
only parameters of theirs that are trained."""
IN_TWO = [
    ("llama", "DP", "full", "fp32", "fp32"),
    ("llama", "DP", "none", "bf16", "fp32"),
    ("llama", "DP", "full", "bf16", "bf16"),
    ("llama", "DP", "full", "fp32", "bf16"),
    pytest.param("llama", "TP", "full", "fp32", "bf16", marks=pytest.mark.slow),
]
"""Two micro-batches, whose gradients add up in the last dtype: of casts they end wider, and after all else; of what is
computed in fp32 each does so when it has come."""


# MemTracker's hooks before the backward find no module for what DTensor wraps; it counts tensors, not modules.
@pytest.mark.filterwarnings("ignore:Module is None:UserWarning")
# It is handed a gradient of None somewhere (where was not looked into); that is no tensor, and counts nothing.
@pytest.mark.filterwarnings("ignore:Expected a tensor or a traceable wrapper-subclass:UserWarning")
# It asks the casts of parameters, in bf16, for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
# peft asks transformers for a name that it has given up.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(("model", "plan", "ac", "dtype"), COMBINATIONS)
def test_the_peak_is_what_memtracker_counts(model: str, plan: str, ac: str, dtype: str) -> None:
    found = outcome(CASES[model], plan, ac, dtype)
    assert found.predicted_bytes == pytest.approx(found.measured_bytes, rel=TARGET)


@pytest.mark.filterwarnings("ignore:Module is None:UserWarning")
@pytest.mark.filterwarnings("ignore:Expected a tensor or a traceable wrapper-subclass:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("model", "plan", "ac", "dtype", "reduce_dtype"), IN_TWO)
def test_so_it_is_while_gradients_add_up(model: str, plan: str, ac: str, dtype: str, reduce_dtype: str) -> None:
    found = outcome(CASES[model], plan, ac, dtype, micro_batches=2, reduce_dtype=reduce_dtype)
    assert found.predicted_bytes == pytest.approx(found.measured_bytes, rel=TARGET)
