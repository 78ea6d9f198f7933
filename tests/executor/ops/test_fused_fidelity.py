"""Plans with fused ops run the collectives of their estimates, and fused ops save the bytes that are priced."""

from __future__ import annotations

import functools

import pytest
import torch
from support.families import make
from support.op_bytes import bytes_seen
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cost_model.layouts.layout import local_shape
from executor.ops.dispatch import OwnOps
from executor.ops.fused import fused_cross_entropy, gated, rms_norm, rotary
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import compiled, fake_process_group, make_dtensor
from executor.verify import verify
from planner import PlanningSession
from planner.counting.flop_count import FlopCount
from planner.model_rewrites import fused_kernels
from planner.plan.sharding_plan import PlanMesh, ShardingPlan

BATCH = 8
MESHES = ("dp=2,tp=2", "dp=1,tp=4")
R = Replicate()


@functools.lru_cache(maxsize=1)
def session(family: str, ac: str, micro_batches: int) -> PlanningSession:
    module, inputs = make(family, BATCH * micro_batches)
    job = {
        "dtype": "fp32" if micro_batches == 1 else "bf16",
        "micro_batches": micro_batches,
        "ac": ac,
        "fused_ops": True,
    }
    return PlanningSession(module, cluster="1x4xtoy", example_inputs=inputs, **job)


@pytest.mark.parametrize(
    ("family", "ac", "micro_batches", "seeds"),
    [
        ("llama", "none", 1, 6),
        ("llama", "selective", 2, 2),
        pytest.param("llama", "full", 2, 10, marks=pytest.mark.slow),
        pytest.param("mixtral", "none", 1, 10, marks=pytest.mark.slow),
        pytest.param("deepseek", "none", 1, 10, marks=pytest.mark.slow),
    ],
)
def test_plans_run_as_planned(family: str, ac: str, micro_batches: int, seeds: int) -> None:
    kinds: set[str] = set()
    for mesh in MESHES:
        for planner in ("ilp", "fully-sharded", "tensor-parallel", *(f"random:{seed}" for seed in range(seeds))):
            module, inputs = make(family, BATCH)
            report = verify(module, session(family, ac, micro_batches).plan(planner=planner, mesh=mesh), inputs)
            assert report.expected
            assert report.equal, (mesh, planner, report.differences)
            kinds |= {row.kind for row in report.expected}
    assert {"all_reduce", "all_gather", "reduce_scatter"} <= kinds


CASES = {
    "norm": (fused_kernels.RMS_NORM, ((64, 32, 128), (128,)), (Shard(1), R), lambda r, x, w: rms_norm(r, x, w, 1e-6)),
    "gated": (
        fused_kernels.GATED,
        ((64, 256), (64, 256)),
        (Shard(1), Shard(1)),
        lambda r, x, y: gated(r, x, y, "silu"),
    ),
    "rotary": (fused_kernels.ROTARY, ((4, 8, 64, 32), (1, 64, 32), (1, 64, 32)), (Shard(1), R, R), rotary),
    "loss": (
        fused_kernels.CROSS_ENTROPY,
        ((64, 512), (64,)),
        (Shard(0), Shard(0)),
        lambda r, x, y: fused_cross_entropy(r, x, y, -100, True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_saved_bytes_are_those_that_are_priced(case: str) -> None:
    name, shapes, placements, op = CASES[case]
    ranks = 4
    mesh = PlanMesh(axes=(("x", ranks),), device="cpu")
    inputs, sizes = [], []
    with fake_process_group(ranks):
        device_mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",))
        redistributor = Redistributor.from_plan(device_mesh, ShardingPlan(mesh=mesh))
        for shape, placement in zip(shapes, placements, strict=True):
            is_label = case == "loss" and len(shape) == 1
            local = torch.empty(
                local_shape(shape, (placement,), (ranks,)),
                dtype=torch.int64 if is_label else torch.bfloat16,
                device="meta",
            )
            tensor = make_dtensor(local, device_mesh, (placement,), shape, contiguous_stride(shape))
            sizes.append((tuple(local.shape), local.nbytes))
            inputs.append(tensor.requires_grad_(local.is_floating_point() and not (case == "rotary" and inputs)))
        seen = bytes_seen(lambda: _call(op, redistributor, inputs), inputs)
    work = fused_kernels.fused_work(name, sizes, output_nbytes=0)
    # The loss also saves two numbers that are not priced: its sum, and the number of labels.
    assert work.saved_extra_nbytes <= seen["saved"] <= work.saved_extra_nbytes + 8


def _call(op: object, redistributor: Redistributor, inputs: list[DTensor]) -> DTensor:
    return op(redistributor, *inputs)  # type: ignore[operator,no-any-return]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_formulas_equal_the_formulas() -> None:
    """On a GPU they are compiled; here by the CPU's compiler."""
    torch.manual_seed(0)
    x, weight, gate, up = torch.randn(4, 8, 16), torch.randn(16), torch.randn(4, 24), torch.randn(4, 24)
    heads, cos, sin = torch.randn(2, 4, 8, 6), torch.randn(1, 8, 6), torch.randn(1, 8, 6)
    logits, labels = torch.randn(12, 10), torch.arange(12) % 11 - 1
    _, scale = fused_kernels.rms_norm_forward(x, weight, 1e-6)
    maxima = fused_kernels.row_maxima(logits)
    calls = [
        (fused_kernels.rms_norm_forward, (x, weight, 1e-6)),
        (fused_kernels.rms_norm_backward, (torch.randn_like(x), x, weight, scale)),
        *((fused_kernels.gated_forward, (gate, up, name)) for name in fused_kernels.ACTIVATIONS),
        *((fused_kernels.gated_backward, (torch.randn_like(up), gate, up, name)) for name in fused_kernels.ACTIVATIONS),
        (fused_kernels.rotary_forward, (heads, cos, sin)),
        (fused_kernels.rotary_backward, (torch.randn_like(heads), cos, sin)),
        (fused_kernels.row_maxima, (logits,)),
        (fused_kernels.row_sums, (logits, labels, maxima)),
        (fused_kernels.logits_gradient, (logits, labels, maxima, torch.rand(12))),
    ]
    for formula, args in calls:
        # As in a step, with the mode of the own ops, and a dispatch mode as that of checkpointing.
        with OwnOps(None), FlopCount():  # type: ignore[arg-type]
            actual = compiled(formula)(*args)
        torch.testing.assert_close(actual, formula(*args), msg=formula.__name__)
