"""The kinds of faults, and what each must lead to.

A fault of a *plan* is told to the fake worker before the study begins: the plan must end in a certain state. A fault of
a *run* hits the tuner, what it started, or what it writes to, at a random moment: it may cost the plan in flight a
launch, but no plan its row.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from faults.study import ORPHAN_LIMIT_S, Study

ENDED_WELL = 0
UNUSABLE = 2

_DEADLY = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
_PYTHON_STARTS_S = 0.08
_LOCKER = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], timeout=30, isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
database.execute("ROLLBACK")
"""


@dataclass(frozen=True)
class Machine:
    """What the machine lets the campaign do.

    Attributes:
        memory_group: a cgroup with little memory; None: only the limit of an address space makes memory run out.
        restart_database: stops the server that a study's database is in for so many seconds; None: there is no server.
    """

    memory_group: str | None
    restart_database: Callable[[float], None] | None = None


# ---- faults of plans


def out_of_memory(study: Study, plan: str, machine: Machine) -> None:
    if machine.memory_group is not None and study.rng.random() < 0.5:
        study.rules[plan] = {"do": "hog", "cgroup": machine.memory_group}
    else:
        study.rules[plan] = {"do": "allocate"}
    study.expected[plan] = {"oom"}


def no_result(study: Study, plan: str, machine: Machine) -> None:
    study.rules[plan] = {"do": "silent"}
    study.expected[plan] = {"no-result"}


def half_a_line(study: Study, plan: str, machine: Machine) -> None:
    study.rules[plan] = {"do": "half"}
    study.expected[plan] = {"no-result"}


def port_taken(study: Study, plan: str, machine: Machine) -> None:
    times = study.rng.choice((1, 2))
    study.rules[plan] = {"do": "port_taken", "times": times}
    study.retries[plan] += times


def not_finite(study: Study, plan: str, machine: Machine) -> None:
    study.rules[plan] = {"do": "not_finite", "loss": study.rng.choice(("nan", "inf", "-inf"))}
    study.expected[plan] = {"non-finite"}


def slow_rank(study: Study, plan: str, machine: Machine) -> None:
    action, state = study.rng.choice((("slow", "timeout"), ("hang", "hang")))
    study.rules[plan] = {"do": action}
    study.expected[plan] = {state}


def huge_log(study: Study, plan: str, machine: Machine) -> None:
    code = study.rng.choice((0, 3))
    study.rules[plan] = {"do": "chatter", "megabytes": 101, "lines": study.rng.random() < 0.5, "code": code}
    study.expected[plan] = {"failed" if code else "ok"}


def stopped_rank(study: Study, plan: str, machine: Machine) -> None:
    study.rules[plan] = {"do": "stopped"}
    study.expected[plan] = {"hang"}


def dying_rank(study: Study, plan: str, machine: Machine) -> None:
    number = study.rng.choice(_DEADLY)
    study.rules[plan] = {"do": "die", "signal": int(number), "after_s": study.rng.random() * 0.2}
    study.expected[plan] = {"killed"} | _also(number, machine)


def _also(number: int, machine: Machine) -> set[str]:
    """A rank that SIGKILL ends counts as out of memory if the kernel ended one for that at the same time, as it does in
    the campaign's other studies."""
    return {"oom"} if number == signal.SIGKILL and machine.memory_group is not None else set()


# ---- faults of runs: each returns whether it hit, with the tuner's run going on or checked to its end


def tuner_signal(study: Study, machine: Machine) -> bool:
    number = study.rng.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL))
    if not _at_a_random_moment(study):
        return False
    assert study.tuner is not None
    study.tuner.send_signal(number)
    # Before the tuner can answer a signal, at its very start, the kernel ends it as if it had none.
    study.finish_run("tuner signal", {-signal.SIGKILL} if number == signal.SIGKILL else {128 + number, -number, 0})
    study.lost_launch("tuner signal")
    return True


