"""Written files are taken by the frameworks that are installed here, without a warning."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from transformers import HfArgumentParser, TrainingArguments
from transformers.distributed import DistributedConfig

from api.frameworks.configurations.accelerate import ACCELERATE
from api.frameworks.configurations.transformers import TRANSFORMERS
from api.frameworks.launch import Launch
from planner.errors import JobError

WITH_ACCELERATE = [
    Launch(replicate=8, checkpointing="full"),
    Launch(tensor=8, dtype="fp32"),
    Launch(shard=8, zero=2, micro_batch=4, batch=64, offload=True),
    Launch(shard=8, zero=3, checkpointing="full", reshard_after_forward=False, compiled=True),
    Launch(replicate=2, shard=2, zero=3, tensor=2, micro_batch=2, batch=32, seq=4096),
    Launch(replicate=2, shard=2, zero=3, context=2),
]
WITH_TRANSFORMERS = [
    Launch(replicate=2, shard=2, tensor=2, zero=3, micro_batch=2, batch=16, checkpointing="full"),
    Launch(shard=8, zero=3, reshard_after_forward=False, optimizer="adafactor", compiled=True, seq=4096),
    Launch(pipeline=2, tensor=4),
    Launch(shard=4, tensor=2, zero=3, expert=8, tp_plan={"layers.*.mlp.up_proj": "colwise"}),
]


def sizes(launch: Launch) -> tuple[int, ...]:
    return launch.replicate, launch.shard, launch.context, launch.tensor


@pytest.mark.parametrize("launch", WITH_ACCELERATE)
def test_accelerate_takes_its_file(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ACCELERATE.file
    path.write_text(ACCELERATE.write(launch, "Llama-3.1-8B"))
    config = load_config_from_file(str(path))
    assert config.num_processes == launch.ranks
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments.nondefault = {"config_file", "training_script"}
    arguments, defaults, _ = _validate_launch_command(arguments)
    assert defaults.distributed_type == config.distributed_type
    assert arguments.mixed_precision == config.mixed_precision
    if config.parallelism_config:
        assert arguments.use_parallelism_config
        # What `accelerate launch` hands to each process.
        for key in ("dp_replicate", "dp_shard", "cp", "tp"):
            monkeypatch.setenv(
                f"PARALLELISM_CONFIG_{key.upper()}_SIZE", str(getattr(arguments, f"parallelism_config_{key}_size"))
            )
        made = ParallelismConfig()
        assert sizes(launch) == (made.dp_replicate_size, made.dp_shard_size, made.cp_size, made.tp_size)
        assert made.total_size == launch.ranks
    if launch.zero == 3:
        assert arguments.use_fsdp
        assert (arguments.fsdp_version, arguments.fsdp_reshard_after_forward) == (2, launch.reshard_after_forward)
    if launch.zero == 2:
        assert arguments.use_deepspeed
        assert (arguments.zero_stage, arguments.gradient_accumulation_steps) == (2, 2)


@pytest.mark.parametrize("launch", WITH_TRANSFORMERS)
def test_transformers_takes_its_file(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / TRANSFORMERS.file
    path.write_text(TRANSFORMERS.write(launch, "Llama-3.1-8B"))
    config = DistributedConfig.from_dict(json.loads(path.read_text()))
    assert (config.dp_replicate_size, config.fsdp_size, config.tp_size) == (
        launch.replicate,
        launch.shard,
        launch.tensor,
    )
    assert (config.pp_size, config.ep_size, config.tp_plan) == (launch.pipeline, launch.expert, launch.tp_plan)
    document = json.loads(path.read_text()) | {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    (arguments,) = HfArgumentParser(TrainingArguments).parse_dict(document, allow_extra_keys=True)
    assert arguments.per_device_train_batch_size == launch.micro_batch
    assert bool(arguments.activation_checkpointing) == (launch.checkpointing == "full")
    assert arguments.bf16
    assert arguments.torch_compile == launch.compiled


@pytest.mark.parametrize(
    "document",
    [
        {"tp_size": 4, "ep_size": 6, "fsdp_size": 2},
        {"pp_size": 2, "fsdp_size": 4},
        {"tp_size": 0, "fsdp_size": 8},
        {"fsdp_size": 8, "ep_plan": "auto"},
        {"tp_plan": "auto", "fsdp_size": 3},
    ],
)
def test_what_transformers_refuses_is_a_fault(document: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "8")
    with pytest.raises(ValueError, match=r".+"):
        DistributedConfig(**document)
    assert TRANSFORMERS.read(json.dumps(document), 8).faults


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_replicate_size": 2, "tp_size": 4},
        {"dp_replicate_size": 4, "cp_size": 2},
        {"cp_size": 2, "sp_size": 4},
        {"dp_shard_size": 0, "tp_size": 8},
    ],
)
def test_what_accelerate_refuses_is_a_fault(degrees: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        ParallelismConfig(**degrees)
    lines = [f"  parallelism_config_{key}: {degree}" for key, degree in degrees.items()]
    head = ["distributed_type: FSDP", "fsdp_config: {fsdp_version: 2}", "parallelism_config:"]
    assert ACCELERATE.read("\n".join([*head, *lines]), 8).faults


def test_unknown_keys_are_those_that_accelerate_refuses(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 8\nnum_process: 8\n")
    with pytest.raises(ValueError, match="num_process"):
        load_config_from_file(str(path))
    faults = ACCELERATE.read(path.read_text(), 8).faults
    assert faults == ("num_process is not a key of accelerate 1.15.0 (the closest is num_processes)",)


@pytest.mark.parametrize("launch", [Launch(replicate=4, tensor=2), Launch(replicate=2, context=2, zero=3)])
def test_what_accelerate_refuses_is_not_written(launch: Launch) -> None:
    with pytest.raises(ValueError, match=r".+"):
        ParallelismConfig(launch.replicate, launch.shard, launch.tensor, launch.context)
    with pytest.raises(JobError):
        ACCELERATE.write(launch, "Llama-3.1-8B")
