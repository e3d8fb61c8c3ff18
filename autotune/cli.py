"""The command line: parses, calls, prints. Heavy imports happen inside the commands that need them."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune import __version__, cli_calibrate, cli_predict, cli_search
from autotune.cli_common import CTRL_C, EPILOG, NOTHING_FEASIBLE, USER_MISTAKE, Json, StudyDir, print_json
from autotune.cli_mistakes import Commands
from autotune.cli_schedule import schedule_app
from autotune.errors import UserError
from autotune.results.text import printable

if TYPE_CHECKING:
    from autotune.export.job import Evaluated
    from autotune.results.columns import Row
    from autotune.results.final import Final

__all__ = ["app", "main"]

_TOP = 20
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)

app = typer.Typer(
    name="autotune",
    cls=Commands,
    help="Find the parallel degrees, micro-batch size and pipeline schedule that train a model fastest.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class ExportTarget(StrEnum):
    """What runs the exported plan."""

    worker = "worker"
    torchrun = "torchrun"
    megatron = "megatron"
    torchtitan = "torchtitan"


def _version(value: bool) -> None:
    if value:
        typer.echo(f"autotune {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


cli_search.mount(app)


@app.command(epilog=EPILOG)
def results(
    study: StudyDir,
    sort: Annotated[str, typer.Option(metavar="COLUMN", help="Column to sort by.")] = "tokens_per_s",
    show_all: Annotated[
        bool,
        typer.Option("--all", help="Also list the plans that are refused, every prediction, and every reason in full."),
    ] = False,
    top: Annotated[
        int | None, typer.Option(min=0, help="Most plans to list that were only predicted. Default: 20.")
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Only plans than which none is both faster and smaller in peak memory.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the table of a study.

    Throughput and peak memory of every plan that was run, best first, and why some have none; then the plans that were
    only predicted. Predictions stand in columns of their own. Last the final, if the study had one.
    """
    from autotune.report.final import final_lines
    from autotune.report.tables import (
        make_console,
        over_limit_lines,
        reason_lines,
        results_table,
        sort_rows,
        summary_line,
        without_the_slow_predictions,
    )

    if pareto and (show_all or top is not None):
        given = " and ".join(name for name, is_given in (("--top", top is not None), ("--all", show_all)) if is_given)
        mean = "mean" if " and " in given else "means"
        raise UserError(f"{given} {mean} nothing with --pareto, which lists the plans of the front and no others")
    rows = _rows(study)
    if pareto:
        _print_pareto(rows, sort, as_json)
        return
    final = _final(study)
    shown = sort_rows([row for row in rows if show_all or row.state != "refused"], sort)
    if as_json:
        print_json([row.to_dict() for row in shown])
        return
    shown, left_out = (shown, 0) if show_all else without_the_slow_predictions(shown, _TOP if top is None else top)
    console = make_console()
    console.print(results_table(shown))
    if left_out:
        console.print(f"{left_out} more plans were only predicted; --all or --top lists them", markup=False)
    for line in [*over_limit_lines(shown), *reason_lines(shown, whole=show_all)]:
        console.print(line, markup=False, soft_wrap=True)
    if show_all:
        for row in shown:
            if row.state == "refused":
                console.print(f"refused: {row.describe()}: {row.reason}", markup=False, soft_wrap=True)
    console.print(summary_line(rows), markup=False)
    for line in final_lines(rows, final):
        console.print(line, markup=False, soft_wrap=True)


def _rows(study: Path) -> list[Row]:
    """The table of a study."""
    from autotune.results.table import read_csv

    try:
        return read_csv(study / "trials.csv")
    except UserError as error:
        raise UserError(f"{error}{_mended(study / 'trials.csv')}") from None


def _final(study: Path) -> Final | None:
    """The final of a study."""
    from autotune.results.final import read_final

    try:
        return read_final(study / "final.json")
    except UserError as error:
        raise UserError(f"{error}{_mended(study / 'final.json')}") from None


def _mended(file: Path) -> str:
    """How a file that can't be used is mended; nothing where it isn't there at all."""
    if not file.is_file():
        return ""
    how = "`autotune search SPACE --resume` writes it anew from the study's database"
    return f"; {how} (a study of fidelity predict begins anew with --fresh)"


def _print_pareto(rows: Sequence[Row], sort: str, as_json: bool) -> None:
    from autotune.report.pareto import pareto_sentence
    from autotune.report.tables import make_console, results_table, sort_rows
    from autotune.results.pareto import pareto_front

    front = pareto_front(rows)
    shown = sort_rows(front, sort)
    if as_json:
        print_json([row.to_dict() for row in shown])
        return
    console = make_console()
    if front:
        console.print(results_table(shown))
    console.print(pareto_sentence(front), markup=False, soft_wrap=True)


