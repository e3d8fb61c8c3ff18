"""The automatic search of the zero-bubble paper: linear schedules with split backward for given costs and memory.

Source: arXiv 2401.10241, section 3.1 and appendix B.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from autotune.errors import UserError
from autotune.schedules.alternating import zb_h1, zb_h2
from autotune.schedules.costs import PassCosts
from autotune.schedules.placement import linear_placement
from autotune.schedules.schedule import Pass, PassKind, Schedule
from autotune.schedules.simulate import Timeline, simulate

__all__ = ["zb", "zb_1p", "zb_2p", "zero_bubble"]

NEVER = float("inf")
EPSILON = 1e-9
OVERRUN = 0.02  # share of a W that may outlast a gap: far less than a W left over costs at the end
COMPARED = (
    3  # the policies are compared on at most this many microbatches per device; later ones repeat the steady state
)


@dataclass(frozen=True)
class _Policy:
    """The switches that the search tries (arXiv 2401.10241, section 3.1).

    Attributes:
        delay_first_backward: in the warm-up, run an F although it delays the first B.
        wait_for_backward: after an F, wait for a B that arrives within the time of an F.
        level_bubbles: put a W into a gap it does not fit when the gap would make this device's bubble the largest.
    """

    delay_first_backward: bool
    wait_for_backward: bool
    level_bubbles: bool


def zero_bubble(
    name: str, devices: int, microbatches: int, memory_limit: float, costs: PassCosts | None = None
) -> Schedule:
    """The fastest linear schedule of the search that keeps to `memory_limit` on every device.

    As in the paper the longest span of a device decides, from its first start to its last end, then the makespan. ZB-H1
    and ZB-H2 are candidates where they fit.

    Args:
        memory_limit: in the unit of the costs' activations; under uniform costs microbatches, so 1F1B needs p.
        costs: times and activations of every stage; None: F = B = W.

    Raises:
        UserError: the limit is below one microbatch, or the costs are for another number of stages.
    """
    costs = PassCosts.uniform(linear_placement(devices)) if costs is None else costs
    if costs.stages != devices:
        raise UserError(f"{name} on {devices} devices needs costs of {devices} stages, not {costs.stages}")
    least = max(costs.activation)
    if memory_limit < least - EPSILON:
        raise UserError(f"{name} needs a memory limit of at least {least:g}, one microbatch, not {memory_limit:g}")
    return replace(_searched(devices, microbatches, memory_limit, costs), name=name)


# The same search serves names that differ in nothing but their limit, and the policy that wins on a sample serves
# every number of microbatches above it: few are kept, a step of many passes is large.
@lru_cache(maxsize=4)
def _searched(devices: int, microbatches: int, memory_limit: float, costs: PassCosts) -> Schedule:
    policy = _best_policy(devices, min(microbatches, COMPARED * devices), memory_limit, costs)
    candidates = [_run(devices, microbatches, memory_limit, costs, policy)]
    candidates += [closed_form(devices, microbatches) for closed_form in (zb_h1, zb_h2)]
    timelines = (simulate(candidate, costs) for candidate in candidates)
    fitting = [line for line in timelines if max(line.peak_activation) <= memory_limit * (1 + EPSILON)]
    return min(fitting, key=_rank).schedule


@lru_cache(maxsize=256)
def _best_policy(devices: int, microbatches: int, memory_limit: float, costs: PassCosts) -> _Policy:
    policies = [_Policy(*switches) for switches in product((False, True), repeat=3)]
    return min(policies, key=lambda policy: _time(_run(devices, microbatches, memory_limit, costs, policy), costs))


def zb(devices: int, microbatches: int, memory_limit: float | None = None, costs: PassCosts | None = None) -> Schedule:
    """The search within any memory limit; None: twice the memory of 1F1B, where bubbles end."""
    limit = _times_largest(2 * devices, costs) if memory_limit is None else memory_limit
    return zero_bubble("zb", devices, microbatches, limit, costs)


def zb_1p(
    devices: int, microbatches: int, memory_limit: float | None = None, costs: PassCosts | None = None
) -> Schedule:
    """The search within the memory of 1F1B: p times the largest activation of a stage, unless a limit is given."""
    limit = _times_largest(devices, costs) if memory_limit is None else memory_limit
    return zero_bubble("zb-1p", devices, microbatches, limit, costs)


def zb_2p(
    devices: int, microbatches: int, memory_limit: float | None = None, costs: PassCosts | None = None
) -> Schedule:
    """The search within twice the memory of 1F1B, unless a limit is given."""
    limit = _times_largest(2 * devices, costs) if memory_limit is None else memory_limit
    return zero_bubble("zb-2p", devices, microbatches, limit, costs)


def _times_largest(count: int, costs: PassCosts | None) -> float:
    return count * (1.0 if costs is None else max(costs.activation))


def _time(schedule: Schedule, costs: PassCosts) -> tuple[float, float]:
    return _rank(simulate(schedule, costs))


def _rank(timeline: Timeline) -> tuple[float, float]:
    """The paper's measure, the longest span of a device, then the makespan; rounded against the noise of sums."""
    return round(timeline.span, 9), round(timeline.makespan, 9)


def _run(devices: int, microbatches: int, limit: float, costs: PassCosts, policy: _Policy) -> Schedule:
    """One greedy run of all devices in the order of time."""
    pipeline = _Pipeline(devices, microbatches, limit, costs, policy)
    order = pipeline.run()
    return Schedule("zb", microbatches, linear_placement(devices), order)


