"""Who may use the folder of a study: one search alone while it begins or clears it, then all that join."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from autotune.errors import UserError
from autotune.profiling.process_tree import started_at

__all__ = ["FolderLock", "locked_folder", "table_lock"]

_JOIN_WITHIN_S = 20.0
_TABLE_WITHIN_S = 20.0
_POLL_S = 0.05
_DATABASE = "study.db"
_NEW_FILES = (_DATABASE, "study.db-wal", "study.db-shm", "study.db-journal")
_TABLE_LOCK, _LOGS, _BEGUN = ".table.lock", "logs", "space.yaml"


@contextlib.contextmanager
def locked_folder(path: Path, join: bool) -> Iterator[FolderLock]:
    """Make the folder and keep out whoever would delete it; the kernel drops the lock when this process ends.

    What was made here of a study, its folder and its locks goes again unless `FolderLock.keep` was called: a search
    that couldn't start leaves nothing behind.

    Args:
        join: share the folder with searches that are at work in it; else none may be.

    Raises:
        UserError: another search is in the way, the message names it; or the folder can't be made or written.
    """
    lock = FolderLock(path)
    lock.acquire(join)
    try:
        yield lock
    finally:
        lock.release()


class FolderLock:
    """The lock of one folder."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path / ".lock"
        self._descriptor = -1
        self._made: list[Path] = []
        self._absent: set[str] = set()
        self._kept = False

    def acquire(self, join: bool) -> None:
        """See `locked_folder`."""
        deadline = time.monotonic() + _JOIN_WITHIN_S
        names = (_DATABASE, _TABLE_LOCK, _LOGS)
        self._absent = {name for name in names if not os.path.lexists(self._path / name)}
        while True:
            self._make_folder()
            try:
                with contextlib.suppress(FileNotFoundError):  # who failed to start here just took it away
                    if self._try(join):
                        return
            except OSError as error:
                self.release()
                raise UserError(f"cannot write to {self._path}: {error.strerror}") from error
            if not join or time.monotonic() > deadline:
                holders = self._holders() or "one whose process is not known"
                self.release()
                raise UserError(f"another search ({holders}) is running in {self._path}")
            time.sleep(_POLL_S)

    def share(self) -> None:
        """Let others join. Raises UserError if one was faster to clear the folder."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another search ({self._holders()}) took over {self._path}") from None

    def keep(self) -> None:
        """The study is there: the folder stays, whatever comes."""
        self._kept = True

    def release(self) -> None:
        """End the lock; what was made for a study that didn't begin goes."""
        if self._descriptor >= 0:
            if not self._kept:
                with contextlib.suppress(OSError):
                    self._unmake()
            os.close(self._descriptor)
            self._descriptor = -1
        if not self._kept:
            with contextlib.suppress(OSError):
                for folder in self._made:
                    folder.rmdir()
            self._made = []

    def _make_folder(self) -> None:
        missing = [folder for folder in (self._path, *self._path.parents) if not folder.exists()]
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot create {self._path}: {error.strerror}") from error
        self._made += [folder for folder in missing if folder not in self._made]
        if not os.access(self._path, os.W_OK | os.X_OK):
            raise UserError(f"cannot write to {self._path}: permission denied")

    def _try(self, join: bool) -> bool:
        is_new = not self._file.exists()
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            alone = _flock(descriptor, fcntl.LOCK_EX)
            if not alone and not (join and _flock(descriptor, fcntl.LOCK_SH)):
                return False
            if not _is_at(descriptor, self._file):  # taken away since it was opened
                return False
            if alone:
                os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{socket.gethostname()} {os.getpid()} {_created(os.getpid())}\n".encode())
            if join and alone and not _flock(descriptor, fcntl.LOCK_SH):
                return False
            self._descriptor, self._is_new, descriptor = descriptor, is_new, -1
            return True
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _unmake(self) -> None:
        if not _flock(self._descriptor, fcntl.LOCK_EX):
            return
        # Another search may have come, begun the study and gone meanwhile.
        if not (self._path / _BEGUN).exists():
            for name in _NEW_FILES if _DATABASE in self._absent else ():
                (self._path / name).unlink(missing_ok=True)
            if _TABLE_LOCK in self._absent:
                (self._path / _TABLE_LOCK).unlink(missing_ok=True)
        if _LOGS in self._absent:
            with contextlib.suppress(OSError):  # not there, or not empty
                (self._path / _LOGS).rmdir()
        if self._is_new or self._made:
            self._file.unlink(missing_ok=True)

    def _holders(self) -> str:
        """Processes in the lock file that still live; of other machines all."""
        found = []
        with contextlib.suppress(OSError, ValueError):
            for line in self._file.read_text(encoding="ascii", errors="replace").splitlines():
                host, pid, created = line.split()
                if host != socket.gethostname():
                    found.append(f"process {pid} on {host}")
                elif created == _created(int(pid)) and int(pid) != os.getpid():
                    found.append(f"process {pid}")
        return ", ".join(found)


@contextlib.contextmanager
def table_lock(path: Path) -> Iterator[bool]:
    """Let one search at a time write the tables of a folder. False after 20 s in vain: who has it was stopped, perhaps.

    Raises:
        UserError: the folder can't be written.
    """
    try:
        descriptor = os.open(path / _TABLE_LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from error
    try:
        deadline = time.monotonic() + _TABLE_WITHIN_S
        while not (held := _flock(descriptor, fcntl.LOCK_EX)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield held
    finally:
        os.close(descriptor)


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    there, here = os.fstat(descriptor), os.stat(path)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _created(pid: int) -> str:
    try:
        return started_at(pid)
    except psutil.Error:
        return "-"
