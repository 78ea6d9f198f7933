"""Written files are taken by frameworks that are not installed here, each in an environment of its own."""

from __future__ import annotations

import json
import shlex

import pytest
from support.framework_environments import run_in

from api.frameworks.configurations.bridge import MEGATRON_BRIDGE
from api.frameworks.configurations.deepspeed import DEEPSPEED
from api.frameworks.configurations.torchtitan import TORCHTITAN
from api.frameworks.configurations.vllm import VLLM
from api.frameworks.launch import Launch

pytestmark = pytest.mark.slow

READ_DEEPSPEED = """
import json, sys
import deepspeed.comm as dist
from deepspeed.runtime.config import DeepSpeedConfig
document = json.loads(sys.argv[1])
dist.get_rank, dist.get_world_size = lambda *_: 0, lambda *_, **__: int(sys.argv[2])
try:
    config = DeepSpeedConfig(document)
except Exception as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({
        "train_batch_size": config.train_batch_size,
        "micro": config.train_micro_batch_size_per_gpu,
        "stage": int(config.zero_config.stage),
        "autotp": config.tensor_parallel_config.autotp_size,
        "bf16": config.bfloat16_config.enabled,
        "experts": config.expert_parallel_config.autoep_size,
    }))
"""

READ_TORCHTITAN = """
import dataclasses, json, sys
from torchtitan.config import ConfigManager
config = ConfigManager().parse_args(sys.argv[1:])
print(json.dumps({**dataclasses.asdict(config.parallelism), **dataclasses.asdict(config.training)}, default=str))
"""

READ_VLLM = """
import json, sys
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms._current_platform = CpuPlatform()  # there is no GPU to find
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
found = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(sys.argv[1:])
names = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "max_num_seqs", "max_model_len",
         "dtype", "enforce_eager", "enable_expert_parallel", "gpu_memory_utilization")
print(json.dumps({name: getattr(found, name) for name in names}))
"""

READ_BRIDGE = """
import dataclasses, json, sys, typing
from hydra.core.override_parser.overrides_parser import OverridesParser
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import ConfigContainer
sections = {field.name: field.type for field in dataclasses.fields(ConfigContainer)}
hints = {**typing.get_type_hints(ConfigContainer), "model": GPTModelProvider}
unknown = []
for override in OverridesParser.create().parse_overrides(sys.argv[1:]):
    section, _, key = override.key_or_group.partition(".")
    kinds = [hints.get(section), *typing.get_args(hints.get(section))]
    names = {field.name for kind in kinds if dataclasses.is_dataclass(kind) for field in dataclasses.fields(kind)}
    if section not in sections or (key and key not in names):
        unknown.append(override.key_or_group)
print(json.dumps(unknown))
"""


@pytest.mark.parametrize(
    "launch",
    [
        Launch(replicate=8, micro_batch=2),
        Launch(shard=8, zero=3, micro_batch=2, batch=64, offload=True, optimizer="adam", checkpointing="full"),
        Launch(shard=8, zero=1, expert=4, compiled=True),
    ],
)
def test_deepspeed(launch: Launch) -> None:
    document = DEEPSPEED.write(launch, "Llama-3.1-8B")
    found = run_in("deepspeed", READ_DEEPSPEED, document, str(launch.data))
    assert found == {
        "train_batch_size": launch.global_batch,
        "micro": launch.micro_batch,
        "stage": launch.zero,
        "autotp": 0,
        "bf16": True,
        "experts": launch.expert,
    }


@pytest.mark.parametrize(
    "document",
    [
        {"train_batch_size": 250, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8},
        {"train_batch_size": 64, "zero_optimization": {"stage": 5}},
        {"train_batch_size": 64, "zero_optimization": {"stage": 3, "mics_shard_size": 4}},
        {"train_batch_size": 64, "zero_optimization": {"stage": 3, "overlap_com": True}},
        {"train_batch_size": 64, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"train_batch_size": 64, "compile": {"disable": False}},
        {"gradient_accumulation_steps": 2},
    ],
)
def test_what_deepspeed_refuses_is_a_fault(document: dict[str, object]) -> None:
    text = json.dumps(document)
    assert run_in("deepspeed", READ_DEEPSPEED, text, "8").keys() == {"error"}
    assert DEEPSPEED.read(text, 8).faults


def test_torchtitan() -> None:
    launch = Launch(
        replicate=2, shard=2, tensor=2, zero=3, micro_batch=2, batch=32, seq=4096, checkpointing="full", compiled=True
    )
    script = TORCHTITAN.write(launch, "Llama-3.1-8B")
    arguments = shlex.split(script.partition("-m torchtitan.train ")[2].replace("\\\n", " "))
    found = run_in("torchtitan", READ_TORCHTITAN, *arguments)
    assert found["data_parallel_replicate_degree"] == 2
    assert found["data_parallel_shard_degree"] == 2
    assert found["tensor_parallel_degree"] == 2
    assert (found["local_batch_size"], found["global_batch_size"], found["seq_len"]) == (2, 32, 4096)


def test_megatron_bridge() -> None:
    launch = Launch(
        shard=2,
        tensor=2,
        pipeline=2,
        zero=1,
        micro_batch=2,
        batch=32,
        seq=4096,
        sequence_parallel=True,
        expert_tensor=2,
    )
    script = MEGATRON_BRIDGE.write(launch, "Llama-3.1-8B").partition("--recipe ")[2].replace("\\\n", " ")
    _, *overrides = shlex.split(script)
    assert overrides
    given = [text for text in overrides if not text.startswith("-")]
    assert run_in("megatron-bridge", READ_BRIDGE, *given, "ddp.no_such_key=1") == ["ddp.no_such_key"]


def test_vllm() -> None:
    launch = Launch(
        phase="decode", tensor=4, replicate=2, expert=8, micro_batch=64, seq=4096, compiled=False, gpu_memory_share=0.9
    )
    command = VLLM.write(launch, "deepseek-ai/DeepSeek-V3").partition("vllm serve ")[2]
    _, *arguments = shlex.split(command.replace("\\\n", " "))
    assert run_in("vllm", READ_VLLM, *arguments) == {
        "tensor_parallel_size": 4,
        "data_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "max_num_seqs": 64,
        "max_model_len": 4096,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "enable_expert_parallel": True,
        "gpu_memory_utilization": 0.9,
    }
