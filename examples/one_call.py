"""Train a tiny Llama on all ranks, planned and sharded in one call.

torchrun --nproc-per-node 4 examples/one_call.py
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from executor import auto_parallelize, local_micro_batches

model = LlamaForCausalLM(LlamaConfig.from_json_file(Path(__file__).with_name("tiny_llama.json")))
tokens = torch.arange(64).repeat(4, 1)
loader = [{"input_ids": tokens + step, "labels": tokens + step, "use_cache": False} for step in range(5)]

model = auto_parallelize(model)
optimizer = torch.optim.AdamW(model.parameters())
for batch in loader:
    parts = local_micro_batches(model, batch)
    for part in parts:
        (model(**part).loss / len(parts)).backward()
    optimizer.step()
    optimizer.zero_grad()
