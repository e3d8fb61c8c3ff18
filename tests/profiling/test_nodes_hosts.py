"""Which nodes a trial spans: names from a command line, a file or Slurm, and how each of them is reached."""

from __future__ import annotations

import itertools
import shlex
import socket
import sys
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.profiling.hosts import Hosts, is_this_machine, make_hosts, parse_hosts, trial_hosts
from autotune.profiling.slurm import allocated_hosts, expand_nodelist, step_command, step_environment
from autotune.space.cluster import ClusterSpec, Link

LINK = Link(1e-6, 1e10)
LISTS = {
    "a": ["a"],
    "a,b": ["a", "b"],
    "gpu[01-03,07],login1": ["gpu01", "gpu02", "gpu03", "gpu07", "login1"],
    "n[8-11]": ["n8", "n9", "n10", "n11"],
    "n[098-101]-ib": ["n098-ib", "n099-ib", "n100-ib", "n101-ib"],
    "r[1-2]n[0,5]": ["r1n0", "r1n5", "r2n0", "r2n5"],
    "x[3]": ["x3"],
    "a1.site.org,b[2-3].site.org": ["a1.site.org", "b2.site.org", "b3.site.org"],
}


def cluster(nodes: int, devices: int = 2) -> ClusterSpec:
    return ClusterSpec(nodes, devices, "cpu", None, LINK, LINK)


@pytest.mark.parametrize(("text", "names"), LISTS.items())
def test_a_slurm_node_list_is_expanded_in_slurms_order(text: str, names: list[str]) -> None:
    """What Slurm makes of them is in `test_nodes_slurm`."""
    assert list(expand_nodelist(text)) == names


@pytest.mark.parametrize("text", ["", "a[", "a]", "a[1-]", "a[3-1]", "a[x]", "a[1,]", "a,,b", "a[1[2]]"])
def test_a_malformed_node_list_is_told(text: str) -> None:
    with pytest.raises(UserError, match="no Slurm node list"):
        expand_nodelist(text)


def test_names_come_from_the_command_line_or_a_file(tmp_path: Path) -> None:
    assert parse_hosts("b, a,c") == ("b", "a", "c")
    file = tmp_path / "hosts"
    file.write_text("# the rack\nb slots=8\n\na slots=4  # older\nc\n")
    assert parse_hosts(str(file), devices_per_node=4) == ("b", "a", "c")
    with pytest.raises(UserError, match=r"line 4: a has 4 slots, but the space's nodes have 8 devices"):
        parse_hosts(str(file), devices_per_node=8)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("a\nb,c\n", "line 2: 'b,c' is no host name; there is one a line"),
        ("# ours\n-oProxyCommand=x\n", "line 2: '-oProxyCommand=x' is no host name"),
        ("a\nb\na slots=2\n", "line 3: a is there already"),
    ],
)
def test_a_bad_line_of_a_file_is_told_by_file_and_line(tmp_path: Path, lines: str, told: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(lines)
    with pytest.raises(UserError, match=f"{file}, {told}"):
        make_hosts(str(file), cluster(2))


@pytest.mark.parametrize("option", ["remote_shell", "python", "rdzv_host"])
def test_an_empty_option_is_not_silently_the_default(option: str) -> None:
    with pytest.raises(UserError, match="is empty; leave it out for its default"):
        make_hosts("a,b", cluster(2), **{option: ""})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,,b", "empty name"),
        ("./none", "no file"),
        ("a,-oProxyCommand=x", "'-oProxyCommand=x' is no host name"),
        ("-oX=a b/c", "'-oX=a b/c' is no host name"),
        ("a,b c", "'b c' is no host name"),
        ("a,a", "a is there 2 times"),
        ("localhost,b", "can't reach the first one as localhost"),
    ],
)
def test_what_names_no_nodes_is_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        make_hosts(text, cluster(2))


def test_options_for_nodes_need_nodes() -> None:
    for option in ({"remote_shell": "rsh {host}"}, {"python": "/opt/python"}, {"rdzv_host": "a"}):
        with pytest.raises(UserError, match="means nothing without --hosts"):
            make_hosts(None, cluster(2), environ={}, **option)
    with pytest.raises(UserError, match=r"lacks \{host\}"):
        make_hosts("a,b", cluster(2), "ssh a")


def test_there_are_as_many_nodes_as_the_space_says() -> None:
    with pytest.raises(UserError, match=r"names 3 nodes \(a, b, c\), but the space's cluster.nodes is 2"):
        trial_hosts(Hosts(("a", "b", "c")), cluster(2))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}
    with pytest.raises(UserError, match=r"allocation has 4 nodes \(n1, n2, n3, n4\), but .* is 2"):
        trial_hosts(None, cluster(2), slurm)


def test_slurms_nodes_are_taken_where_the_space_has_several_and_none_are_named() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "1"}  # NNODES of the tuner's step
    found = trial_hosts(None, cluster(2), slurm)
    assert found == Hosts(("n1", "n2"), slurm=True)
    assert trial_hosts(Hosts(("a", "b")), cluster(2), slurm) == Hosts(("a", "b"))
    assert trial_hosts(None, cluster(1), slurm) is None
    assert trial_hosts(None, cluster(2), {}) is None
    assert allocated_hosts({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}) is None


def test_slurms_step_takes_all_nodes_and_nothing_of_the_step_around_it() -> None:
    command = step_command(("n1", "n2"), ("python", "x.py"))
    assert command[0] == "srun"
    assert command[-2:] == ("python", "x.py")
    for words in (("--nodes", "2"), ("--ntasks", "2"), ("--ntasks-per-node", "1"), ("--nodelist", "n1,n2")):
        assert words in itertools.pairwise(command)
    assert {"--overlap", "--kill-on-bad-exit=1", "--input=all", "--cpu-bind=none"} <= set(command)
    around = {"SLURM_CPUS_PER_TASK": "1", "SLURM_CPU_BIND": "cores", "SLURM_STEP_ID": "0"}
    assert step_environment({"SLURM_JOB_ID": "7", "TOKEN": "t", **around}) == {"SLURM_JOB_ID": "7", "TOKEN": "t"}


def test_the_tuners_own_machine_needs_no_remote_shell() -> None:
    own = socket.gethostname()
    assert is_this_machine(own)
    assert is_this_machine("localhost")
    assert not is_this_machine("127.0.0.2")  # further loopback addresses stand for nodes
    assert not is_this_machine("no-such-host.invalid")
    assert Hosts((own, "127.0.0.2")).command_on(0, ("python", "x")) == ("python", "x")


def test_a_remote_shell_gets_one_text_and_other_starters_get_words() -> None:
    words = ("/opt/my python", "x.py", "1")
    text = "exec '/opt/my python' x.py 1"
    assert Hosts(("a", "b")).command_on(1, words) == ("ssh", "-o", "BatchMode=yes", "b", text)
    namespace = Hosts(("a", "b"), ("ip", "netns", "exec", "{host}"))
    assert namespace.command_on(1, words) == ("ip", "netns", "exec", "b", *words)
    own = Hosts(("a", "b"), tuple(shlex.split("wrap --to={host} {command} --end")))
    assert own.command_on(1, words) == ("wrap", "--to=b", text, "--end")


def test_the_nodes_have_the_tuners_python_unless_another_is_named() -> None:
    assert Hosts(("a",)).python == sys.executable
    made = make_hosts("a,b", cluster(2), python="/opt/venv/bin/python", rdzv_host="a-ib")
    assert made is not None
    assert (made.python, made.head) == ("/opt/venv/bin/python", "a-ib")