def launcher_signal(study: Study, machine: Machine) -> bool:
    """The supervisor, or the launcher below it, gets a signal: the plan is launched again."""
    number = study.rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
    found = _a_launch(study)
    if found is None:
        return False
    supervisor, plan = found
    target = supervisor
    if study.rng.random() < 0.5:
        target = _child(supervisor) or supervisor
    _send(target, number)
    if plan is not None:
        study.ran_again(plan, "launcher signal")
        if target is not supervisor:
            # A launcher hands INT to its ranks: then a signal ended a rank, and nobody ended the launcher.
            study.expected[plan] |= {"killed"} if number == signal.SIGINT else set()
    return True


def rank_signal(study: Study, machine: Machine) -> bool:
    """A rank gets a signal at a random moment; one that has reported by then is none the worse."""
    number = study.rng.choice((*_DEADLY, signal.SIGTERM, signal.SIGINT))
    found = _a_launch(study)
    if found is None:
        return False
    supervisor, plan = found
    rank = _rank(study, supervisor)
    if rank is None or plan is None:
        return False
    _send(rank, number)
    study.touched[plan].append("rank signal")
    if number == signal.SIGTERM:
        study.retries[plan] += 1
    else:
        study.expected[plan] = study.expected[plan] | {"killed"} | _also(number, machine)
    return True


def tuner_stopped(study: Study, machine: Machine) -> bool:
    """The tuner is stopped for a while; then it goes on, or is killed in its sleep."""
    if not _at_a_random_moment(study):
        return False
    assert study.tuner is not None
    study.tuner.send_signal(signal.SIGSTOP)
    time.sleep(study.rng.uniform(0.3, 2.0))
    if study.rng.random() < 0.5:
        study.tuner.send_signal(signal.SIGCONT)
        return True
    study.tuner.kill()
    study.finish_run("stop", {-signal.SIGKILL})
    study.lost_launch("stop")
    return True


def disk_full(study: Study, machine: Machine) -> bool:
    """Somebody fills the disk; the search says so and ends; with space again it goes on."""
    if not study.small_disk or not _at_a_random_moment(study):
        return False
    ballast = study.results / "ballast"
    left = study.rng.choice((0, 0, 4096, 65536))
    free = os.statvfs(study.results).f_bavail * os.statvfs(study.results).f_frsize
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        remaining = max(0, free - left)
        while remaining > 0:
            remaining -= file.write(b"\0" * min(remaining, 1 << 16))
    code = study.finish_run("disk full", {UNUSABLE, ENDED_WELL})
    if code == UNUSABLE and not ("No space left" in study.shown() or "disk is full" in study.shown()):
        study.blame("disk full", f"the message does not tell that the disk is full: {study.shown()[-600:]}")
    ballast.unlink()
    study.lost_launch("disk full")
    return True


def unwritable(study: Study, machine: Machine) -> bool:
    """The folder loses its write permission, or has none from the start."""
    if not _at_a_random_moment(study):
        return False
    folders = [path for path in (study.results, study.folder, study.folder / "logs") if path.is_dir()]
    for path in folders:
        path.chmod(0o555)
    code = study.finish_run("unwritable", {UNUSABLE, ENDED_WELL})
    for path in folders:
        path.chmod(0o755)
    if code == UNUSABLE and str(study.folder.name) not in study.shown():
        study.blame("unwritable", f"the message does not name the folder: {study.shown()[-600:]}")
    study.lost_launch("unwritable")
    return True


