"""One study of the campaign: its space, its tuner, what is known to be true of it, and whether that holds."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from faults.sandbox import clear, mount_small, unmount, without_override
from faults.worker import plan_key, step_time_s

ORPHAN_LIMIT_S = 10.0
HANG_S, TRIAL_S = 5.0, 12.0
MARK = "AUTOTUNE_FAULT_CAMPAIGN"
SMALL_DISK_BYTES = 8 << 20
STOP = "stop"
"""A file of this name in the campaign's folder ends it: no tuner is started any more."""

_SPACE = """\
name: tiny
model: {{layers: 8, hidden: 64, heads: 4, kv_heads: 4, ffn_hidden: 128, vocab: 128, sequence_length: 32}}
cluster: {{nodes: 1, devices_per_node: {devices}, device: cpu, memory_limit: 1GiB}}
training: {{global_batch_size: 16}}
trial: {{warmup_steps: 1, measured_steps: 3}}
search:
  pp: {pp}
  tp: [1, 3]
  micro_batch_size: {sizes}
  schedule: {schedules}
"""
_WORKER = """\
worker:
  command: ["{{python}}", "{script}", "--request", "{{request}}", "--out", "{{out}}", "--script", "{rules}"]
  starter: {starter}
  env: {{CAMPAIGN_PORT: "{{port}}"}}
"""
_LINE_READER = """\
  reader:
    kind: regex
    log: rank-0.log
    skip_steps: 1
    pattern: '"step": (?P<step>\\d+), "step_time_s": (?P<step_time_s>[\\d.e-]+), "loss": (?P<loss>[^}]+)}'
"""


@dataclass(frozen=True)
class Engine:
    """How a study runs its plans.

    Attributes:
        name: `reports`, `result`, `lines` (forms of the fake worker's result), `torchrun` (its ranks started by torch's
            launcher) or `pool` (the package's own worker on warm ranks).
    """

    name: str

    @property
    def fake(self) -> bool:
        return self.name != "pool"

    def space(self, rules: Path) -> str:
        light = self.name in ("reports", "result", "lines")
        space = _SPACE.format(
            devices=4 if light else 2,
            pp=[1, 2, 4] if light else [1, 2],
            sizes=[1, 2] if light else [2],
            schedules=["1f1b", "gpipe", "zb-h1", "v-min", "interleaved-1f1b"] if light else ["1f1b", "gpipe", "zb-h1"],
        )
        if not self.fake:
            return space
        script = Path(__file__).with_name("worker.py")
        starter = "torchrun" if self.name == "torchrun" else "none"
        worker = _WORKER.format(script=script, rules=rules, starter=starter)
        return space + worker + (_LINE_READER if self.name == "lines" else "")


