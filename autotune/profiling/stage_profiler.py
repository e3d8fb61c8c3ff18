"""Profiles of stages for the tuner: from the cache, else from a process that measures them. Loads no torch itself."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from autotune.profiling.host_ranks import measure_host
from autotune.profiling.process_tree import die_with_parent
from autotune.profiling.profile_cache import ProfileCache, fingerprint
from autotune.profiling.profile_errors import ProfileError
from autotune.profiling.profile_records import DeviceFigures, DeviceKey, HostFigures, HostKey, PassesKey, StageFigures
from autotune.space.model import ModelSpec
from autotune.space.training import DType

__all__ = ["Key", "StageProfiler", "median_record"]

MEASURE_TIMEOUT_S = 600.0
_POLL_S = 0.5

Key = PassesKey | DeviceKey | HostKey


class StageProfiler:
    """Measures the stages of one model on the local device, each shape once.

    Measuring processes are started when the cache lacks something and kept until `close`.

    Args:
        device: the cluster's device name; `cpu`, or a GPU of this machine.
        timeout_s: most time one shape may take.

    Attributes:
        measured: shapes that were not in the cache.
        stop: asked while something is measured; once it says True, measuring ends with a ProfileError.
    """

    def __init__(
        self,
        model: ModelSpec,
        dtype: DType,
        device: str,
        cache: ProfileCache | None = None,
        timeout_s: float = MEASURE_TIMEOUT_S,
    ) -> None:
        self.model, self.dtype, self.device, self.timeout_s = model, dtype, device, timeout_s
        self.cache = ProfileCache() if cache is None else cache
        self.measured = 0
        self.stop: Callable[[], bool] = lambda: False
        self._known: dict[Key, dict[str, Any]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> StageProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the measuring processes, if there are any."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()

    def passes(self, key: PassesKey) -> dict[int, dict[str, StageFigures]]:
        """Figures by depth and stage kind: `first`, `middle` and `last`, or `whole`. Raises ProfileError."""
        return {
            int(depth): {kind: StageFigures.from_dict(values) for kind, values in stages.items()}
            for depth, stages in self._record("passes", key).items()
        }

    def device_figures(self, key: DeviceKey) -> dict[int, DeviceFigures]:
        """Figures by depth of what a rank does outside of passes. Raises ProfileError."""
        return {int(depth): DeviceFigures(**values) for depth, values in self._record("device", key).items()}

    def host_figures(self, key: HostKey) -> HostFigures:
        """CPU time of collectives, by as many real processes as `key.ranks`. Raises ProfileError."""
        return HostFigures(**self._record("host", key))

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Those of `keys` that would have to be measured."""
        return [key for key in dict.fromkeys(keys) if key not in self._known and self._stored(key) is None]

    def _stored(self, key: Key) -> dict[str, Any] | None:
        return self.cache.load(self._name(key))

    def _name(self, key: Key) -> str:
        identity = {"kind": type(key).__name__, **asdict(key)}
        return fingerprint(identity, self.model, self.dtype, self.device)

    def _record(self, kind: str, key: Key) -> dict[str, Any]:
        found = self._known.get(key)
        if found is None:
            found = self._stored(key)
        if found is None:
            if isinstance(key, HostKey):
                found = measure_host(key, self.model, self.dtype, self.timeout_s, self.stop)
            else:
                found = self._ask({"kind": kind, "key": asdict(key)}, key.crowd)
            self.cache.store(self._name(key), found)
            self.measured += 1
        self._known[key] = found
        return found

    def _ask(self, question: dict[str, Any], crowd: int) -> dict[str, Any]:
        """What `crowd` processes that measure the same at the same time find: of every figure the median."""
        question |= {"model": asdict(self.model), "dtype": self.dtype, "device": self.device}
        while len(self._processes) < crowd:
            self._processes.append(_start())
        asked = self._processes[:crowd]
        deadline = time.monotonic() + self.timeout_s
        try:
            for process in asked:
                assert process.stdin is not None
                process.stdin.write(json.dumps(question).encode() + b"\n")
                process.stdin.flush()
            answers = [json.loads(_answer(process, deadline, self.stop)) for process in asked]
        except BrokenPipeError:
            self.close()
            raise ProfileError("failed", "a profiling process ended unasked") from None
        except InterruptedError:
            self.close()
            raise ProfileError("failed", "profiling was stopped") from None
        except TimeoutError:
            self.close()
            raise ProfileError("timeout", f"profiling a stage took more than {self.timeout_s:g} s") from None
        except EOFError:
            codes = [process.poll() for process in asked]
            self.close()
            raise ProfileError("failed", f"a profiling process ended; exit codes {codes}") from None
        for answer in answers:
            if "record" not in answer:
                raise ProfileError(answer["state"], answer["error"])
        return median_record([answer["record"] for answer in answers])


def median_record(records: Sequence[Any]) -> Any:
    """Equal trees of numbers as one, with the median of every number.

    >>> median_record([{"a": 1.0}, {"a": 5.0}, {"a": 2.0}])
    {'a': 2.0}
    """
    first = records[0]
    if isinstance(first, dict):
        return {key: median_record([record[key] for record in records]) for key in first}
    return statistics.median(records)


def _start() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", "autotune.profiling.profile_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(die_with_parent, os.getpid()),
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )


def _answer(process: subprocess.Popen[bytes], deadline: float, stop: Callable[[], bool]) -> bytes:
    """The next line of a process. Raises TimeoutError, InterruptedError if told to stop, or EOFError when it ended."""
    assert process.stdout is not None
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if not selector.select(max(0.0, min(left_s, _POLL_S))):
                if stop():
                    raise InterruptedError
                if left_s <= 0:
                    raise TimeoutError
                continue
            part = os.read(process.stdout.fileno(), 2**16)
            if not part:
                raise EOFError
            line += part
    return line
