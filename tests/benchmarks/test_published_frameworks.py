"""What a published row says of its framework and its version decides what the cost model takes it to do."""

import pytest
from published.frameworks.assumptions import assumptions_of
from published.frameworks.configuration import UnknownConfigurationError, configuration_of
from published.rows.models import model_of
from support.published_rows import RUN

from cost_model.configuration.implementation import Implementation


def test_what_rows_say_of_their_run_changes_the_implementation() -> None:
    def implementation(**change: str) -> Implementation:
        found = assumptions_of({**RUN, **change})
        assert found is not None
        return found.implementation

    tensorwise = implementation(precision="bf16+fp8 tensorwise (fp8 all-gather)")
    rowwise = implementation(precision="bf16+fp8 rowwise")
    assert tensorwise.low_precision.casts_before_gather
    assert tensorwise.low_precision.casts_shards
    assert not rowwise.low_precision.casts_before_gather
    assert rowwise.low_precision.rescale_nbytes > 0
    assert implementation(precision="nvfp4").saving.selective_cast_gemms == "none"
    early = implementation(act_ckpt="graph SAC", source_date="2026-03-13", model="DeepSeek-V3-16B")
    late = implementation(compile="Y (graph_trainer)", source_date="2026-06-02")
    assert (early.kernels.attention, early.data_parallel.overlaps) == ("dense", False)
    assert (late.saving.selective_gemms, late.kernels.host_ops_per_layer) == ("all", 0)
    automodel = implementation(framework="NeMo AutoModel", n_experts="32")
    assert (automodel.data_parallel.reshard_after_forward, automodel.data_parallel.defers_reduction) == (False, True)
    assert assumptions_of({**RUN, "framework": "Abacus"}) is None


def test_a_run_may_state_its_own_vocabulary_and_leave_expert_ranks_to_its_framework() -> None:
    assert model_of({**RUN, "notes": "vocab 129280 in this run"}).vocab == 129280
    row = {**RUN, "framework": "NeMo AutoModel", "model": "GPT-OSS-20B", "n_experts": "32"}
    assumed = assumptions_of(row)
    assert assumed is not None
    assert configuration_of(row, assumed).expert == 8
    with pytest.raises(UnknownConfigurationError, match="devices"):
        configuration_of({**row, "n_gpus": "?"}, assumed)


def test_interleaved_stages_of_torchtitan_are_two_per_rank_where_the_row_does_not_count_them() -> None:
    row = {**RUN, "pp": "4", "n_gpus": "16", "gbs": "32", "fsdp": "4"}
    assumed = assumptions_of(row)
    assert assumed is not None
    plain = configuration_of(row, assumed)
    interleaved = configuration_of({**row, "config_notes": "PP schedule Interleaved 1F1B"}, assumed)
    stated = configuration_of({**row, "config_notes": "Interleaved1F1B", "vp": "3"}, assumed)
    assert (plain.schedule, plain.virtual_stages) == ("1f1b", 1)
    assert (interleaved.schedule, interleaved.virtual_stages, stated.virtual_stages) == ("interleaved", 2, 3)


