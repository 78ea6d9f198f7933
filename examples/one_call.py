"""Train a tiny Llama, planned and sharded by one call.

torchrun --nproc-per-node 4 examples/one_call.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from executor import auto_parallelize, local_batch

model = LlamaForCausalLM(LlamaConfig.from_json_file("examples/tiny_llama.json"))
auto_parallelize(model, batch=8, seq=32)  # plans for the ranks that torchrun started, and shards in place
optimizer = torch.optim.AdamW(model.parameters())
for ids in torch.randint(64, (10, 8, 32), generator=torch.Generator().manual_seed(0)):  # the same on every rank
    loss = model(**local_batch({"input_ids": ids, "labels": ids}, model), use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
