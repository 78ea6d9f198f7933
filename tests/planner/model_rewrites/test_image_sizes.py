"""Images that are packed: tables of their sizes, batches with them, the ops that a trace has, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from covered.popular import inputs_of
from covered.small_configs import small_model
from support.packed_images import AddsToMarks, PackedEncoder, SeesImages, inputs
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from cost_model.layouts.layout import Layout
from planner import build_plan
from planner.errors import JobError
from planner.graph.example_inputs import batch_size_of, meta_inputs, with_batch
from planner.graph.op_graph import at_batch
from planner.graph.trace_module import TRACE_BATCH, resolve_inputs, trace_module
from planner.model_rewrites.image_sizes.encoders import encoders_of_sizes
from planner.model_rewrites.image_sizes.packed_attention import packed_attention
from planner.model_rewrites.image_sizes.tables import size_tables
from planner.model_rewrites.image_sizes.values import values_of
from planner.model_rewrites.opaque_op import OP_NAME, OpaqueArguments
from planner.model_rewrites.replaced_calls.split_and_cat import parts_together
from planner.model_rewrites.tree_paths import tensors_in
from planner.plan.sharding_plan import ShardingPlan
from planner.strategies.local_ops import samples_divide
from planner.traced_job import TracedJob

TOY: dict[str, Any] = {"cluster": "1x4xtoy", "dtype": "fp32", "tolerance": 0.0}


def plan(model: nn.Module, given: dict[str, Any], **options: Any) -> ShardingPlan:
    return build_plan(model, example_inputs=given, **{**TOY, "mesh": "dp=4", **options})


# --- tables ------------------------------------------------------------------------------------------------------


def test_a_table_says_how_many_rows_another_input_has() -> None:
    given = inputs()
    (table,) = size_tables(given.values())
    assert table.tensor is given["sizes"]
    assert table.packed is given["patches"]


@pytest.mark.parametrize(
    "other",
    [
        {"sizes": torch.tensor([[1, 2, 4]])},  # counts fewer rows
        {"sizes": torch.ones(16, 3, dtype=torch.long), "patches": torch.randn(16, 12)},  # ids, one for each row
        {"sizes": torch.zeros(16, 3, dtype=torch.long, device="meta")},  # no values
    ],
)
def test_other_integers_are_no_table(other: dict[str, Tensor]) -> None:
    assert not size_tables({**inputs(), **other}.values())


@pytest.mark.parametrize("first", ["ids", "patches", "sizes"])
def test_samples_are_counted_by_what_has_them(first: str) -> None:
    given = inputs(samples=6)
    assert batch_size_of(meta_inputs({first: given[first], **given})) == 6


def test_an_encoder_alone_has_images_as_samples() -> None:
    given = inputs(samples=6, sizes=((1, 4, 4),))
    assert batch_size_of(meta_inputs((given["patches"], given["sizes"]))) == 6


def test_another_batch_has_as_many_images_for_each_sample() -> None:
    resized = with_batch(meta_inputs(inputs(samples=6)), 6, 3).kwargs
    assert {name: tuple(tensor.shape) for name, tensor in resized.items()} == {
        "ids": (3, 16),
        "patches": (3 * 24, 12),
        "sizes": (6, 3),
        "labels": (3, 16),
    }
    values = values_of(resized["sizes"])
    assert values is not None
    assert values.tolist() == [[1, 2, 4], [1, 4, 4]] * 3


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_position_ids_have_their_samples_second(samples: int) -> None:
    given = {**inputs(samples), "position_ids": torch.zeros(3, samples, 16, dtype=torch.long)}
    resized = with_batch(meta_inputs(given), samples, 8).kwargs
    assert tuple(resized["position_ids"].shape) == (3, 8, 16)


def test_images_of_other_sizes_are_refused_by_name_and_sample() -> None:
    given = inputs(samples=2)
    given["sizes"] = torch.tensor([[1, 2, 4], [1, 4, 4], [1, 4, 4], [1, 2, 4]])
    with pytest.raises(JobError, match="sizes has other sizes for sample 1 than for sample 0: 1x4x4, 1x2x4, not 1x2x4"):
        plan(SeesImages(), given)


def test_images_that_samples_do_not_share_are_refused() -> None:
    given = inputs(samples=2)
    given["sizes"] = torch.tensor([[1, 2, 4], [1, 4, 4], [1, 4, 6]])
    with pytest.raises(JobError, match="sizes has 3 images for 2 samples"):
        plan(SeesImages(), given)


# --- the trace ---------------------------------------------------------------------------------------------------


def test_the_module_that_reads_sizes_is_one_op_and_the_rest_is_planned() -> None:
    traced = trace_module(SeesImages(), example_inputs=inputs(), dtype="fp32")
    names = [op.target_name for op in traced.graph.ops]
    (opaque,) = [op for op in traced.graph.ops if op.target_name == OP_NAME]
    call = OpaqueArguments(*opaque.args)
    assert call.split == "0=0;0"
    assert call.cause == "it reads the sizes of images"
    assert call.rows == [24]
    assert traced.any_batch
    assert "aten.masked_scatter.default" in names
    assert not {"aten.cat.default", "aten.split_with_sizes.default"} & set(names)
    (opaque,) = [op for op in at_batch(traced.graph, traced.traced_batch, 3).ops if op.target_name == OP_NAME]
    assert OpaqueArguments(*opaque.args).sizes == [18, 16]


def test_samples_stay_with_their_images() -> None:
    made = plan(SeesImages(), inputs())
    assert made.opaque_modules == {"encoder": "0=0;0"}
    assert made.verification is not None
    assert made.verification.outcome == "as-planned"
    layouts = {name: port.layout for name, port in made.input_plan["input"].items()}  # type: ignore[union-attr]
    assert layouts["patches"] == layouts["ids"]
    assert "sizes" not in layouts


def test_no_rank_has_a_part_of_a_sample() -> None:
    """Two samples on four ranks: the rows of patches would divide, the samples do not."""
    made = plan(SeesImages(), inputs(samples=2), micro_batches=1, mesh="dp=4")
    assert made.verification is not None
    assert made.verification.outcome == "as-planned"
    graph = at_batch(trace_module(SeesImages(), example_inputs=inputs(), dtype="fp32").graph, TRACE_BATCH, 2)
    (op,) = [op for op in graph.ops if op.target_name == OP_NAME]
    shapes = [graph.values[name].shape for name in op.inputs]
    split: list[Layout | None] = [(Shard(0),), *[(Replicate(),)] * (len(shapes) - 1)]
    assert samples_divide(op, shapes, split, (2,))
    assert not samples_divide(op, shapes, split, (4,))


class UsesParts(nn.Module):
    """Reads the features of each image by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = PackedEncoder()

    def forward(self, patches: Tensor, sizes: Tensor) -> Tensor:
        parts = torch.split(self.encoder(patches, sizes), (sizes.prod(-1) // 4).tolist())
        return torch.stack([part.mean(0) for part in parts])


def test_parts_that_are_read_are_split_off() -> None:
    given = inputs(samples=4, sizes=((1, 4, 4),))
    made = plan(UsesParts(), {"patches": given["patches"], "sizes": given["sizes"]}, micro_batches=1)
    assert made.verification is not None
    assert made.verification.outcome == "as-planned"


def test_rows_that_are_added_to_selected_ones_are_put_in_their_places() -> None:
    graph = trace_module(AddsToMarks(), example_inputs=inputs(), dtype="fp32").graph
    names = [op.target_name for op in graph.ops]
    assert names.count("aten.masked_scatter.default") == 1
    assert names.count(OP_NAME) == 1


def test_parts_are_a_sequence() -> None:
    x = torch.randn(6, 2)
    expected = x.split([1, 2, 3])
    with parts_together(lambda tensor: True):
        parts = torch.split(x, [1, 2, 3])
        assert torch.cat(parts) is x
        assert torch.equal(torch.cat(parts[1:]), x[1:])
        assert torch.equal(torch.cat([*parts], 0), x)
        assert len(parts) == 3
        assert [tuple(part.shape) for part in parts] == [tuple(part.shape) for part in expected]
        assert torch.equal(parts[-1], expected[-1])
        assert isinstance(x.split(2), tuple)
        assert isinstance(torch.split(x, [1, 1], dim=1), tuple)


def test_attention_of_large_images_keeps_no_scores() -> None:
    """As on a GPU: what autograd saves grows as the pieces do, not as their square."""

    def saved(side: int) -> int:
        table = torch.tensor([[1, side, side]] * 8)
        given = {"patches": torch.empty(8 * side * side, 12, device="meta"), "sizes": table}
        graph = trace_module(PackedEncoder(), example_inputs=given, dtype="fp32").graph
        (op,) = [op for op in graph.ops if op.target_name == OP_NAME]
        return OpaqueArguments(*op.args).costs.saved_nbytes

    assert saved(32) < 1.1 * 64 * saved(4)


def test_equal_layers_of_an_encoder_are_stored_alike() -> None:
    job = TracedJob(SeesImages(), example_inputs=inputs(), **TOY)
    classes = [set(each.values) for each in job._analysis.structure(8).parameters]
    names = dict(job._analysis.graph.parameters)
    weights = {value for value, each in names.items() if re.fullmatch(r"encoder\.layers\.\d\.weight", each[0])}
    assert len(weights) == 3
    assert weights in classes


def test_what_the_encoder_frees_is_no_peak() -> None:
    """Its backward holds the gradients of a layer or two, not those of all layers."""

    class Deep(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.encoder = PackedEncoder()
            self.encoder.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(depth))

        def forward(self, patches: Tensor, sizes: Tensor) -> Tensor:
            return self.encoder(patches, sizes).sum()

    given = {name: value for name, value in inputs(8, ((1, 4, 4),)).items() if name in ("patches", "sizes")}

    def rise(depth: int) -> int:
        graph = trace_module(Deep(depth), example_inputs=given, dtype="fp32").graph
        (op,) = [op for op in graph.ops if op.target_name == OP_NAME]
        return OpaqueArguments(*op.args).costs.rise_nbytes

    assert rise(12) < 1.2 * rise(3)


# --- models of transformers --------------------------------------------------------------------------------------


def of_transformers(name: str, samples: int = 8) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = small_model(name)
    return model, inputs_of(model, samples)


def test_position_ids_are_made_before_the_forward() -> None:
    model, given = of_transformers("qwen2_5_vl", 4)
    made = resolve_inputs(model, given, batch=None, seq=None, phase="training").kwargs["position_ids"]
    expected, _ = model.model.get_rope_index(  # type: ignore[union-attr,operator]
        given["input_ids"], given["mm_token_type_ids"], given["image_grid_thw"]
    )
    values = values_of(made)
    assert values is not None
    assert torch.equal(values, expected)
    assert model.model.rope_deltas is None  # type: ignore[union-attr]


def test_only_the_encoder_reads_sizes() -> None:
    model, given = of_transformers("qwen2_5_vl", 2)
    call = resolve_inputs(model, given, batch=None, seq=None, phase="training")
    assert encoders_of_sizes(model.to("meta"), call.args, call.kwargs) == ["model.visual"]
    assert all("forward" not in vars(part) for part in model.modules())


def test_tokens_that_do_not_go_with_the_images_are_an_error_of_the_job() -> None:
    model, given = of_transformers("qwen2_5_vl", 2)
    given["mm_token_type_ids"] = torch.ones_like(given["mm_token_type_ids"])
    given["mm_token_type_ids"][:, ::2] = 0
    with pytest.raises(JobError, match="position_ids of these inputs: there are fewer images"):
        plan(model, given)


@pytest.mark.parametrize("sizes", [[[1, 4, 4], [1, 4, 4]], [[1, 4, 8], [1, 4, 4], [2, 4, 4]]])
def test_attention_of_packed_images_is_that_of_a_loop(sizes: list[list[int]]) -> None:
    torch.manual_seed(0)
    model = small_model("qwen2_5_vl")
    encoder = model.model.visual.eval()
    table = torch.tensor(sizes)
    patches = torch.randn(int(table.prod(-1).sum()), encoder.patch_embed.proj.weight[0].numel())
    expected = encoder(patches, table)
    with packed_attention(encoder):
        found = encoder(patches, table)
    for one, other in zip(tensors_in(expected), tensors_in(found), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_video_is_planned() -> None:
    model, given = of_transformers("qwen2_5_vl", 4)
    config = model.config
    ids = given["input_ids"].masked_fill(given["input_ids"] == config.image_token_id, config.video_token_id)
    kinds = 2 * given["mm_token_type_ids"]
    video = {"pixel_values_videos": given["pixel_values"], "video_grid_thw": given["image_grid_thw"]}
    made = plan(model, {"input_ids": ids, "mm_token_type_ids": kinds, **video, "labels": ids})
    assert made.opaque_modules == {"model.visual": "0=0;0 0"}
    assert made.verification is not None
    assert made.verification.outcome == "as-planned"


def test_tables_on_meta_are_refused_as_before() -> None:
    model, given = of_transformers("qwen2_5_vl", 4)
    given = {name: v.to("meta") if isinstance(v, Tensor) else v for name, v in given.items()}
    with pytest.raises(JobError, match="image_grid_thw is on the meta device"):
        plan(model, given)


def test_masks_select_what_each_sample_has() -> None:
    """Of rows like the target's, any number may be taken: such an op stays whole."""

    class Scatters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return x.masked_scatter(x > 0, torch.ones_like(x))

    made = plan(Scatters(), {"x": torch.randn(8, 4, 8)}, micro_batches=1)
    assert made.verification is not None
    assert made.verification.outcome == "as-planned"
