"""The plan as a value and as a file: round trips, the published schema, and files that are no plans."""

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import MeshSpec, parse_placement
from planner.errors import MeshError, PlanFormatError, PlanKeyError, PlanLayoutError, PlanTypeError
from planner.plan.document import SCHEMA_FILE, json_schema
from planner.plan.sharding_plan import CollectiveEstimate, Estimate, Job, PlanMesh, Port, ShardingPlan, SolverReport

MESH = PlanMesh.parse("dp=2,tp=4")
SPLIT = (Shard(0), Replicate())
WHOLE = (Replicate(), Replicate())


def full_plan() -> ShardingPlan:
    """A plan with something in every field."""
    return ShardingPlan(
        mesh=MESH,
        plan={"layers.*.weight": (Shard(0), parse_placement("SS(0,8)")), "ebc": "bags"},
        compute_plan={"layers.*.weight": (Replicate(), Shard(1))},
        gradient_plan={"layers.*.weight": (Shard(0), Shard(1))},
        fully_shard={"layers.*": ("weight", "mlp.up.weight")},
        input_plan={
            "layers.*.input": {"0": Port(layout=WHOLE, grad=(Replicate(), Partial()), source=SPLIT, source_grad=SPLIT)},
            "relu.input": SPLIT,
            "named.input": {"layout": Port(layout=SPLIT), "grad": Port(layout=SPLIT)},
        },
        output_plan={"": (SPLIT, None, Port(layout=WHOLE, grad=SPLIT)), "head.output": (Replicate(), Partial("avg"))},
        keep_gathered=("layers.*",),
        return_local_tensor=("",),
        activation_checkpointing={"layers.*": "full", "head": "selective"},
        micro_batches=4,
        estimate=Estimate(
            step_time_s=1.5,
            forward_s=0.5,
            backward_s=0.75,
            grad_reduce_s=0.125,
            optimizer_s=0.125,
            peak_memory_bytes=80_000_000_000,
            memory={"parameters": 2, "activations": 3},
            collectives=(
                CollectiveEstimate(kind="all_gather", axis="dp", phase="recompute", count=3, bytes=2**40, time_s=1e-3),
            ),
        ),
        solver=SolverReport(name="cbc", status="optimal", objective_s=1.5, bound_s=1.5, gap=0.0, time_s=0.25),
        job=Job(batch=128, seq=8192, micro_batches=4, ac="full"),
        cluster={"nodes": 2, "devices_per_node": 4, "device": "h100-sxm-80gb"},
        fingerprint={"model": "abc", "torch": "2.13"},
        timings={"trace_s": 1.25, "solve_s": 3.0},
        notes=("seq is ignored: ü",),
    )


def check_schema(document: Any) -> None:
    jsonschema.validate(document, json_schema(), cls=jsonschema.Draft202012Validator)


def test_a_plan_comes_back_equal_from_its_file(tmp_path: Path) -> None:
    plan = full_plan()
    plan.save(tmp_path / "plan.json")
    again = ShardingPlan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.to_dict() == plan.to_dict()
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


PLACEMENTS: st.SearchStrategy[Placement] = st.sampled_from(
    [Replicate(), Shard(0), Shard(11), Partial(), Partial("avg"), parse_placement("SS(1,8)")]
)
LAYOUTS = st.tuples(PLACEMENTS, PLACEMENTS)
PORTS = st.builds(
    Port, layout=LAYOUTS, grad=st.none() | LAYOUTS, source=st.none() | LAYOUTS, source_grad=st.none() | LAYOUTS
)
NAMES = st.sampled_from(["0", "x", "layout", "grad", "source", "position_embeddings.0"])
SPECS = (
    PORTS
    | st.lists(st.none() | PORTS, min_size=1, max_size=3).map(tuple).filter(any)
    | st.dictionaries(NAMES, PORTS, min_size=1, max_size=3)
)


@given(SPECS)
def test_every_spelling_of_ports_comes_back_equal_and_fits_the_schema(spec: Any) -> None:
    plan = ShardingPlan(mesh=MESH, input_plan={"a.input": spec}, output_plan={"a": spec})
    document = json.loads(json.dumps(plan.to_dict()))
    assert ShardingPlan.from_dict(document) == plan
    check_schema(document)


