"""Reads every table of the campaign over and over: `reader.py FOLDER REPORT`. At no moment may one be unreadable.

Ends when its standard input is closed; then REPORT (JSON) holds how often it read and what was wrong.
"""

from __future__ import annotations

import json
import select
import sys
from pathlib import Path

from autotune.errors import UserError
from autotune.results.table import read_csv, read_parquet

_PAUSE_S = 0.05
_READERS = {"trials.csv": read_csv, "trials.parquet": read_parquet}


def main() -> None:
    root, report = Path(sys.argv[1]), Path(sys.argv[2])
    reads, problems = 0, []
    done: dict[Path, int] = {}
    while not select.select([0], [], [], _PAUSE_S)[0]:
        for home in list(root.glob("study-*")):
            for name, read in _READERS.items():
                path = home / "results" / "tiny" / name
                if not path.exists() and path not in done:
                    continue
                try:
                    rows = read(path)
                except UserError as error:
                    if home.exists() and (home / "live").exists():
                        problems.append(f"{home.name}/{name}: {error}")
                    continue
                reads += 1
                # A launch that failed for no fault of the plan is tried again by the next run.
                tried = sum(row.trial is not None and row.state != "launcher" for row in rows)
                if tried < done.get(path, 0) and (home / "live").exists():
                    problems.append(f"{home.name}/{name}: {tried} plans with a trial after {done[path]}")
                done[path] = max(tried, done.get(path, 0))
    report.write_text(json.dumps({"reads": reads, "problems": problems[:50]}))


if __name__ == "__main__":
    main()
