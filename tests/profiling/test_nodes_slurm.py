"""Slurm itself, where it is installed: two nodes that are two daemons on this machine, in an allocation of both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import OWNER, processes, read, wait_until
from test_nodes_hosts import LISTS

from autotune.profiling.slurm import step_command

pytestmark = pytest.mark.slow

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sinfo")
CONFIGURATION = """
ClusterName=try
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge.sock
SlurmctldPort={port}
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd.%n.pid
SlurmdSpoolDir={here}/spool.%n
StateSaveLocation={here}/state
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port}1 CPUs=2 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port}2 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

LAUNCH = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from nodes import make_request, once_a_node
from autotune.profiling.assess import assess
from autotune.profiling.hosts import Hosts, trial_hosts
from autotune.profiling.launcher import launch
folder, owner, action, *options = sys.argv[1:]
worker, request = once_a_node(action, *options), make_request()
hosts = trial_hosts(None, request.cluster)
hosts = Hosts(hosts.names, slurm=True, rdzv_host="127.0.0.4")
ending = launch(request, worker, Path(folder), 120, owner, hosts=hosts)
outcome = assess(request, ending, Path(folder), worker=worker)
print(outcome.state, outcome.reason.replace(chr(10), " "))
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment in which Slurm's commands reach a cluster of our own."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and Slurm's programs; missing: {', '.join(missing) or 'none'}")
    here = tmp_path_factory.mktemp("slurm")
    here.chmod(0o755)
    (here / "state").mkdir()
    port = 1000 + os.getpid() % 5000
    (here / "slurm.conf").write_text(CONFIGURATION.format(host=os.uname().nodename, here=here, port=port))
    (here / "munge.key").write_bytes(os.urandom(1024))
    (here / "munge.key").chmod(0o400)
    environ = os.environ | {"SLURM_CONF": str(here / "slurm.conf")}
    paths = {"key-file": "munge.key", "socket": "munge.sock", "log-file": "munge.log", "seed-file": "munge.seed"}
    options = [f"--{name}={here / file}" for name, file in paths.items()]
    commands = [["munged", "--foreground", "--force", f"--pid-file={here / 'munge.pid'}", *options]]
    commands += [["slurmctld", "-D"], ["slurmd", "-D", "-N", "node1"], ["slurmd", "-D", "-N", "node2"]]
    daemons = []
    try:
        for command in commands:
            log = open(here / f"{len(daemons)}.out", "wb")  # noqa: SIM115
            daemons.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
            time.sleep(0.5)
        wait_until(lambda: sinfo(environ).split() == ["idle", "idle"])
        yield environ
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(20)


def sinfo(environ: dict[str, str]) -> str:
    return subprocess.run(["sinfo", "-hN", "-o", "%T"], env=environ, capture_output=True, text=True).stdout


def allocated(*words: str) -> list[str]:
    """A command in an allocation of both nodes, as `salloc` runs it."""
    return ["salloc", "-N2", "--exclusive", sys.executable, "-c", LAUNCH, *words]


def test_a_launch_in_an_allocation_runs_on_its_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    words = (str(tmp_path / "trial"), OWNER, "fail", "--on", "1")
    done = subprocess.run(allocated(*words), env=slurm, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("failed the worker on node node2 failed first"), done.stderr


def test_a_search_in_a_step_of_its_own_starts_its_step_beside_it(slurm: dict[str, str], tmp_path: Path) -> None:
    command = allocated(str(tmp_path / "trial"), OWNER, "fail", "--on", "0")
    command[3:3] = ["srun", "-N1", "-n1"]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("failed the worker on node node1 failed first"), done.stderr


@pytest.mark.parametrize("victim", ["tuner", "srun"])
def test_nothing_lives_after_a_killed_one(slurm: dict[str, str], tmp_path: Path, victim: str) -> None:
    owner, folder = f"{OWNER}-{victim}", tmp_path / "trial"
    salloc = subprocess.Popen(allocated(str(folder), owner, "daemon"), env=slurm, stdout=subprocess.PIPE, text=True)
    try:
        for number in (0, 1):
            read(folder / f"pid-daemon-{number}")
        if victim == "tuner":
            tuner = next(one for one in processes(owner) if "autotune.profiling.supervisor" in one.cmdline()).parent()
            assert tuner is not None
            tuner.kill()
        else:
            next(one for one in processes(owner) if one.name() == "srun").kill()
        wait_until(lambda: not processes(owner), 10.0)
        said = salloc.communicate(timeout=60)[0]
        assert victim == "tuner" or said.startswith("launcher node node"), said
    finally:
        salloc.kill()
        salloc.wait()


def test_srun_takes_every_option_of_ours(slurm: dict[str, str]) -> None:
    command = ["salloc", "-N2", "--exclusive", *step_command(("node1", "node2"), ("true",))]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# A name must not end in letters after a bracket for Slurm.
@pytest.mark.parametrize(("text", "names"), [one for one in LISTS.items() if "]-" not in one[0] and "]." not in one[0]])
def test_slurm_expands_node_lists_as_we_do(slurm: dict[str, str], text: str, names: list[str]) -> None:
    shown = subprocess.run(["scontrol", "show", "hostnames", text], env=slurm, capture_output=True, text=True)
    assert shown.stdout.split() == names
