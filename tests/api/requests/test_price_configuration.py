import pytest

from api.requests.model_configs import check_config, read_preset
from api.requests.price_configuration import parse_degrees, price_configuration, transformer_of
from planner.errors import JobError, MeshError, ModelError

SPARSE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("llama-3.1-8b", 8.03e9), ("llama-3.1-70b", 70.55e9), ("qwen3-8b", 8.19e9), ("gpt2", 124e6)],
)
def test_presets_have_the_parameters_of_their_checkpoints(preset, parameters):
    assert transformer_of(read_preset(preset)).parameters == pytest.approx(parameters, rel=5e-3)


def test_a_mixture_of_experts_is_read():
    spec = transformer_of(check_config(SPARSE, name="sparse"))
    assert spec.parameters == pytest.approx(30.5e9, rel=0.01)
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.top_k) == (128, 8)


def test_a_configuration_is_priced():
    found = price_configuration(
        "llama-3.1-8b", cluster="1x8xh100-sxm-80gb", mesh="fsdp=8", micro_batch=1, seq=8192, ac="selective"
    )
    data = found.to_dict()
    assert 0.3 < found.model_flops_share < 0.6
    assert data["step_time_s"] == pytest.approx(sum(data["parts_s"].values()))
    assert found.fits


def test_every_axis_is_accepted():
    found = price_configuration(
        {"hf_config": SPARSE}, cluster="4x8xh100-sxm-80gb", mesh="dp=2,fsdp=2,tp=2,pp=2,cp=2,ep=8", batch=16,
        sequence_parallel=True, ac="full", virtual_stages=2,
    )  # fmt: skip
    assert found.parallel.ranks == 32
    assert found.time.expert_s > 0


def test_what_cannot_be_is_refused():
    with pytest.raises(MeshError, match="unknown axis"):
        parse_degrees("zz=2")
    with pytest.raises(MeshError, match="whole number"):
        parse_degrees("tp=two")
    with pytest.raises(MeshError, match="8 devices"):
        price_configuration("llama-3.1-8b", cluster="1x8xh100-sxm-80gb", mesh="fsdp=4")
    with pytest.raises(MeshError, match=r"do not divide a batch of 12 \(8 or 16 would do\)"):
        price_configuration("llama-3.1-8b", cluster="1x8xh100-sxm-80gb", mesh="fsdp=8", batch=12)
    with pytest.raises(JobError, match="ac is"):
        price_configuration("llama-3.1-8b", cluster="1x8xh100-sxm-80gb", mesh="fsdp=8", ac="some")
    with pytest.raises(ModelError, match="no stack"):
        price_configuration("t5-large", cluster="1x8xh100-sxm-80gb", mesh="fsdp=8")


def test_everything_that_does_not_divide_is_refused_in_one_error():
    with pytest.raises(MeshError) as caught:
        price_configuration(
            {"hf_config": SPARSE}, cluster="1x8xh100-sxm-80gb", mesh="ep=3,cp=8,tp=3", seq=4097, batch=3, micro_batch=2
        )
    text = str(caught.value)
    listed = ("tp=3 does not divide 32 heads", "cp=8 does not divide a sequence", "ep=3 does not divide 128 experts")
    for words in (*listed, "do not divide a batch of 3", "24 ranks"):
        assert words in text


def test_an_empty_batch_is_refused():
    with pytest.raises(JobError, match="below 1"):
        price_configuration("llama-3.1-8b", cluster="1x8xh100-sxm-80gb", mesh="fsdp=8", batch=0)
