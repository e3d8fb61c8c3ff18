"""A worker that does as it is told: stands in for training in tests of launcher, search and table. No torch.

    python worker.py --request REQUEST --out FOLDER [--script SCRIPT]

Started once per rank by a launcher, or once alone (no RANK in the environment), when it reports for every rank.
SCRIPT is a JSON file: a list of rules {"when": {"schedule": "gpipe", ...}, "do": ACTION, ...options}. The first rule
whose `when` agrees with the plan decides; without one the plan succeeds. Every start is written to SCRIPT.starts.
The key "launch" in `when` is the number of the start of this plan, from 1: [2, 3] is the second or the third. An option
"step_s" that is a list gives the step time of each start; the last one counts for all later ones.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--request", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--script")
    arguments = parser.parse_args()
    request = json.loads(Path(arguments.request).read_text())
    plan = request["plan"]
    world = plan["pp"] * plan["tp"] * plan["dp"]
    launch = 1 + starts_of(arguments.script, plan)
    rule = choose(arguments.script, plan | {"launch": launch})
    if isinstance(rule.get("step_s"), list):
        rule = rule | {"step_s": rule["step_s"][min(launch, len(rule["step_s"])) - 1]}
    ranks = [int(os.environ["RANK"])] if "RANK" in os.environ else list(range(world))
    out = Path(arguments.out)
    for rank in ranks:
        (out / f"pid-{rank}").write_text(str(os.getpid()))
        if rank == 0 and arguments.script:
            with open(arguments.script + ".starts", "a") as starts:
                starts.write(json.dumps(plan) + "\n")
    for rank in ranks:
        ACTIONS[rule.get("do", "succeed")](request, rule, rank, out)


def choose(script: str | None, plan: dict) -> dict:
    rules = json.loads(Path(script).read_text()) if script else []
    for rule in rules:
        if all(plan[k] == v or (isinstance(v, list) and plan[k] in v) for k, v in rule.get("when", {}).items()):
            return rule
    return {}


def starts_of(script: str | None, plan: dict) -> int:
    """How often the plan was started before, where one process reports for all ranks."""
    starts = Path(f"{script}.starts")
    return starts.read_text().splitlines().count(json.dumps(plan)) if script and starts.exists() else 0


def write(out: Path, rank: int, request: dict, report: dict) -> None:
    temporary = out / f"rank-{rank}.tmp"
    temporary.write_text(json.dumps({"version": 1, "rank": rank, "request_id": request["id"], **report}))
    temporary.rename(out / f"rank-{rank}.json")


def succeed(request: dict, rule: dict, rank: int, out: Path) -> None:
    time.sleep(rule.get("sleep_s", 0))
    plan = request["plan"]
    # By default more pipeline stages are slower, so that the plans have different numbers.
    step_s = rule.get("step_s", 0.1 + 0.01 * plan["pp"] + 0.001 * plan["micro_batch_size"])
    steps = rule.get("steps", request["measured_steps"])
    write(
        out,
        rank,
        request,
        {
            "state": "ok",
            "step_wall_s": [step_s + 0.001 * k + 0.0001 * rank for k in range(steps)],
            "peak_memory_bytes": rule.get("peak", 1000) + rank,
            "losses": [rule.get("loss", 2.5)] * steps,
            "torch": "2.13.0",
            "device": "fake",
        },
    )


def silent(request: dict, rule: dict, rank: int, out: Path) -> None:
    print("leaving without a word")


def sleep(request: dict, rule: dict, rank: int, out: Path) -> None:
    print("about to sleep")
    if rule.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rule.get("daemon") and os.fork() == 0:
        os.setsid()
        if os.fork() == 0:  # a grandchild in a session of its own, whose parent is gone
            (out / f"pid-daemon-{rank}").write_text(str(os.getpid()))
            time.sleep(3600)
        os._exit(0)
    if rule.get("stopped") == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(rule.get("sleep_s", 3600))


def fail(request: dict, rule: dict, rank: int, out: Path) -> None:
    """Rank `rank` of the rule fails first; the others see their connection break a moment later."""
    first = rule.get("rank", 1)
    if rank != first and "RANK" in os.environ:
        while not (out / f"rank-{first}.json").exists():
            time.sleep(0.02)
    own, consequence = rule.get("error", "ValueError: the first cause"), "RuntimeError: connection closed by peer"
    state = rule.get("state", "failed") if rank == first else "failed"
    error = own if rank == first else consequence
    write(out, rank, request, {"state": state, "error": error, "failed_at": time.time()})
    print(error)
    sys.exit(1)


def crash(request: dict, rule: dict, rank: int, out: Path) -> None:
    """Rank `rank` of the rule ends without a report."""
    if rank == rule.get("rank", 1):
        print("Traceback:\n  in fake\nRuntimeError: lost my marbles", file=sys.stderr, flush=True)
        os.kill(os.getpid(), rule["signal"]) if "signal" in rule else os._exit(3)
    time.sleep(60)


def memory_error(request: dict, rule: dict, rank: int, out: Path) -> None:
    """A real failing allocation under an address-space limit, reported as a worker should."""
    resource.setrlimit(resource.RLIMIT_AS, (rule["limit"], rule["limit"]))
    try:
        bytearray(4 * rule["limit"])
    except MemoryError:
        write(out, rank, request, {"state": "oom", "error": "MemoryError: 4 x the limit", "failed_at": time.time()})
        sys.exit(1)


def hog(request: dict, rule: dict, rank: int, out: Path) -> None:
    """Touch memory until the kernel ends us."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    while True:
        block = libc.malloc(ctypes.c_size_t(16 << 20))
        ctypes.memset(block, 1, 16 << 20)
        time.sleep(0.005)


def chatter(request: dict, rule: dict, rank: int, out: Path) -> None:
    line = "x" * 1023 + "\n"
    for _ in range(rule.get("megabytes", 20) * 1024):
        sys.stdout.write(line)
    print("the very last words", flush=True)
    sys.exit(1)


def half(request: dict, rule: dict, rank: int, out: Path) -> None:
    succeed(request, rule, rank, out)
    if rank == rule.get("rank", 0):
        path = out / f"rank-{rank}.json"
        path.write_bytes(path.read_bytes()[:40])


def other(request: dict, rule: dict, rank: int, out: Path) -> None:
    """Reports that are good, but of another request; then it sleeps, as a rank at work would."""
    succeed(request | {"id": "0" * 16}, rule, rank, out)
    if rank == request["plan"]["pp"] - 1 or "RANK" in os.environ:
        time.sleep(3600)


ACTIONS = {
    "succeed": succeed,
    "silent": silent,
    "sleep": sleep,
    "fail": fail,
    "crash": crash,
    "memory_error": memory_error,
    "hog": hog,
    "chatter": chatter,
    "half": half,
    "other": other,
}

if __name__ == "__main__":
    main()
