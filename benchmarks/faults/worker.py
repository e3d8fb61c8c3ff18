"""A worker that trains nothing and fails as it is told: `worker.py --request FILE --out FOLDER --script FILE`.

Imports no torch. Started once for all ranks, or once a rank by a launcher (RANK is set). The script is JSON: plan ->
rule `{"do": ACTION, ...}`; a plan without one is healthy. Every start appends the plan to `SCRIPT.starts`, which lies
outside of the study: what a fault does to the study's folder must not touch the campaign's own book.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
import zlib
from typing import Any

Plan = dict[str, Any]

STEPS = 3


def plan_key(plan: Plan) -> str:
    """Names a plan in scripts, in the book of starts and in checks."""
    names = ("pp", "tp", "dp", "micro_batch_size", "schedule", "stages_per_device")
    return " ".join(str(plan[name]) for name in names)


def step_time_s(key: str) -> float:
    """What a healthy run of a plan reports: its own, so that a number in the wrong row shows."""
    return 0.1 + (zlib.crc32(key.encode()) % 1000) / 1e4


class Job:
    """One start of the worker."""

    def __init__(self, request: dict[str, Any], out: str, rule: dict[str, Any], starts: int) -> None:
        self.request, self.out, self.rule, self.starts = request, out, rule, starts
        plan = request["plan"]
        world = plan["pp"] * plan["tp"] * plan["dp"]
        self.ranks = [int(os.environ["RANK"])] if "RANK" in os.environ else list(range(world))
        self.key = plan_key(plan)

    def write(self, name: str, values: dict[str, Any], share: float = 1.0) -> None:
        text = json.dumps(values)
        path = os.path.join(self.out, name)
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            file.write(text[: int(len(text) * share)])
        os.replace(path + ".tmp", path)

    def report(self, loss: float = 2.5, share: float = 1.0) -> None:
        """The numbers of a run that went well, in the form that the study reads."""
        step_s = step_time_s(self.key)
        form = self.rule.get("form", "reports")
        if form == "reports":
            for rank in self.ranks:
                values = {
                    "version": 1,
                    "rank": rank,
                    "request_id": self.request["id"],
                    "state": "ok",
                    "step_wall_s": [step_s] * STEPS,
                    "losses": [loss] * STEPS,
                    "peak_memory_bytes": 1000 + rank,
                    "device": "fake",
                }
                self.write(f"rank-{rank}.json", values, share)
        elif form == "result":
            self.write("result.json", {"step_time_s": step_s, "loss": loss, "peak_memory_bytes": 1000}, share)
        else:
            steps = self.request["warmup_steps"] + self.request["measured_steps"]
            lines = [json.dumps({"step": step, "step_time_s": step_s, "loss": loss}) for step in range(1, steps + 1)]
            text = "\n".join(lines)
            print(text[: int(len(text) * share)], flush=True)


def healthy(job: Job) -> None:
    time.sleep(job.rule.get("sleep_s", 0.0))
    job.report()


def silent(job: Job) -> None:
    """Exit code 0 without a result."""


def half(job: Job) -> None:
    """The result breaks off in the middle of a JSON text."""
    job.report(share=0.55)


def not_finite(job: Job) -> None:
    job.report(loss=float(job.rule["loss"]))


def allocate(job: Job) -> None:
    """A real allocation fails at a limit of the address space."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (1 << 29, limit))
    held = []
    while True:
        held.append(bytearray(1 << 26))


def hog(job: Job) -> None:
    """Touch memory in a group that may have little of it, until the kernel ends this process."""
    with open(os.path.join(job.rule["cgroup"], "cgroup.procs"), "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    held = []
    while True:
        held.append(b"x" * (1 << 22))


def port_taken(job: Job) -> None:
    """The first launches find their port taken, as by a stranger that was faster."""
    port = int(os.environ["CAMPAIGN_PORT"])
    stranger = socket.socket()
    if job.starts <= job.rule["times"]:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
    # torch raises this where a store's port is taken; importing torch for it would cost seconds
    error = type("DistNetworkError", (RuntimeError,), {"__module__": "torch.distributed"})
    with socket.socket() as store:
        try:
            store.bind(("127.0.0.1", port))
        except OSError as taken:
            raise error(f"The server socket has failed to listen on port {port}: {taken}") from taken
    job.report()


def slow(job: Job) -> None:
    """Far too slow, but alive: it goes on printing."""
    while True:
        print("still at it", flush=True)
        time.sleep(0.2)


def hang(job: Job) -> None:
    """No progress at all."""
    time.sleep(3600)


def stopped(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)


def die(job: Job) -> None:
    """A rank ends by a signal, after a while."""
    time.sleep(job.rule["after_s"])
    os.kill(os.getpid(), job.rule["signal"])
    time.sleep(3600)


def chatter(job: Job) -> None:
    """More log than anyone wants to hold in memory; lines or one endless line. Then success or failure."""
    block = (b"y" * 1023 + (b"\n" if job.rule["lines"] else b"y")) * 1024
    for _ in range(job.rule["megabytes"]):
        os.write(1, block)
    os.write(1, b"\n")
    if job.rule["code"]:
        print("the very last words", flush=True)
        sys.exit(job.rule["code"])
    job.report()


ACTIONS = {
    action.__name__: action
    for action in (healthy, silent, half, not_finite, allocate, hog, port_taken, slow, hang, stopped, die, chatter)
}


def main() -> None:
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    with open(arguments["--request"], encoding="utf-8") as file:
        request = json.load(file)
    with open(arguments["--script"], encoding="utf-8") as file:
        script = json.load(file)
    key = plan_key(request["plan"])
    book = arguments["--script"] + ".starts"
    with open(book, "a+", encoding="utf-8") as file:
        if os.environ.get("RANK", "0") == "0":
            file.write(key + "\n")
            file.flush()
        file.seek(0)
        starts = file.read().splitlines().count(key)
    rule = script["defaults"] | script["rules"].get(key, {})
    if "rank" in rule and os.environ.get("RANK", str(rule["rank"])) != str(rule["rank"]):
        rule = script["defaults"] | {"do": "hang"}  # the peers of the rank that fails wait for it
    ACTIONS[rule["do"]](Job(request, arguments["--out"], rule, starts))


if __name__ == "__main__":
    main()
