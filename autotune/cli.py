"""The command line: parses, calls, prints. Heavy imports happen inside the commands that need them."""

from __future__ import annotations

import errno
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune import __version__, cli_predict
from autotune.cli_schedule import schedule_app
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.results.columns import Row
    from autotune.search.search import SearchOptions, SearchResult
    from autotune.space.space import Space

__all__ = ["app", "main"]

NOTHING_FEASIBLE = 1
USER_MISTAKE = 2
CTRL_C = 130
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)

EPILOG = (
    "Exit codes: 0 done; 1 no plan ran within its limits; 2 a mistake in what was given, or a folder or database that "
    "can't be used; 129, 130, 143 ended by SIGHUP, Ctrl-C, SIGTERM (go on with --resume)."
)

app = typer.Typer(
    name="autotune",
    help="Find the parallel degrees, micro-batch size and pipeline schedule that train a model fastest.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Sampler(StrEnum):
    """How the next plan is picked."""

    grid = "grid"
    random = "random"
    tpe = "tpe"


class Starter(StrEnum):
    """Who starts the ranks of a trial."""

    torchrun = "torchrun"
    none = "none"


class Isolation(StrEnum):
    """How long ranks live."""

    pool = "pool"
    trial = "trial"


class ExportTarget(StrEnum):
    """What runs the exported plan."""

    torchrun = "torchrun"
    megatron = "megatron"
    torchtitan = "torchtitan"


SpaceFile = Annotated[Path, typer.Argument(metavar="SPACE", help="Space file (YAML); see search_spaces/.")]
StudyDir = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a study, such as results/quickstart.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]


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