class _Pipeline:
    """Devices that decide one after the other what to run next; each knows only what has been started."""

    def __init__(self, devices: int, microbatches: int, limit: float, costs: PassCosts, policy: _Policy) -> None:
        self.devices, self.microbatches = devices, microbatches
        self.limit = limit * (1 + EPSILON)
        self.costs, self.policy = costs, policy
        placement = linear_placement(devices)
        self.forward_hop = [costs.edge_latency(placement, d, d + 1) for d in range(devices - 1)]
        self.backward_hop = [costs.edge_latency(placement, d + 1, d) for d in range(devices - 1)]
        self.forward_end: list[list[float]] = [[] for _ in range(devices)]
        self.backward_end: list[list[float]] = [[] for _ in range(devices)]
        self.weights = [0] * devices
        self.held = [0.0] * devices
        self.last: list[PassKind | None] = [None] * devices  # the last F or B
        self.free = [0.0] * devices
        self.bubble = [0.0] * devices
        self.order: list[list[Pass]] = [[] for _ in range(devices)]
        self.wake = [0.0] * devices
        self.queue = [(0.0, device) for device in range(devices)]

    def run(self) -> tuple[tuple[Pass, ...], ...]:
        left = 3 * self.microbatches * self.devices
        while left:
            now, device = heapq.heappop(self.queue)
            if now != self.wake[device]:
                continue  # the device has been woken earlier
            kind, until = self.choose(device, now)
            if kind is not None:
                self.start(device, kind, now)
                left -= 1
            elif until < NEVER:
                self.sleep(device, until)
            else:
                self.wake[device] = NEVER
        return tuple(tuple(passes) for passes in self.order)

    def sleep(self, device: int, until: float) -> None:
        self.wake[device] = until
        heapq.heappush(self.queue, (until, device))

    def arrivals(self, device: int) -> tuple[float, float]:
        """When the input of the next F and of the next B is there; infinite while unknown or when none is left."""
        forwards, backwards = len(self.forward_end[device]), len(self.backward_end[device])
        forward = backward = NEVER
        if forwards < self.microbatches:
            if device == 0:
                forward = 0.0
            elif forwards < len(self.forward_end[device - 1]):
                forward = self.forward_end[device - 1][forwards] + self.forward_hop[device - 1]
        if backwards < forwards:
            if device == self.devices - 1:
                backward = self.forward_end[device][backwards]
            elif backwards < len(self.backward_end[device + 1]):
                backward = self.backward_end[device + 1][backwards] + self.backward_hop[device]
        return forward, backward

    def choose(self, device: int, now: float) -> tuple[PassKind | None, float]:
        """What to start now, or None and the time to decide again."""
        forward, backward = self.arrivals(device)
        soon = now + EPSILON
        fits = self.held[device] + self.costs.activation[device] <= self.limit
        if backward <= soon:
            return "B", now
        refused = False
        if fits and forward <= soon:
            if self.allows_forward(device, now, backward):
                return "F", now
            refused = True
        wanted = backward if refused or not fits else min(backward, forward)
        if self.weights[device] < len(self.backward_end[device]) and self.allows_weight(device, now, wanted):
            return "W", now
        return None, wanted

    def allows_forward(self, device: int, now: float, backward: float) -> bool:
        """Whether an F that is ready may run although the next B arrives at `backward`."""
        in_time = backward >= now + self.costs.forward[device] - EPSILON
        if not self.backward_end[device]:
            return in_time or self.policy.delay_first_backward
        return in_time or not (self.policy.wait_for_backward and self.last[device] == "F")

    def allows_weight(self, device: int, now: float, wanted: float) -> bool:
        """Whether a W may fill the gap from now to `wanted`."""
        if wanted >= now + self.costs.weight[device] * (1 - OVERRUN) - EPSILON:
            return True
        widest = max(self.bubble)
        return self.policy.level_bubbles and self.bubble[device] + wanted - now > widest + EPSILON

    def start(self, device: int, kind: PassKind, now: float) -> None:
        """Run the next pass of a kind and wake whoever reads its result."""
        costs = self.costs
        if self.order[device]:
            self.bubble[device] += now - self.free[device]
        if kind == "F":
            done, end = self.forward_end[device], now + costs.forward[device]
            self.held[device] += costs.activation[device]
        elif kind == "B":
            done, end = self.backward_end[device], now + costs.backward[device]
            self.held[device] -= costs.activation[device] - costs.kept[device]
        else:
            end = now + costs.weight[device]
            self.held[device] -= costs.kept[device]
        if kind == "W":
            self.order[device].append(Pass("W", device, self.weights[device]))
            self.weights[device] += 1
        else:
            self.order[device].append(Pass(kind, device, len(done)))
            done.append(end)
            self.last[device] = kind
        self.free[device] = end
        self.sleep(device, end)
        for reader, arrival in self.readers(device, kind, end):
            earliest = max(arrival, self.free[reader])
            if earliest < self.wake[reader]:
                self.sleep(reader, earliest)

    def readers(self, device: int, kind: PassKind, end: float) -> Iterator[tuple[int, float]]:
        """The other device that reads the result of a pass, and when it arrives."""
        if kind == "F" and device + 1 < self.devices:
            yield device + 1, end + self.forward_hop[device]
        if kind == "B" and device > 0:
            yield device - 1, end + self.backward_hop[device - 1]
