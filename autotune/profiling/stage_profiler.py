"""Profiles of stages for the tuner: from the cache, else from a process that measures them. Loads no torch itself."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable
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

__all__ = ["Key", "StageProfiler"]

MEASURE_TIMEOUT_S = 600.0

Key = PassesKey | DeviceKey | HostKey


class StageProfiler:
    """Measures the stages of one model on the local device, each shape once.

    The measuring process is started when the cache lacks something and kept until `close`.

    Args:
        device: the cluster's device name; `cpu`, or a GPU of this machine.
        timeout_s: most time one shape may take.
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
        self._known: dict[Key, dict[str, Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> StageProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the measuring process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

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
                found = measure_host(key, self.model, self.dtype, self.timeout_s)
            else:
                found = self._ask({"kind": kind, "key": asdict(key)})
            self.cache.store(self._name(key), found)
            self.measured += 1
        self._known[key] = found
        return found

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        question |= {"model": asdict(self.model), "dtype": self.dtype, "device": self.device}
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = self._answer(process)
        except BrokenPipeError:
            line = b""
        if not line:
            self.close()
            raise ProfileError("failed", f"the profiling process ended with exit code {process.returncode}")
        answer = json.loads(line)
        if "record" not in answer:
            raise ProfileError(answer["state"], answer["error"])
        return answer["record"]

    def _answer(self, process: subprocess.Popen[bytes]) -> bytes:
        """The next line of the process; empty when it ended. Raises ProfileError when it takes too long."""
        assert process.stdout is not None
        deadline = time.monotonic() + self.timeout_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(deadline - time.monotonic()):
                    self.close()
                    raise ProfileError("timeout", f"profiling a stage took more than {self.timeout_s:g} s")
                part = os.read(process.stdout.fileno(), 2**16)
                if not part:
                    return b""
                line += part
        return line

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            root = str(Path(__file__).resolve().parents[2])
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "autotune.profiling.profile_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                preexec_fn=partial(die_with_parent, os.getpid()),
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
            )
        return self._process
