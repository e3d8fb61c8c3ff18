"""A small space, a worker that does as it is told, and the real command line on them."""

from __future__ import annotations

import csv
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune.search.observer import Observer, Silent
from autotune.search.search import SearchOptions, SearchResult, search
from autotune.space.space import load_space

FAKE = Path(__file__).parents[1] / "fakes" / "worker.py"

SPACE = """
name: tiny
model: {layers: 8, hidden: 64, heads: 4, kv_heads: 4, ffn_hidden: 128, vocab: 128, sequence_length: 32}
cluster: {nodes: 1, devices_per_node: 4, device: cpu, memory_limit: 1MiB}
training: {global_batch_size: 16}
search:
  pp: [1, 2, 4]
  tp: [1, 3]
  micro_batch_size: [2]
  schedule: [1f1b, interleaved-1f1b, zb-h1, v-min]
"""
LEGAL = 9  # pp 1, and four schedules at pp 2 and pp 4
REFUSED = 9  # the same with tp 3


@dataclass
class Bench:
    """A folder in which searches run."""

    path: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def study(self) -> Path:
        return self.path / "results" / "tiny"

    def tell_worker(self, *rules: dict[str, Any]) -> None:
        (self.path / "script.json").write_text(json.dumps(rules))

    def edit_space(self, old: str, new: str) -> None:
        text = (self.path / "tiny.yaml").read_text()
        assert old in text
        (self.path / "tiny.yaml").write_text(text.replace(old, new))

    def keep_three_plans(self, others: str) -> None:
        """One plan of 1f1b, and one each of the two schedules that are named."""
        self.edit_space("pp: [1, 2, 4]", "pp: [2]")
        self.edit_space("tp: [1, 3]", "tp: [1]")
        self.edit_space("interleaved-1f1b, zb-h1, v-min", others)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "autotune.cli", *arguments]

    def search_command(self, *arguments: str, launcher: str = "none") -> list[str]:
        worker = f"{{python}} {FAKE} --request {{request}} --out {{out}} --script {self.path / 'script.json'}"
        if "--sampler" not in arguments:
            arguments = ("--sampler", "grid", *arguments)
        if "--final" not in arguments:  # so that tests count the launches of the search alone
            arguments = ("--final", "0", *arguments)
        return self.command("search", "tiny.yaml", "--worker", worker, "--launcher", launcher, *arguments)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*arguments), cwd=self.path, capture_output=True, text=True, timeout=300)

    def search(self, *arguments: str, launcher: str = "none") -> subprocess.CompletedProcess[str]:
        command = self.search_command(*arguments, launcher=launcher)
        done = subprocess.run(command, cwd=self.path, capture_output=True, text=True, timeout=300)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def here(self, observer: Observer | None = None, **options: Any) -> SearchResult:
        """The same search in this process, which need not be started."""
        from autotune.profiling.command import parse_worker

        words = self.search_command()
        worker = parse_worker(words[words.index("--worker") + 1], "none")
        chosen = {"folder": self.study, "worker": worker, "sampler": "grid", "final": 0, **options}
        return search(load_space(self.path / "tiny.yaml"), SearchOptions(**chosen), observer)

    def start(self, *arguments: str, launcher: str = "none") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.search_command(*arguments, launcher=launcher),
            cwd=self.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def launches(self) -> list[str]:
        """The plans that a worker was started with, as text."""
        starts = self.path / "script.json.starts"
        return starts.read_text().splitlines() if starts.exists() else []

    def table(self) -> list[dict[str, str]]:
        with open(self.study / "trials.csv", newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def states(self) -> dict[str, int]:
        states = [row["state"] for row in self.table()]
        return {state: states.count(state) for state in set(states)}


class Notes(Silent):
    """Remembers what a search notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def __contains__(self, text: str) -> bool:
        return any(text in line for line in self.lines)


def wait_until(what: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def bench(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Bench(tmp_path)
    (tmp_path / "tiny.yaml").write_text(SPACE)
    made.tell_worker()
    yield made
    for process in made.running:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="session")
def postgres():  # type: ignore[no-untyped-def]
    """A PostgreSQL server of these tests alone. Only a machine that has no programs for one goes without."""
    sys.path.insert(0, str(FAKE.parent))
    from postgres import NoPostgresError, Postgres

    try:
        server = Postgres()
    except NoPostgresError as error:
        # The extra `dev` brings the programs wherever there are any: their absence is a fault of the environment.
        if platform.machine().lower() in ("x86_64", "amd64", "aarch64", "arm64"):
            raise
        pytest.skip(str(error))
    yield server
    server.close()
