"""Faulty scripts of torch, as users reported them."""

from __future__ import annotations

from support.reported_faults import Fault, Report

TORCH = (
    Report(
        "pytorch/pytorch#157182 (rule)",
        "modules that are not there",
        "torch",
        "llama-3.1-8b",
        "1x8xh100-sxm-80gb",
        """
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
parallelize_module(model, mesh["tp"], {
    "layers.*.attention.wq": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "output": ColwiseParallel(output_layouts=Replicate()),
})
fully_shard(model, mesh=mesh["dp"])
""",
        (
            Fault("'layers.*.attention.wq'", "no module of llama-3.1-8b", "self_attn.q_proj"),
            Fault("'output'", "no module of llama-3.1-8b", "self_attn.q_proj"),
        ),
        seq=4096,
    ),
    Report(
        "pytorch/torchtitan#2577 (rule, in a script)",
        "key-value heads",
        "torch",
        {
            "hf_config": {
                "model_type": "llama",
                "num_hidden_layers": 4,
                "hidden_size": 2048,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "intermediate_size": 4096,
                "vocab_size": 32000,
            }
        },
        "1x8xh100-sxm-80gb",
        """
mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
plan = {"self_attn.k_proj": ColwiseParallel(), "self_attn.v_proj": ColwiseParallel()}
for block in model.model.layers:
    parallelize_module(block, mesh, plan)
""",
        (Fault("mesh axis tp of 8", "2 key-value heads", "2"),),
        seq=4096,
    ),
)
