import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.configuration.transformer import Experts, MultiHeadLatentAttention, TransformerSpec

LLAMA_8B = TransformerSpec(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256)
DEEPSEEK_V3 = TransformerSpec(
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    head_dim=128,
    ffn=18432,
    vocab=129280,
    experts=Experts(count=256, top_k=8, ffn=2048, shared_ffn=2048, first_dense=3),
    mla=MultiHeadLatentAttention(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
)


def test_parameters_of_llama_are_those_of_its_checkpoint():
    assert LLAMA_8B.parameters == 8_030_261_248


def test_parameters_of_gpt_3_are_175_billion():
    spec = TransformerSpec(
        layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=49152, vocab=50257, gated=False, tied=True,
        positions=2048, layer_norm=True,
    )  # fmt: skip
    assert spec.parameters == pytest.approx(174.6e9, rel=1e-3)


def test_parameters_of_deepseek_v3_are_671_billion_of_which_37_are_active():
    assert DEEPSEEK_V3.parameters == pytest.approx(671e9, rel=2e-3)
    assert DEEPSEEK_V3.active_matmul_parameters == pytest.approx(37e9, rel=0.03)


def test_sparse_layers_start_after_the_dense_ones_and_may_alternate():
    experts = Experts(count=8, top_k=1, ffn=64, every=2)
    spec = TransformerSpec(layers=6, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=100, experts=experts)
    assert (DEEPSEEK_V3.dense_layers, DEEPSEEK_V3.sparse_layers) == (3, 58)
    assert (spec.dense_layers, spec.sparse_layers) == (3, 3)


def test_flops_by_hand():
    spec = TransformerSpec(layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, ffn=8, vocab=10)
    linear = 4 * 4 + 4 * 2 * 2 + 4 * 4 + 3 * 4 * 8 + 4 * 10
    attention = 2 * (4 + 4) * 8 / 2
    assert spec.model_flops(16, 8) == 3 * 16 * (2 * linear + attention)


def test_half_of_the_layers_have_a_window():
    spec = TransformerSpec(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=100, window=10)
    assert spec.attended_keys(100) == pytest.approx((50 + 9.5) / 2)
    assert spec.attended_keys(8) == 4


@given(seq=st.integers(1, 10_000), more=st.integers(0, 10_000))
def test_flops_rise_with_the_sequence(seq, more):
    assert LLAMA_8B.model_flops(1, seq + more) >= LLAMA_8B.model_flops(1, seq)


def test_dimensions_below_one_are_rejected():
    with pytest.raises(ValueError, match="below 1"):
        TransformerSpec(layers=0, hidden=4, heads=2, kv_heads=1, head_dim=2, ffn=8, vocab=10)
    with pytest.raises(ValueError, match="multiple"):
        TransformerSpec(layers=1, hidden=4, heads=3, kv_heads=2, head_dim=2, ffn=8, vocab=10)
