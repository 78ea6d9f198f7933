"""Caches of windows, latents and recurrent states: bytes as transformers' own cache holds them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from support.cached_models import (
    EAGER,
    ENCODER_DECODERS,
    FRAMES,
    RECURRENT,
    SMALL,
    eager_model,
    encoder_decoder,
    recurrent_model,
)
from transformers.cache_utils import DynamicCache

from cost_model import ClusterSpec
from executor.verify import verify
from planner import PlanningSession, build_plan, estimate_plan
from planner.errors import GraphFormatError, JobError, ModelError
from planner.graph.example_inputs import inputs_from_config
from planner.graph.op_graph import OpGraph
from planner.graph.trace_module import trace_module
from planner.plan.ports import ports_of
from planner.plan.sharding_plan import ShardingPlan
from planner.wire.codec import read_graph, write_graph
from planner.wire.encode import document_of

SEQ, BATCH = 64, 2
CONFIGS: dict[str, Any] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "head_dim": 8},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
}
"""Every second or third layer without a window, all with one, and the first without."""


def model_of(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        name,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        sliding_window=16,
        **CONFIGS[name],
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def cached_nbytes(model: transformers.PreTrainedModel, steps: int) -> int:
    """Return the bytes in transformers' cache after a prompt of ``SEQ`` tokens and ``steps`` steps of decoding."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros(BATCH, SEQ, dtype=torch.long), cache=cache)
        for _ in range(steps):
            model(torch.zeros(BATCH, 1, dtype=torch.long), cache=cache)
    return sum(tensor.numel() * tensor.itemsize for layer in cache.layers for tensor in (layer.keys, layer.values))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("phase", "steps"), [("prefill", 0), ("decode", 1)])
def test_the_cache_has_the_bytes_of_transformers_own(name: str, phase: Any, steps: int) -> None:
    model = model_of(name)
    plan = build_plan(model, cluster="1x1xtoy", phase=phase, batch=BATCH, seq=SEQ, dtype="fp32")
    assert plan.estimate.memory["kv_cache"] == cached_nbytes(model, steps)
    assert any("keep at most 15 tokens" in note for note in plan.notes)


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize(("phase", "steps"), [("prefill", 0), ("decode", 1)])
def test_attention_of_many_ops_keeps_keys_and_values(name: str, phase: Any, steps: int) -> None:
    model = eager_model(name)
    plan = build_plan(model, cluster="1x1xtoy", phase=phase, batch=BATCH, seq=SEQ, dtype="fp32")
    assert plan.estimate is not None
    assert plan.estimate.memory["kv_cache"] == cached_nbytes(model, steps)


def test_attention_of_many_ops_reads_all_earlier_tokens() -> None:
    model = eager_model("bloom")
    plans = [
        build_plan(model, cluster="1x1xtoy", phase="decode", batch=8, seq=seq, dtype="fp32") for seq in (500, 5500)
    ]
    short, long = (plan.estimate for plan in plans)
    assert short is not None
    assert long is not None
    # Two layers, 5,000 more tokens of eight sequences: they are read and written by the concatenation, and read again.
    more = 3 * 2 * 2 * 8 * 5000 * 32 * 4
    device = ClusterSpec.parse("1x1xtoy").device
    assert long.compute_s - short.compute_s > more / device.memory_bandwidth_bytes_per_s


def test_a_graph_with_keys_is_for_one_number_of_tokens() -> None:
    traced = trace_module(eager_model("gemma2"), phase="decode", batch=BATCH, seq=SEQ, dtype="fp32")
    with pytest.raises(JobError, match="was traced for 64 tokens in the cache, and the job has 32"):
        PlanningSession(traced, cluster="1x1xtoy", phase="decode", batch=BATCH, seq=32, dtype="fp32")


@pytest.mark.parametrize(
    ("name", "phase", "seed"), [("gpt_oss", "decode", 0), ("gemma2", "decode", 8), ("gemma2", "prefill", 1)]
)
def test_drawn_plans_of_attention_of_many_ops_run_as_planned(name: str, phase: Any, seed: int) -> None:
    model = eager_model(name)
    session = PlanningSession(model, cluster="1x4xtoy", batch=8, seq=SEQ, dtype="fp32", phase=phase)
    plan = session.plan(planner=f"random:{seed}", mesh="dp=2,tp=2")
    report = verify(model, plan, inputs_from_config(model, batch=8, seq=SEQ, phase=phase).kwargs)
    assert report.equal, str(report)