def test_the_published_schema_is_current_and_is_itself_a_schema() -> None:
    # Renew: .venv/bin/python -m planner.plan.document > planner/plan/plan.schema.json
    assert json.loads(SCHEMA_FILE.read_text()) == json_schema()
    assert json_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_saved_plans_fit_the_schema(tmp_path: Path) -> None:
    for plan in (full_plan(), ShardingPlan(mesh=MESH)):
        plan.save(tmp_path / "plan.json")
        check_schema(json.loads((tmp_path / "plan.json").read_text()))


def test_a_file_says_only_what_its_writer_meant() -> None:
    text = full_plan().to_json()
    assert '"layers.*.weight": ["S(0)", "SS(0,8)"]' in text
    assert '"relu.input": ["S(0)", "R"]' in text
    assert '"mesh": {"names": ["dp", "tp"], "shape": [2, 4], "device": "cuda"}' in text


def test_a_minimal_document_is_a_plan() -> None:
    mesh = {"names": ["dp"], "shape": [2], "device": "cpu"}
    document = {"$schema": "plan.schema.json", "format_version": 1, "mesh": mesh, "plan": {"weight": ["S(0)"]}}
    check_schema(document)
    plan = ShardingPlan.from_dict(document)
    assert plan == ShardingPlan(mesh=PlanMesh(axes=(("dp", 2),), device="cpu"), plan={"weight": (Shard(0),)})


BROKEN: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "placement": (("plan", "layers.*.weight", 0), "Q(0)", "plan/layers.*.weight/0: 'Q(0)' is no placement"),
    "placement in a port": (
        ("input_plan", "layers.*.input", "0", "grad"),
        ["R", "S"],
        "input_plan/layers.*.input/0/grad/1",
    ),
    "too few placements": (("plan", "layers.*.weight"), ["R"], "1 placement(s) for 2 axes"),
    "partial parameter": (("plan", "layers.*.weight"), ["R", "P(sum)"], "cannot be partial"),
    "no ports": (("input_plan", "relu.input"), [], "input_plan/relu.input"),
    "unknown field": (("colour",), "red", "colour: there is no such field"),
    "unknown field of the estimate": (("estimate", "colour"), 1, "estimate/colour: there is no such field"),
    "number as text": (("estimate", "step_time_s"), "1", "estimate/step_time_s"),
    "bool for a number": (("micro_batches",), True, "micro_batches"),
    "no micro-batches": (("micro_batches",), 0, "micro_batches"),
    "unknown phase": (("estimate", "collectives", 0, "phase"), "lunch", "estimate/collectives/0/phase"),
    "axes without sizes": (("mesh", "shape"), [2], "2 names for 1 sizes"),
    "axis name": (("mesh", "names"), ["d p", "tp"], "d p"),
    "impossible job": (("job", "batch"), -1, "job: batch is -1"),
    "unknown optimizer type": (("job", "optimizer"), 3, "job/optimizer"),
    "checkpointing": (("activation_checkpointing", "head"), "none", "activation_checkpointing/head"),
    "bad key": (("plan",), {"a..b": ["R", "R"]}, "empty component"),
    "another version": (("format_version",), 2, "format version 2"),
    "empty group": (("fully_shard", "layers.*"), [], "fully_shard/layers.*"),
    "one name for a list": (("fully_shard", "layers.*"), "weight", "fully_shard/layers.*"),
    "name that is no text": (("fully_shard", "layers.*", 0), 1, "fully_shard/layers.*/0"),
    "name twice in a group": (("fully_shard", "layers.*"), ["weight", "weight"], "'weight' twice for 'layers.*'"),
    "nan": (("timings", "trace_s"), float("nan"), "timings/trace_s"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_place_is_named(name: str, tmp_path: Path) -> None:
    path, value, message = BROKEN[name]
    document: Any = json.loads(full_plan().to_json())
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document))
    with pytest.raises(PlanFormatError) as caught:
        ShardingPlan.load(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert caught.value.what_to_do


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\x80\x04\x95",
        b"null",
        b"[]",
        b'"plan"',
        b'{"a": 1}',
        b"{}",
        b"[" * 100_000,
        b'{"mesh": 1e999',
        b"9" * 5000,
    ],
    ids=lambda content: repr(content[:10]),
)
def test_foreign_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanFormatError, match="not a plan") as caught:
        ShardingPlan.load(tmp_path / "plan.json")
    assert caught.value.file == str(tmp_path / "plan.json")
    assert caught.value.what_to_do


