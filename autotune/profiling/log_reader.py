"""From the logs of a trainer to the numbers of its trial."""

from __future__ import annotations

import glob
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.profiling.log_lines import LineParser, LogLine, line_parser
from autotune.profiling.outcome import NoMeasurement, make_measurement, require_finite_loss
from autotune.profiling.protocol import TrialRequest
from autotune.results.measurement import Measurement
from autotune.space.settings import ReaderSettings

__all__ = ["logged_steps", "read_logs"]

_LONGEST_LINE = 65536
_RANK_LOG = re.compile(r"rank-(\d+)\.log")


@dataclass
class _Log:
    """What the logs of a trial tell.

    Attributes:
        times: step -> (seconds, slowest log first to tell; steps that the line stands for), warm-up left out.
        losses: step -> loss; of several logs the largest, since ranks may print less than the whole.
        peaks: rank or file -> bytes.
    """

    times: dict[int, tuple[float, int]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    peaks: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))


def read_logs(request: TrialRequest, reader: ReaderSettings, folder: Path, log: str) -> Measurement:
    """The numbers that the logs `log` (a glob, seen from `folder`) tell.

    A line may stand for several steps, of which it gives the mean; the first `skip_steps` don't count.

    Raises:
        NoMeasurement: `no-result` if fewer steps than `measured_steps` are told, `non-finite` for a loss that is no
            number, `invalid` for numbers that can't be of this plan.
    """
    found = _read(request, reader, folder, log)
    for step, loss in sorted(found.losses.items()):
        require_finite_loss(loss, f"the loss of step {step} is")
    seconds = [time for _, (time, _) in sorted(found.times.items())]
    told = sum(count for _, count in found.times.values())
    if told < request.measured_steps:
        raise NoMeasurement("no-result", f"the worker ended well, but {_told(reader, told, log)}; {_wanted(request)}")
    if not found.losses and reader.kind != "regex":
        raise NoMeasurement("invalid", "the logs tell no loss, so nothing shows that the model was trained")
    return make_measurement(
        seconds,
        peaks=tuple(peak for _, peak in sorted(found.peaks.items())) or None,
        loss=found.losses[max(found.losses)] if found.losses else None,
        torch="",
        device=request.cluster.device,
    )


def logged_steps(request: TrialRequest, reader: ReaderSettings, folder: Path, log: str) -> str:
    """A remark on how many steps a trial that was ended had told."""
    try:
        told = sum(count for _, count in _read(request, reader, folder, log).times.values())
    except NoMeasurement as problem:
        return problem.reason
    return f"{_told(reader, told, log)}; {_wanted(request)}"


def _told(reader: ReaderSettings, told: int, log: str) -> str:
    return f"its logs {log!r} tell the time of {told} steps after the warm-up to the reader {reader.kind}"


def _wanted(request: TrialRequest) -> str:
    steps = request.warmup_steps + request.measured_steps
    return f"a trial trains {steps} steps ({{steps}}) and logs each, of which {request.measured_steps} are measured"


def _read(request: TrialRequest, reader: ReaderSettings, folder: Path, log: str) -> _Log:
    found = _Log()
    skip = request.warmup_steps if reader.skip_steps is None else reader.skip_steps
    parse = line_parser(reader)
    for path in sorted(map(Path, glob.glob(str(Path(glob.escape(str(folder)), log))))):
        try:
            lines = list(_parsed(path, parse))
        except ValueError as error:
            raise NoMeasurement("invalid", f"{path.name}: {error}") from None
        _add_memory(found, lines, path, request.plan.devices)
        _add_steps(found, [line for line in lines if _seconds(request, line) is not None], request, skip)
    return found


def _parsed(path: Path, parse: LineParser) -> Iterator[LogLine]:
    """What the lines of a log of any size tell. Raises ValueError for a line with a number that is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            while line := file.readline(_LONGEST_LINE):
                try:
                    told = parse(line)
                except (ValueError, OverflowError) as error:
                    raise ValueError(f"{error} in the line {line.strip()[:300]!r}") from None
                if told is not None:
                    yield told
    except OSError as error:
        raise ValueError(f"can't be read: {error.strerror}") from None


def _add_memory(found: _Log, lines: Sequence[LogLine], path: Path, ranks: int) -> None:
    match = _RANK_LOG.fullmatch(path.name)
    own = (int(match[1]), "") if match else (-1, path.name)
    for line in lines:
        if line.peak_memory_bytes is not None:
            who = own if line.rank is None else (line.rank, "")
            if line.rank is not None and line.rank >= ranks:
                raise NoMeasurement(
                    "invalid", f"{path.name} tells the memory of rank {line.rank}, but the plan has {ranks} ranks"
                )
            found.peaks[who] = max(found.peaks[who], line.peak_memory_bytes)


def _add_steps(found: _Log, lines: Sequence[LogLine], request: TrialRequest, skip: int) -> None:
    numbers = [line.step if line.step is not None else index for index, line in enumerate(lines, 1)]
    done = 0
    for index, (line, number) in enumerate(zip(lines, numbers, strict=True)):
        batch = request.training.global_batch_size
        if line.global_batch_size not in (None, batch):
            raise NoMeasurement(
                "invalid", f"the worker trained a global batch of {line.global_batch_size} samples, not {batch}"
            )
        if line.loss is not None:
            before = found.losses.get(number, line.loss)
            found.losses[number] = line.loss if math.isnan(line.loss) else max(before, line.loss)
        count = _steps_of(numbers, index)
        if done >= skip and not line.skipped:
            seconds = _seconds(request, line)
            assert seconds is not None
            found.times[number] = (max(seconds, found.times.get(number, (0.0, 0))[0]), count)
        done += count


def _steps_of(numbers: Sequence[int], index: int) -> int:
    """How many steps a line stands for: those since the line before. A run may begin at a checkpoint's step."""
    if index > 0:
        return max(1, numbers[index] - numbers[index - 1])
    interval = numbers[1] - numbers[0] if len(numbers) > 1 else numbers[0]
    return max(1, min(numbers[0], interval))


def _seconds(request: TrialRequest, line: LogLine) -> float | None:
    """Time of a step by one line, by whatever measure it gives."""
    tokens = request.training.global_batch_size * request.model.sequence_length
    if line.step_time_s is not None:
        return line.step_time_s
    rate = line.tokens_per_s
    if rate is None and line.device_tokens_per_s is not None:
        rate = line.device_tokens_per_s * request.plan.devices
    if rate is None:
        return None
    return tokens / rate if rate > 0 else math.inf
