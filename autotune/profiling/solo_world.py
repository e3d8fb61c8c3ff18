"""A world of many ranks that has one process: groups whose collectives move nothing, so shards can be measured alone.

torch's `fake` backend answers every collective at once. Gathered and scattered tensors are filled with copies of the
rank's own, so what follows computes with sound numbers.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from autotune.profiling.mesh import AXES, MeshCache, PlanMesh

__all__ = ["SoloWorld"]

RANKS = 2**20


class SoloWorld(MeshCache):
    """The process groups of a world in which this process, rank 0 of every group, is the only one.

    Owns the process's default process group, so there can be one at a time, and none beside a real one. torch caches
    meshes by their ranks beyond the life of a group: open one world in a process.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type, timedelta(seconds=60))
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())

    @property
    def ranks(self) -> None:
        """A mesh may have any number of ranks."""
        return

    def close(self) -> None:
        """Give the default process group up."""
        dist.destroy_process_group()

    def pair(self, mesh: PlanMesh, first: int, second: int) -> dist.ProcessGroup | None:
        """The group of rank 0 and its counterpart when pipeline devices `first` and `second` are paired."""
        members = sorted(int(mesh.mesh.mesh[device, 0, 0]) for device in (first, second))
        return dist.new_group(members) if members[0] == 0 else None

    def _make(self, pp: int, dp: int, tp: int) -> PlanMesh:
        ranks = torch.arange(pp * dp * tp).view(pp, dp, tp)
        axes = (ranks[:, 0, 0], ranks[0, :, 0], ranks[0, 0, :])
        groups = [dist.new_group(axis.tolist()) for axis in axes]
        return PlanMesh(DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=AXES), 0, 0, 0)
