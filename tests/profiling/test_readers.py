"""Numbers from the logs that trainers really print, and from a result file; what they can't mean is no result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_launcher import make_request

from autotune.profiling.assess import assess
from autotune.profiling.command import WorkerCommand
from autotune.profiling.log_lines import megatron_line, torchtitan_line
from autotune.profiling.result_file import KEYS
from autotune.profiling.supervisor import Ending
from autotune.results.measurement import Measurement, TrialOutcome
from autotune.space.settings import ReaderSettings

EXITED = Ending("exited", 0, None, 1_700_000_000.0, 12.5, 0)
REQUEST = make_request()  # 2 ranks, 1 warm-up step, 3 measured, 4 samples of 4 tokens
MEGATRON, TITAN, JSON = ReaderSettings("megatron"), ReaderSettings("torchtitan"), ReaderSettings()
# as Megatron-LM prints them
MEMORY = (
    "[Rank 1] (after 10 iterations) memory (MB) | allocated: 1464.33154296875 | max allocated: 1464.3408203125 | "
    "reserved: 1576.0 | max reserved: 1576.0"
)


def iteration(number: int, milliseconds: float, loss: str = "1.072453E+01", batch: int = 4, nan: int = 0) -> str:
    return (
        f" [2025-04-13 23:41:20] iteration {number:8d}/    1000 | consumed samples: {number * batch:12d} | "
        f"elapsed time per iteration (ms): {milliseconds:.1f} | learning rate: 4.000000E-05 | "
        f"global batch size: {batch:5d} | lm loss: {loss} | loss scale: 1.0 | grad norm: 3.874 | num zeros: 71.0 | "
        f"number of skipped iterations:   0 | number of nan iterations:   {nan} |"
    )


def titan(step: int, tps: str, loss: str = " 7.1234", memory: str = "12.34") -> str:
    return (
        f"[titan] 2026-01-01 10:00:00,000 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: {loss}  "
        f"\x1b[38;2;180;60;0mgrad_norm:  1.2345  \x1b[36mmemory: {memory}GiB(15.60%)  "
        f"\x1b[34mtps: {tps}  \x1b[36mtflops: 12.34  \x1b[35mmfu: 1.23%\x1b[39m"
    )


def read(folder: Path, reader: ReaderSettings, ending: Ending = EXITED, **logs: str) -> TrialOutcome:
    for name, text in logs.items():
        (folder / f"{name.replace('_', '-')}.log").write_text(text)
    return assess(REQUEST, ending, folder, worker=WorkerCommand(("x",), reader=reader))


def numbers(outcome: TrialOutcome) -> Measurement:
    assert (outcome.state, outcome.reason) == ("ok", "")
    assert outcome.measurement is not None
    return outcome.measurement


def test_megatron_times_losses_and_memory_of_every_rank_that_tells(tmp_path: Path) -> None:
    lines = [iteration(1, 9000), iteration(2, 820.7), iteration(3, 800), iteration(4, 810, "9.5E+00")]
    found = numbers(
        read(
            tmp_path,
            MEGATRON,
            rank_0="[Rank 0] (after 1 iterations) memory (MB) | allocated: 10.0 | max allocated: 20.5 | reserved: 30.0",
            rank_1="\n".join(["> setting tensorboard ...", lines[0], MEMORY, *lines[1:], "[exiting program]"]),
        )
    )
    assert (found.step_time_s, found.step_time_min_s, found.step_time_max_s) == pytest.approx((0.81, 0.8, 0.8207))
    assert found.peak_memory_bytes_per_rank == (round(20.5 * 2**20), round(1464.3408203125 * 2**20))
    assert (found.loss, found.clock) == (9.5, "wall")


def test_a_line_for_many_iterations_stands_for_their_mean_and_the_one_with_the_warm_up_is_left_out(
    tmp_path: Path,
) -> None:
    text = "\n".join([iteration(10, 1147.6), iteration(20, 820.7), iteration(30, 810.7)])
    assert numbers(read(tmp_path, MEGATRON, rank_1=text)).step_time_s == pytest.approx(0.8157)


def test_a_run_from_a_checkpoint_skips_its_own_first_iterations(tmp_path: Path) -> None:
    text = "\n".join(iteration(1000 + k, 9000 if k == 1 else 800) for k in range(1, 5))
    assert numbers(read(tmp_path, MEGATRON, rank_1=text)).step_time_max_s == 0.8


def test_iterations_that_megatron_skipped_are_no_steps(tmp_path: Path) -> None:
    skipped = iteration(2, 100).replace("skipped iterations:   0", "skipped iterations:   1").replace("lm loss", "x")
    lines = [iteration(1, 9000), skipped, *(iteration(k, 800) for k in (3, 4, 5))]
    assert numbers(read(tmp_path, MEGATRON, rank_1="\n".join(lines))).step_time_min_s == 0.8


@pytest.mark.parametrize(
    ("lines", "state", "why"),
    [
        ([iteration(1, 9), iteration(2, 8)], "no-result", "the time of 1 steps after the warm-up"),
        ([], "no-result", "a trial trains 4 steps ({steps})"),
        ([iteration(k, 8, "NAN") for k in range(1, 5)], "non-finite", "the loss of step 1 is nan"),
        ([*(iteration(k, 8) for k in range(1, 5)), iteration(5, 8, nan=1)], "non-finite", "the loss of step 5 is nan"),
        ([iteration(k, 8, batch=8) for k in range(1, 5)], "invalid", "a global batch of 8 samples, not 4"),
        ([iteration(k, 0) for k in range(1, 5)], "invalid", "step times"),
        ([iteration(k, 8).replace("lm loss", "no loss") for k in range(1, 5)], "invalid", "tell no loss"),
        ([iteration(1, 8).replace(": 8.0 |", ": eight |")], "invalid", "could not convert"),
    ],
)
def test_megatron_logs_that_are_no_result(tmp_path: Path, lines: list[str], state: str, why: str) -> None:
    outcome = read(tmp_path, MEGATRON, rank_1="\n".join(lines))
    assert (outcome.state, outcome.measurement) == (state, None)
    assert why in outcome.reason


def test_a_worker_that_failed_at_last_has_no_numbers_whatever_it_logged(tmp_path: Path) -> None:
    text = "\n".join(iteration(k, 800) for k in range(1, 5))
    failed = read(tmp_path, MEGATRON, replace(EXITED, exit_code=1), rank_1=text)
    assert failed.measurement is None
    late = read(tmp_path, MEGATRON, replace(EXITED, kind="timeout", exit_code=None), rank_1=text)
    assert late.state == "timeout"
    assert "the time of 3 steps after the warm-up" in late.reason


def test_torchtitan_rates_are_of_one_device_and_ranks_print_their_own_memory(tmp_path: Path) -> None:
    first = "\n".join([titan(1, "1", "-1.0000"), *(titan(k, "2,000", "-1.0000", "10.50") for k in (2, 3, 4))])
    last = "\n".join([titan(1, "1"), *(titan(k, "1,000") for k in (2, 3)), titan(4, "1,000", "6.5")])
    found = numbers(read(tmp_path, TITAN, rank_0=first, rank_1=last + "\n" + "validate step: 4  loss: 9  tps: 9"))
    # 16 tokens a step over 2 devices x 1000 tokens/s, by the slower rank
    assert found.step_time_s == pytest.approx(16 / 2000)
    assert found.peak_memory_bytes_per_rank == (round(12.34 * 2**30), round(12.34 * 2**30))
    assert found.loss == 6.5


def test_torchtitan_steps_between_two_lines_count_as_many(tmp_path: Path) -> None:
    text = "\n".join([titan(1, "1"), titan(10, "1,000"), titan(20, "1,000")])
    assert numbers(read(tmp_path, TITAN, rank_1=text)).step_time_s == pytest.approx(16 / 2000)


def test_lines_of_other_things_tell_nothing() -> None:
    assert megatron_line("training iteration: 3 of the validation loss") is None
    assert torchtitan_line("validate step: 10  loss:  7.1  memory: 1.0GiB  tps: 1,000") is None


def test_regular_expressions_read_any_log(tmp_path: Path) -> None:
    patterns = (
        r"step (?P<step>\d+): (?P<step_time_ms>[\d.]+) ms, loss (?P<loss>\S+)",
        r"peak (?P<peak_memory_gib>[\d.]+) GiB",
    )
    reader = ReaderSettings("regex", patterns, log="train*.txt", skip_steps=2)
    text = "".join(f"step {k}: {900 if k < 3 else 100 + k} ms, loss 2.{k}\n" for k in range(1, 7))
    (tmp_path / "train-a.txt").write_text(text + "peak 1.5 GiB\n")
    found = numbers(read(tmp_path, reader))
    assert (found.step_time_s, found.step_time_max_s) == pytest.approx((0.1045, 0.106))
    assert (found.loss, found.peak_memory_bytes) == (2.6, round(1.5 * 2**30))


def test_regular_expression_of_a_rate_is_of_the_whole_cluster(tmp_path: Path) -> None:
    reader = ReaderSettings("regex", (r"(?P<tokens_per_s>[\d,]+) tok/s",))
    found = numbers(read(tmp_path, reader, rank_0="1 tok/s\n" + "1,600 tok/s\n" * 3))
    assert found.step_time_s == pytest.approx(0.01)
    assert (found.loss, found.peak_memory_bytes) == (None, None)


def result(folder: Path, text: str | dict[str, Any]) -> TrialOutcome:
    (folder / "result.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return read(folder, JSON)


def test_one_result_file_stands_for_all_ranks(tmp_path: Path) -> None:
    found = numbers(result(tmp_path, {"step_times_s": [0.2, 0.1, 0.3], "peak_memory_bytes": 1000, "loss": 2.5}))
    assert (found.step_time_s, found.step_time_min_s, found.peak_memory_bytes, found.loss) == (0.2, 0.1, 1000, 2.5)
    found = numbers(result(tmp_path, {"tokens_per_s": 1600, "peak_memory_bytes_per_rank": [1, 2], "torch": "x"}))
    assert (found.step_time_s, found.peak_memory_bytes_per_rank, found.torch) == (0.01, (1, 2), "x")


@pytest.mark.parametrize(
    ("text", "state", "why"),
    [
        ('{"step_time_s": 0.', "no-result", "no whole JSON"),
        ("[]", "no-result", "no object"),
        ({"loss": 2.5}, "no-result", "gives none of step_time_s"),
        (
            {"step_time_s": 1, "tokens_per_s": 2},
            "invalid",
            "step_time_s 1 and tokens_per_s 2 contradict each other: by tokens_per_s a step takes 8 s (16 tokens",
        ),
        (
            {"step_times_s": [1, 2], "step_time_s": 3},
            "invalid",
            "step_times_s [1, 2] and step_time_s 3 contradict each other: by step_time_s a step takes 3 s",
        ),
        ({"tokens_per_s": 1e300}, "invalid", "tokens_per_s 1e+300 is none above 0 and up to 1e+15"),
        ({"tokens_per_s": 0}, "invalid", "tokens_per_s 0 is none above 0"),
        ({"step_time_s": 1e300}, "invalid", "step times of [1e+300] s; a step takes 1e-09 to 1e+09 s"),
        (
            {"step_time_s": 1, "peak_memory_bytes_per_rank": [1, 2, 3, 4]},
            "no-result",
            "peak_memory_bytes_per_rank holds 4 peaks, but the plan has 2 ranks; give one of every rank",
        ),
        ({"step_time_s": 1, "peak_memory_bytes_per_rank": [1]}, "no-result", "holds 1 peaks, but the plan has 2 ranks"),
        (
            {"step_time_s": 1, "peak_memory_bytes": 5, "peak_memory_bytes_per_rank": [1, 2]},
            "invalid",
            "peak_memory_bytes 5 and peak_memory_bytes_per_rank contradict each other: the largest of these is 2",
        ),
        ({"step_time_s": 1, "peak_memory_bytes": 1.5}, "invalid", "peak_memory_bytes: 1.5 is no whole number of bytes"),
        ({"step_time_s": 1, "peak_memory_bytes": 1e300}, "invalid", "1e+300 is no whole number of bytes from 1 to"),
        ({"step_time_s": 1, "peak_memory_bytes": 10**300}, "invalid", "1.000000e+300 is no whole number of bytes"),
        ({"state": "oom"}, "oom", "the worker reports oom"),
        ({"step_time_s": 1, "loss": float("nan")}, "non-finite", "the loss is nan"),
        ({"step_time_s": float("inf")}, "invalid", "step times of [inf] s"),
        ({"step_time_s": "1"}, "invalid", "'1' is no number"),
        ({"step_times_s": []}, "invalid", "list of numbers"),
        ({"step_time_s": 1, "peak_memory": 2}, "invalid", "unknown key 'peak_memory'; known: step_time_s"),
        (
            {"step_time_s": 1, "peak_memory_bytes": -2},
            "invalid",
            "peak_memory_bytes: -2 is no whole number of bytes from 1",
        ),
        ({"state": "oom", "error": "device 3 is full"}, "oom", "the worker reports oom: device 3 is full"),
        ({"state": "failed", "error": "OOM!"}, "failed", "the worker reports failed: OOM!"),
        ({"state": "fine"}, "invalid", "'fine' is none of ok, oom, failed"),
    ],
)
def test_result_files_that_are_no_result(tmp_path: Path, text: str | dict[str, Any], state: str, why: str) -> None:
    outcome = result(tmp_path, text)
    assert (outcome.state, outcome.measurement) == (state, None)
    assert why in outcome.reason


def test_several_figures_of_one_time_are_taken_where_they_agree_as_they_are_rounded(tmp_path: Path) -> None:
    found = numbers(result(tmp_path, {"step_time_s": 0.0101, "tokens_per_s": 1590}))
    assert found.step_time_s == 0.0101
    found = numbers(result(tmp_path, {"step_times_s": [0.2, 0.1, 0.3], "step_time_s": 0.2, "tokens_per_s": 80.0}))
    assert (found.step_time_s, found.step_time_max_s) == (0.2, 0.3)
    both = {"step_time_s": 1, "peak_memory_bytes": 2.0, "peak_memory_bytes_per_rank": [1, 2]}
    assert numbers(result(tmp_path, both)).peak_memory_bytes_per_rank == (1, 2)


REGEX = ReaderSettings("regex", (r"took (?P<step_time_ms>\S+) ms", r"peak (?P<peak_memory_bytes>\S+) B"))


@pytest.mark.parametrize("exit_code", [0, 1])
@pytest.mark.parametrize("reader", [REGEX, MEGATRON])
def test_a_worker_whose_logs_are_read_can_report_its_state(
    tmp_path: Path, reader: ReaderSettings, exit_code: int
) -> None:
    log = "".join(f"took 100 ms\n{iteration(k, 800)}\n" for k in range(1, 5))
    (tmp_path / "result.json").write_text('{"state": "oom", "error": "device 3 is full"}')
    outcome = read(tmp_path, reader, replace(EXITED, exit_code=exit_code), rank_0=log)
    assert (outcome.state, outcome.reason) == ("oom", "the worker reports oom: device 3 is full")
    for no_failure in ('{"state": "ok"}', "{}", "no json", '[{"state": "oom"}]'):
        (tmp_path / "result.json").write_text(no_failure)
        assert numbers(read(tmp_path, reader, rank_0=log))
    (tmp_path / "rank-1.json").write_text(json.dumps({"rank": 1, "state": "oom", "error": "rank 1 is full"}))
    outcome = read(tmp_path, reader, replace(EXITED, exit_code=exit_code), rank_0=log)
    assert (outcome.state, outcome.reason) == ("oom", "rank 1 ran out of memory: rank 1 is full")


@pytest.mark.parametrize(
    ("peak", "why"),
    [
        ("1.5", "peak_memory_bytes 1.5 is no whole number; peak_memory_gib reads one in GiB"),
        ("1e300", "a peak of 1e+300 bytes is none from 1 to 1125899906842624 (1 PiB)"),
        ("inf", "peak_memory_bytes inf is no whole number"),
        ("0", "a peak of 0.0 bytes is none from 1 to"),
    ],
)
def test_a_logged_peak_that_no_device_has_is_told(tmp_path: Path, peak: str, why: str) -> None:
    outcome = read(tmp_path, REGEX, rank_0="took 100 ms\n" * 4 + f"peak {peak} B\n")
    assert outcome.state == "invalid"
    assert why in outcome.reason


def test_numbers_of_hundreds_of_digits_are_told_in_a_few(tmp_path: Path) -> None:
    reader = ReaderSettings("regex", (r"step (?P<step>\S+) took (?P<step_time_ms>\S+) ms, loss (?P<loss>\S+)",))
    outcome = read(tmp_path, reader, rank_0="step 1e300 took 100 ms, loss nan\n")
    assert (outcome.state, "step 1e+300 is no whole number from 0 to" in outcome.reason) == ("invalid", True)
    outcome = read(tmp_path, MEGATRON, rank_0=iteration(1, 800, batch=10**300))
    assert (outcome.state, "global batch size 1.000000e+300 is no" in outcome.reason) == ("invalid", True)


def test_memory_of_a_rank_that_the_plan_has_not_is_told(tmp_path: Path) -> None:
    text = "\n".join([*(iteration(k, 800) for k in range(1, 5)), MEMORY.replace("[Rank 1]", "[Rank 5]")])
    outcome = read(tmp_path, MEGATRON, rank_1=text)
    assert (outcome.state, outcome.reason) == (
        "invalid",
        "rank-1.log tells the memory of rank 5, but the plan has 2 ranks",
    )


def test_log_numbers_over_the_memory_limit_are_oom_with_the_rank(tmp_path: Path) -> None:
    request = replace(REQUEST, cluster=replace(REQUEST.cluster, memory_limit_bytes=1 << 30))
    text = "\n".join([*(iteration(k, 800) for k in range(1, 5)), MEMORY])
    (tmp_path / "rank-1.log").write_text(text)
    outcome = assess(request, EXITED, tmp_path, worker=WorkerCommand(("x",), reader=MEGATRON))
    assert outcome.state == "oom"
    assert "over the limit of 1073741824 on cpu" in outcome.reason
    assert outcome.measurement is not None


def test_the_documentation_lists_exactly_the_keys_of_a_result_file() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "worker.md").read_text(encoding="utf-8").splitlines()
    wanted = [f"| `{key}` | {meaning} |" for key, meaning in KEYS.items()]
    start = lines.index(wanted[0])
    assert lines[start : start + len(wanted) + 1] == [*wanted, ""]
