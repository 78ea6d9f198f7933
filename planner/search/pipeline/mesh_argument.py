"""A mesh argument with pipeline stages: its outermost axis is ``pp``, the other axes are the mesh of one stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cost_model.layouts.layout import MeshSpec
from planner.errors import InfeasibleError, MeshError
from planner.pricing.run_spec import PIPELINE_AXIS


def given_stages(
    mesh: MeshSpec,
    planner: str,
    obstacle: str | None,
    numbers: Collection[int],
    micro_batches: Sequence[int],
    *,
    executable_only: bool,
) -> tuple[int, MeshSpec] | None:
    """Return the number of stages of a mesh and the mesh of one stage; None where it has no axis ``pp``.

    Args:
        mesh: the mesh that the job fixes.
        planner: name of the planner that the job asks for.
        obstacle: the reason why the job cannot have pipeline stages; None if it can.
        numbers: numbers of stages that the cluster and the model can be split into.
        micro_batches: sizes of micro-batches, in samples, that may be chosen.
        executable_only: whether only plans that can be run are asked for.

    Raises:
        MeshError: the mesh has an axis ``pp``, but no such pipeline can be planned.
    """
    if PIPELINE_AXIS not in mesh.names:
        return None
    if mesh.names[0] != PIPELINE_AXIS or len(mesh.names) == 1:
        raise MeshError(
            f"mesh {mesh}: {PIPELINE_AXIS} is the axis of pipeline stages, and must be the outermost of several axes.",
            what_to_do=f"Write {PIPELINE_AXIS} first and the axes of a stage after it, such as pp=4,dp=2,tp=8.",
        )
    stages, inner = mesh.shape[0], MeshSpec(axes=mesh.axes[1:])
    if planner != "ilp":
        raise MeshError(f"mesh {mesh}: {planner} plans no pipelines.", what_to_do="Choose the planner ilp.")
    if obstacle is not None:
        can_ask = (
            "--no-executable-only (executable_only=False) plans pipelines, which cannot be run here yet; or choose"
        )
        raise MeshError(
            f"mesh {mesh} asks for a pipeline, and there is none: {obstacle}.",
            what_to_do=f"{can_ask if executable_only else 'Choose'} a mesh without {PIPELINE_AXIS}.",
        )
    if stages not in numbers:
        raise MeshError(
            f"mesh {mesh}: the cluster and the blocks of the model cannot be split into {stages} stages.",
            what_to_do=f"Choose {', '.join(map(str, sorted(numbers))) or 'no'} stages.",
        )
    if all(samples % inner.shape[0] for samples in micro_batches):
        raise MeshError(
            f"mesh {mesh}: axis {inner.names[0]} divides the samples of no micro-batch.",
            what_to_do="Make the first axis of a stage smaller, or the batch larger.",
        )
    return stages, inner


def no_pipeline(mesh: str, memory_bytes: int, *, more_micro_batches: bool) -> InfeasibleError:
    """Return the error that no plan on a mesh with stages fits ``memory_bytes`` per device.

    Args:
        mesh: the mesh as given.
        memory_bytes: cap on the peak per device.
        more_micro_batches: whether the job fixes fewer micro-batches than the batch allows.
    """
    return InfeasibleError(
        f"No pipeline on the mesh {mesh} fits {memory_bytes / 1e9:.2f} GB per device.",
        budget_bytes=memory_bytes,
        least_bytes=None,
        what_to_do=f"Choose more stages{', more micro-batches' if more_micro_batches else ''} or another mesh, or "
        "allow more memory.",
    )


def check_no_pipeline_axis(mesh: MeshSpec) -> None:
    """Check that a mesh has no pipeline stages.

    Raises:
        MeshError: the mesh has an axis ``pp``.
    """
    if PIPELINE_AXIS in mesh.names:
        raise MeshError(
            f"mesh {mesh}: {PIPELINE_AXIS} is the axis of pipeline stages, which this command does not plan.",
            what_to_do=f"Choose a mesh without {PIPELINE_AXIS}.",
        )
