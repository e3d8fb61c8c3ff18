"""The folder of one study: what lies in it, and who may write to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import UserError
from autotune.results.columns import Row
from autotune.results.table import replace_file, write_csv, write_parquet

__all__ = ["StudyFolder"]


_LOG_FOLDER = re.compile(r"(trial|ranks|final)-\d{4,}")


@dataclass(frozen=True)
class StudyFolder:
    """`results/NAME`: study.db, trials.csv, trials.parquet, best.json, final.json, space.yaml and logs/."""

    path: Path

    @property
    def database(self) -> Path:
        """The Optuna study, unless it lives in another database."""
        return self.path / "study.db"

    @property
    def csv(self) -> Path:
        """The results table."""
        return self.path / "trials.csv"

    @property
    def parquet(self) -> Path:
        """The results table with types."""
        return self.path / "trials.parquet"

    @property
    def best(self) -> Path:
        """The best plan, for the exporters."""
        return self.path / "best.json"

    @property
    def final(self) -> Path:
        """The final, every launch of it."""
        return self.path / "final.json"

    @property
    def space(self) -> Path:
        """The space that was searched, as a file that stands alone."""
        return self.path / "space.yaml"

    @property
    def logs(self) -> Path:
        """One folder a trial."""
        return self.path / "logs"

    def holds_study(self) -> bool:
        """Whether a study was begun here."""
        return self.database.exists() or (self.csv.exists() and self.space.exists())

    def create(self) -> None:
        """Make the folder. Raises UserError if that or writing to it is impossible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot create {self.path}: {error.strerror}") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise UserError(f"cannot write to {self.path}: permission denied")

    def clear(self) -> None:
        """Delete the files of a study and nothing else that may lie here; of links what they lead to stays.

        The folders of trials go first, and also where their study is gone. The database goes last: until then a clear
        that was cut short leaves a study that can be cleared.
        """
        held = self.holds_study()
        try:
            self._clear_logs()
            if not held:
                return
            for path in (self.parquet, self.best, self.final, self.csv, self.space):
                path.unlink(missing_ok=True)
            for suffix in ("-journal", "-wal", "-shm", ""):
                self.database.with_name(self.database.name + suffix).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot clear {self.path}: {error.strerror}") from error

    def _clear_logs(self) -> None:
        if self.logs.is_symlink() or not self.logs.is_dir():
            return
        for path in list(self.logs.iterdir()):
            if _LOG_FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
        if not any(self.logs.iterdir()):
            self.logs.rmdir()

    def write_tables(self, rows: Sequence[Row]) -> None:
        """Write trials.csv and trials.parquet. Raises UserError if the disk is full or the folder read-only."""
        write_csv(rows, self.csv)
        write_parquet(rows, self.parquet)

    def write_text(self, path: Path, text: str) -> None:
        """Replace one text file of the folder as a whole."""
        replace_file(path, lambda file: Path(file).write_text(text, encoding="utf-8"))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other tuners out; the kernel drops the lock when this process ends, however it ends.

        Raises:
            UserError: another process searches here; the message names it.
        """
        try:
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 20).decode("ascii", "replace").strip() or "unknown"
                raise UserError(f"another search (process {holder}) is running in {self.path}") from None
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            yield
        finally:
            os.close(descriptor)