def test_no_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(PlanFormatError, match="Cannot read"):
            ShardingPlan.load(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    text = full_plan().to_json().rstrip()
    file = tmp_path / "plan.json"
    for length in range(0, len(text), 17):
        file.write_text(text[:length])
        with pytest.raises(PlanFormatError, match="no complete JSON text"):
            ShardingPlan.load(file)


def test_saving_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    ShardingPlan(mesh=MESH).save(file)
    before = file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o666 & ~_umask()

    def broken(source: str, target: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        full_plan().save(file)
    assert file.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_plan_that_contradicts_itself_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(PlanLayoutError, match="placement"):
        ShardingPlan(mesh=MESH, plan={"weight": (Shard(0),)}).save(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_bare_layouts_become_ports_as_torch_and_hyperparallel_write_them() -> None:
    plan = ShardingPlan(
        mesh=MeshSpec.parse("dp=2,tp=4"),  # type: ignore[arg-type]
        plan={"weight": [Shard(0), Replicate()]},  # type: ignore[dict-item]
        input_plan={"input": SPLIT, "relu.input": [SPLIT, None], "add.input": {"x": SPLIT}},  # type: ignore[dict-item]
        return_local_tensor=["relu"],  # type: ignore[arg-type]
    )
    plan.validate()
    assert plan.mesh == MESH
    assert plan.mesh.spec == MeshSpec.parse("dp=2,tp=4")
    assert plan.plan == {"weight": SPLIT}
    port = Port(layout=SPLIT)
    assert plan.input_plan == {"input": port, "relu.input": (port, None), "add.input": {"x": port}}
    assert plan.return_local_tensor == ("relu",)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"plan": {"weight": 3}}, PlanTypeError),
        ({"plan": {"weight": ""}}, PlanTypeError),
        ({"plan": {"weight": ()}}, PlanTypeError),
        ({"plan": {"weight": (Shard(0), "R")}}, PlanTypeError),
        ({"plan": {3: SPLIT}}, PlanTypeError),
        ({"plan": [SPLIT]}, PlanTypeError),
        ({"compute_plan": {"weight": "bags"}}, PlanTypeError),
        ({"fully_shard": {"block": "weight"}}, PlanTypeError),
        ({"fully_shard": {"block": ()}}, PlanTypeError),
        ({"fully_shard": {"block": ("weight", "")}}, PlanTypeError),
        ({"fully_shard": {"a..b": ("weight",)}}, PlanKeyError),
        ({"input_plan": {"input": "R"}}, PlanTypeError),
        ({"output_plan": {"": [None]}}, PlanTypeError),
        ({"output_plan": {"": {"x": 3}}}, PlanTypeError),
        ({"output_plan": {"": {}}}, PlanTypeError),
        ({"return_local_tensor": "relu"}, PlanTypeError),
        ({"keep_gathered": "relu"}, PlanTypeError),
        ({"activation_checkpointing": {"": "none"}}, PlanTypeError),
        ({"micro_batches": 0}, MeshError),
        ({"mesh": "dp=2"}, PlanTypeError),
        ({"plan": {"weight": (Shard(-1), Replicate())}}, PlanLayoutError),
        ({"plan": {"weight": (Partial(), Replicate())}}, PlanLayoutError),
        ({"input_plan": {"input": (Shard(0),)}}, PlanLayoutError),
        ({"output_plan": {"": Port(layout=SPLIT, grad=(Shard(0),))}}, PlanLayoutError),
        ({"return_local_tensor": ("a..b",)}, PlanKeyError),
    ],
)
def test_validate_names_the_wrong_entry(fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        ShardingPlan(**{"mesh": MESH, **fields}).validate()