@dataclass
class Study:
    """A study, its tuner if one runs, and what must be true.

    Attributes:
        expected: the states in which a plan may end.
        retries: launches of a plan beyond its first that faults make necessary.
        touched: kinds of the faults that a plan had, for the blame.
        violations: (kind, what was violated).
    """

    home: Path
    engine: Engine
    seed: int
    small_disk: bool = False
    storage: str | None = None
    rng: random.Random = field(init=False)
    rules: dict[str, dict[str, Any]] = field(default_factory=dict)
    expected: dict[str, set[str]] = field(default_factory=dict)
    retries: Counter[str] = field(default_factory=Counter)
    touched: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    violations: list[tuple[str, str]] = field(default_factory=list)
    tuner: subprocess.Popen[bytes] | None = None
    runs: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.home.mkdir(parents=True)
        self.script = self.home / "script.json"
        (self.home / "space.yaml").write_text(self.engine.space(self.script))
        self.results = self.home / "results"
        if self.small_disk:
            self.small_disk = mount_small(self.results, SMALL_DISK_BYTES)
        self.folder = self.results / "tiny"
        self.plans = self._legal_plans()
        for plan in self.plans:
            self.expected[plan] = {"ok"}
        self._rows: dict[str, int] = {}
        self.tell_worker()

    def _legal_plans(self) -> list[str]:
        from autotune.space.space import load_space

        return [plan_key(plan.to_dict()) for plan in load_space(self.home / "space.yaml").plans()]

    # ---- what the worker is told

    def tell_worker(self) -> None:
        """Write the rules down. Healthy plans take a little, so that a random moment may be inside of one."""
        form = self.engine.name if self.engine.name in ("result", "lines") else "reports"
        defaults = {"do": "healthy", "sleep_s": 0.15, "form": form}
        temporary = self.script.with_suffix(".tmp")
        temporary.write_text(json.dumps({"defaults": defaults, "rules": self.rules}))
        os.replace(temporary, self.script)

    def starts(self) -> list[str]:
        """Plans in the order in which the worker was started with them."""
        if not self.engine.fake:
            return []
        book = Path(f"{self.script}.starts")
        return book.read_text(encoding="utf-8").splitlines() if book.exists() else []

    # ---- the tuner

    def start(self) -> None:
        """Start a tuner that begins the study or goes on with it."""
        if (self.home.parent / STOP).exists():
            raise RuntimeError("the campaign was stopped")
        self.runs += 1
        command = [*without_override(), sys.executable, "-m", "autotune", "search", "space.yaml", "--resume"]
        # A final would launch measured plans again, on purpose.
        command += [
            "--sampler",
            "grid",
            "--final",
            "0",
            "--hang-timeout",
            str(self.hang_s),
            "--trial-timeout",
            str(self.trial_s),
        ]
        if self.storage is not None:
            command += ["--storage", self.storage]
        out, err = self._stream("out"), self._stream("err")
        with open(out, "wb") as stdout, open(err, "wb") as stderr:
            self.tuner = subprocess.Popen(
                command,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=os.environ | {MARK: str(self.home)},
                start_new_session=True,
            )

    @property
    def hang_s(self) -> float:
        return HANG_S if self.engine.fake else 60.0

    @property
    def trial_s(self) -> float:
        return TRIAL_S if self.engine.name in ("reports", "result", "lines") else 120.0

    def _stream(self, name: str) -> Path:
        return self.home / f"run-{self.runs}.{name}"

    def shown(self) -> str:
        """What the current or last tuner has printed."""
        return "".join(self._stream(name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))

    @property
    def running(self) -> bool:
        return self.tuner is not None and self.tuner.poll() is None

    def cpu_s(self) -> float:
        """CPU time of the tuner."""
        assert self.tuner is not None
        try:
            times = psutil.Process(self.tuner.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    def wait_for_trials(self, more: int, limit_s: float = 60.0) -> bool:
        """Wait until so many more trials have begun; False if the tuner ends before."""
        return self.wait(lambda: self.begun() >= goal, limit_s) if (goal := self.begun() + more) else True

    def begun(self) -> int:
        """Trials that the current tuner has begun, by what it shows."""
        path = self._stream("out")
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return sum(line.endswith("...") and "] trial " in line for line in text.splitlines())

    def wait(self, what: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not what():
            if not self.running or time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def finish_run(self, kind: str, codes: set[int], limit_s: float = 180.0) -> int:
        """Wait for the end of the tuner and check what it left: exit code, processes, output."""
        assert self.tuner is not None
        try:
            code = self.tuner.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.blame(kind, f"the tuner did not end within {limit_s:.0f} s")
            self.tuner.kill()
            code = self.tuner.wait()
        if code not in codes:
            wanted = " or ".join(map(str, sorted(codes)))
            self.blame(kind, f"exit code {code}, not {wanted}: {self.shown()[-600:]}")
        self._check_orphans(kind)
        shown = self.shown()
        for sign in ("Traceback", "Exception ignored", "Error in atexit", "\x1b"):
            if sign in shown:
                self.blame(kind, f"{sign!r} was shown: {shown[-1200:]}")
        return code

    def _check_orphans(self, kind: str) -> None:
        deadline = time.monotonic() + ORPHAN_LIMIT_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            names = [(process.pid, process.info["cmdline"][:6]) for process in left]
            self.blame(kind, f"{len(left)} processes live {ORPHAN_LIMIT_S:.0f} s after the tuner's end: {names}")
        for process in left:
            process.kill()

    def processes(self) -> list[psutil.Process]:
        """Living processes that were started by this study's tuners, the tuner included."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            try:
                if process.info["status"] != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == str(self.home):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    # ---- what faults touch

    def supervisor(self) -> psutil.Process | None:
        """The supervisor of the launch in flight."""
        return next((p for p in self._children() if "autotune.profiling.supervisor" in p.cmdline()), None)

    def _children(self) -> list[psutil.Process]:
        if self.tuner is None:
            return []
        try:
            return psutil.Process(self.tuner.pid).children()
        except psutil.Error:
            return []

    def plan_of(self, supervisor: psutil.Process) -> str | None:
        """The plan that a supervisor's launch runs, or a warm pool's is about to."""
        if not self.engine.fake:
            return self.in_flight()
        try:
            folder = json.loads(supervisor.cmdline()[-1])["folder"]
            return plan_key(json.loads(Path(folder, "request.json").read_text(encoding="utf-8"))["plan"])
        except (psutil.Error, OSError, ValueError, KeyError, IndexError):
            return None

    def in_flight(self) -> str | None:
        """The plan of the newest trial folder."""
        requests = sorted((self.folder / "logs").glob("trial-*/request.json"))
        try:
            return plan_key(json.loads(requests[-1].read_text(encoding="utf-8"))["plan"])
        except (OSError, ValueError, IndexError):
            return None

    # ---- what must be true

    def blame(self, kind: str, text: str) -> None:
        self.violations.append((kind, f"{self.home.name} (seed {self.seed}, {self.engine.name}): {text}"))

    def ran_again(self, plan: str | None, kind: str) -> None:
        """A fault may have cost this plan a launch."""
        if plan is not None:
            self.retries[plan] += 1
            self.touched[plan].append(kind)

    def lost_launch(self, kind: str) -> None:
        """The tuner died: the plan that was started last may have been in flight."""
        starts = self.starts()
        self.ran_again(starts[-1] if starts else None, kind)

    def check(self) -> None:
        """The finished study: every plan once, in the right state, with its own numbers; nothing started in vain."""
        try:
            with open(self.folder / "trials.csv", newline="", encoding="utf-8") as file:
                # Points that a rule refuses are no plans and have no fingerprint.
                rows = [row for row in csv.DictReader(file) if row["fingerprint"]]
        except OSError as error:
            self.blame("study", f"no table: {error}")
            return
        found: dict[str, list[dict[str, str]]] = defaultdict(list)
        for row in rows:
            found[plan_key(row)].append(row)
        for plan in found.keys() - set(self.plans):
            self.blame("study", f"a row of no plan of the space: {plan}")
        for plan in self.plans:
            self._check_plan(plan, found[plan], self._may_be_refused(plan, found))
        self._check_store()

    def _may_be_refused(self, plan: str, found: dict[str, list[dict[str, str]]]) -> bool:
        """Whether the same plan with smaller microbatches ran out of memory: then a search need not try this one."""
        pp, tp, dp, size, *rest = plan.split()
        smaller = [" ".join((pp, tp, dp, str(less), *rest)) for less in range(1, int(size))]
        return any(row["state"] == "oom" for other in smaller for row in found[other])

    def _check_plan(self, plan: str, rows: list[dict[str, str]], may_be_refused: bool) -> None:
        kind = (self.touched[plan] or ["study"])[-1]
        if len(rows) != 1:
            self.blame(kind, f"{len(rows)} rows of plan {plan}")
            return
        row = rows[0]
        if row["state"] == "refused" and may_be_refused and row["reason"].startswith("history"):
            if starts := self.starts().count(plan):
                self.blame(kind, f"plan {plan} is refused by history, but was started {starts} times")
            return
        if row["state"] not in self.expected[plan]:
            wanted = " or ".join(sorted(self.expected[plan]))
            self.blame(kind, f"plan {plan} ended {row['state']} ({row['reason'][:600]}), not {wanted}")
        if row["state"] == "ok" and self.engine.fake:
            step_s = float(row["step_time_s"])
            if abs(step_s / step_time_s(plan) - 1) > 1e-9:
                self.blame(kind, f"plan {plan} has the step time {step_s}, not its own {step_time_s(plan)}")
        if self.engine.fake:
            starts, most = self.starts().count(plan), 1 + self.retries[plan]
            # A rank that dies before its first line is launched without a start.
            least = 0 if row["state"] == "killed" else 1
            if not least <= starts <= most:
                self.blame(kind, f"plan {plan} was started {starts} times, not {least} to {most}")

    def _check_store(self) -> None:
        """Every plan has one outcome in the study's database, launches that failed for no fault of the plan aside."""
        if self.storage is not None:
            return
        with sqlite3.connect(self.folder / "study.db") as database:
            attributes = database.execute(
                "SELECT trial_id, key, value_json FROM trial_user_attributes WHERE key IN ('plan', 'outcome')"
            ).fetchall()
            told: dict[int, dict[str, Any]] = defaultdict(dict)
            for trial, key, value in attributes:
                told[trial][key] = json.loads(value)
            open_trials = database.execute("SELECT count(*) FROM trials WHERE state = 'RUNNING'").fetchone()[0]
        database.close()
        outcomes = Counter(
            one["plan"] for one in told.values() if one.get("outcome", {}).get("state", "launcher") != "launcher"
        )
        for plan, count in outcomes.items():
            if count > 1:
                self.blame("study", f"plan {plan} has {count} outcomes in the database")
        if open_trials:
            self.blame("study", f"{open_trials} trials are open in the database of a finished study")

    def close(self) -> None:
        """End what still runs and delete everything."""
        if self.tuner is not None and self.tuner.poll() is None:
            self.tuner.kill()
            self.tuner.wait()
        for process in self.processes():
            process.kill()
        if self.small_disk:
            unmount(self.results)
        clear(self.home)


def end_all_of(root: Path) -> None:
    """Kill what the tuners of a campaign have left, if it was cut short."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK, "").startswith(f"{root}/"):
                process.kill()
