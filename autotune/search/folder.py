"""The folder of one study: what lies in it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
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
