"""A worker whose ranks run job after job, as `autotune.profiling.serve` does, and do as they are told. No torch.

python serving.py --inbox INBOX --script SCRIPT
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from worker import ACTIONS, choose


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inbox", type=Path, required=True)
    parser.add_argument("--script", required=True)
    arguments = parser.parse_args()
    ranks = [int(os.environ["RANK"])] if "RANK" in os.environ else None
    number = 0
    while True:
        path = arguments.inbox / f"job-{number}.json"
        while not path.exists():
            time.sleep(0.01)
        job = json.loads(path.read_text())
        request, out = json.loads(Path(job["request"]).read_text()), Path(job["out"])
        rule = choose(arguments.script, request["plan"])
        world = request["plan"]["pp"] * request["plan"]["tp"] * request["plan"]["dp"]
        for rank in ranks or range(world):
            (out / f"pid-{rank}").write_text(str(os.getpid()))
            ACTIONS[rule.get("do", "succeed")](request, rule, rank, out)
        number += 1


if __name__ == "__main__":
    sys.exit(main())
