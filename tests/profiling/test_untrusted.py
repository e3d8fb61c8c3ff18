"""Ranks may write anything: whatever it is, the trial ends in a state, and its row goes to the table and back."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_assess import EXITED, write_report
from test_launcher import make_request

from autotune.profiling.assess import assess
from autotune.profiling.rank_files import last_lines
from autotune.profiling.result_file import KEYS
from autotune.profiling.supervisor import Ending
from autotune.profiling.untrusted_json import MOST_BYTES
from autotune.results.measurement import TrialOutcome
from autotune.results.rows import row_of
from autotune.results.table import read_csv, read_parquet, write_csv, write_parquet

FAILED = Ending("exited", 1, None, 1_700_000_000.0, 12.5, 0)
NUMBERS = st.sampled_from([0, -1, 1e308, 5e-324, 1e-12, 10**400, 2**63, 2**62 + 0.5, float("nan"), float("-inf")])
TEXTS = st.text(max_size=20) | st.sampled_from(["\x1b[2J", "\ud800", "a\x00b", "x" * 10_000, 'a "b",\r\n\n'])
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
FIELDS = ["rank", "state", "request_id", "error", "failed_at", "step_wall_s", "passes", "optimizer_cpu_s", "losses"]
FIELDS += ["collective_bytes", "collective_calls", "peak_memory_bytes", "parameters", "torch", "device", "version"]


def outcome_of(folder: Path, ending: Ending = EXITED) -> TrialOutcome:
    """The outcome, after its row went to both tables and came back as it was."""
    request = make_request()
    outcome = assess(request, ending, folder)
    row = row_of(0, request.plan, "0" * 16, outcome, request.model, request.training)
    write_csv([row], folder / "t.csv")
    write_parquet([row], folder / "t.parquet")
    assert read_csv(folder / "t.csv") == read_parquet(folder / "t.parquet")
    assert read_csv(folder / "t.csv")[0].reason == outcome.reason
    assert all(c.isprintable() or c in " \n\t" or ord(c) > 0xFF for c in outcome.reason)
    return outcome


fuzz = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)


@fuzz
@given(wrong=st.dictionaries(st.sampled_from(FIELDS), ANYTHING | st.lists(NUMBERS, min_size=3, max_size=3), min_size=1))
def test_no_report_breaks_the_search_or_the_table(
    tmp_path_factory: pytest.TempPathFactory, wrong: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("trial")
    write_report(folder, 0)
    write_report(folder, 1, **wrong)
    outcome = outcome_of(folder)
    assert (outcome.state == "ok") == (outcome.measurement is not None)


@fuzz
@given(values=st.dictionaries(st.sampled_from(sorted(KEYS)), ANYTHING), exit_values=ANYTHING, failure=ANYTHING)
def test_no_other_file_of_a_rank_does(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], exit_values: Any, failure: Any
) -> None:
    folder = tmp_path_factory.mktemp("trial")
    (folder / "result.json").write_text(json.dumps(values))
    (folder / "rank-0.exit.json").write_text(json.dumps(exit_values))
    told = {"rank": 1, "exit_code": 1, "signal": None, "ended_at": 1.0, "peak_rss_bytes": 1}
    (folder / "rank-1.exit.json").write_text(json.dumps({**told, "ended_at": exit_values}))
    (folder / "rank-1.failure.json").write_text(
        json.dumps({"state": "failed", "error": failure, "failed_at": 1.0, "device": failure})
    )
    outcome_of(folder)
    outcome_of(folder, FAILED)


@pytest.mark.parametrize("name", ["rank-1.json", "result.json"])
@pytest.mark.parametrize("what", ["deep", "endless", "pipe", "folder", "bytes"])
def test_what_is_no_report_is_no_result(tmp_path: Path, name: str, what: str) -> None:
    path = tmp_path / name
    if what == "deep":
        path.write_text("[" * 200_000)
    elif what == "endless":  # a sparse file: it takes no space, but reading it whole would
        with open(path, "wb") as file:
            file.truncate(MOST_BYTES * 1000)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.write_bytes(bytes(range(256)))
    began = time.monotonic()
    assert assess(make_request(), EXITED, tmp_path).state == "no-result"
    assert time.monotonic() - began < 20


def test_of_a_log_of_any_size_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\n\x1b[31mthe last\x07 words\x1b[0m\n")
    assert last_lines(path).splitlines()[-1] == "the last\\x07 words"
