"""The table keeps what it was given: every value, every text, every gap, every column."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import UserError
from autotune.results.columns import COLUMNS, Row
from autotune.results.table import read_csv, read_parquet, replace_file, to_frame, write_csv, write_parquet

HEADER = (
    "trial,state,reason,pp,tp,dp,micro_batch_size,microbatches,schedule,stages_per_device,layer_split,recompute,"
    "fidelity,clock,step_time_s,step_time_min_s,step_time_max_s,step_time_std_s,step_time_wall_s,tokens_per_s,"
    "tokens_per_s_per_device,peak_memory_bytes,peak_memory_bytes_per_rank,bubble_rate,loss,speedup_vs_1f1b,"
    "is_baseline,is_best,started,duration_s,torch,device,fingerprint,"
    "predicted_step_time_s,predicted_step_time_error,predicted_tokens_per_s,predicted_peak_memory_bytes,"
    "predicted_peak_memory_error,predicted_fits,predicted_compute_s,predicted_bubble_s,predicted_tp_s,predicted_pp_s,"
    "predicted_dp_s,predicted_optimizer_s,predicted_overhead_s"
)
# What a search may write, of rows that have the fewest ties between columns: points that a rule refused.
LEGAL = {
    "integer": st.none() | st.integers(1, 2**62),
    "number": st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
    "text": st.text(st.characters(exclude_categories=["Cs"])),
    "flag": st.none() | st.booleans(),
    "integers": st.none() | st.lists(st.integers(1, 2**50), min_size=1).map(tuple),
}
LEGAL_ROW = st.builds(
    Row,
    **{column.name: LEGAL[column.type] for column in COLUMNS}
    | {"state": st.just("refused"), "fidelity": st.just(""), "predicted_step_time_s": st.floats(1e-9, 1e9)},
)
OK = Row(
    trial=3,
    state="ok",
    pp=2,
    tp=1,
    dp=2,
    micro_batch_size=1,
    microbatches=4,
    schedule="1f1b",
    stages_per_device=1,
    layer_split=(2, 2),
    recompute="none",
    fidelity="run",
    step_time_s=0.5,
    tokens_per_s=100.0,
    predicted_step_time_s=0.4,
    predicted_tokens_per_s=125.0,
)


def test_header_is_fixed(tmp_path: Path) -> None:
    write_csv([], tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text().splitlines() == [HEADER]


@settings(deadline=None)
@given(rows=st.lists(LEGAL_ROW, max_size=4))
def test_csv_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> None:
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    write_csv(rows, path)
    assert read_csv(path) == rows


@settings(deadline=None)
@given(rows=st.lists(LEGAL_ROW, max_size=4))
def test_parquet_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> None:
    path = tmp_path_factory.mktemp("parquet") / "t.parquet"
    write_parquet(rows, path)
    assert read_parquet(path) == rows


def test_exotic_text_survives_and_any_csv_reader_agrees(tmp_path: Path) -> None:
    reason = 'a "quoted", comma; \r\n\ttab\n\n=SUM(A1) \x00 \U0001f4a5 e\u0301 ' + "x" * 200_000
    write_csv([Row(trial=1, state="refused", reason=reason)], tmp_path / "t.csv")
    assert read_csv(tmp_path / "t.csv")[0].reason == reason
    with open(tmp_path / "t.csv", newline="", encoding="utf-8") as file:
        assert next(iter(csv.DictReader(file)))["reason"] == reason


def test_text_that_utf8_cannot_hold_is_escaped_not_fatal(tmp_path: Path) -> None:
    write_csv([Row(state="refused", reason="bad \udcff byte")], tmp_path / "t.csv")
    assert read_csv(tmp_path / "t.csv")[0].reason == "bad \\udcff byte"


def test_missing_numbers_are_empty_never_zero_or_nan(tmp_path: Path) -> None:
    rows = [
        Row(trial=0, state="failed"),
        Row(trial=1, state="ok", loss=math.nan, bubble_rate=math.inf, step_time_s=0.0),
    ]
    write_csv(rows, tmp_path / "t.csv")
    with open(tmp_path / "t.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert first["tokens_per_s"] == first["peak_memory_bytes"] == first["is_best"] == ""
    assert (second["loss"], second["bubble_rate"], second["step_time_s"]) == ("", "", "0.0")


def test_column_does_not_vanish_or_lose_its_type_when_every_trial_failed(tmp_path: Path) -> None:
    write_parquet([Row(trial=0, state="failed"), Row(state="refused")], tmp_path / "t.parquet")
    frame = pandas.read_parquet(tmp_path / "t.parquet")
    assert ",".join(frame.columns) == HEADER
    assert str(frame["tokens_per_s"].dtype) == "Float64"
    assert str(frame["peak_memory_bytes"].dtype) == "Int64"
    assert frame["tokens_per_s"].isna().all()
    assert frame["trial"].tolist()[0] == 0


def test_frame_keeps_missing_apart_from_zero() -> None:
    frame = to_frame([Row(trial=0, loss=0.0), Row(trial=None, loss=None)])
    assert frame["loss"].isna().tolist() == [False, True]
    assert frame["trial"].isna().tolist() == [False, True]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a results table"),
        ("a,b\n1,2\n", "not a results table"),
        (HEADER.replace(",pp,", ",") + "\n", "column 4 must be pp, not 'tp'"),
        (HEADER.rpartition(",")[0] + "\n", "column 46, predicted_overhead_s, is missing"),
        (HEADER + ",mine\n", "column 47, 'mine', is unknown"),
        (HEADER + "\n1,ok\n", "line 2 has 2 fields, not 46"),
        (HEADER + "\nx" + "," * (len(COLUMNS) - 1) + "\n", "line 2, column trial: must be a whole number, not 'x'"),
    ],
)
def test_damaged_table_is_an_error_that_names_the_file(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=why) as caught:
        read_csv(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("column", "text", "why"),
    [
        ("layer_split", "5", "must be a JSON list of whole numbers, not '5'"),
        ("layer_split", "[2,true]", "must be a JSON list of whole numbers"),
        ("layer_split", "[2,2,2]", "pp x stages_per_device = 2 stages"),
        ("layer_split", "[4,0]", "whole numbers of at least 1"),
        ("layer_split", "[" * 100_000, "recursion|JSON list"),
        ("pp", "", "is empty"),
        ("recompute", "", "is empty"),
        ("dp", "0", "must be at least 1, not 0"),
        ("trial", "-1", "must be at least 0, not -1"),
        ("state", "okay", "must be one of ok, refused, .*, not 'okay'"),
        ("fidelity", "walk", "must be one of predict, profile, run, not 'walk'"),
        ("is_best", "yes", "must be true or false, not 'yes'"),
        ("step_time_s", "0", "must be above 0, not 0.0"),
        ("step_time_s", "", "is empty"),
        ("step_time_min_s", "nan", "must be a finite number"),
        ("tokens_per_s", "fast", "must be a number, not 'fast'"),
        ("predicted_step_time_s", "", "is empty"),
        ("predicted_step_time_s", "0.0", "must be above 0"),
    ],
)
def test_damaged_value_is_told_by_its_line_and_column(tmp_path: Path, column: str, text: str, why: str) -> None:
    path = tmp_path / "t.csv"
    write_csv([Row(state="refused", reason="two\nlines"), OK], path)
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    lines[1][column] = text
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    with pytest.raises(UserError, match=rf"t\.csv is damaged: line 4, column {column}: .*({why})"):
        read_csv(path)


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("step_time_s", 0.0, "must be above 0, not 0.0"),
        ("step_time_min_s", float("inf"), "must be a finite number"),
        ("state", "okay", "must be one of"),
        ("dp", 0, "must be at least 1, not 0"),
        ("trial", "three", "must be a whole number, not 'three'"),
        ("is_best", "yes", "must be true or false, not 'yes'"),
        ("reason", 5, "must be a text, not 5"),
        ("layer_split", ["a"], r"must be a list of whole numbers, not \['a'\]"),
        ("layer_split", [2, 2, 2], "must list the layers of pp x stages_per_device = 2 stages"),
    ],
)
def test_parquet_is_checked_as_the_csv_is(tmp_path: Path, column: str, value: object, why: str) -> None:
    path = tmp_path / "t.parquet"
    pandas.DataFrame([OK.to_dict() | {column: value}]).to_parquet(path)
    with pytest.raises(UserError, match=rf"t\.parquet is damaged: row 1, column {column}: {why}"):
        read_parquet(path)


@pytest.mark.parametrize("damage", ["text", "cut", "overwritten", "folder", "columns"])
def test_what_is_no_parquet_table_is_an_error_that_names_it(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "t.parquet"
    write_parquet([OK] * 50, path)
    data = path.read_bytes()
    if damage == "text":
        path.write_text("a poem")
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "overwritten":
        path.write_bytes(data[:-200] + os.urandom(192) + data[-8:])
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        to_frame([OK]).drop(columns="pp").to_parquet(path)
    with pytest.raises(UserError, match=r"t\.parquet"):
        read_parquet(path)


def test_missing_table_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no results table"):
        read_csv(tmp_path / "none.csv")
    with pytest.raises(UserError, match="no results table"):
        read_parquet(tmp_path / "none.parquet")


def test_failed_write_leaves_the_old_table_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    write_csv([OK], path)

    def disk_full(file: str) -> None:
        Path(file).write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        replace_file(path, disk_full)
    assert read_csv(path) == [OK]
    assert os.listdir(tmp_path) == ["t.csv"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No space left"):
        replace_file(tmp_path / "t.csv", lambda file: Path("/dev/full").write_text("x"))