def database_away(study: Study, machine: Machine) -> bool:
    """The database can't be reached for seconds: a server restarts, or another process has the file for itself."""
    if not _at_a_random_moment(study):
        return False
    if study.storage is not None and machine.restart_database is not None:
        at_work = study.begun() > 0
        machine.restart_database(study.rng.uniform(0.1, 3.0))
        if not study.running:
            # A search that has begun waits; one that starts may have been given a wrong address.
            study.finish_run("database", {ENDED_WELL} if at_work else {ENDED_WELL, UNUSABLE})
            study.lost_launch("database")
        return True
    database = study.folder / "study.db"
    if not database.exists():
        return False
    command = [sys.executable, "-c", _LOCKER, str(database), str(study.rng.uniform(0.5, 4.0))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as locker:
        assert locker.stdout is not None
        return locker.stdout.readline() == b"locked\n"


# ---- where and when


def _at_a_random_moment(study: Study) -> bool:
    """Wait: into the start of the tuner, or into one of its next trials. False if the tuner has ended by then."""
    if study.rng.random() < 0.25:
        # In its first moments a process is Python's own: only what comes after is ours to get right.
        study.wait(lambda: study.cpu_s() > _PYTHON_STARTS_S, 20.0)
        time.sleep(study.rng.uniform(0.0, 2.0))
        return study.running
    if not study.wait_for_trials(study.rng.choice((1, 2, 3))):
        return False
    time.sleep(study.rng.uniform(0.0, 0.6))
    return study.running


def _a_launch(study: Study) -> tuple[psutil.Process, str | None] | None:
    """A launch in flight, at a random moment of it, and its plan."""
    if not study.wait_for_trials(study.rng.choice((1, 2))):
        return None
    found: list[psutil.Process] = []

    def look() -> bool:
        if (supervisor := study.supervisor()) is not None:
            found.append(supervisor)
        return bool(found)

    if not study.wait(look, 20.0):
        return None
    time.sleep(study.rng.uniform(0.0, 0.5 if study.engine.fake and study.engine.name != "torchrun" else 6.0))
    supervisor = study.supervisor()
    return None if supervisor is None else (supervisor, study.plan_of(supervisor))


def _child(process: psutil.Process) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        return next(iter(process.children()), None)
    return None


def _rank(study: Study, supervisor: psutil.Process) -> psutil.Process | None:
    """A process that runs the worker, not one that starts it."""
    with contextlib.suppress(psutil.Error):
        below = supervisor.children(recursive=True)
        names = ("worker.py", "autotune.profiling.serve")
        ranks = [
            process
            for process in below
            if any(word.endswith(names) for word in process.cmdline())
            and "rank_entry.py" not in " ".join(process.cmdline())
        ]
        return study.rng.choice(ranks) if ranks else None
    return None


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


# ---- the list


@dataclass(frozen=True)
class Kind:
    """One kind of fault: told to a plan's worker, or done to a run, or by chance the one or the other."""

    name: str
    of_plan: Callable[[Study, str, Machine], None] | None = None
    of_run: Callable[[Study, Machine], bool] | None = None
    needs: str = ""

    def as_plan_fault(self, rng: random.Random) -> bool:
        """Whether this time it is told to a plan."""
        if self.of_plan is None or self.of_run is None:
            return self.of_plan is not None
        return rng.random() < 0.4


KINDS = {
    kind.name: kind
    for kind in (
        Kind("tuner signal", of_run=tuner_signal),
        Kind("launcher signal", of_run=launcher_signal),
        Kind("rank signal", of_plan=dying_rank, of_run=rank_signal),
        Kind("stop", of_plan=stopped_rank, of_run=tuner_stopped),
        Kind("out of memory", of_plan=out_of_memory),
        Kind("no result", of_plan=no_result),
        Kind("half a line", of_plan=half_a_line),
        Kind("port taken", of_plan=port_taken),
        Kind("disk full", of_run=disk_full, needs="small disk"),
        Kind("not finite", of_plan=not_finite),
        Kind("slow rank", of_plan=slow_rank),
        Kind("huge log", of_plan=huge_log, needs="large disk"),
        Kind("unwritable", of_run=unwritable),
        Kind("database", of_run=database_away),
    )
}
"""By name."""

__all__ = ["KINDS", "ORPHAN_LIMIT_S", "Kind", "Machine"]