@app.command(epilog=EPILOG)
def compare(study: StudyDir, as_json: Json = False) -> None:
    """Compare the best plan of a study with 1F1B.

    That is its best 1F1B plan, and its best interleaved one beside it: same model, global batch and devices.
    Says plainly when 1F1B is the best, or when there is no significant gain. The numbers are those of the study's
    final, with 95 % confidence intervals; without one the search's own, with the spread of the measured steps.
    """
    from autotune.report.tables import comparison_table, make_console
    from autotune.results.compare import compare as compare_rows

    comparison = compare_rows(_rows(study), _final(study))
    if as_json:
        print_json(comparison.to_dict())
    else:
        console = make_console()
        if comparison.best is not None:
            console.print(comparison_table(comparison))
        for sentence in comparison.sentences():
            console.print(sentence, markup=False, soft_wrap=True)
    if comparison.best is None:
        raise typer.Exit(NOTHING_FEASIBLE)


@app.command(epilog=EPILOG)
def export(
    study: StudyDir,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the files go.")],
    to: Annotated[
        ExportTarget,
        typer.Option(
            help="What runs the plan. worker: the command of the space's section worker, or the built-in worker; "
            "torchrun: that command if torchrun starts its ranks, or the built-in worker."
        ),
    ] = ExportTarget.worker,
    trial: Annotated[int | None, typer.Option(help="Trial to export. Default: the best plan.")] = None,
    fingerprint: Annotated[
        str | None, typer.Option(metavar="HEX", help="Plan to export by its fingerprint, also one that was not run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a plan as files that a launcher runs.

    Default is the best plan of the study, run by what ran it there. What a launcher can't express is refused with the
    reason.
    """
    from autotune.export.exporter import export_note, export_plan
    from autotune.results.rows import plan_of
    from autotune.space.space import load_space

    if trial is not None and fingerprint is not None:
        raise UserError("--trial and --fingerprint exclude each other: each names one plan")
    rows = _rows(study)
    if fingerprint is not None:
        wanted, known = [row for row in rows if row.fingerprint == fingerprint], f"it has no plan {fingerprint!r}"
    elif trial is not None:
        wanted, known = [row for row in rows if row.trial == trial], f"it has no trial {trial}"
    else:
        _final(study)  # which says what is the best: a damaged one is told, not passed over
        wanted, known = [row for row in rows if row.is_best], ""
        if not wanted:
            typer.echo(
                printable(f"error: nothing to export from {study}: no plan of it ran within its limits"), err=True
            )
            raise typer.Exit(NOTHING_FEASIBLE)
    if not wanted:
        raise UserError(f"nothing to export from {study}: {known}")
    row, space = wanted[0], load_space(study / "space.yaml")
    plan = plan_of(row)
    if space.fingerprint(plan) != row.fingerprint:
        raise UserError(
            f"{study / 'trials.csv'} and {study / 'space.yaml'} are not of one study, or one of them was changed: the "
            f"fingerprint of {row.describe()} is {row.fingerprint or 'empty'} in the table and "
            f"{space.fingerprint(plan)} in that space"
        )
    evaluated = _evaluated(row)
    files = export_plan(space, plan, to.value, out, evaluated=evaluated, trial=row.trial)
    note = export_note(space, plan, to.value, evaluated)
    if as_json:
        print_json({"plan": row.to_dict(), "files": [str(path) for path in files], "note": note})
        return
    typer.echo(printable(f"{row.describe()} for {to.value}{_state_note(row)}:"))
    for path in files:
        typer.echo(printable(f"  {path}"))
    if note is not None:
        typer.echo(printable(note))


def _evaluated(row: Row) -> Evaluated:
    """How the study came by the figures of a plan."""
    if row.step_time_s is not None:
        return "measured"
    if row.predicted_step_time_s is None:
        return "not evaluated"
    return "profiled" if row.fidelity == "profile" else "predicted"


def _state_note(row: Row) -> str:
    """What to know of an exported plan that didn't run within its limits."""
    if row.state == "ok":
        return ""
    if row.state == "predicted":
        over = ", and its predicted peak is over the memory limit" if row.predicted_fits is False else ""
        return f" (predicted, not measured{over})"
    return f" (it is {row.state}: {row.reason.splitlines()[0]})" if row.reason else f" (it is {row.state})"


app.add_typer(schedule_app)
cli_predict.mount(app)
cli_calibrate.mount(app, epilog=EPILOG)


def main() -> None:
    """Run the command line. A user's mistake is one line on standard error, never a traceback."""
    try:
        app()
    except UserError as error:
        sys.exit(_fail(f"error: {error}", USER_MISTAKE))
    except KeyboardInterrupt:
        sys.exit(_fail("interrupted", CTRL_C))
    except BrokenPipeError:
        # The reader of our output, such as `head`, has had enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(_fail(f"error: {where}{error.strerror}", USER_MISTAKE))


def _fail(text: str, code: int) -> int:
    # It may quote a file, or what a worker wrote.
    print(printable(text), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
