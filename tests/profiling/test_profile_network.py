"""Communication as the wall clock sees it: latencies found in a pipeline's time, messages charged to who posts them."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.profiling import profile_network
from autotune.profiling.message_cost import _latency_s, _Pipeline, solve_increasing
from autotune.profiling.profile_network import Network, measured_network
from autotune.profiling.profile_records import HostFigures, HostKey
from autotune.profiling.protocol import TrialRequest
from autotune.schedules.costs import PassCosts
from autotune.schedules.registry import build
from autotune.schedules.schedule import Schedule
from autotune.schedules.simulate import simulate
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import TrainingSpec

NOTHING = HostFigures(0.0, 0.0)


def network(messages: HostFigures | None) -> Network:
    return Network(NOTHING, NOTHING, messages, hand_over=True, by_links=("tied",))


@pytest.mark.parametrize("hop_s", [0.0, 1e-4, 3e-3])
def test_latency_of_a_pipeline_is_found_again(hop_s: float) -> None:
    schedule = build("1f1b", 2, 8, 1)
    passes = {("F", 0): 2e-3, ("F", 1): 2.1e-3, ("BW", 0): 4e-3, ("BW", 1): 4.2e-3}
    between = (1e-4, 2e-4)
    costs = PassCosts((2.1e-3, 2.3e-3), (4.1e-3, 4.4e-3), (0.0, 0.0), hop_s, (0.0, 0.0), (0.0, 0.0))
    taken = simulate(schedule, costs).makespan
    assert _latency_s(schedule, _Pipeline(passes, between, taken, 1024)) == pytest.approx(hop_s, abs=1e-8)


def test_time_below_what_passes_take_means_no_latency() -> None:
    assert solve_increasing(lambda x: 5 + x, 3.0) == 0.0


class _Asked:
    """Stands for the machine: every kind of communication takes a second a call."""

    device = "cpu"

    def __init__(self, model: ModelSpec) -> None:
        self.model, self.keys = model, list[HostKey]()

    def host_figures(self, key: HostKey) -> HostFigures:
        self.keys.append(key)
        return HostFigures(1.0, 0.0)


@pytest.mark.parametrize(("dp", "by_links"), [(1, ("tied",)), (2, ())])
def test_sum_of_a_tied_embedding_is_priced_once(dp: int, by_links: tuple[str, ...], cores: None) -> None:
    model = ModelSpec(4, 16, 2, 2, 8, 32, 50, 8, tied_embeddings=True)
    link = Link(1.0, 1.0)
    plan = Plan(2, 1, dp, 1, 4, "1f1b", 1, (2, 2))
    cluster = ClusterSpec(1, 2 * dp, "cpu", None, link, link)
    request = TrialRequest(0, plan, build("1f1b", 2, 4, 1), model, cluster, TrainingSpec(4 * dp))
    asked = _Asked(model)
    found = measured_network(asked, request, 2 * dp)  # type: ignore[arg-type]
    assert tuple(found.by_links) == by_links
    assert found.dp.call_s == (1.0 if dp > 1 else 0.0)
    assert {key.clock for key in asked.keys} == {"wall"}


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_network, "usable_cores", lambda: 4)


def posted(schedule: Schedule) -> list[float]:
    messages = network(HostFigures(0.0, 0.0, own_s=1.0))
    return [messages.posting_s(schedule, "F", stage) for stage in range(schedule.stages)]


def test_pass_pays_for_the_messages_it_reads_and_sends() -> None:
    assert posted(build("1f1b", 3, 6, 1)) == [1.0, 2.0, 1.0]
    # In a V the stages in the middle and the ends lie on the device of a neighbour.
    assert posted(build("v-half", 2, 4, 2)) == [1.0, 1.0, 1.0, 1.0]
    assert posted(build("1f1b", 1, 4, 1)) == [0.0]
    assert network(HostFigures(0.0, 0.0, own_s=1.0)).posting_s(build("zb-h1", 2, 4, 1), "W", 0) == 0.0


def test_measured_messages_take_the_place_of_the_clusters_links() -> None:
    link = Link(1.0, 1.0)
    plan = Plan(2, 1, 1, 1, 4, "1f1b", 1, (1, 1))
    model = ModelSpec(2, 16, 2, 2, 8, 32, 50, 8, name="two")
    request = TrialRequest(
        0, plan, build("1f1b", 2, 4, 1), model, ClusterSpec(1, 2, "cpu", None, link, link), TrainingSpec(4)
    )
    assert network(None).judged(request) == request
    judged = network(HostFigures(2e-4, 1e-9)).judged(request)
    assert judged.cluster.intra_node == judged.cluster.inter_node == Link(2e-4, pytest.approx(1e9))
    assert judged.link_efficiency == 1.0
    assert network(HostFigures(2e-4, 0.0)).judged(request).cluster.intra_node.bandwidth_bytes_per_s >= 1e18
    assert dataclasses.replace(judged, cluster=request.cluster, link_efficiency=request.link_efficiency) == request
