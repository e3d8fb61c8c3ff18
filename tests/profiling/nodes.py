"""Two nodes on one machine: loopback addresses that a stand-in for ssh reaches."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from autotune.profiling.assess import assess
from autotune.profiling.command import WorkerCommand, parse_worker
from autotune.profiling.hosts import Hosts
from autotune.profiling.launcher import launch
from autotune.profiling.process_tree import marked
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.supervisor import Ending
from autotune.results.measurement import TrialOutcome
from autotune.schedules import registry
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import TrainingSpec

FAKES = Path(__file__).parents[1] / "fakes"
SHELL = (sys.executable, str(FAKES / "remote_shell.py"), "{host}")
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
LINK = Link(1e-6, 1e10)
OWNER = "a-study/1/1.00"


def two_nodes(*names: str) -> Hosts:
    return Hosts(names or (HEAD, OTHER), SHELL)


def make_request(per_node: int = 1, nodes: int = 2) -> TrialRequest:
    """A plan on all devices of the nodes, each a pipeline stage."""
    pp = per_node * nodes
    model = ModelSpec(pp, 8, 2, 2, 4, 8, 16, 4)
    cluster = ClusterSpec(nodes, per_node, "cpu", None, LINK, LINK)
    plan = Plan(pp, 1, 1, 1, 4, "1f1b", 1, (1,) * pp)
    return TrialRequest(3, plan, registry.build("1f1b", pp, 4, 1), model, cluster, TrainingSpec(4))


def once_a_node(action: str, *options: str) -> WorkerCommand:
    """The fake, started once on every node: so nothing waits for torch's launcher."""
    return parse_worker(f"{{python}} {FAKES / 'node_worker.py'} {{node_rank}} {action} {' '.join(options)}", "none")


def once_a_rank(action: str, *options: str) -> WorkerCommand:
    return parse_worker(f"{{python}} {FAKES / 'node_worker.py'} {action} {' '.join(options)}")


def wait_until(what: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def read(path: Path) -> str:
    wait_until(path.exists)
    return path.read_text()


class Running:
    """A launch in a thread, of which all processes carry the mark `owner`, which no other has."""

    def __init__(
        self,
        folder: Path,
        worker: WorkerCommand,
        request: TrialRequest | None = None,
        hosts: Hosts | None = None,
        limit_s: float = 60.0,
        hang_s: float | None = None,
    ) -> None:
        self.folder, self.request, self.worker = folder, request or make_request(), worker
        self.owner = f"{OWNER}-{uuid.uuid4().hex}"  # one that fails leaves nothing to the next
        self.ending: Ending | None = None
        self.is_stopped = False

        def run() -> None:
            self.ending = launch(
                self.request,
                worker,
                folder,
                limit_s,
                self.owner,
                lambda: self.is_stopped,
                hang_s,
                hosts or two_nodes(),
            )

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def pid(self, name: str) -> int:
        """Of a worker, once it runs."""
        return int(read(self.folder / f"pid-{name}"))

    def finish(self, limit_s: float = 90.0) -> TrialOutcome:
        """How it ended. Nothing of it is alive then, on any node."""
        self.thread.join(limit_s)
        assert self.ending is not None
        assert processes(self.owner) == []
        return assess(self.request, self.ending, self.folder, worker=self.worker)


def processes(owner: str) -> list[psutil.Process]:
    """Living processes of the launches of `owner`, wherever they are: all nodes are here."""
    return marked(f"{owner}/")


def supervisor_of(owner: str, node: int) -> psutil.Process:
    """What runs a node's part."""

    def found() -> list[psutil.Process]:
        words = ["-m", "autotune.profiling.node", str(node)]
        return [one for one in processes(owner) if one.cmdline()[1:4] == words]

    wait_until(lambda: bool(found()))
    return found()[0]
