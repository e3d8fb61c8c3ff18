"""What one line of a trainer's log tells: Megatron-LM's, torchtitan's, or one that regular expressions match."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from autotune.profiling.outcome import MOST_BYTES, brief
from autotune.space.settings import ReaderSettings

__all__ = ["LineParser", "LogLine", "line_parser", "megatron_line", "torchtitan_line"]

_MIB, _GIB = 2**20, 2**30
_MOST = 2**53
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# " [2025-04-13 23:41:20] iteration 20/ 1000 | consumed samples: 320 | elapsed time per iteration (ms): 820.7 | ..."
_MEGATRON_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*(?:\d+|infinity)\s*\|(.*)")
# "[Rank 0] (after 10 iterations) memory (MB) | allocated: 1464.3 | max allocated: 1464.3 | reserved: 1576.0 | ..."
_MEGATRON_MEMORY = re.compile(r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\)\s*\|(.*)")
# "step: 10  loss:  7.1234  grad_norm:  1.2345  memory: 12.34GiB(15.60%)  tps: 1,234  tflops: 12.34  mfu: 1.23%"
_TITAN_STEP = re.compile(r"(?<!validate )\bstep:\s*(\d+)\s+loss:\s*(\S+)")
_TITAN_MEMORY = re.compile(r"\bmemory:\s*([\d.]+)GiB")
_TITAN_TPS = re.compile(r"\btps:\s*([\d,.]+)")


@dataclass(frozen=True)
class LogLine:
    """What a line tells of one optimizer step, or of the mean of the steps since the line before; None: nothing.

    Attributes:
        step: number of the (last) step.
        tokens_per_s: of the whole cluster.
        device_tokens_per_s: tokens_per_s / devices.
        rank: whom the memory is of; None: the rank whose log it is.
        loss: mean loss per token; NaN where the trainer counted steps without a finite one.
        skipped: a step was left out by the trainer, so its time is none of a whole step.
    """

    step: int | None = None
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    device_tokens_per_s: float | None = None
    loss: float | None = None
    peak_memory_bytes: int | None = None
    rank: int | None = None
    global_batch_size: int | None = None
    skipped: bool = False


LineParser = Callable[[str], LogLine | None]


def line_parser(reader: ReaderSettings) -> LineParser:
    """The parser of the lines that `reader` reads. Lines come without colour codes and line ends."""
    if reader.kind == "megatron":
        parse: LineParser = megatron_line
    elif reader.kind == "torchtitan":
        parse = torchtitan_line
    else:
        patterns = [re.compile(text) for text in reader.patterns]

        def parse(line: str) -> LogLine | None:
            return _matched_line(patterns, line)

    return lambda line: parse(_ESCAPES.sub("", line))


def megatron_line(line: str) -> LogLine | None:
    """A line of Megatron-LM's `training_log` or `report_memory` (megatron/training, core 0.20)."""
    if match := _MEGATRON_MEMORY.search(line):
        peak = _fields(match[2]).get("max allocated")
        return (
            None
            if peak is None
            else LogLine(rank=_whole(int(match[1]), "rank"), peak_memory_bytes=_peak(float(peak) * _MIB))
        )
    match = _MEGATRON_ITERATION.search(line)
    if match is None:
        return None
    fields = _fields(match[2])
    milliseconds, loss, batch = (
        fields.get(name) for name in ("elapsed time per iteration (ms)", "lm loss", "global batch size")
    )
    bad = int(fields.get("number of nan iterations", "0"))
    return LogLine(
        step=_whole(int(match[1]), "step"),
        step_time_s=None if milliseconds is None else float(milliseconds) / 1000,
        loss=float("nan") if bad else None if loss is None else float(loss),
        global_batch_size=None if batch is None else _whole(int(batch), "global batch size"),
        skipped=int(fields.get("number of skipped iterations", "0")) > 0,
    )


def torchtitan_line(line: str) -> LogLine | None:
    """A line of torchtitan's `MetricsProcessor.log` (0.3.0); its tps are of one device, its memory is reserved."""
    match = _TITAN_STEP.search(line)
    if match is None:
        return None
    memory, tps = _TITAN_MEMORY.search(line), _TITAN_TPS.search(line)
    loss = float(match[2])
    return LogLine(
        step=_whole(int(match[1]), "step"),
        device_tokens_per_s=float(tps[1].replace(",", "")) if tps else None,
        # ranks without the last stage print -1
        loss=None if loss < 0 else loss,
        peak_memory_bytes=_peak(float(memory[1]) * _GIB) if memory else None,
    )


def _fields(text: str) -> dict[str, str]:
    """`a: 1 | b c: 2 |` as names and values."""
    parts = (part.rpartition(":") for part in text.split("|"))
    return {name.strip(): value.strip() for name, colon, value in parts if colon}


def _whole(number: float, what: str) -> int:
    """Raises ValueError for what can't be counted or is no count."""
    if not (0 <= number <= _MOST and number == int(number)):
        raise ValueError(f"{what} {brief(number)} is no whole number from 0 to {_MOST}")
    return int(number)


def _peak(number: float) -> int:
    """A peak in bytes, of a text that may have rounded it. Raises ValueError for what no device has."""
    if not 1 <= number <= MOST_BYTES:
        raise ValueError(f"a peak of {brief(number)} bytes is none from 1 to {MOST_BYTES} (1 PiB)")
    return round(number)


def _matched_line(patterns: list[re.Pattern[str]], line: str) -> LogLine | None:
    """The groups of all patterns that match. Raises ValueError where a group is no number."""
    found: dict[str, float] = {}
    for pattern in patterns:
        if match := pattern.search(line):
            found |= {k: float(v.replace(",", "")) for k, v in match.groupdict().items() if v is not None}
    if not found:
        return None
    seconds = found.get("step_time_s")
    if seconds is None and "step_time_ms" in found:
        seconds = found["step_time_ms"] / 1000
    peak = found.get("peak_memory_bytes")
    if peak is not None and peak % 1 != 0:
        raise ValueError(f"peak_memory_bytes {brief(peak)} is no whole number; peak_memory_gib reads one in GiB")
    if peak is None and "peak_memory_gib" in found:
        peak = found["peak_memory_gib"] * _GIB
    return LogLine(
        step=_whole(found["step"], "step") if "step" in found else None,
        step_time_s=seconds,
        tokens_per_s=found.get("tokens_per_s"),
        loss=found.get("loss"),
        peak_memory_bytes=None if peak is None else _peak(peak),
    )
