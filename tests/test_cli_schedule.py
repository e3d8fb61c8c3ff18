"""`autotune schedule`: formats, mistakes, cost of starting."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from autotune.cli_schedule import schedule_app
from autotune.errors import UserError
from autotune.schedules.checks import problems
from autotune.schedules.registry import SCHEDULES, build
from autotune.schedules.schedule import Schedule

SVG = "{http://www.w3.org/2000/svg}"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(schedule_app, list(arguments), catch_exceptions=False)


def show(name: str, *options: str, devices: int = 4, microbatches: int = 8) -> str:
    result = run("show", name, "--devices", str(devices), "--microbatches", str(microbatches), *options)
    assert result.exit_code == 0
    return result.stdout


def test_list_names_every_schedule() -> None:
    assert [row["name"] for row in json.loads(run("list", "--json").stdout)] == list(SCHEDULES)
    listed = run("list").stdout.splitlines()
    assert [line.split()[0] for line in listed[1:]] == list(SCHEDULES)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_json_is_the_schedule_with_its_figures(name: str) -> None:
    shown = json.loads(show(name, "--format", "json", "--pass-times", "1,1.5,0.6", "--comm", "0.2"))
    assert list(shown) == [
        "name", "devices", "microbatches", "placement", "order",
        "makespan", "bubble_rate", "span_bubble_rate", "peak_activation", "valid",
    ]  # fmt: skip
    schedule = Schedule.from_dict(shown)
    assert problems(schedule) == []
    assert shown["valid"] is True
    assert (schedule.devices, schedule.microbatches, len(shown["peak_activation"])) == (4, 8, 4)
    assert 0 < shown["span_bubble_rate"] <= shown["bubble_rate"] < 1
    work = 8 * 3.1
    assert shown["makespan"] == pytest.approx(work / (1 - shown["bubble_rate"]))


def test_pass_times_are_for_a_devices_whole_share() -> None:
    one = json.loads(show("1f1b", "--format", "json", "--pass-times", "2,2,2", microbatches=1))
    two = json.loads(show("v-min", "--format", "json", "--pass-times", "2,2,2", microbatches=1))
    assert one["makespan"] == 4 * 6
    assert two["makespan"] == 4 * 4 + 1  # W of the last stage fills gaps, the one of the first follows the chain


@pytest.mark.parametrize("name", ["1f1b", "v-half", "zb-h2", "interleaved-1f1b", "dualpipe-v"])
def test_csv_is_read_back_by_torch_as_the_same_order(name: str, tmp_path: Path) -> None:
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    text = show(name, "--format", "csv")
    schedule = build(name, 4, 8)
    assert len(list(csv.reader(io.StringIO(text)))) == 4
    path = tmp_path / "schedule.csv"
    path.write_text(text)

    class Reader(_PipelineScheduleRuntime):
        def __init__(self) -> None:
            self.pipeline_order = {}
            self.pp_group_size = 4
            self._num_stages = schedule.stages
            self._n_microbatches = 8
            self._stages: list = []

        def _prepare_schedule_with_comms(self, actions: dict, format: str = "compute_only") -> None:
            self.read = actions, format

    reader = Reader()
    reader._load_csv(str(path), format="compute_only")
    table, _ = reader.read
    letters = {"F": "F", "B": "I", "W": "W", "BW": "B"}
    for rank, passes in enumerate(schedule.order):
        read = [str(action) for action in table[rank] if action is not None]
        assert read == [f"{item.stage}{letters[item.kind]}{item.microbatch}" for item in passes]


def test_svg_draws_every_pass_once_in_the_row_of_its_device() -> None:
    root = ET.fromstring(show("v-half", "--format", "svg"))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert len(titles) == len(set(titles)) == 3 * 8 * 8
    assert sum(title.startswith("W of stage 7, microbatch 3:") for title in titles) == 1
    rows = {rect.get("y") for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None}
    assert len(rows) == 4
    words = " ".join(text.text or "" for text in root.iter(f"{SVG}text"))
    assert "v-half: 4 devices, 8 microbatches, 2 stages per device" in words
    assert "bubble 9.4%" in words
    assert "peak activation 3" in words


def test_svg_tells_stages_of_a_device_apart_by_shade() -> None:
    root = ET.fromstring(show("v-half", "--format", "svg"))
    colour: dict[str, set] = {}
    for rect in root.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and title.text:
            colour.setdefault(" ".join(title.text.split()[:4]).rstrip(","), set()).add(rect.get("fill"))
    assert all(len(fills) == 1 for fills in colour.values())
    assert colour["F of stage 0"] != colour["F of stage 7"]
    assert colour["F of stage 0"] == colour["F of stage 1"]
    assert len({min(colour[f"{kind} of stage 0"]) for kind in "FBW"}) == 3


def test_anatomy_shows_block_repetition_and_result_with_memory() -> None:
    root = ET.fromstring(show("v-min", "--format", "svg", "--anatomy"))
    words = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert "building block: interval 6, holds at most 2.5 microbatches" in words
    assert "repeated every 6 slots (4 of 8 microbatches)" in words
    assert "final schedule" in words
    assert len(list(root.iter(f"{SVG}polygon"))) == 4
    closed_form = ET.fromstring(show("gis", "--format", "svg", "--anatomy"))
    assert "microbatch 4 alone" in [text.text for text in closed_form.iter(f"{SVG}text")]


def test_chrome_trace_has_every_pass_every_message_and_the_memory() -> None:
    events = json.loads(show("v-half", "--format", "chrome"))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 3 * 8 * 8
    for device in range(4):
        row = sorted((event["ts"], event["dur"]) for event in slices if event["tid"] == device)
        assert all(a + length <= b + 1e-6 for (a, length), (b, _) in pairwise(row))
    arrows = {ph: [event for event in events if event["ph"] == ph] for ph in "sf"}
    assert len(arrows["s"]) == len(arrows["f"]) == 2 * 6 * 8
    ends = {event["id"]: event["ts"] for event in arrows["f"]}
    assert all(event["ts"] <= ends[event["id"]] + 1e-6 for event in arrows["s"])
    assert {event["name"] for event in events if event["ph"] == "C"} == {
        f"activation held, device {device}" for device in range(4)
    }


def test_text_draws_a_row_a_device_and_sums_up() -> None:
    text = show("1f1b", devices=2, microbatches=2)
    lines = text.splitlines()
    assert lines[1:3] == ["0  F0- F1- ........B0----- ....B1-----", "1  ....F0- B0----- F1- B1----- ........"]
    assert "makespan 9, bubble rate 0.3333" in text
    assert "peak activation per device, in microbatches of its share: 2 1" in text
    assert "\x1b" not in text


def test_text_folds_into_bands_of_the_terminals_width() -> None:
    from autotune.report.schedule_text import schedule_text
    from autotune.schedules.simulate import simulate

    timeline = simulate(build("v-half", 4, 16))
    drawn = schedule_text(timeline, width=60)
    assert all(len(line) <= 60 for line in drawn.splitlines() if line[:1].isdigit())
    assert sum(line.startswith("0  ") for line in drawn.splitlines()) > 1
    painted = schedule_text(timeline, width=60, colour=True)
    assert "F forward" in painted
    plain = re.sub(r"\x1b\[[0-9;]*m", "", painted)
    assert plain != painted
    assert all(len(line) <= 60 for line in plain.splitlines() if line[:1].isdigit())


def test_out_writes_a_file(tmp_path: Path) -> None:
    target = tmp_path / "picture.svg"
    assert show("1f1b", "--format", "svg", "--out", str(target)) == f"wrote {target}\n"
    ET.parse(target)


@pytest.mark.parametrize("command", [("show", "v-half"), ("best", "--quick")], ids=["show", "best"])
def test_the_ending_of_the_file_names_the_format(command: tuple[str, ...], tmp_path: Path) -> None:
    common = (*command, "--devices", "2", "--microbatches", "2")
    written = {}
    for ending in ("svg", "json", "csv", "txt"):
        target = tmp_path / f"schedule.{ending}"
        assert run(*common, "--out", str(target)).exit_code == 0
        written[ending] = target.read_text()
    ET.fromstring(written["svg"])
    assert json.loads(written["json"])["devices"] == 2
    assert "0F0" in next(csv.reader(io.StringIO(written["csv"])))
    assert "bubble rate" in written["txt"]
    trace = tmp_path / "trace.json"
    run(*common, "--format", "chrome", "--out", str(trace))
    assert "traceEvents" in json.loads(trace.read_text())
    bare = tmp_path / "schedule"
    run(*common, "--out", str(bare))
    assert bare.read_text() == written["txt"]


@pytest.mark.parametrize("command", [("show", "v-half"), ("best",)], ids=["show", "best"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out", "DIR/x.png"), "no format is known by the ending '.png'"),
        (("--out", "DIR/x.svg", "--format", "json"), "contradict each other: .svg is svg"),
        (("--out", "DIR/x.json", "--format", "csv"), "contradict each other: .json is json"),
        (("--out", "DIR/new/x.svg"), "there is no folder"),
        (("--out", "DIR"), "it is a folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_worked_out(
    command: tuple[str, ...], options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    given = [option.replace("DIR", str(tmp_path)) for option in options]
    with pytest.raises(UserError, match=message):
        run(*command, "--devices", "8", "--microbatches", "64", *given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--anatomy", "--memory"])
def test_what_is_drawn_into_a_picture_is_refused_in_any_other_format(option: str, tmp_path: Path) -> None:
    common = ("show", "v-half", "--devices", "2", "--microbatches", "2", option)
    with pytest.raises(UserError, match=f"{option} is drawn into an svg, not text"):
        run(*common)
    with pytest.raises(UserError, match="not json"):
        run(*common, "--out", str(tmp_path / "x.json"))
    run(*common, "--out", str(tmp_path / "x.svg"))
    assert list(ET.parse(tmp_path / "x.svg").iter(f"{SVG}polygon"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--slowdown", "-5"), "--slowdown must be 0 or more percent (5 for 5 %), not -5"),
        (("--slowdown", "nan"), "not nan"),
        (("--slowdown", "inf"), "not inf"),
        (("--prove", "0"), "--prove must be a number of seconds above 0, not 0"),
        (("--prove", "nan"), "not nan"),
        (("--stages-per-device", "0"), "--stages-per-device must be at least 1, not 0"),
        (("--memory-limit", "1,-2"), "--memory-limit must be a number above 0 (leave it out for no limit), not -2"),
        (("--front", "--format", "svg"), "this can be printed as text, csv or json, not svg"),
        (("--front", "--prove", "1"), "--prove works on one schedule"),
    ],
)
def test_mistakes_about_a_search_are_named_as_they_were_given(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        run("best", "--devices", "2", "--microbatches", "2", *options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", "--devices", "2", "--microbatches", "2"), "did you mean '1f1b'"),
        (
            ("v-half", "--devices", "2", "--microbatches", "2", "--stages-per-device", "3"),
            "exactly 2 stages per device",
        ),
        (("1f1b", "--devices", "0", "--microbatches", "2"), "--devices must be at least 1"),
        (("1f1b", "--devices", "2", "--microbatches", "0"), "at least 1 microbatch"),
        (("1f1b", "--devices", "2", "--microbatches", "2", "--pass-times", "1,2"), "three numbers F,B,W"),
        (("1f1b", "--devices", "2", "--microbatches", "2", "--pass-times", "a,b,c"), "three numbers F,B,W"),
        (("1f1b", "--devices", "2", "--microbatches", "2", "--pass-times", "0,0,0"), "three numbers F,B,W"),
        (("1f1b", "--devices", "2", "--microbatches", "2", "--pass-times", "1,-1,1"), "three numbers F,B,W"),
        (("1f1b", "--devices", "2", "--microbatches", "2", "--comm", "-1"), "--comm must be a number from 0 up"),
        (("1f1b", "--devices", "2", "--microbatches", "2", "--memory-limit", "1"), "takes no limit"),
        (("1f1b", "--devices", "2", "--microbatches", "2", "--pass-times", "nan,1,1"), "three numbers F,B,W"),
        (("1f1b", "--devices", "2", "--microbatches", "2", "--pass-times", "inf,1,1"), "three numbers F,B,W"),
        (("1f1b", "--devices", "2", "--microbatches", "2", "--pass-times", "1e308,1e308,1e308"), "from 1e-09 to 1e"),
        (("1f1b", "--devices", "2", "--microbatches", "2", "--pass-times", "1e-300,0,0"), "from 1e-09 to 1e"),
        (("1f1b", "--devices", "2", "--microbatches", "2", "--pass-times", "1e-9,1e12,0"), "from 1e-09 to 1e"),
        (("1f1b", "--devices", "2", "--microbatches", "2", "--comm", "1e300"), "--comm holds 1e.300"),
        (("1f1b", "--devices", "2", "--microbatches", "2", "--comm", "nan"), "--comm must be a number from 0 up"),
        (("zb-1p", "--devices", "2", "--microbatches", "2", "--memory-limit", "nan"), "--memory-limit must be"),
        (("1f1b", "--devices", "4", "--microbatches", "2000", "--pass-times", "1,1e5,0"), "--format svg, json"),
        (("1f1b", "--devices", "100000", "--microbatches", "100000"), "20,000,000,000 passes, more than the 2,000,000"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run("show", *arguments)


@pytest.mark.parametrize("times", ["1e12,1e12,1e12", "1e-9,1e-9,1e-9", "1,1e6,0"])
def test_times_up_to_the_limits_keep_the_shape_of_the_schedule(times: str) -> None:
    forward, backward, weight = (float(part) for part in times.split(","))
    shown = json.loads(show("1f1b", "--format", "json", "--pass-times", times))
    assert shown["makespan"] == pytest.approx((8 + 3) * (forward + backward + weight), rel=1e-9)


def test_a_mistake_ends_with_exit_code_2_and_no_traceback() -> None:
    command = [sys.executable, "-m", "autotune.cli_schedule", "show", "nope", "--devices", "2", "--microbatches", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: no schedule 'nope'")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("output", ["json", "svg", "text", "chrome", "csv"])
def test_showing_a_schedule_is_cheap_and_imports_nothing_heavy(output: str) -> None:
    script = (
        "import resource, sys\n"
        "from autotune.cli_schedule import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = sorted({'torch', 'optuna', 'numba', 'numpy', 'pandas'} & set(sys.modules))\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(heavy, used.ru_utime + used.ru_stime, file=sys.stderr)\n"
    )
    arguments = ["show", "v-half", "--devices", "8", "--microbatches", "32", "--format", output]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    heavy, _, seconds = result.stderr.strip().rpartition(" ")
    assert heavy == "[]"
    assert float(seconds) < 0.5
