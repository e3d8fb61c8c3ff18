"""The machines that a trial spans: their names, how a process is started on each, and where they come from.

The order of the names is the order of the nodes: with d devices a node, ranks i d to (i + 1) d - 1 run on node i, so a
tensor-parallel group (the innermost axis) never leaves a node whose devices it divides.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.errors import UserError
from autotune.profiling.slurm import allocated_hosts
from autotune.space.cluster import ClusterSpec

__all__ = ["DEFAULT_REMOTE_SHELL", "Hosts", "is_this_machine", "make_hosts", "parse_hosts", "trial_hosts"]

DEFAULT_REMOTE_SHELL = "ssh -o BatchMode=yes {host}"

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_SHELLS_OF_ONE_TEXT = ("ssh", "rsh")
_OWN_NAMES = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Hosts:
    """Nodes in the order of their ranks.

    Attributes:
        names: as the nodes call each other; the first is where ranks meet.
        remote_shell: words of the command that starts another on `{host}`; this machine needs none.
        python: path of Python on every node.
        rdzv_host: address of the first node, if its name isn't the one that the others reach it by.
        slurm: whether `srun` starts all nodes at once, instead of a remote shell a node.
    """

    names: tuple[str, ...]
    remote_shell: tuple[str, ...] = tuple(shlex.split(DEFAULT_REMOTE_SHELL))
    python: str = sys.executable
    rdzv_host: str | None = None
    slurm: bool = False

    def __post_init__(self) -> None:
        for name in self.names:
            if not _NAME.fullmatch(name):
                raise UserError(f"--hosts: {name!r} is no host name")
            if self.names.count(name) > 1:
                raise UserError(f"--hosts: {name} is there {self.names.count(name)} times; every node is named once")
        if not self.remote_shell[0].strip():
            raise UserError(
                f"--remote-shell {shlex.join(self.remote_shell)!r}: its first word, the program to run, is empty"
            )
        if not any("{host}" in word for word in self.remote_shell):
            raise UserError(f"--remote-shell {shlex.join(self.remote_shell)!r} lacks {{host}}, the name of the node")
        if self.head in _OWN_NAMES and not all(name.startswith("127.") for name in self.names[1:]):
            raise UserError(
                f"--hosts: the other nodes can't reach the first one as {self.head}; name it as they do, or give that "
                "name by --rdzv-host"
            )

    @property
    def head(self) -> str:
        """Where the ranks meet: the first node, as the others reach it."""
        return self.rdzv_host or self.names[0]

    def command_on(self, index: int, words: Sequence[str]) -> tuple[str, ...]:
        """What runs `words` on node `index`."""
        name = self.names[index]
        if is_this_machine(name):
            return tuple(words)
        text = f"exec {shlex.join(words)}"
        shell = tuple(word.replace("{host}", name).replace("{command}", text) for word in self.remote_shell)
        if any("{command}" in word for word in self.remote_shell):
            return shell
        # A remote shell as ssh hands one text to the shell at the other end; others take the words of a command.
        return (*shell, text) if Path(shell[0]).name in _SHELLS_OF_ONE_TEXT else (*shell, *words)


def is_this_machine(name: str) -> bool:
    """Whether `name` is this machine: by its own names, or by an address that one of its network cards has.

    Further loopback addresses (127.0.0.2) don't count: like other nodes they are reached by the remote shell.
    """
    own = socket.gethostname()
    if name in _OWN_NAMES or name in (own, own.partition(".")[0]):
        return True
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            if str(address[0]).startswith("127.") or address[0] == "::1":
                continue
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # only an address of ours can be bound
                return True
    return False


def make_hosts(
    text: str | None,
    cluster: ClusterSpec,
    remote_shell: str | None = None,
    python: str | None = None,
    rdzv_host: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Hosts | None:
    """The nodes that a command line names; without names those of Slurm, if options for nodes are given at all.

    Args:
        text: names with commas, or a file.
        remote_shell: a command with {host}, split like a shell would.

    Raises:
        UserError: one of them is malformed, or an option has no nodes to speak of.
    """
    given = {"--remote-shell": remote_shell, "--remote-python": python, "--rdzv-host": rdzv_host}
    for name, value in given.items():
        if value is not None and not value.strip():
            raise UserError(f"{name} is empty; leave it out for its default")
    if text is None:
        if not any(given.values()):
            return None
        if remote_shell is not None or (allocated := trial_hosts(None, cluster, environ)) is None:
            name = next(name for name, value in given.items() if value)
            raise UserError(f"{name} means nothing without --hosts")
        return replace(allocated, python=python or allocated.python, rdzv_host=rdzv_host)
    try:
        words = tuple(shlex.split(remote_shell or DEFAULT_REMOTE_SHELL))
    except ValueError as error:
        raise UserError(f"--remote-shell {remote_shell!r}: {error}") from None
    return Hosts(parse_hosts(text, cluster.devices_per_node), words, python or sys.executable, rdzv_host)


def parse_hosts(text: str, devices_per_node: int | None = None) -> tuple[str, ...]:
    """Host names from `a,b,c`, or from the file of that path: one host a line, `#` comments, `slots=N` after a name.

    Args:
        devices_per_node: that the slots of a file must suffice for; None: they aren't looked at.

    Raises:
        UserError: no host is named, the file can't be read, or a node has too few slots.
    """
    if os.path.isfile(text):
        return _from_file(Path(text), devices_per_node)
    if "/" in text and not text.startswith("-"):
        raise UserError(f"--hosts: there is no file {text}")
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UserError(f"--hosts {text!r} has an empty name; it takes host names with commas between, or a file")
    return names


def _from_file(path: Path, devices_per_node: int | None) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hosts: cannot read {path}: {error}") from None
    names = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if not _NAME.fullmatch(words[0]):
            raise UserError(f"--hosts {path}, line {number}: {words[0]!r} is no host name; there is one a line")
        if words[0] in names:
            raise UserError(f"--hosts {path}, line {number}: {words[0]} is there already; every node is named once")
        names.append(words[0])
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key == "slots" and not value.isdecimal():
                raise UserError(f"--hosts {path}, line {number}: {word!r}; slots is a number")
            if key == "slots" and devices_per_node is not None and int(value) < devices_per_node:
                raise UserError(
                    f"--hosts {path}, line {number}: {words[0]} has {value} slots, but the space's nodes have "
                    f"{devices_per_node} devices each"
                )
    if not names:
        raise UserError(f"--hosts: {path} names no host")
    return tuple(names)


def trial_hosts(given: Hosts | None, cluster: ClusterSpec, environ: Mapping[str, str] = os.environ) -> Hosts | None:
    """The nodes that trials of `cluster` span; None: all ranks run on this machine.

    They are the given ones, or those of the Slurm allocation that this process runs in, if the cluster has several.

    Raises:
        UserError: there are more or fewer of them than the cluster has nodes.
    """
    if given is not None:
        if len(given.names) != cluster.nodes:
            raise UserError(
                f"--hosts names {len(given.names)} nodes ({', '.join(given.names)}), but the space's cluster.nodes is "
                f"{cluster.nodes}; both must be equal"
            )
        return given
    if cluster.nodes == 1 or (names := allocated_hosts(environ)) is None:
        return None
    if len(names) != cluster.nodes:
        raise UserError(
            f"the Slurm allocation has {len(names)} nodes ({', '.join(names)}), but the space's cluster.nodes is "
            f"{cluster.nodes}; allocate {cluster.nodes}, or name that many of them by --hosts"
        )
    return Hosts(names, slurm=True)
