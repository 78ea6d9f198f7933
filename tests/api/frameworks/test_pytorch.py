"""Scripts of torch, and dicts of ``parallelize_module``, as configurations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families

from api.frameworks.check import check
from api.frameworks.configurations.pytorch import PYTORCH, read
from api.frameworks.launch import Launch
from api.frameworks.plan_launch import launch_of
from api.frameworks.registry import framework_of
from api.frameworks.torch_script import torch_script
from planner import build_plan
from planner.errors import JobError

BLOCK = """
tp = 4
mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]) // tp, tp), mesh_dim_names=("data", "model"))
tp_mesh = mesh["model"]
for layer in model.model.layers:
    parallelize_module(layer, tp_mesh, {
        "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)), "input_layernorm": SequenceParallel(),
    })
    fully_shard(layer, **options)
options = {"mesh": mesh["data"], "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
optimizer = torch.optim.SGD(model.parameters())
loader = torch.utils.data.DataLoader(data, batch_size=2)
accumulation_steps = 3
"""


def test_a_loop_over_blocks_with_fsdp() -> None:
    assert framework_of(None, BLOCK) is PYTORCH
    reading = read(BLOCK, 32)
    assert reading.faults == ()
    assert reading.launch == Launch(
        shard=8, zero=3, tensor=4, sequence_parallel=True, micro_batch=2, batch=48, optimizer="sgd"
    )
    assert reading.assumed == ("mesh axis data of 8: its size is computed",)
    assert reading.styles["self_attn.o_proj"] == "RowwiseParallel"
    assert len(reading.styles) == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": ColwiseParallel()}', Launch(tensor=8)),
        ("plan = dict()\nDistributedDataParallel(model)", Launch(replicate=8)),
        ('mesh = init_device_mesh("cuda", (2, 4))\nfully_shard(m, mesh=mesh)', Launch(replicate=2, shard=4, zero=3)),
        (
            'm = init_device_mesh("cuda", (2, 4), mesh_dim_names=["a", "b"])\nfully_shard(x, mesh=m["b"])\nDDP(x)',
            Launch(replicate=2, shard=4, zero=3),
        ),
        ("fully_shard(model, reshard_after_forward=False)", Launch(shard=8, zero=3, reshard_after_forward=False)),
        ("fully_shard(model, offload_policy=CPUOffloadPolicy())", Launch(shard=8, zero=3, offload=True)),
        (
            'MESH = {"fsdp": 4, "tp": 2}\nBATCH = 16\nMICRO_BATCHES = 2\nSEQ = 128\nfully_shard(m)\nRowwiseParallel()',
            Launch(shard=4, zero=3, tensor=2, micro_batch=2, batch=16, seq=128),
        ),
        (
            "from torch.distributed.fsdp import FullyShardedDataParallel as Wrapped\n"
            "batch_size = 2\ngradient_accumulation_steps = 3\nm = Wrapped(m)",
            Launch(shard=8, zero=3, micro_batch=2, batch=48),
        ),
        (
            'p.add_argument("--tp-size", type=int, default=4)\np.add_argument("--seq_len", default=64)\n'
            'mesh = init_device_mesh("cuda", (n // args.tp_size, args.tp_size), mesh_dim_names=("dp", "tp"))\n'
            'parallelize_module(m, mesh["tp"], plan)\nfully_shard(m, mesh=mesh["dp"])\nglobal_batch_size = 4',
            Launch(shard=2, zero=3, tensor=4, micro_batch=2, seq=64),
        ),
        (
            'mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("cp", "fsdp"))\n'
            'context_parallel(mesh["cp"])\nfully_shard(m, mesh=mesh["fsdp"])\ncheckpoint_wrapper(m)\nm.compile()',
            Launch(context=4, shard=2, zero=3, checkpointing="full", compiled=True),
        ),
    ],
)
def test_what_calls_say(text: str, expected: Launch) -> None:
    reading = read(text, 8)
    assert (reading.launch, reading.faults) == (expected, ())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('fully_shard(m)\ninit_device_mesh("cuda", (3,))', "the mesh dim 0 3 is not the cluster's 8 devices"),
        ('fully_shard(m)\ninit_device_mesh("cuda", (a, 3), mesh_dim_names=("x", "y"))', "x ? x y 3 is not"),
        ("fully_shard(m)\nBATCH = 12", "the batch of 12 is not split into 8 ranks: 8 would do"),
        ("fully_shard(m)\nBATCH = 24\nMICRO_BATCHES = 2", "not split into 2 micro-batches of 8 ranks: 16 would do"),
    ],
)
def test_what_does_not_fit_the_devices(text: str, fault: str) -> None:
    (found,) = read(text, 8).faults
    assert fault in found


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("fully_shard(model", "not valid Python at line 1"),
        ("fully_shard(model)\nx = PipelineStage(model)", "a pipeline of a script"),
        ("fully_shard(" + "(" * 100_000, "not valid Python"),
        ("fully_shard(" + "9" * 5000 + ")", "not valid Python"),
        ("fully_shard(m)\0", "not valid Python"),
        ("#" * 1_000_001, "more than 1,000,000 characters"),
    ],
)
def test_what_is_not_read(text: str, detail: str) -> None:
    with pytest.raises(JobError, match=detail):
        read(text, 8)


def test_nothing_is_run(tmp_path: object) -> None:
    reading = read(f"open({str(tmp_path)!r} + '/x', 'w')\nraise SystemExit(3)\nfully_shard(m)", 8)
    assert reading.launch.shard == 8


def test_keys_that_match_no_module_are_named_with_what_the_model_has() -> None:
    text = """{"layers.*.attention.wq": ColwiseParallel(), "model.layers.*.self_attn.o_prj": RowwiseParallel(),
        f"model.layers.{i}.mlp.up_proj": ColwiseParallel()}"""
    found = check("llama-3.1-8b", text, cluster="1x8xh100-sxm-80gb", seq=4096, plans=False)
    first, second = found.faults
    assert "'layers.*.attention.wq' matches no module of llama-3.1-8b (its blocks have self_attn.q_proj" in first
    assert "o_prj' matches no module of llama-3.1-8b (model.layers.*.self_attn.o_proj would do)" in second


def test_what_no_key_splits_is_said() -> None:
    found = check("llama-3.1-8b", BLOCK, cluster="1x8xh100-sxm-80gb", seq=4096, plans=False)
    assert not found.faults
    assert found.priced is not None
    assert found.unpriced == ("model.embed_tokens, lm_head: no key splits them, and they are priced as split",)


@pytest.mark.parametrize("planner", ["ddp", "fsdp", "hsdp", "fsdp-tp"])
def test_a_script_that_a_plan_became_is_read_as_the_plans_launch(planner: str) -> None:
    module, _ = families.make("llama", 16)
    plan = build_plan(module, cluster="2x4xtoy", batch=16, seq=32, planner=planner, dtype="bf16")
    reading = read(torch_script(plan, module).text, 8)
    expected = launch_of(plan)
    assert not reading.faults
    for name in ("replicate", "shard", "zero", "tensor", "sequence_parallel", "micro_batch", "batch", "seq", "dtype"):
        assert getattr(reading.launch, name) == getattr(expected, name), name


@settings(max_examples=60, deadline=None)
@given(
    degrees=st.tuples(*[st.sampled_from([1, 2, 4])] * 4),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    seq=st.sampled_from([None, 128]),
    choices=st.fixed_dictionaries(
        {
            "checkpointing": st.sampled_from(["none", "full", "selective"]),
            "dtype": st.sampled_from(["bf16", "fp16", "fp32"]),
            "optimizer": st.sampled_from(["adamw", "sgd", "adagrad", "adafactor", "adamw-8bit"]),
            "compiled": st.booleans(),
        }
    ),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_what_is_written_is_read_again(
    degrees: tuple[int, ...],
    sizes: tuple[int, int],
    seq: int | None,
    choices: dict[str, object],
    flags: tuple[bool, bool, bool],
) -> None:
    replicate, shard, tensor, context = degrees
    launch = Launch(
        replicate=replicate if tensor == 1 or shard > 1 else 1,
        shard=shard,
        zero=3 if shard > 1 else 0,
        tensor=tensor,
        context=context,
        sequence_parallel=flags[0] and tensor > 1,
        reshard_after_forward=flags[1] or shard == 1,
        offload=flags[2] and shard > 1,
        micro_batch=sizes[0],
        seq=seq,
        **choices,  # type: ignore[arg-type]
    )
    launch = Launch(
        **{name: getattr(launch, name) for name in launch.__slots__} | {"batch": launch.data * sizes[0] * sizes[1]}
    )
    reading = read(PYTORCH.write(launch, "m"), launch.ranks)
    assert (reading.launch, reading.faults) == (launch, ())
