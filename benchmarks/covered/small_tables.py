"""The tables of ``small_configs``: sizes by the fields' names, and what single model types need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size.*", 256),
    (r"num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|depth|num_(de|en)coder_layers", 2),
    (r".*num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|index_n_heads", 4),
    (r"linear_num_(key_|value_)?heads|mamba_n_heads|mamba_num_heads", 4),
    (r".*num_key_value_heads|num_kv_heads|multi_query_group_num", 2),
    (r"qk_head_dim", 32),
    (r"(|.*_)head_dim|d_kv|d_head|query_pre_attn_scalar", 16),
    (r"rotary_dim", 8),
    (r"(kv|q|o|dt)_lora_rank|mamba_dt_rank|laurel_rank|embedding_rank|loop_gate_rank|hc_lowrank", 16),
    (r"hidden_size|n_embd|d_model|dim|embedding_(size|dim)|moe_hidden_size|hidden_dim|projection_dim", 64),
    (r"hidden_size_per_layer_input|ple_embed_dim|d_rel", 16),
    (r"adapter_in_dim|adapter_out_dim|adapter_input_size|out_hidden_size|projector_hidden_size", 64),
    (r".*intermediate_size(_mlp)?|ffn_hidden_size|n_inner|d_ff|.*ffn_dim|intermediate_dim|.*ffn_hidden_size", 128),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|index_topk|index_topk_blocks|zero_expert_num", 2),
    (r"n_group|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers|n_shared_experts|n_groups", 1),
    (r"max_position_embeddings|n_positions|n_ctx|model_max_length|max_(source|target)_positions", 128),
    (r"sliding_window|attention_chunk_size|sliding_window_size|rel_extent|keep_window_size", 16),
    (r"mamba_d_head|mamba_head_dim", 32),
    (r"mamba_d_ssm", 128),
    (r"mamba_d_state|ssm_state_size|state_size", 16),
    (r"mamba_chunk_size|chunk_size|block_size|index_block_size|index_kpool", 8),
    (r"max_(en|de)coder_position_embeddings|max_2d_position_embeddings|max_seq_len", 128),
    (r"d_inner", 128),
    (r"attention_window|attention_window_size|local_attention|num_mel_bins", 16),
    (r"conv_channels|decoder_hidden_size|lru_width|image_text_hidden_size", 64),
    (r"vision_output_dim|projector_(in|out)put_dim", 64),
    (r"num_queries|num_detection_tokens", 8),
    (r"mm_tokens_per_image", 4),
    (r"image_size", 32),
    (r"patch_size", 8),
)
"""Pattern of a field's whole name -> its size in the small model; only fields that are larger are changed."""

SPEECH: Mapping[str, Any] = {
    "conv_dim": [32] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 32,
    "apply_spec_augment": False,
}
"""The fields that wav2vec2 and those of its kind share; masking of the input by NumPy is off."""

MORE: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_head": 32},
    "glm5_next_text": {"index_topk": 8, "head_dim": 0},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl_text": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "inkling2_loop_text": {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "n_layers_per_attn_res_block": 1,
    },
    "codegen": {"rotary_dim": 8},
    # Types without a tensor-parallel plan.
    "audio-spectrogram-transformer": {"max_length": 64, "patch_size": 16},
    "big_bird": {"block_size": 4, "num_random_blocks": 1},
    "convnext": {"hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2},
    "detr": {
        "backbone_config": {
            "model_type": "resnet",
            "embedding_size": 16,
            "hidden_sizes": [32, 64],
            "depths": [1, 1],
            "out_features": ["stage2"],
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8},
    "mamba2": {"head_dim": 32},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mllama_vision_model": {
        "num_global_layers": 1,
        "intermediate_layers_indices": [0, 1],
        "vision_output_dim": 192,
        "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    },
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "qwen2_5_vl_vision": {"fullatt_block_indexes": [1], "window_size": 32},
    "qwen3_vl_vision": {"deepstack_visual_indexes": [0]},
    "qwen3_vl_moe_vision": {"deepstack_visual_indexes": [0]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "resnet": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]},
    "segformer": {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [4, 1],
        "hidden_sizes": [32, 64],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [2, 4],
        "mlp_ratios": [4, 4],
    },
    "swin": {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    "wav2vec2": SPEECH,
    "hubert": SPEECH,
    "wavlm": SPEECH,
    "t5": {"decoder_start_token_id": 0},
    # Types with one.
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64, "global_head_dim": 32},
    "phi4_multimodal_audio": {
        "num_blocks": 2,
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
        "nemo_conv_channels": 64,
    },
    "step3p5": {"sliding_window": 16},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "dory": {
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "mistral4": {"head_dim": 32},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [128, 64],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]},
    },
    "dots3_note_text": {
        "head_dim": 64,
        "qk_nope_head_dim": 48,
        "index_topk": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 64,
        "swa_qk_nope_head_dim": 48,
        "swa_v_head_dim": 16,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gemma4_vision": {"position_embedding_size": 64, "pooling_kernel_size": 2},
    "llama4_vision_model": {"intermediate_size": 256},
    "muse_spark_audio": {"hidden_sizes": [16, 16, 32, 64], "depths": [1, 1, 1, 1], "num_hidden_layers": 4},
    "muse_spark": {"out_hidden_size": 256},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "qwen3_omni_moe_talker_code_predictor": {"num_code_groups": 4},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 128},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
}
"""model_type -> fields of its own, which no rule gives."""

SPECIAL_TOKENS: Mapping[str, int] = {
    "boi": 248,
    "eoi": 249,
    "image": 250,
    "video": 251,
    "vision_start": 252,
    "vision_end": 253,
    "audio": 254,
}
"""The tokens that stand for what is no text, which must differ -> their ids in the small vocabulary."""

SECTIONED = frozenset({"qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_ocr_text", "paddleocr_vl_text"})
"""Model types whose code has default sections of the rotary parameters, which the config does not show."""
