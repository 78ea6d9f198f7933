"""``PlanMesh``: the mesh that a plan is for, with its device type."""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.layouts.layout import MeshSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMesh(MeshSpec):
    """A mesh of one device type, as torch names it: "cuda" (ROCm too) or "cpu"."""

    device: str = "cuda"

    @classmethod
    def from_mesh(cls, mesh: MeshSpec, device: str = "cuda") -> PlanMesh:
        """Return ``mesh`` with the device type ``device``."""
        return cls(axes=mesh.axes, device=device)

    @property
    def spec(self) -> MeshSpec:
        """The axes alone, as a ``MeshSpec``, for comparisons: a ``PlanMesh`` never equals a ``MeshSpec``."""
        return MeshSpec(axes=self.axes)


UNSTATED = PlanMesh(axes=(("unstated", 1),))
"""The mesh of a plan that names none: ``shard_module`` takes the mesh that it is called with."""
