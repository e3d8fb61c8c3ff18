"""Does a search survive everything? Faults of 14 kinds over studies that are resumed until they are whole.

A fake worker stands in for training, so that trials are fast; in one study torch's launcher starts its ranks, in one
the package's own worker runs on warm ranks. After every end of a tuner its processes, its output and its exit code are
checked, and after every study its table, its database and every launch; beside that a process reads all tables all the
time. Exit code 1 if anything was violated.

    python benchmarks/fault_campaign.py [--faults 200] [--seed 1] [--kinds "disk full,port taken"] [--jobs 3]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import sandbox
from faults.kinds import KINDS, Kind, Machine
from faults.study import STOP, Engine, Study, end_all_of

PLAN_FAULTS, RUN_FAULTS = 8, 6  # of one study
MOST_RUNS = 40
_LIGHT = ("reports", "result", "lines")
GROUP_BYTES = 48 << 20
SERVER_FAULTS = 5  # restarts of a database server


@dataclass(frozen=True)
class Hand:
    """The faults of one study, and how it runs."""

    number: int
    engine: Engine
    faults: list[Kind]
    small_disk: bool = False
    storage: str | None = None


@dataclass
class Tally:
    """What happened, over all studies."""

    injected: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[str, str]] = field(default_factory=list)
    studies: int = 0
    runs: int = 0
    launches: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Campaign:
    """Deals faults out to studies and runs these side by side."""

    def __init__(self, root: Path, arguments: argparse.Namespace) -> None:
        self.root, self.arguments = root, arguments
        self.rng = random.Random(arguments.seed)
        self.tally = Tally()
        self.namespace = sandbox.enter_namespace()
        self.server = None if arguments.light else database_server()
        group = sandbox.memory_group(f"autotune-campaign-{os.getpid()}", GROUP_BYTES)
        self.machine = Machine(group, None if self.server is None else self._restart)
        self.numbers = iter(range(10_000))

    def run(self, kinds: list[Kind]) -> None:
        """Inject all faults; those that found no target are dealt out again."""
        waiting = [kinds[index % len(kinds)] for index in range(self.arguments.faults)]
        self.rng.shuffle(waiting)
        hands = []
        for engine, count in self._heavy_studies(waiting):
            faults = [kind for kind in waiting if kind.of_run and not kind.needs][:count]
            for kind in faults:
                waiting.remove(kind)
            hands.append(Hand(next(self.numbers), engine, faults))
        if self.server is not None:
            faults = [kind for kind in waiting if kind.name == "database"][:SERVER_FAULTS]
            for kind in faults:
                waiting.remove(kind)
            hands.append(Hand(next(self.numbers), Engine("reports"), faults, storage=self.server.url))
        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            while waiting or hands:
                while waiting:
                    hands.append(self._deal(waiting))
                try:
                    for left in pool.map(self._survive, hands):
                        waiting += left
                except BaseException:
                    (self.root / STOP).touch()
                    end_all_of(self.root)
                    raise
                hands = []

    def _restart(self, away_s: float) -> None:
        self.server.stop()
        time.sleep(away_s)
        self.server.start()

    def _heavy_studies(self, waiting: list[Kind]) -> list[tuple[Engine, int]]:
        """Studies whose ranks take seconds to start, and how many faults each gets."""
        if self.arguments.light:
            return []
        return [(Engine("torchrun"), 4), (Engine("pool"), 4)]

    def _survive(self, hand: Hand) -> list[Kind]:
        try:
            return self._run_study(hand)
        except Exception:  # a fault of the campaign itself must not pass for a good end
            with self.tally.lock:
                self.tally.violations.append(("campaign", traceback.format_exc()))
            return []

    def _deal(self, waiting: list[Kind]) -> Hand:
        """Faults for one study. Some need a small disk, some a large one."""
        small = sum(kind.needs == "small disk" for kind in waiting)
        small_disk = small > 0 and (small == len(waiting) or self.rng.random() < 0.5)
        unfit = "large disk" if small_disk else "small disk"
        faults: list[Kind] = []
        plans, runs = PLAN_FAULTS, RUN_FAULTS
        for kind in list(waiting):
            if kind.needs == unfit:
                continue
            if kind.of_run is not None and runs:
                runs -= 1
            elif kind.of_plan is not None and plans:
                plans -= 1
            else:
                continue
            faults.append(kind)
            waiting.remove(kind)
        number = next(self.numbers)
        return Hand(number, Engine(_LIGHT[number % len(_LIGHT)]), faults, small_disk)

    def _run_study(self, hand: Hand) -> list[Kind]:
        """Run a study with these faults until it is whole; the faults that found no target."""
        seed, faults = self.arguments.seed * 1000 + hand.number, hand.faults
        study = Study(self.root / f"study-{hand.number:03d}", hand.engine, seed, hand.small_disk, hand.storage)
        (study.home / "live").touch()
        if self.arguments.verbose:
            print(
                f"{study.home.name} seed {seed} {hand.engine.name}: {', '.join(kind.name for kind in faults)}",
                flush=True,
            )
        try:
            missed = self._inject(study, faults)
            study.check()
            self._once_more(study)
        finally:
            (study.home / "live").unlink()
            with self.tally.lock:
                self.tally.violations += study.violations
                self.tally.studies += 1
                self.tally.runs += study.runs
                self.tally.launches += len(study.starts())
            if self.arguments.keep and study.violations:
                print(f"kept {study.home}", flush=True)
            else:
                study.close()
        return missed

    def _inject(self, study: Study, faults: list[Kind]) -> list[Kind]:
        """Plans get theirs at once, runs theirs one after the other; then the study runs to its end."""
        runs: list[Kind] = []
        # The first plans of a study stay healthy: a search whose first trials all fail may well give up.
        victims = study.plans[4:]
        study.rng.shuffle(victims)
        for kind in faults:
            if victims and study.engine.fake and kind.as_plan_fault(study.rng):
                assert kind.of_plan is not None
                plan = victims.pop()
                kind.of_plan(study, plan, self.machine)
                study.touched[plan].append(kind.name)
                self._count(kind)
            else:
                runs.append(kind)
        study.tell_worker()
        missed = []
        for kind in runs:
            if not study.running:
                study.start()
            if kind.of_run is not None and study.runs < MOST_RUNS and kind.of_run(study, self.machine):
                self._count(kind)
            else:
                missed.append(kind)
                if not study.running and study.tuner is not None:
                    study.finish_run("study", {0})
        if not study.running:
            study.start()
        study.finish_run("study", {0})
        return missed

    def _once_more(self, study: Study) -> None:
        """A whole study is resumed: nothing is left to do, nothing changes."""
        before, table = len(study.starts()), (study.folder / "trials.csv").read_bytes()
        study.start()
        study.finish_run("study", {0})
        if len(study.starts()) != before:
            study.blame("study", f"resuming the whole study started {study.starts()[before:]}")
        if (study.folder / "trials.csv").read_bytes() != table:
            study.blame("study", "resuming the whole study changed its table")

    def _count(self, kind: Kind) -> None:
        with self.tally.lock:
            self.tally.injected[kind.name] += 1


def database_server() -> Any:
    """A PostgreSQL server of the campaign's own; None where its programs are not installed."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fakes"))
    from postgres import NoPostgresError, Postgres

    try:
        server = Postgres()
    except NoPostgresError:
        return None
    server.folder.chmod(0o755)
    return server