def test_what_torchtitan_holds_changes_with_its_versions() -> None:
    def implementation(**change: str) -> Implementation:
        row = {**RUN, "framework": "torchtitan", "compile": "N", "tp": "1", "source_date": "2025-02-05"}
        found = assumptions_of({**row, **change})
        assert found is not None
        return found.implementation

    usual = implementation()
    assert (usual.loss.logit_nbytes, usual.loss.logit_hole_nbytes) == (12.0, 2.0)
    assert usual.allocator.gather_stream
    assert usual.allocator.reduce_stream
    assert usual.data_parallel.root_holds_ends
    assert usual.allocator.expandable_segments
    assert implementation(source_date="2024-06-05").loss.logit_nbytes == 16.0  # float32 logits are live, too
    assert not implementation(source_date="2024-06-05").allocator.expandable_segments
    compiled = implementation(source_date="2025-06-13", compile="Y")
    assert (compiled.loss.logit_nbytes, compiled.loss.logit_hole_nbytes) == (4.0, 0.0)
    assert implementation(tp="2").loss.logit_nbytes == 16.0  # loss parallelism
    assert not implementation(source_date="2024-03-28", tp="2").loss.vocabulary_parallel
    late = {"source_date": "2025-08-01"}
    assert not implementation(**late).data_parallel.root_holds_ends
    assert implementation(**late, n_experts="64").data_parallel.root_holds_ends
    assert not implementation(**late, n_experts="64").experts.shards_shared_experts
    assert implementation(source_date="2025-08-13", n_experts="64").experts.shards_shared_experts
    pipeline = implementation(source_date="2025-10-21", pp="4")
    assert (pipeline.pipeline.preallocates_receives, pipeline.pipeline.retains_outputs) == (True, True)
    assert not implementation(source_date="2025-10-22", pp="4").pipeline.retains_outputs
    assert (usual.pipeline.preallocates_receives, usual.pipeline.retains_outputs) == (False, False)
    days = ("2025-11-20", "2026-03-13", "2026-04-06")
    combines = [implementation(source_date=day).experts.float32_combine for day in days]
    assert combines == [False, True, False]
    assert usual.experts.router_nbytes == 0
    assert implementation(source_date="2026-03-04").experts.router_nbytes == 4
    chunked = implementation(source_date="2026-05-01")
    assert (chunked.loss.chunks, chunked.loss.input_nbytes) == (8, 10.0)
    rowwise = implementation(precision="bf16+fp8 rowwise", notes="saves abs() of weights")
    assert rowwise.saving.selective_weight_nbytes == 2.0


def test_who_sets_expandable_segments() -> None:
    def expands(**change: str) -> bool:
        row = {**RUN, "framework": "torchtitan", "source_date": "2025-08-08", **change}
        found = assumptions_of(row)
        assert found is not None
        return found.implementation.allocator.expandable_segments

    assert expands()
    assert not expands(gpu="MI300X")
    assert expands(gpu="MI300X", source_date="2026-06-01")
    assert not expands(source="pytorch/torchtitan commit bcc09297a message (#3914)")
    assert not expands(source_date="2024-10-21")
    assert not expands(framework="torchtune")


def test_graph_trainer_computes_and_communicates_on_one_stream_and_does_not_cut_its_loss() -> None:
    row = {**RUN, "framework": "torchtitan", "compile": "Y (graph_trainer)", "source_date": "2026-06-02"}
    found = assumptions_of(row)
    assert found is not None
    assert not found.implementation.allocator.gather_stream
    assert not found.implementation.allocator.reduce_stream
    assert found.implementation.loss.chunks == 1


def test_what_graph_trainers_graphs_keep_changes_with_its_versions() -> None:
    def implementation(**change: str) -> Implementation:
        row = {**RUN, "framework": "torchtitan", "compile": "Y (graph_trainer)", "source_date": "2026-03-13"}
        found = assumptions_of({**row, **change})
        assert found is not None
        return found.implementation

    early, bare, late = implementation(), implementation(act_ckpt="none"), implementation(source_date="2026-06-02")
    assert not early.saving.frees_in_backward
    assert early.data_parallel.saves_cast_shards
    assert early.allocator.gradient_holes
    assert early.data_parallel.reshard_after_forward
    assert not bare.data_parallel.reshard_after_forward
    assert late.saving.frees_in_backward
    assert not late.data_parallel.saves_cast_shards
    assert not late.allocator.gradient_holes
    assert late.saving.full_attention
    experts = {"source_date": "2026-06-02", "model": "DeepSeek-V3", "n_experts": "64"}
    hopper, blackwell = implementation(**experts, gpu="H100 SXM 80GB"), implementation(**experts, gpu="GB200")
    assert not hopper.saving.full_attention
    assert (hopper.allocator.gradient_holes, blackwell.allocator.gradient_holes) == (True, False)
    assert hopper.kernels.host_ops_per_layer > blackwell.kernels.host_ops_per_layer == 0
