"""What communication takes in a profiled plan, by the clock that judges its run. No torch.

On GPUs, and where CPU ranks outnumber the cores, the links of the cluster price bytes and calls, as they do in the
replay of a run; on CPUs collectives also cost the ranks that call them. Where all CPU ranks have a core each, the
wall clock judges a run, and it knows nothing of the cluster's links: there the machine's own communication is measured,
by that clock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from autotune.profiling.cores import usable_cores
from autotune.profiling.profile_records import HostFigures, HostKey
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.stage_profiler import StageProfiler
from autotune.schedules.schedule import PassKind, Schedule
from autotune.space.cluster import Link
from autotune.space.model import ModelSpec

__all__ = ["Network", "measured_network"]

_NOTHING = HostFigures(0.0, 0.0)
_NO_LIMIT = 1e18  # bytes a second


@dataclass(frozen=True)
class Network:
    """Prices of a plan's communication.

    Attributes:
        tp, dp: what collectives take of the ranks that call them.
        messages: what messages take on this machine; None: the cluster's links tell.
        hand_over: whether a rank's work between its passes counts, as for the wall clock it does.
        by_links: mesh axes whose collectives the links price; `tied` is the sum of an embedding on two devices.
    """

    tp: HostFigures
    dp: HostFigures
    messages: HostFigures | None
    hand_over: bool
    by_links: Collection[str]

    def judged(self, request: TrialRequest) -> TrialRequest:
        """The request with links as they were measured."""
        if self.messages is None:
            return request
        speed = 1 / self.messages.byte_s if self.messages.byte_s > 1 / _NO_LIMIT else _NO_LIMIT
        link = Link(self.messages.call_s, speed)
        cluster = replace(request.cluster, intra_node=link, inter_node=link)
        return replace(request, cluster=cluster, link_efficiency=1.0)

    def posting_s(self, schedule: Schedule, kind: PassKind, stage: int) -> float:
        """A rank's own time for the messages that a pass reads and sends."""
        if self.messages is None or kind == "W":
            return 0.0
        place, here = schedule.placement, schedule.placement[stage]
        neighbours = [other for other in (stage - 1, stage + 1) if 0 <= other < schedule.stages]
        return self.messages.own_s * sum(place[other] != here for other in neighbours)


def measured_network(stages: StageProfiler, request: TrialRequest, crowd: int) -> Network:
    """The network of a plan, its CPU ranks measured among `crowd` processes of this machine. Raises ProfileError."""
    plan = request.plan
    if stages.device != "cpu":
        return Network(_NOTHING, _NOTHING, None, hand_over=False, by_links=("tp", "dp", "tied"))
    own_cores = crowd <= usable_cores()
    wall = own_cores and (plan.devices == crowd or plan.devices <= request.cluster.devices_per_node)

    def host(axis: str, ranks: int) -> HostFigures:
        # Of a group that spans machines, the ranks of one are measured: what others do costs no time here.
        ranks = min(ranks, crowd)
        if ranks == 1:
            return _NOTHING
        world = crowd if crowd % ranks == 0 else ranks
        if axis == "dp" and not _shardable(stages.model, world // ranks):
            world = ranks
        return stages.host_figures(HostKey(axis, ranks, world, "wall" if wall else "cpu"))  # type: ignore[arg-type]

    messages = host("pp", 2) if wall and plan.pp > 1 else None  # what each device exchanges with its neighbour
    # By the wall clock all is measured but a tied embedding's sum on two devices where dp has one rank.
    by_links = ("tp", "dp", "tied") if not wall else ("tied",) if plan.dp == 1 else ()
    return Network(host("tp", plan.tp), host("dp", plan.dp), messages, own_cores, by_links)


def _shardable(model: ModelSpec, tp: int) -> bool:
    """Whether tensor parallelism of that degree can shard the model."""
    widths = (model.heads, model.kv_heads, model.hidden, model.ffn_hidden, model.sequence_length)
    return all(width % tp == 0 for width in widths)