def with_reader(root: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the process that reads all tables."""
    report = root / "reader.json"
    command = [sys.executable, "-m", "faults.reader", str(root), str(report)]
    return subprocess.Popen(command, cwd=Path(__file__).parent, stdin=subprocess.PIPE), report


def print_table(tally: Tally, reader: dict[str, Any], kinds: list[Kind], seconds: float) -> None:
    """By kind: injected, survived, and what was violated."""
    bad = Counter(kind for kind, _ in tally.violations)
    print(f"\n{'kind':<18}{'injected':>9}{'survived':>10}{'violations':>12}")
    for kind in kinds:
        count = tally.injected[kind.name]
        print(f"{kind.name:<18}{count:>9}{count - min(count, bad[kind.name]):>10}{bad[kind.name]:>12}")
    other = sum(bad.values()) - sum(bad[kind.name] for kind in kinds)
    print(f"{'study as a whole':<18}{'':>9}{'':>10}{other:>12}")
    print(f"{'all':<18}{tally.injected.total():>9}{'':>10}{sum(bad.values()):>12}")
    print(
        f"\n{tally.studies} studies, {tally.runs} runs of a tuner, {tally.launches} launches of the fake worker, "
        f"{reader['reads']} reads of tables beside them, {seconds:.0f} s"
    )
    for kind, text in tally.violations:
        print(f"\nVIOLATED, {kind}: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default="", help=f"some of: {', '.join(KINDS)}; default: all")
    parser.add_argument("--jobs", type=int, default=3, help="studies at once: most of a study's time is waiting")
    parser.add_argument("--light", action="store_true", help="no study with torch's launcher or with warm ranks")
    parser.add_argument("--keep", action="store_true", help="keep the folders of studies with violations")
    parser.add_argument("--verbose", action="store_true", help="say what goes on")
    arguments = parser.parse_args()
    names = [name.strip() for name in arguments.kinds.split(",") if name.strip()] or list(KINDS)
    if unknown := [name for name in names if name not in KINDS]:
        parser.error(f"unknown kind {unknown[0]!r}; known: {', '.join(KINDS)}")
    began = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="autotune-faults-"))
    campaign = Campaign(root, arguments)
    group = campaign.machine.memory_group
    kinds = [KINDS[name] for name in names]
    if not campaign.namespace:
        kinds = [kind for kind in kinds if kind.needs != "small disk"]
    if not sandbox.permissions_hold():
        kinds = [kind for kind in kinds if kind.name != "unwritable"]
    print(
        f"seed {arguments.seed}, {arguments.faults} faults of {len(kinds)} kinds; "
        f"small disks: {'tmpfs in a mount namespace' if campaign.namespace else 'none, mounting is forbidden'}; "
        f"out of memory: RLIMIT_AS{'' if group is None else ' and a memory cgroup'}; "
        f"database: SQLite{'' if campaign.server is None else ' and a PostgreSQL server'}; "
        f"permissions: {'hold' if sandbox.permissions_hold() else 'none, root overrides them'}",
        flush=True,
    )
    reader, report = with_reader(root)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        campaign.run(kinds)
    finally:
        end_all_of(root)
        assert reader.stdin is not None
        reader.stdin.close()
        reader.wait(60)
        sandbox.drop_memory_group(group)
        if campaign.server is not None:
            campaign.server.close()
    read = json.loads(report.read_text()) if report.exists() else {"reads": 0, "problems": ["the reader died"]}
    campaign.tally.violations += [("reader", problem) for problem in read["problems"]]
    print_table(campaign.tally, read, kinds, time.monotonic() - began)
    if not arguments.keep:
        sandbox.clear(root)
    return 1 if campaign.tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
