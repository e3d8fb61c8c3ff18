"""`autotune schedule best`: the fastest schedule the engine finds for real costs within a memory limit."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli_schedule_limits import check_limit, check_search, check_size, check_times, parse_pass_times
from autotune.cli_schedule_output import Format, check_file, choose_format, emit
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.schedules.engine import BestSchedule, CostSource
    from autotune.schedules.engine.prove import Proof

__all__ = ["best"]


class PlacementName(StrEnum):
    """Where stages go."""

    linear = "linear"
    v = "v"
    loop = "loop"


def best(
    devices: Annotated[int, typer.Option(help="Devices of the pipeline.")],
    microbatches: Annotated[int, typer.Option(help="Microbatches of one step.")],
    pass_times: Annotated[
        str, typer.Option(metavar="F,B,W", help="Times of one microbatch on one device's whole share of the model.")
    ] = "1,1,1",
    comm: Annotated[float, typer.Option(help="Latency of one hop between devices.")] = 0.0,
    costs: Annotated[
        Path | None,
        typer.Option(help="YAML file of per-stage or per-layer times, latencies and bytes, instead of the two above."),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="LIMIT",
            help="Most activation of a device, in microbatches of a device's share or the unit of the costs file; or a "
            "comma-separated list, one per device.",
        ),
    ] = None,
    placement: Annotated[PlacementName | None, typer.Option(help="Stay with this placement.")] = None,
    stages_per_device: Annotated[int | None, typer.Option(help="Stay with this number of stages per device.")] = None,
    fused: Annotated[bool, typer.Option("--fused", help="Run B and W as one pass.")] = False,
    balance: Annotated[
        bool, typer.Option("--balance", help="Choose the layers of each stage too; needs layers in the costs file.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of a second of search instead of seconds.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the search; equal seeds give equal schedules.")] = 0,
    front: Annotated[bool, typer.Option("--front", help="All trade-offs of memory and time up to the limit.")] = False,
    slowdown: Annotated[
        float | None,
        typer.Option(metavar="PERCENT", help="The least memory that is at most so many percent slower than no limit."),
    ] = None,
    prove: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Then solve exactly for so long; small cases only.")
    ] = None,
    output: Annotated[
        Format | None, typer.Option("--format", help="What to print. Default: by the ending of --out, else text.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of standard output.")] = None,
) -> None:
    """Find the fastest schedule for real costs within a memory limit, over placements, and say which and why."""
    from autotune.schedules.engine import FULL, QUICK, best_schedule, memory_front, smallest_memory
    from autotune.schedules.engine.best import MAX_STAGES_PER_DEVICE

    if front and slowdown is not None:
        raise UserError("--front and --slowdown exclude each other")
    if front and prove is not None:
        raise UserError("--prove works on one schedule, not on a --front")
    chosen = choose_format(output, out, FRONT_FORMATS if front else Format)
    check_file(out)
    check_search(stages_per_device, slowdown, prove)
    stages = MAX_STAGES_PER_DEVICE if placement is None else {"linear": 1, "v": 2}.get(placement, MAX_STAGES_PER_DEVICE)
    check_size(devices, microbatches, stages if stages_per_device is None else stages_per_device, not fused)
    source, file_limit = _costs(devices, pass_times, comm, costs, balance)
    limit = file_limit if memory_limit is None else _parse_limit(memory_limit)
    check_limit(limit)
    common = {
        "placement": None if placement is None else placement.value,
        "stages_per_device": stages_per_device,
        "fused": fused,
        "effort": QUICK if quick else FULL,
        "seed": seed,
    }
    if front:
        if isinstance(limit, tuple):
            raise UserError("--front takes one limit for all devices, not a list")
        emit(_front_text(memory_front(devices, microbatches, source, limit, **common), chosen), out)  # type: ignore[arg-type]
        return
    if slowdown is not None:
        if limit is not None:
            raise UserError("--slowdown looks for a memory limit: give no --memory-limit")
        found = smallest_memory(devices, microbatches, slowdown / 100, source, **common)  # type: ignore[arg-type]
    else:
        found = best_schedule(devices, microbatches, source, limit, **common)  # type: ignore[arg-type]
    proof = None
    if prove is not None:
        found, proof = _prove(found, prove, fused)
    emit(_best_text(found, proof, chosen, to_file=out is not None), out)


def _costs(
    devices: int, pass_times: str, comm: float, path: Path | None, balance: bool
) -> tuple[CostSource, float | tuple[float, ...] | None]:
    """The cost source, and the limit the costs file gives."""
    from autotune.schedules.engine import uniform_share

    if path is not None:
        from autotune.schedules.engine.costs_file import read_costs

        if pass_times != "1,1,1" or comm:
            raise UserError("--costs replaces --pass-times and --comm: give one or the others")
        read = read_costs(path)
        limit = tuple(read.memory_limit) if isinstance(read.memory_limit, list) else read.memory_limit
        return read.source(devices, balance), limit
    if balance:
        raise UserError("--balance needs a --costs file with the costs of layers")
    forward, backward, weight = parse_pass_times(pass_times)
    check_times((forward, backward, weight), comm)
    return uniform_share(forward, backward, weight, comm), None


def _parse_limit(text: str) -> float | tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--memory-limit must be a number or a comma-separated list of numbers, not {text!r}") from None
    return values[0] if len(values) == 1 else values


def _prove(found: BestSchedule, seconds: float, fused: bool) -> tuple[BestSchedule, Proof]:
    """Go on from the found schedule with the exact solver, on the same placement."""
    from autotune.schedules.engine.problem import Problem
    from autotune.schedules.engine.prove import prove

    schedule, costs = found.timeline.schedule, found.timeline.costs
    problem = Problem(schedule.placement, schedule.microbatches, costs, fused)
    everything = schedule.microbatches * max(problem.smallest_caps())
    proof = prove(problem, everything if found.limit is None else found.limit, seconds, found.timeline)
    if proof.timeline.makespan < found.makespan * (1 - 1e-9):
        return replace(found, timeline=proof.timeline, origin="proof"), proof
    return found, proof


def best_dict(found: BestSchedule, proof: Proof | None = None) -> dict[str, object]:
    """Plain JSON values: those of `schedule show`, plus chosen, candidates, lower_bound and gap."""
    from autotune.cli_schedule import timeline_dict

    values = timeline_dict(found.timeline) | {
        "limit": list(found.limit) if isinstance(found.limit, tuple) else found.limit,
        "chosen": {
            "placement": found.chosen.placement,
            "stages_per_device": found.chosen.stages_per_device,
            "layer_split": found.chosen.layer_split and list(found.chosen.layer_split),
            "origin": found.origin,
            "reason": found.reason(),
        },
        "candidates": [
            {
                "placement": option.placement,
                "stages_per_device": option.stages_per_device,
                "layer_split": option.layer_split and list(option.layer_split),
                "makespan": option.makespan,
                "lower_bound": option.lower_bound,
            }
            for option in found.options
        ],
        "lower_bound": found.lower_bound,
        "gap": found.gap,
    }
    if proof is not None:
        values["proof"] = {"optimal": proof.optimal, "lower_bound": proof.lower_bound}
    return values


def _best_text(found: BestSchedule, proof: Proof | None, output: Format, *, to_file: bool) -> str:
    from autotune.cli_schedule import render

    if output is Format.json:
        return json.dumps(best_dict(found, proof)) + "\n"
    drawn = render(found.timeline, output, anatomy=False, memory=False, to_file=to_file)
    if output is not Format.text:
        return drawn
    lines = [
        drawn.rstrip("\n"),
        "",
        f"chosen: {found.reason()}",
        f"makespan {found.makespan:.6g}, lower bound {found.lower_bound:.6g}, gap {found.gap:.2%}, "
        f"peak activation {max(found.timeline.peak_activation):g}"
        + (
            ""
            if found.limit is None
            else f" of {found.limit if isinstance(found.limit, tuple) else f'{found.limit:g}'}"
        ),
    ]
    if found.origin != "search":
        lines.append(f"order: {found.origin}")
    if proof is not None:
        verdict = "proven the fastest on this placement" if proof.optimal else "not proven the fastest"
        lines.append(f"proof: {verdict}; nothing on it is below {proof.lower_bound:.6g}")
    return "\n".join(lines) + "\n"


FRONT_FORMATS = (Format.text, Format.csv, Format.json)


def _front_text(front: list[BestSchedule], output: Format) -> str:
    if output is Format.json:
        return json.dumps([best_dict(entry) for entry in front]) + "\n"
    rows = [("limit", "peak", "makespan", "bubble", "gap", "placement")]
    for entry in front:
        peak = max(entry.timeline.peak_activation)
        rows.append(
            (
                f"{entry.limit:g}",
                f"{peak:g}",
                f"{entry.makespan:.6g}",
                f"{entry.timeline.bubble_rate:.2%}",
                f"{entry.gap:.2%}",
                entry.chosen.describe(),
            )
        )
    if output is Format.csv:
        import csv
        import io

        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(rows)
        return buffer.getvalue()
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )
