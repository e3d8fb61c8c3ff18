"""A schedule as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from typing import Any

from autotune.schedules.lowering import Receive, Send, lower
from autotune.schedules.schedule import Pass
from autotune.schedules.simulate import Timeline

__all__ = ["schedule_trace"]

UNIT_US = 1000.0  # one unit of pass time is shown as a millisecond
COLOURS = {"F": "thread_state_running", "B": "good", "BW": "good", "W": "thread_state_iowait"}


def schedule_trace(timeline: Timeline) -> str:
    """JSON in the trace event format: a thread a device, passes as slices, messages as arrows, memory as counters.

    One unit of pass time becomes one millisecond.
    """
    schedule = timeline.schedule
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"schedule {schedule.name}"}}
    ]
    times: dict[Pass, tuple[int, float, float]] = {}
    for device, passes in enumerate(schedule.order):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": device, "args": {"name": f"device {device}"}})
        for item, start, end in zip(passes, timeline.start[device], timeline.end[device], strict=True):
            times[item] = device, start, end
            events.append(_slice(item, device, start, end))
        events += [
            {
                "name": f"activation held, device {device}",
                "ph": "C",
                "pid": 0,
                "ts": time * UNIT_US,
                "args": {"held": round(held, 9)},
            }
            for time, held in timeline.memory_curve(device)
        ]
    return json.dumps({"traceEvents": events + _arrows(timeline, times), "displayTimeUnit": "ms"}, indent=1) + "\n"


def _slice(item: Pass, device: int, start: float, end: float) -> dict[str, Any]:
    return {
        "name": f"{item.kind} stage {item.stage} microbatch {item.microbatch}",
        "cat": item.kind,
        "ph": "X",
        "ts": start * UNIT_US,
        "dur": (end - start) * UNIT_US,
        "pid": 0,
        "tid": device,
        "cname": COLOURS[item.kind],
        "args": {"kind": item.kind, "stage": item.stage, "microbatch": item.microbatch},
    }


def _arrows(timeline: Timeline, times: dict[Pass, tuple[int, float, float]]) -> list[dict[str, Any]]:
    """A pair of flow events for every message between devices, from the end of its pass to the start of its reader."""
    events = []
    sends = [action for actions in lower(timeline.schedule) for action in actions if isinstance(action, Send)]
    for number, send in enumerate(sends):
        made, reads = _ends(send, times)
        label = {"name": "activation" if send.kind == "F" else "gradient", "cat": "message", "pid": 0, "id": number}
        # Arrows bind to the slice around their time, so they stay just inside it.
        events.append(label | {"ph": "s", "tid": made[0], "ts": (made[2] - (made[2] - made[1]) / 1000) * UNIT_US})
        events.append(label | {"ph": "f", "bp": "e", "tid": reads[0], "ts": reads[1] * UNIT_US})
    return events


def _ends(
    message: Send | Receive, times: dict[Pass, tuple[int, float, float]]
) -> tuple[tuple[int, float, float], tuple[int, float, float]]:
    """(device, start, end) of the pass that makes a message and of the pass that reads it."""

    def lookup(stage: int) -> tuple[int, float, float]:
        if message.kind == "F":
            return times[Pass("F", stage, message.microbatch)]
        split = times.get(Pass("B", stage, message.microbatch))
        return times[Pass("BW", stage, message.microbatch)] if split is None else split

    return lookup(message.stage), lookup(message.reader)
