"""The one result file of a worker whose ranks write no reports: `result.json` in the trial's folder."""

from __future__ import annotations

import contextlib
import math
import reprlib
from pathlib import Path
from typing import Any

from autotune.profiling.outcome import MOST_BYTES, NoMeasurement, brief, make_measurement
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.untrusted_json import read_json
from autotune.results.measurement import Measurement, State

__all__ = ["KEYS", "read_result", "require_no_failure"]

KEYS = {
    "step_time_s": "time of one optimizer step, the slowest rank's, if there is one figure",
    "step_times_s": "times of the measured steps, instead of step_time_s",
    "tokens_per_s": "of the whole cluster, instead of step_time_s",
    "peak_memory_bytes": "largest peak of any rank",
    "peak_memory_bytes_per_rank": "peak of every rank, instead of peak_memory_bytes",
    "loss": "mean loss per token of the last step",
    "torch": "version that ran the trial",
    "device": "device that ran the trial",
    "state": "`ok` (default), `oom` or `failed`",
    "error": "why the state isn't ok",
}
"""The keys of the file, and what they mean."""

_MOST_TOKENS_PER_S = 1e15
_ROUNDING = 0.01
"""Share by which two figures of one time may differ, since both may be rounded."""

_STATES: dict[str, State] = {"ok": "ok", "oom": "oom", "failed": "failed"}


def read_result(request: TrialRequest, path: Path) -> Measurement | None:
    """The numbers in the file; None if there is no file.

    Raises:
        NoMeasurement: the file is damaged, lacks a time or the peak of a rank (`no-result`), says that the plan failed
            (`oom`, `failed`), holds a loss that is no number (`non-finite`) or values that can't be (`invalid`).
    """
    try:
        values = read_json(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoMeasurement("no-result", f"{path.name} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise NoMeasurement("no-result", f"{path.name} is no whole JSON text: {error}") from None
    if not isinstance(values, dict):
        raise NoMeasurement("no-result", f"{path.name} holds no object with one of step_time_s, step_times_s")
    if unknown := [key for key in values if key not in KEYS]:
        raise NoMeasurement("invalid", f"{path.name}: unknown key {reprlib.repr(unknown[0])}; known: {', '.join(KEYS)}")
    _require_ok(values, path.name)
    return _measurement(request, values, path.name)


def require_no_failure(path: Path) -> None:
    """Looks for a failure that the worker wrote down, where its numbers are read elsewhere.

    Raises:
        NoMeasurement: the file tells a state that isn't `ok`.
    """
    with contextlib.suppress(OSError, ValueError):  # what is no such file tells no state
        values = read_json(path)
        if isinstance(values, dict):
            _require_ok(values, path.name)


def _require_ok(values: dict[str, Any], name: str) -> None:
    state = _STATES.get(str(values.get("state", "ok")))
    if state is None:
        told = reprlib.repr(values["state"])
        raise NoMeasurement("invalid", f"{name}: state {told} is none of {', '.join(_STATES)}")
    if state != "ok":
        why = f": {values['error']}" if values.get("error") else ""
        raise NoMeasurement(state, f"the worker reports {state}{why}")


def _measurement(request: TrialRequest, values: dict[str, Any], name: str) -> Measurement:
    loss = None if values.get("loss") is None else _number(values["loss"], f"{name}: loss")
    return make_measurement(
        _step_times(request, values, name),
        source=f"{name}: ",
        peaks=_peaks(values, name, request.plan.devices),
        loss=loss,
        torch=str(values.get("torch", "")),
        device=str(values.get("device", request.cluster.device)),
    )


def _step_times(request: TrialRequest, values: dict[str, Any], name: str) -> list[float]:
    """The times, by the key that tells most of them; another one must say the same."""
    told = {
        key: times
        for key in ("step_times_s", "step_time_s", "tokens_per_s")
        if values.get(key) is not None and (times := _times(request, key, values[key], name))
    }
    if not told:
        raise NoMeasurement("no-result", f"{name} gives none of step_time_s, step_times_s and tokens_per_s; give one")
    first, *others = told
    times = told[first]
    for key in others:
        (other,) = told[key]
        # a mean and a median both lie between
        if not min(times) * (1 - _ROUNDING) <= other <= max(times) * (1 + _ROUNDING):
            tokens = request.training.global_batch_size * request.model.sequence_length
            rate = f" ({tokens} tokens a step)" if key == "tokens_per_s" else ""
            raise NoMeasurement(
                "invalid",
                f"{name}: {first} {brief(values[first])} and {key} {brief(values[key])} contradict each other: "
                f"by {key} a step takes {other:.6g} s{rate}; give one of them, or the same time by both",
            )
    return times


def _times(request: TrialRequest, key: str, value: Any, name: str) -> list[float]:
    if key == "step_times_s":
        if not isinstance(value, list) or not value:
            raise NoMeasurement("invalid", f"{name}: step_times_s must be a list of numbers, not {brief(value)}")
        return [_number(time, f"{name}: step_times_s") for time in value]
    number = _number(value, f"{name}: {key}")
    if key == "step_time_s":
        return [number]
    if not 0 < number <= _MOST_TOKENS_PER_S:
        raise NoMeasurement(
            "invalid", f"{name}: tokens_per_s {brief(value)} is none above 0 and up to {_MOST_TOKENS_PER_S:g}"
        )
    return [request.training.global_batch_size * request.model.sequence_length / number]


def _peaks(values: dict[str, Any], name: str, ranks: int) -> tuple[int, ...] | None:
    largest, each = values.get("peak_memory_bytes"), values.get("peak_memory_bytes_per_rank")
    peak = None if largest is None else _peak(largest, f"{name}: peak_memory_bytes")
    if each is None:
        return None if peak is None else (peak,)
    if not isinstance(each, list) or not each:
        raise NoMeasurement(
            "invalid", f"{name}: peak_memory_bytes_per_rank must be a list of numbers, not {brief(each)}"
        )
    peaks = tuple(_peak(value, f"{name}: peak_memory_bytes_per_rank") for value in each)
    if len(peaks) != ranks:
        raise NoMeasurement(
            "no-result",
            f"{name}: peak_memory_bytes_per_rank holds {len(peaks)} peaks, but the plan has {ranks} ranks; give one of "
            "every rank, or the largest as peak_memory_bytes",
        )
    if peak is not None and peak != max(peaks):
        raise NoMeasurement(
            "invalid",
            f"{name}: peak_memory_bytes {peak} and peak_memory_bytes_per_rank contradict each other: the largest of "
            f"these is {max(peaks)}",
        )
    return peaks


def _peak(value: Any, what: str) -> int:
    number = _number(value, what)
    if not (1 <= number <= MOST_BYTES and number == math.floor(number)):
        raise NoMeasurement(
            "invalid", f"{what}: {brief(value)} is no whole number of bytes from 1 to {MOST_BYTES} (1 PiB)"
        )
    return int(number)


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NoMeasurement("invalid", f"{what}: {reprlib.repr(value)} is no number")
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if value > 0 else -math.inf
