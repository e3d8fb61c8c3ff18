"""The command `search`; `mount` adds it to the command line. Heavy imports happen inside what needs them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli_common import EPILOG, NOTHING_FEASIBLE, Json, SpaceFile, print_json
from autotune.cli_figures import Assume, CalibratedBy, Stack, assumptions_of, figures_of
from autotune.errors import UserError
from autotune.results.text import printable

if TYPE_CHECKING:
    from autotune.profiling.hosts import Hosts
    from autotune.results.columns import Row
    from autotune.search.options import SearchOptions, SearchResult
    from autotune.space.space import Space

__all__ = ["mount", "search"]


def mount(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command(epilog=EPILOG)(search)


class Fidelity(StrEnum):
    """How plans are evaluated."""

    predict = "predict"
    profile = "profile"
    run = "run"


class Sampler(StrEnum):
    """How the next plan is picked."""

    auto = "auto"
    grid = "grid"
    random = "random"
    tpe = "tpe"
    nsga2 = "nsga2"
    gp = "gp"


class Starter(StrEnum):
    """Who starts the ranks of a trial."""

    torchrun = "torchrun"
    none = "none"


class Isolation(StrEnum):
    """How long ranks live."""

    pool = "pool"
    trial = "trial"


def search(
    space: SpaceFile,
    fidelity: Annotated[
        Fidelity,
        typer.Option(
            help="run: every plan by torch on all its devices. profile: each distinct stage once on one device, the "
            "schedule simulated. predict: the cost model alone ranks every plan; nothing is started."
        ),
    ] = Fidelity.run,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Most trials of the study, earlier runs included. Default: every plan.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Begin no trial after this much time in trials, earlier runs included."),
    ] = None,
    device_hours: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            help="Begin no trial after this many device-hours in trials (time times devices), earlier runs included.",
        ),
    ] = None,
    sampler: Annotated[
        Sampler,
        typer.Option(
            help="How the next plan is picked. auto: by predictions that measurements correct, until no plan left is "
            "likely to win. grid: every plan in order. random, tpe, gp: without predictions. nsga2: throughput against "
            "peak memory."
        ),
    ] = Sampler.auto,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    trial_timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Wall-clock limit of one trial. Default: trial.timeout_s of the space."),
    ] = None,
    hang_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Time without progress of any rank after which a trial is ended, its stacks saved. Default: "
            "trial.hang_timeout_s of the space, or 300 with the built-in worker.",
        ),
    ] = None,
    results_dir: Annotated[Path, typer.Option(help="Folder that holds the studies.")] = Path("results"),
    name: Annotated[str | None, typer.Option(help="Name of the study and its folder. Default: the space's.")] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the study of that name, or begin it; other searches may be at it.",
        ),
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the study of that name first.")] = False,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt",
            help="With --resume: take over the rows that hold though something changed that no measurement depends on, "
            "such as the memory limit.",
        ),
    ] = False,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help="With --resume: run the plans again that failed before, by failed, timeout, hang, killed, no-result, "
            "non-finite or invalid; their new rows take the place of the old ones. What ran, what ran out of memory "
            "and what was refused stays. Failed launches are tried again in any case.",
        ),
    ] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on though the first trials all failed alike.")
    ] = False,
    takeover_after: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="Take another search of the same study for dead, and its plan over, after this much silence.",
        ),
    ] = 30.0,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="AUTOTUNE_STORAGE",
            help="Database of the study (sqlite, postgresql, mysql). Default: DIR/study.db. The variable "
            "AUTOTUNE_STORAGE keeps a password in it off the list of processes.",
        ),
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Command that runs a plan instead of the built-in worker or that of the space's section worker (see "
            "docs/worker.md). {request} is the plan's file, {out} the "
            "folder for the ranks' reports; {pp}, {tp}, {dp}, {micro_batch_size}, {microbatches}, {schedule} and "
            "more are filled in. No shell is used.",
        ),
    ] = None,
    launcher: Annotated[
        Starter | None,
        typer.Option(
            help="Of --worker: torchrun starts it once per rank (default); none starts it once, and it starts its "
            "ranks.",
            show_default=False,
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,... or FILE",
            help="Nodes that every trial spans, in the order of their ranks: names, or a file with one a line. As many "
            "as the space's cluster.nodes; they share the results folder. Default: in a Slurm allocation of several "
            "nodes those, by srun; else all ranks run here. See docs/multi-node.md.",
        ),
    ] = None,
    remote_shell: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="How a command is started on a node of --hosts: {host} is its name, {command} the command as one "
            "text; without it the command's words are appended. Default: ssh -o BatchMode=yes {host}.",
        ),
    ] = None,
    remote_python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Python on the nodes. Default: the path of the one that runs the tuner."),
    ] = None,
    rdzv_host: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="First node as the others reach it. Default: its name in --hosts."),
    ] = None,
    isolation: Annotated[
        Isolation,
        typer.Option(
            help="pool keeps ranks from trial to trial as long as all goes well; trial starts new ones for each. "
            "A worker of your own always gets new ones."
        ),
    ] = Isolation.pool,
    refuse_by_estimate: Annotated[
        bool | None,
        typer.Option(
            "--refuse-by-estimate/--no-refuse-by-estimate",
            help="Refuse plans that can't fit in memory by the estimate, even were it too high by its proven error. "
            "Default: yes, but not with --worker: other software may need less.",
            show_default=False,
        ),
    ] = None,
    stack: Stack = None,
    assume: Assume = "",
    calibrated_by: CalibratedBy = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every legal plan and what the rules refuse; run nothing.")
    ] = False,
    final: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=0,
            help="When a run search ends, measure the K fastest plans and both baselines again, in turns and fresh "
            "processes; these numbers decide. 0: no final. Default: 3.",
            show_default=False,
        ),
    ] = None,
    final_rounds: Annotated[
        int, typer.Option(min=3, help="Most rounds of the final; it ends earlier when the answer is clear.")
    ] = 8,
    as_json: Json = False,
) -> None:
    """Measure the plans of a space and find the fastest that fits.

    Every plan is run by torch on all its devices, or predicted (--fidelity). Results go to RESULTS_DIR/NAME:
    trials.csv, trials.parquet, best.json, final.json, study.db, space.yaml and logs/.
    """
    from autotune.space.space import load_space
    from autotune.space.space_file import NAME_RULE, can_name_a_study

    loaded = load_space(space)
    if name is not None and not can_name_a_study(name):
        raise UserError(f"--name: {name!r} can't name a study: {NAME_RULE}")
    from autotune.profiling.command import parse_worker, worker_of
    from autotune.search.worker_plans import for_worker

    if launcher is not None and worker is None:
        raise UserError(
            "--launcher says how the command of --worker is started, which isn't given; a worker of the space file has "
            "its own key, starter"
        )
    if storage is not None:
        from autotune.search.storage_url import check_url

        check_url(storage)
    given = None if worker is None else parse_worker(worker, (launcher or Starter.torchrun).value)
    from autotune.search.options import SearchOptions

    assumptions = assumptions_of(loaded, stack, assume, given)
    options = SearchOptions(
        folder=results_dir / (name or loaded.name),
        fidelity=fidelity.value,
        trials=trials,
        timeout_s=timeout,
        device_hours=device_hours,
        trial_timeout_s=trial_timeout,
        hang_timeout_s=hang_timeout,
        sampler=sampler.value,
        seed=seed,
        storage=storage,
        resume=resume,
        fresh=fresh,
        adopt=adopt,
        retry_failed=retry_failed,
        keep_going=keep_going,
        takeover_s=takeover_after,
        worker=given,
        isolation=isolation.value,
        hosts=_hosts(loaded, hosts, remote_shell, remote_python, rdzv_host),
        assumptions=assumptions,
        figures=None if calibrated_by is None else figures_of(loaded, calibrated_by, assumptions),
        refuse_by_estimate=refuse_by_estimate,
        final=final,
        final_rounds=final_rounds,
    )
    if dry_run:
        _print_dry_run(for_worker(loaded, given or worker_of(loaded.worker)), as_json)
        return
    _run_search(loaded, options, as_json)


def _hosts(
    space: Space, text: str | None, remote_shell: str | None, remote_python: str | None, rdzv_host: str | None
) -> Hosts | None:
    """The nodes of --hosts; None without."""
    from autotune.profiling.hosts import make_hosts

    return make_hosts(text, space.cluster, remote_shell, remote_python, rdzv_host)


def _print_dry_run(space: Space, as_json: bool) -> None:
    from autotune.space.describe import describe_space, description_lines

    if as_json:
        print_json(describe_space(space))
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
        print_json(_search_json(options.folder, result))
    else:
        _print_search(options.folder, result)
        if options.sampler == "nsga2":
            _print_front(result)
    if interrupt:
        raise typer.Exit(interrupt.exit_code)
    if result.best is None:
        typer.echo(printable(f"error: {_why_nothing(result)}"), err=True)
        raise typer.Exit(NOTHING_FEASIBLE)


def _print_search(folder: Path, result: SearchResult) -> None:
    from autotune.report.tables import summary_line
    from autotune.results.compare import compare

    typer.echo(f"{_ending(result)}; {summary_line(result.rows)}")
    typer.echo(f"table: {folder / 'trials.csv'}")
    if (best := result.best) is not None:
        typer.echo(_best_line(best))
        comparison = compare(result.rows, result.final)
        typer.echo(comparison.sentences()[0])
        if remark := result.no_final or comparison.remark:
            typer.echo(printable(remark))
    if result.refit is not None:
        doubt = result.refit.doubt
        use = f"--calibrated-by {folder} uses it" if doubt is None else f"not recommended: the fit {doubt}"
        typer.echo(f"predictions: {result.refit.sentence()}; {use}")


def _print_front(result: SearchResult) -> None:
    """What a search for two objectives found: the plans than which none is both faster and smaller."""
    from autotune.report.pareto import pareto_lines
    from autotune.results.pareto import pareto_front

    typer.echo("\n".join(pareto_lines(pareto_front(result.rows))))


def _ending(result: SearchResult) -> str:
    """Why the search ended, and what that leaves."""
    done = {"run": "measured", "profile": "profiled", "predict": "predicted"}[result.fidelity]
    refused = result.refused_by_estimate
    also = f" or refused by the estimate of its memory ({refused})" if refused else ""
    if result.refused_by_history:
        also += f" or refused by what a smaller one showed ({result.refused_by_history})"
    left = result.legal - result.evaluated - refused - result.refused_by_history
    tried = "run" if result.fidelity == "run" else done
    all_well = all(row.state in ("ok", "predicted", "refused") for row in result.rows)
    return {
        "complete": f"every legal plan was {done if all_well else 'tried'}{also}",
        "converged": f"stopped: {result.why}; {left} legal plans were not {tried}",
        "trials": f"the budget of trials is spent, {left} legal plans were not {tried}",
        "timeout": f"the time is spent, {left} legal plans were not {tried}",
        "device-hours": f"the budget of device-hours is spent, {left} legal plans were not {tried}",
        "failing": f"stopped early, {left} legal plans were not {tried}; --keep-going goes on",
        "interrupted": f"interrupted, {left} legal plans were not {tried}; --resume goes on",
    }[result.ended]


def _best_line(best: Row) -> str:
    from autotune.report.numbers import bytes_text, count_text

    if best.state == "predicted":
        return (
            f"best predicted: {best.describe()}: {count_text(best.predicted_tokens_per_s)} tokens/s, "
            f"peak memory {bytes_text(best.predicted_peak_memory_bytes)}"
        )
    return (
        f"best: {best.describe()}: {count_text(best.tokens_per_s)} tokens/s, "
        f"peak memory {bytes_text(best.peak_memory_bytes)}"
    )


def _search_json(folder: Path, result: SearchResult) -> dict[str, Any]:
    from collections import Counter

    from autotune.results.compare import compare
    from autotune.results.pareto import pareto_front

    return {
        "folder": str(folder),
        "fidelity": result.fidelity,
        "ended": result.ended,
        "why": result.why,
        "legal_plans": result.legal,
        "refused_by_estimate": result.refused_by_estimate,
        "refused_by_history": result.refused_by_history,
        "states": dict(Counter(row.state for row in result.rows)),
        "best": result.best.to_dict() if result.best else None,
        "comparison": compare(result.rows, result.final).to_dict(),
        "no_final": result.no_final,
        "pareto": [row.fingerprint for row in pareto_front(result.rows)],
        "refit": _refit_json(result),
        "rows": [row.to_dict() for row in result.rows],
    }


def _refit_json(result: SearchResult) -> dict[str, Any] | None:
    """How predictions of the step time err over the finished trials, before and after fitting the device to them."""
    from statistics import fmean

    if (found := result.refit) is None:
        return None

    def mean(errors: tuple[float, ...] | None) -> float | None:
        return None if errors is None else fmean(map(abs, errors))

    return {
        "numbers": {name: getattr(found.machine, name) for name in found.numbers},
        "trials": len(found.before),
        "mean_error_before": mean(found.before),
        "mean_error_after": mean(found.after),
        "mean_error_left_out": mean(found.left_out),
        "doubt": found.doubt,
    }


def _why_nothing(result: SearchResult) -> str:
    """Why no plan is feasible: the closest one over its memory, and the first line of each kind of failure."""
    from autotune.report.numbers import bytes_text
    from autotune.search.history import PREFIX as HISTORY

    if result.ended == "failing":
        return f"stopped: {result.why}"
    tried = [row for row in result.rows if row.trial is not None]
    estimates = [
        row
        for row in result.rows
        if row.trial is None and row.state == "refused" and row.fidelity and not row.reason.startswith(HISTORY)
    ]
    over_limit = []
    if result.fidelity != "run":
        over_limit = [row for row in result.rows if row.state == "predicted" and row.predicted_fits is False]
    if not tried and not estimates and not over_limit:
        return "no plan was evaluated"
    text = f"none of {len(tried)} plans ran within its limits" if tried else "no plan was tried"
    over = [row for row in tried if row.state == "oom" and row.peak_memory_bytes is not None]
    if over:
        closest = min(over, key=lambda row: row.peak_memory_bytes or 0)
        text += f"; closest is {closest.describe()}: {closest.reason}"
    elif foreseen := [row for row in tried if row.state == "oom" and row.predicted_peak_memory_bytes is not None]:
        closest = min(foreseen, key=lambda row: row.predicted_peak_memory_bytes or 0)
        text += (
            f"; no peak was measured, closest by prediction is {closest.describe()}: its predicted peak is "
            f"{bytes_text(closest.predicted_peak_memory_bytes)}"
        )
    first: dict[str, Row] = {}
    for row in tried:
        first.setdefault(row.state, row)
    for state, row in first.items():
        count = sum(other.state == state for other in tried)
        text += f"\n  {count} {state}, such as trial {row.trial}: {row.reason.splitlines()[0] if row.reason else ''}"
    if over_limit:
        least = min(over_limit, key=lambda row: row.predicted_peak_memory_bytes or 0)
        text += (
            f"\n  {len(over_limit)} fit only if their prediction is too high; the least is "
            f"{bytes_text(least.predicted_peak_memory_bytes)} of {least.describe()}"
        )
    if estimates:
        least = min(estimates, key=lambda row: row.predicted_peak_memory_bytes or 0)
        text += (
            f"\n  {len(estimates)} refused by the estimate of their memory (--no-refuse-by-estimate tries them); the "
            f"least is of {least.describe()}: {least.reason}"
        )
    return text