@app.command(epilog=EPILOG)
def search(
    space: SpaceFile,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Most trials of the study, earlier runs included. Default: every plan.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Begin no trial after this much time in trials, earlier runs included."),
    ] = None,
    sampler: Annotated[Sampler, typer.Option(help="How the next plan is picked.")] = Sampler.grid,
    seed: Annotated[int, typer.Option(help="Seed of the random and tpe samplers.")] = 0,
    trial_timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Wall-clock limit of one trial. Default: trial.timeout_s of the space."),
    ] = None,
    results_dir: Annotated[Path, typer.Option(help="Folder that holds the studies.")] = Path("results"),
    name: Annotated[str | None, typer.Option(help="Name of the study and its folder. Default: the space's.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the study of that name.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the study of that name first.")] = False,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Database of the study (sqlite, postgresql, mysql). Default: DIR/study.db."),
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Command that runs a plan instead of the built-in worker. {request} is the plan's file, {out} the "
            "folder for the ranks' reports; {pp}, {tp}, {dp}, {micro_batch_size}, {microbatches}, {schedule} and "
            "more are filled in. No shell is used.",
        ),
    ] = None,
    launcher: Annotated[
        Starter,
        typer.Option(help="torchrun starts the worker once per rank; none starts it once and it starts its ranks."),
    ] = Starter.torchrun,
    isolation: Annotated[
        Isolation,
        typer.Option(
            help="pool keeps ranks from trial to trial as long as all goes well; trial starts new ones for each. "
            "A worker given by --worker always gets new ones."
        ),
    ] = Isolation.pool,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every legal plan and what the rules refuse; run nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure the plans of a space and find the fastest that fits.

    Every plan is run by torch on all its devices. Results go to RESULTS_DIR/NAME: trials.csv, trials.parquet,
    best.json, study.db, space.yaml and logs/.
    """
    from autotune.space.space import load_space

    loaded = load_space(space)
    if dry_run:
        _print_dry_run(loaded, as_json)
        return
    from autotune.profiling.command import DEFAULT_WORKER, parse_worker
    from autotune.search.search import SearchOptions

    options = SearchOptions(
        folder=results_dir / (name or loaded.name),
        trials=trials,
        timeout_s=timeout,
        trial_timeout_s=trial_timeout,
        sampler=sampler.value,
        seed=seed,
        storage=storage,
        resume=resume,
        fresh=fresh,
        worker=DEFAULT_WORKER if worker is None else parse_worker(worker, launcher.value),
        isolation=isolation.value,
    )
    _run_search(loaded, options, as_json)


def _print_dry_run(space: Space, as_json: bool) -> None:
    from autotune.space.describe import describe_space, description_lines

    if as_json:
        _print_json(describe_space(space))
    else:
        typer.echo("\n".join(description_lines(space)))


def _run_search(space: Space, options: SearchOptions, as_json: bool) -> None:
    from autotune.report.progress import make_progress
    from autotune.report.tables import make_console
    from autotune.search.interrupt import catch_interrupts
    from autotune.search.search import search as run_search

    # With --json standard output holds the JSON and nothing else.
    console = make_console(stderr=as_json)
    with catch_interrupts() as interrupt, make_progress(console) as progress:
        for note in space.notes:
            progress.note(note)
        result = run_search(space, options, progress, interrupt)
    if as_json:
        _print_json(_search_json(options.folder, result))
    else:
        _print_search(options.folder, result)
    if interrupt:
        raise typer.Exit(interrupt.exit_code)
    if result.best is None:
        typer.echo(f"error: {_why_nothing(result)}", err=True)
        raise typer.Exit(NOTHING_FEASIBLE)


def _print_search(folder: Path, result: SearchResult) -> None:
    from autotune.report.numbers import bytes_text, count_text
    from autotune.report.tables import summary_line
    from autotune.results.compare import compare

    not_run = result.legal - sum(row.trial is not None for row in result.rows)
    endings = {
        "complete": "every legal plan was measured",
        "trials": f"the budget of trials is spent, {not_run} legal plans were not run",
        "timeout": f"the time is spent, {not_run} legal plans were not run",
        "interrupted": f"interrupted, {not_run} legal plans were not run; --resume goes on",
    }
    typer.echo(f"{endings[result.ended]}; {summary_line(result.rows)}")
    typer.echo(f"table: {folder / 'trials.csv'}")
    if (best := result.best) is not None:
        typer.echo(
            f"best: {best.describe()}: {count_text(best.tokens_per_s)} tokens/s, "
            f"peak memory {bytes_text(best.peak_memory_bytes)}"
        )
        typer.echo(compare(result.rows).sentences()[0])


def _search_json(folder: Path, result: SearchResult) -> dict[str, Any]:
    from collections import Counter

    from autotune.results.compare import compare

    return {
        "folder": str(folder),
        "ended": result.ended,
        "legal_plans": result.legal,
        "states": dict(Counter(row.state for row in result.rows)),
        "best": result.best.to_dict() if result.best else None,
        "comparison": compare(result.rows).to_dict(),
        "rows": [row.to_dict() for row in result.rows],
    }


def _why_nothing(result: SearchResult) -> str:
    """Why no plan is feasible: the closest one over its memory, and the first line of each kind of failure."""
    tried = [row for row in result.rows if row.trial is not None]
    if not tried:
        return "no plan was run"
    over = [row for row in tried if row.state == "oom" and row.peak_memory_bytes is not None]
    text = f"none of {len(tried)} plans ran within its limits"
    if over:
        closest = min(over, key=lambda row: row.peak_memory_bytes or 0)
        text += f"; closest is {closest.describe()}: {closest.reason}"
    first: dict[str, Row] = {}
    for row in tried:
        first.setdefault(row.state, row)
    for state, row in first.items():
        count = result.count(state)
        text += f"\n  {count} {state}, such as trial {row.trial}: {row.reason.splitlines()[0] if row.reason else ''}"
    return text


@app.command(epilog=EPILOG)
def results(
    study: StudyDir,
    sort: Annotated[str, typer.Option(metavar="COLUMN", help="Column to sort by.")] = "tokens_per_s",
    show_all: Annotated[bool, typer.Option("--all", help="Also list the plans that the rules refuse.")] = False,
    as_json: Json = False,
) -> None:
    """Print the table of a study.

    Throughput and peak memory of every plan that was run, best first, and why some have none.
    """
    from autotune.report.tables import make_console, reason_lines, results_table, sort_rows, summary_line
    from autotune.results.table import read_csv

    rows = read_csv(study / "trials.csv")
    shown = sort_rows([row for row in rows if show_all or row.state != "refused"], sort)
    if as_json:
        _print_json([row.to_dict() for row in shown])
        return
    console = make_console()
    console.print(results_table(shown))
    for line in reason_lines(shown):
        console.print(line, markup=False, soft_wrap=True)
    if show_all:
        for row in shown:
            if row.state == "refused":
                console.print(f"refused: {row.describe()}: {row.reason}", markup=False, soft_wrap=True)
    console.print(summary_line(rows), markup=False)


@app.command(epilog=EPILOG)
def compare(study: StudyDir, as_json: Json = False) -> None:
    """Compare the best plan of a study with 1F1B.

    That is its best 1F1B plan, and its best interleaved one beside it: same model, global batch and devices.
    Says plainly when 1F1B is the best, or when the difference is inside the spread of the measured steps.
    """
    from autotune.report.tables import comparison_table, make_console
    from autotune.results.compare import compare as compare_rows
    from autotune.results.table import read_csv

    comparison = compare_rows(read_csv(study / "trials.csv"))
    if as_json:
        _print_json(comparison.to_dict())
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
    to: Annotated[ExportTarget, typer.Option(help="What runs the plan.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the files go.")],
    trial: Annotated[int | None, typer.Option(help="Trial to export. Default: the best plan.")] = None,
    as_json: Json = False,
) -> None:
    """Write a plan as files that a launcher runs.

    Default is the best plan of the study. What a launcher can't express is refused with the reason.
    """
    from autotune.export.exporter import export_plan
    from autotune.results.rows import plan_of
    from autotune.results.table import read_csv
    from autotune.space.space import load_space

    rows = read_csv(study / "trials.csv")
    wanted = [row for row in rows if (row.is_best if trial is None else row.trial == trial)]
    if not wanted:
        known = "no plan of it ran within its limits" if trial is None else f"it has no trial {trial}"
        raise UserError(f"nothing to export from {study}: {known}")
    files = export_plan(load_space(study / "space.yaml"), plan_of(wanted[0]), to.value, out)
    if as_json:
        _print_json({"plan": wanted[0].to_dict(), "files": [str(path) for path in files]})
        return
    typer.echo(f"{wanted[0].describe()} for {to.value}:")
    for path in files:
        typer.echo(f"  {path}")


app.add_typer(schedule_app)
cli_predict.mount(app)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


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
    print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
