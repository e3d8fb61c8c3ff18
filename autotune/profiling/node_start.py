"""Becomes the supervisor of one node's part of a launch: `python -I -S node_start.py [NODE]`.

A remote shell starts this file, with the standard library alone. The first line of its standard input is the header, a
JSON object of `autotune.profiling.crew`: with the environment, so that no secret stands on a command line. Without NODE
it finds its number by its name in Slurm.
"""

import json
import os
import re
import socket
import sys
import tempfile

# What belongs to a host or to the shell that started us, and not to the tuner's environment.
_OF_THE_HOST = re.compile(
    r"^(HOSTNAME|HOST|HOSTTYPE|MACHTYPE|HOME|USER|LOGNAME|SHELL|MAIL|TMPDIR|PWD|OLDPWD|SHLVL|_|TERM|TTY|DISPLAY"
    r"|XAUTHORITY|XDG_RUNTIME_DIR|XDG_SESSION_.*|DBUS_.*|SSH_.*|SLURM.*|PMI.*|PMIX.*)$"
)

_MARKER = "AUTOTUNE_TRIAL_ID"


def main() -> None:
    header = json.loads(_read_line())
    node = int(sys.argv[1]) if len(sys.argv) > 1 else _number_in_slurm(header["hosts"])
    environ = {name: value for name, value in os.environ.items() if _OF_THE_HOST.match(name)}
    environ.update({name: value for name, value in header.pop("env").items() if not _OF_THE_HOST.match(name)})
    if _MARKER in environ:
        environ[_MARKER] += f"/node-{node}"  # the parts of a launch may share a machine
    try:
        os.chdir(header["cwd"])
    except OSError as error:
        _refuse(node, f"the folder {header['cwd']} can't be used here: {error.strerror}")
    # The rest goes through a file without a name: a pipe might be too small.
    rest = tempfile.TemporaryFile()  # noqa: SIM115  the supervisor reads it
    rest.write(json.dumps(header).encode())
    rest.flush()
    rest.seek(0)
    os.set_inheritable(rest.fileno(), True)
    python = header["python"]
    try:
        os.execve(python, [python, "-m", "autotune.profiling.node", str(node), str(rest.fileno())], environ)
    except OSError as error:
        _refuse(node, f"cannot start {python}: {error.strerror}")


def _number_in_slurm(hosts: "list[str]") -> int:
    """Place among the nodes, by the name that Slurm knows this one by."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    if name in hosts:
        return hosts.index(name)
    return int(os.environ.get("SLURM_NODEID") or os.environ["SLURM_PROCID"])


def _refuse(node: int, message: str) -> None:
    print(json.dumps({"node": node, "event": "refused", "message": message}), flush=True)
    sys.exit(1)


def _read_line() -> bytes:
    """The first line, and no byte of what comes after it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(1)  # whoever started us is gone
        line += byte
    return line


if __name__ == "__main__":
    main()
