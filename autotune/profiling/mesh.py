"""Process groups of a plan: ranks laid out as pp x dp x tp, tp innermost."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["MeshCache", "PlanMesh"]

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class PlanMesh:
    """This rank's place in a plan's process groups.

    Attributes:
        mesh: three-dimensional, axes `pp`, `dp`, `tp`.
        pp_rank, dp_rank, tp_rank: coordinates of this rank; pp_rank is its device in the schedule.
    """

    mesh: DeviceMesh
    pp_rank: int
    dp_rank: int
    tp_rank: int

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in `axis` alone."""
        return self.mesh.get_group(axis)


@dataclass
class MeshCache:
    """Process groups made so far in this launch; plans of equal degrees share them.

    Groups are kept until the process ends: torch's sharding caches compare meshes by their ranks, so a mesh that was
    destroyed would come back through an equal one.

    Attributes:
        device_type: `cpu` or `cuda`.
        timeout: how long a collective of any of the groups may take.
        backend: of the groups; None: that of the default process group.
    """

    device_type: str
    timeout: timedelta
    backend: str | None = None
    _meshes: dict[tuple[int, int, int], PlanMesh] = field(default_factory=dict)
    _pairs: dict[tuple[int, int, int, int, int], dist.ProcessGroup | None] = field(default_factory=dict)

    @property
    def ranks(self) -> int | None:
        """Ranks that every mesh must have; None when any number will do."""
        return dist.get_world_size()

    def get(self, pp: int, dp: int, tp: int) -> PlanMesh:
        """The mesh of these degrees. Every rank must ask for the same meshes in the same order."""
        key = (pp, dp, tp)
        if key not in self._meshes:
            self._meshes[key] = self._make(*key)
        return self._meshes[key]

    def pair(self, mesh: PlanMesh, first: int, second: int) -> dist.ProcessGroup | None:
        """The group of this rank and its counterpart when pipeline devices `first` and `second` are paired.

        None on other pipeline devices. Every rank must call this, in the same order.
        """
        ranks = mesh.mesh.mesh
        key = (*ranks.shape, first, second)
        if key not in self._pairs:
            mine = None
            for dp_rank in range(ranks.shape[1]):
                for tp_rank in range(ranks.shape[2]):
                    members = [int(ranks[device, dp_rank, tp_rank]) for device in (first, second)]
                    group = dist.new_group(members, timeout=self.timeout, backend=self.backend)
                    if dist.get_rank() in members:
                        mine = group
            self._pairs[key] = mine
        return self._pairs[key]

    def _make(self, pp: int, dp: int, tp: int) -> PlanMesh:
        world, rank = dist.get_world_size(), dist.get_rank()
        assert pp * dp * tp == world, f"a mesh of {pp} x {dp} x {tp} in a world of {world} ranks"
        ranks = torch.arange(world).view(pp, dp, tp)
        groups = []
        for axis in range(3):
            mine = None
            for members in ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist():
                group = dist.new_group(members, timeout=self.timeout, backend=self.backend)
                if rank in members:
                    mine = group
            assert mine is not None
            groups.append(mine)
        mesh = DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=AXES)
        place = (ranks == rank).nonzero()[0].tolist()
        return PlanMesh(mesh, *place)
