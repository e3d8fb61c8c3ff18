"""The fault campaign in short: a fault of every kind, and nothing lost, doubled, orphaned or shown as a traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "fault_campaign.py"


@pytest.mark.timeout(500)
def test_studies_survive_a_fault_of_every_kind() -> None:
    command = [sys.executable, str(CAMPAIGN), "--faults", "14", "--seed", "1", "--light", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    lines = re.findall(r"^(\w[\w ]+?) {2,}(\d+) +(\d+) +(\d+)$", done.stdout, re.MULTILINE)
    kinds = {name: tuple(map(int, counts)) for name, *counts in lines}
    assert len(kinds) >= 12
    assert all(injected == survived >= 1 and violated == 0 for injected, survived, violated in kinds.values())
    reads = re.search(r"(\d+) reads of tables", done.stdout)
    assert reads is not None
    assert int(reads[1]) > 100
