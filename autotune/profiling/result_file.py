"""The one result file of a worker whose ranks write no reports: `result.json` in the trial's folder."""

from __future__ import annotations

import math
import reprlib
from pathlib import Path
from typing import Any

from autotune.profiling.outcome import NoMeasurement, make_measurement
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.untrusted_json import read_json
from autotune.results.measurement import Measurement, State

__all__ = ["KEYS", "read_result"]

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

_STATES: dict[str, State] = {"ok": "ok", "oom": "oom", "failed": "failed"}


def read_result(request: TrialRequest, path: Path) -> Measurement | None:
    """The numbers in the file; None if there is no file.

    Raises:
        NoMeasurement: the file is damaged or lacks a time (`no-result`), says that the plan failed (`oom`, `failed`),
            holds a loss that is no number (`non-finite`) or values that can't be (`invalid`).
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
    state = _STATES.get(str(values.get("state", "ok")))
    if state is None:
        told = reprlib.repr(values["state"])
        raise NoMeasurement("invalid", f"{path.name}: state {told} is none of {', '.join(_STATES)}")
    if state != "ok":
        raise NoMeasurement(state, f"the worker reports {state}: {values.get('error', '')}")
    return _measurement(request, values, path.name)


def _measurement(request: TrialRequest, values: dict[str, Any], name: str) -> Measurement:
    loss = None if values.get("loss") is None else _number(values["loss"], f"{name}: loss")
    return make_measurement(
        _step_times(request, values, name),
        source=f"{name}: ",
        peaks=_peaks(values, name),
        loss=loss,
        torch=str(values.get("torch", "")),
        device=str(values.get("device", request.cluster.device)),
    )


def _step_times(request: TrialRequest, values: dict[str, Any], name: str) -> list[float]:
    given = [key for key in ("step_time_s", "step_times_s", "tokens_per_s") if values.get(key) is not None]
    if len(given) != 1:
        told = " and ".join(given) or "none"
        raise NoMeasurement("no-result", f"{name} gives {told} of step_time_s, step_times_s and tokens_per_s; give one")
    key = given[0]
    if key == "step_times_s":
        times = values[key]
        if not isinstance(times, list) or not times:
            raise NoMeasurement("invalid", f"{name}: step_times_s must be a list of numbers, not {reprlib.repr(times)}")
        return [_number(time, f"{name}: step_times_s") for time in times]
    number = _number(values[key], f"{name}: {key}")
    if key == "step_time_s":
        return [number]
    tokens = request.training.global_batch_size * request.model.sequence_length
    return [tokens / number if number > 0 else math.inf]


def _peaks(values: dict[str, Any], name: str) -> tuple[int, ...] | None:
    peaks = values.get("peak_memory_bytes_per_rank")
    if peaks is None:
        peak = values.get("peak_memory_bytes")
        peaks = None if peak is None else [peak]
    if peaks is None:
        return None
    if not isinstance(peaks, list) or not peaks:
        told = reprlib.repr(peaks)
        raise NoMeasurement("invalid", f"{name}: peak_memory_bytes_per_rank must be a list of numbers, not {told}")
    numbers = [_number(peak, f"{name}: peak memory") for peak in peaks]
    if not all(math.isfinite(number) for number in numbers):
        raise NoMeasurement("invalid", f"{name}: peaks of {reprlib.repr(numbers)} bytes")
    return tuple(round(number) for number in numbers)


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NoMeasurement("invalid", f"{what}: {reprlib.repr(value)} is no number")
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if value > 0 else -math.inf
