"""`autotune schedule`: list the named schedules, show one. Imports stay inside the commands, so that help is cheap."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli_mistakes import Commands
from autotune.cli_schedule_best import best
from autotune.cli_schedule_limits import check_drawing, check_limit, check_size, check_times, parse_pass_times
from autotune.cli_schedule_output import Format, check_file, choose_format, emit
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.schedules.simulate import Timeline

__all__ = ["schedule_app"]

schedule_app = typer.Typer(
    name="schedule",
    cls=Commands,
    help="Pipeline schedules: list the named ones, simulate and draw one, or find the best for given costs and memory.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
schedule_app.command("best")(best)


@schedule_app.command("list")
def list_schedules(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """List every named schedule with its source, stages per device, peak activation and bubble."""
    from autotune.schedules.catalogue import catalogue, catalogue_text

    if as_json:
        typer.echo(json.dumps(catalogue(), indent=2))
    else:
        typer.echo(catalogue_text(), nl=False)


@schedule_app.command("show")
def show_schedule(
    name: Annotated[str, typer.Argument(help="A name of `autotune schedule list`.")],
    devices: Annotated[int, typer.Option(help="Devices of the pipeline.")],
    microbatches: Annotated[int, typer.Option(help="Microbatches of one step.")],
    stages_per_device: Annotated[
        int | None, typer.Option(help="Stages each device holds; default: the fewest the schedule allows.")
    ] = None,
    pass_times: Annotated[
        str, typer.Option(metavar="F,B,W", help="Times of one microbatch on one device's whole share of the model.")
    ] = "1,1,1",
    comm: Annotated[float, typer.Option(help="Latency of one hop between devices.")] = 0.0,
    memory_limit: Annotated[
        float | None, typer.Option(help="Most microbatches a device may hold; for zb, zb-1p and zb-2p.")
    ] = None,
    output: Annotated[
        Format | None, typer.Option("--format", help="What to print. Default: by the ending of --out, else text.")
    ] = None,
    anatomy: Annotated[
        bool, typer.Option("--anatomy", help="svg: building block, repeated block and final schedule, with memory.")
    ] = False,
    memory: Annotated[bool, typer.Option("--memory", help="svg: draw the memory curve under each device.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of standard output.")] = None,
) -> None:
    """Build, check and simulate one schedule and print it."""
    from autotune.schedules.costs import PassCosts
    from autotune.schedules.placement import make_placement
    from autotune.schedules.registry import build, find
    from autotune.schedules.simulate import simulate

    kind = find(name)
    chosen = choose_format(output, out)
    for option, given in (("--anatomy", anatomy), ("--memory", memory)):
        if given and chosen is not Format.svg:
            raise UserError(f"{option} is drawn into an svg, not {chosen.value}: add --format svg or --out FILE.svg")
    check_file(out)
    forward, backward, weight = parse_pass_times(pass_times)
    if devices < 1:
        raise UserError(f"--devices must be at least 1, not {devices}")
    stages = kind.default_stages_per_device() if stages_per_device is None else stages_per_device
    problem = kind.stages_problem(stages)
    if problem:
        raise UserError(problem)
    check_times((forward, backward, weight), comm)
    check_limit(memory_limit)
    check_size(devices, microbatches, stages, kind.split_backward)
    costs = PassCosts.uniform(make_placement(kind.placement, devices, stages), forward, backward, weight, comm)
    schedule = build(name, devices, microbatches, stages, memory_limit=memory_limit, costs=costs)
    emit(render(simulate(schedule, costs), chosen, anatomy=anatomy, memory=memory, to_file=out is not None), out)


def render(timeline: Timeline, output: Format, *, anatomy: bool, memory: bool, to_file: bool) -> str:
    """The timeline in one of the formats."""
    if output is Format.json:
        return json.dumps(timeline_dict(timeline)) + "\n"
    if output is Format.csv:
        from autotune.export.schedule_csv import schedule_csv

        return schedule_csv(timeline.schedule)
    if output is Format.chrome:
        from autotune.report.schedule_trace import schedule_trace

        return schedule_trace(timeline)
    if output is Format.svg:
        from autotune.report.schedule_anatomy import anatomy_svg
        from autotune.report.schedule_svg import schedule_svg

        return anatomy_svg(timeline) if anatomy else schedule_svg(timeline, memory=memory)
    check_drawing(timeline)
    import os
    import shutil

    from autotune.report.schedule_text import schedule_text

    colour = sys.stdout.isatty() and not to_file and "NO_COLOR" not in os.environ
    return schedule_text(timeline, width=shutil.get_terminal_size((120, 24)).columns, colour=colour)


def timeline_dict(timeline: Timeline) -> dict[str, object]:
    """Plain JSON values of a schedule and its timeline."""
    from autotune.schedules.checks import problems

    return timeline.schedule.to_dict() | {
        "makespan": timeline.makespan,
        "bubble_rate": timeline.bubble_rate,
        "span_bubble_rate": timeline.span_bubble_rate,
        "peak_activation": list(timeline.peak_activation),
        "valid": not problems(timeline.schedule),
    }


def main() -> None:
    """Run these commands alone; mistakes as the whole command line reports them."""
    try:
        schedule_app()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
