"""A mesh that says how many stages a pipeline has: its outermost axis is ``pp``, the others are the mesh of a stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cost_model.layouts.layout import MeshSpec
from planner.errors import InfeasibleError, MeshError
from planner.pricing.run_spec import PIPELINE_AXIS


def given_stages(
    mesh: MeshSpec, planner: str, uncut: str | None, numbers: Collection[int], micro_batches: Sequence[int]
) -> tuple[int, MeshSpec] | None:
    """Return the number of stages that a mesh asks for, and the mesh of one; None where it asks for no pipeline.

    Args:
        planner: that is to plan on it.
        uncut: why the model cannot be cut into stages; None where it can.
        numbers: of stages that the cluster and the model can be cut into; asked for where there is no ``uncut`` only.
        micro_batches: samples of each micro-batch that may be chosen.

    Raises:
        MeshError: there can be no such pipeline.
    """
    if PIPELINE_AXIS not in mesh.names:
        return None
    if mesh.names[0] != PIPELINE_AXIS or len(mesh.names) == 1:
        raise MeshError(
            f"mesh {mesh}: {PIPELINE_AXIS} is the axis of pipeline stages, and has to be the outermost of several.",
            what_to_do=f"Write {PIPELINE_AXIS} first and the axes of a stage after it, such as pp=4,dp=2,tp=8.",
        )
    stages, inner = mesh.shape[0], MeshSpec(axes=mesh.axes[1:])
    if planner != "ilp":
        raise MeshError(f"mesh {mesh}: {planner} plans no pipelines.", what_to_do="Choose the planner ilp.")
    if uncut is not None:
        raise MeshError(
            f"mesh {mesh} asks for a pipeline, and there is none: {uncut}.",
            what_to_do="--no-executable-only (executable_only=False) plans pipelines, which cannot be run here yet; or "
            f"choose a mesh without {PIPELINE_AXIS}.",
        )
    if stages not in numbers:
        raise MeshError(
            f"mesh {mesh}: the nodes and the blocks of the model are not to be had in {stages} stages.",
            what_to_do=f"Choose {', '.join(map(str, sorted(numbers))) or 'no'} stages.",
        )
    if all(samples % inner.shape[0] for samples in micro_batches):
        raise MeshError(
            f"mesh {mesh}: axis {inner.names[0]} divides the samples of no micro-batch.",
            what_to_do="Make the first axis of a stage smaller, or the batch larger.",
        )
    return stages, inner


def no_pipeline(mesh: str, memory_bytes: int) -> InfeasibleError:
    """Return the error that no plan on a mesh with stages fits ``memory_bytes`` per device."""
    return InfeasibleError(
        f"No pipeline on the mesh {mesh} fits {memory_bytes / 1e9:.2f} GB per device.",
        budget_bytes=memory_bytes,
        least_bytes=None,
        what_to_do="Choose more stages, more micro-batches or another mesh, or allow more memory.",
    )


def check_no_pipeline_axis(mesh: MeshSpec) -> None:
    """Refuse a mesh that asks for a pipeline where none is meant.

    Raises:
        MeshError: it does.
    """
    if PIPELINE_AXIS in mesh.names:
        raise MeshError(
            f"mesh {mesh}: {PIPELINE_AXIS} is the axis of pipeline stages, which are not looked at here.",
            what_to_do=f"Choose a mesh without {PIPELINE_AXIS}.",
        )