def test_repeated_heads_are_not_kept() -> None:
    """Heads of keys are repeated for those of queries where attention takes a mask; a rank keeps at least one."""
    model = model_of("gemma3_text")
    whole = cached_nbytes(model, 0)
    plan = build_plan(model, cluster="1x4xtoy", mesh="tp=4", phase="prefill", batch=BATCH, seq=SEQ, dtype="fp32")
    assert plan.estimate.memory["kv_cache"] in (whole / 2, whole)  # two heads on four ranks: one each, or both


def all_nbytes(layer: Any) -> int:
    """Return the bytes of all that a layer of transformers' cache holds."""
    held = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    held += [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return sum(tensor.nbytes for tensor in held if tensor is not None)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize(("phase", "steps"), [("prefill", 0), ("decode", 1)])
def test_recurrent_states_have_the_bytes_of_transformers_own(name: str, phase: Any, steps: int) -> None:
    model = recurrent_model(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for length in (SEQ, *[1] * steps):
            model(torch.zeros(BATCH, length, dtype=torch.long), cache=cache)
    plan = build_plan(model, cluster="1x1xtoy", phase=phase, batch=BATCH, seq=SEQ, dtype="fp32")
    assert plan.estimate is not None
    assert plan.estimate.memory["kv_cache"] == sum(map(all_nbytes, cache.layers))


def ops_of(graph: OpGraph) -> Counter[str]:
    return Counter(op.target_name.partition(".")[2].partition(".")[0] for op in graph.ops)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_step_of_recurrent_layers_runs_the_ops_of_a_step(name: str) -> None:
    """A scan over a prompt has other ops; the linear layers are the same, and no state is computed anew."""
    model = recurrent_model(name)
    step, prompt = (
        ops_of(trace_module(model, phase=phase, batch=BATCH, seq=SEQ, dtype="fp32").graph)
        for phase in ("decode", "prefill")
    )
    recurrent = [layer for layer in DynamicCache(config=model.config).layers if hasattr(layer, "conv_states")]
    states = {"lfm2": 1}.get(name, 2)  # a short convolution has no other state
    assert step["cached_state"] == states * len(recurrent)
    assert step["linear"] == prompt["linear"]
    assert step["cumsum"] == 0
    assert prompt["cached_state"] == 0


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_an_encoders_keys_and_values_are_in_the_cache_of_a_step(name: str) -> None:
    model = encoder_decoder(name)
    inputs = torch.zeros(BATCH, 8, 2 * FRAMES) if name == "whisper" else torch.zeros(BATCH, SEQ, dtype=torch.long)
    with torch.no_grad():
        output = model(inputs, decoder_input_ids=torch.zeros(BATCH, SEQ + 1, dtype=torch.long), use_cache=True)
    both = (output.cache.self_attention_cache, output.cache.cross_attention_cache)
    plan = build_plan(model, cluster="1x1xtoy", phase="decode", batch=BATCH, seq=SEQ, dtype="fp32")
    assert plan.estimate is not None
    assert plan.estimate.memory["kv_cache"] == sum(all_nbytes(layer) for cache in both for layer in cache.layers)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert any("does not run the encoder" in note for note in plan.notes)


@pytest.mark.parametrize("mesh", [None, "dp=2,tp=2"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_a_prompt_leaves_keys_and_values_of_both_kinds(name: str, mesh: str | None) -> None:
    """Of the decoder's 5 tokens, and of what its encoder made; the encoder keeps nothing."""
    model, batch = encoder_decoder(name), 8
    inputs: dict[str, torch.Tensor] = {"decoder_input_ids": torch.zeros(batch, 5, dtype=torch.long)}
    if name == "whisper":
        inputs["input_features"] = torch.zeros(batch, 8, 2 * FRAMES)
    else:
        inputs["input_ids"] = torch.zeros(batch, SEQ, dtype=torch.long)
    with torch.no_grad():
        output = model(**inputs, use_cache=True)
    both = (output.cache.self_attention_cache, output.cache.cross_attention_cache)
    nbytes = sum(all_nbytes(layer) for cache in both for layer in cache.layers)
    cluster = "1x1xtoy" if mesh is None else "1x4xtoy"
    plan = build_plan(
        model, example_inputs=inputs, cluster=cluster, mesh=mesh, phase="prefill", batch=batch, dtype="fp32"
    )
    assert plan.estimate is not None
    assert plan.estimate.memory["kv_cache"] == nbytes / plan.mesh.size
    assert not any("no key-value cache" in note for note in plan.notes)


def test_an_encoder_of_images_keeps_nothing() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=32, patch_size=8, **sizes),
        text_config=transformers.LlamaConfig(vocab_size=96, **sizes),
        image_token_index=90,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    ids[:, :16] = 90
    inputs = {"input_ids": ids, "pixel_values": torch.zeros(BATCH, 3, 32, 32)}
    plan = build_plan(model, example_inputs=inputs, cluster="1x1xtoy", phase="prefill", batch=BATCH, dtype="fp32")
    assert plan.estimate is not None
    assert plan.estimate.memory["kv_cache"] == 2 * 2 * BATCH * SEQ * 64 * 4


def test_a_step_reads_the_encoders_keys_and_values_and_computes_none_of_them() -> None:
    graph = trace_module(encoder_decoder("t5"), phase="decode", batch=BATCH, seq=SEQ, dtype="fp32").graph
    modules = {graph.calls[op.call].fqn for op in graph.ops}
    assert not any(
        fqn.startswith("encoder.") or fqn.endswith(("EncDecAttention.k", "EncDecAttention.v")) for fqn in modules
    )
    short, long = (
        build_plan(encoder_decoder("t5"), cluster="1x1xtoy", phase="decode", batch=8, seq=seq, dtype="fp32").estimate
        for seq in (1000, 3000)
    )
    assert short is not None
    assert long is not None
    # Two layers, each with keys and values of 2,000 more tokens, of both sequences, that are read once.
    more = 2 * 2 * 2 * 8 * 2000 * 64 * 4
    assert long.memory["kv_cache"] - short.memory["kv_cache"] == more
    device = ClusterSpec.parse("1x1xtoy").device
    rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    assert long.compute_s - short.compute_s == pytest.approx(more / rate, rel=0.1)


@pytest.mark.parametrize(
    ("name", "mesh", "seed"),
    [
        ("mamba2", "dp=2,tp=2", 6),
        ("lfm2", "tp=4", 3),
        ("qwen3_next", "tp=4", 5),
        ("bart", "dp=2,tp=2", 2),
        ("whisper", "tp=4", 1),
    ],
)
def test_states_are_in_the_layouts_of_the_plan(name: str, mesh: str, seed: int) -> None:
    """Drawn plans split states otherwise than a prompt leaves them: each step would read other pieces."""
    model = encoder_decoder(name) if name in ENCODER_DECODERS else recurrent_model(name)
    session = PlanningSession(model, cluster="1x4xtoy", batch=8, seq=SEQ, dtype="fp32", phase="decode")
    plan = session.plan(planner=f"random:{seed}", mesh=mesh)
    inputs = inputs_from_config(model, batch=8, seq=SEQ, phase="decode").kwargs
    report = verify(model, plan, inputs)
    assert report.equal, str(report)
    states = [path for ports in plan.input_plan.values() for path, _ in ports_of(ports) if path.startswith("cache.")]
    assert states
    assert estimate_plan(model, ShardingPlan.from_dict(plan.to_dict())).estimate == plan.estimate


def test_a_model_that_does_not_run_with_a_cache_is_an_error() -> None:
    """transformers asks an attention layer for the number of tokens, and this model has none."""
    config = transformers.GraniteMoeHybridConfig(
        num_hidden_layers=2, **{name: SMALL[name] for name in ("hidden_size", "vocab_size")}
    )
    with torch.device("meta"):
        model = transformers.GraniteMoeHybridForCausalLM(config)
    with pytest.raises(ModelError, match="does not run with transformers' cache"):
        build_plan(model, cluster="1x1xtoy", phase="decode", batch=BATCH, seq=SEQ)


@pytest.mark.parametrize("name", ["xlstm", "recurrent_gemma"])
def test_states_outside_of_the_usual_cache_are_refused(name: str) -> None:
    heads = {} if name == "xlstm" else {"num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(name, hidden_size=64, num_hidden_layers=3, vocab_size=96, **heads)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(JobError, match="it has a cache of its own"):
        build_plan(model, cluster="1x1xtoy", phase="decode", batch=BATCH, seq=SEQ)


def test_decoding_with_the_keys_of_an_indexer_is_refused() -> None:
    """DeepSeek-V3.2 chooses tokens by keys that its indexer caches beside the latents."""
    config = transformers.DeepseekV32Config(num_hidden_layers=2, vocab_size=96)
    with torch.device("meta"):
        model = transformers.DeepseekV32ForCausalLM(config)
    with pytest.raises(JobError, match=r"sparse attention cannot be planned yet.*DynamicIndexedLayer"):
        build_plan(model, cluster="1x1xtoy", phase="decode", batch=BATCH, seq=SEQ)


def deepseek_v2(layers: int = 2, **dims: Any) -> transformers.PreTrainedModel:
    small = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96, "num_attention_heads": 4}
    latents = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_shared_experts": 1}
    groups = {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
    config = transformers.DeepseekV2Config(
        num_hidden_layers=layers, **{**small, **latents, **experts, **groups, **dims}
    )
    return transformers.DeepseekV2ForCausalLM(config).eval()


@pytest.mark.parametrize(("phase", "steps"), [("prefill", 0), ("decode", 1)])
def test_latents_are_cached_in_place_of_keys_and_values(phase: Any, steps: int) -> None:
    model = deepseek_v2()
    plan = build_plan(model, cluster="1x1xtoy", phase=phase, batch=BATCH, seq=SEQ, dtype="fp32")
    assert plan.estimate is not None
    assert plan.estimate.memory["kv_cache"] == cached_nbytes(model, steps)


def test_deepseek_v2_lite_caches_31104_bytes_of_a_token() -> None:
    """27 layers of 512 latents and 64 rotary keys in two bytes each; heads are not cached, so they may be few."""
    model = deepseek_v2(layers=27, kv_lora_rank=512, qk_rope_head_dim=64)
    plan = build_plan(model, cluster="1x2xtoy", mesh="tp=2", phase="decode", batch=1, seq=SEQ, memory_gb=100)
    assert plan.estimate is not None
    assert plan.estimate.memory["kv_cache"] == 31_104 * (SEQ + 1)


def test_keys_and_values_of_earlier_tokens_are_computed_from_latents_in_every_step() -> None:
    model = deepseek_v2()
    job: dict[str, Any] = {"cluster": "1x1xtoy", "phase": "decode", "batch": BATCH, "dtype": "fp32", "memory_gb": 1}
    short, long = (build_plan(model, seq=seq, **job).estimate for seq in (1000, 3000))
    assert short is not None
    assert long is not None
    # Of each token and layer: four heads of 16 + 24 from 16 latents, and the products of 24 and of 24 with the query.
    flops = 2 * BATCH * (4 * 2 * 40 * 16 + 4 * 2 * (24 + 24))
    assert long.model_flops is not None
    assert short.model_flops is not None
    assert long.model_flops - short.model_flops == 2000 * flops
    expanded = BATCH * 2000 * 4 * (40 + 24) * 4
    assert long.memory["transient"] - short.memory["transient"] == expanded


@pytest.mark.parametrize(
    ("model", "phase"),
    [
        (deepseek_v2(), "prefill"),
        (model_of("gemma3_text"), "prefill"),
        (recurrent_model("qwen3_next"), "prefill"),
        (recurrent_model("qwen3_next"), "decode"),
    ],
    ids=["deepseek_v2", "gemma3", "qwen3_next", "qwen3_next-decode"],
)
def test_a_graph_that_is_sent_keeps_its_caches(model: transformers.PreTrainedModel, phase: Any) -> None:
    sent = trace_module(model, phase=phase, batch=BATCH, seq=SEQ, dtype="fp32")
    received = read_graph(write_graph(sent))
    caches = [op.cache for op in received.graph.ops]
    assert caches == [op.cache for op in sent.graph.ops]
    assert any(caches) or phase == "decode"
    assert ops_of(received.graph) == ops_of(sent.graph)


def test_a_cache_where_there_is_none_is_refused() -> None:
    sent = document_of(trace_module(deepseek_v2(), phase="prefill", batch=BATCH, seq=SEQ))
    document = sent.model_dump(mode="json", exclude_defaults=True)
    kept = next(op for op in document["ops"] if op.get("cache"))
    kept["cache"] = {"latents": [16, 4096]}
    with pytest.raises(GraphFormatError, match="no attention with keys of such a width"):
        read_graph(document)


@pytest.mark.parametrize("position", [1, 3, 4])
def test_a_state_that_no_trace_has_is_refused(position: int) -> None:
    """Keys of which a step has one more token have three dims, and a state has a place in the cache."""
    sent = document_of(trace_module(recurrent_model("lfm2"), phase="decode", batch=BATCH, seq=SEQ))
    document = sent.model_dump(mode="json", exclude_defaults=True)
    state = next(op for op in document["ops"] if "cached_state" in op.get("op", ""))
    state["args"][position] = {1: state["args"][1][:1], 3: "cache.conv_states", 4: True}[position]
    with pytest.raises(GraphFormatError):
        read_graph(document)
