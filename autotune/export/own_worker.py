"""Export of the space's own worker: a script that runs the command of the section `worker` as a trial would."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from autotune.export.job import Job
from autotune.export.script import launch_script, shell_array
from autotune.export.worker_arguments import trainer_arguments
from autotune.profiling.command import PLAN_FILE, WorkerCommand, worker_of
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.rank_files import RESULT_FILE
from autotune.space.placeholders import placeholders_in
from autotune.space.settings import WorkerSettings

__all__ = ["own_worker_files", "trial_request"]

REQUEST_FILE = "request.json"

# What only the script knows, by the placeholder that stands for it; bash fills it in.
_AT_RUN_TIME = {
    "out": "$OUT",
    "request": f"$OUT/{REQUEST_FILE}",
    "plan_json": f"$OUT/{PLAN_FILE}",
    "result_json": f"$OUT/{RESULT_FILE}",
    "python": "$PYTHON",
    "nnodes": "$NNODES",
    "nproc": "$NPROC_PER_NODE",
    "node_rank": "$NODE_RANK",
    "master_addr": "${MASTER_ADDR:-localhost}",
    "hosts": "$HOSTS",
    "port": "$MASTER_PORT",
    "measured_steps": "$STEPS",
    "steps": "$(( WARMUP_STEPS + STEPS ))",
}
_FOLDER, _ARGUMENTS = "/@autotune-folder@", "@autotune-arguments@"
_TOKENS = {f"@autotune-{name}@": text for name, text in _AT_RUN_TIME.items()} | {_FOLDER: "$OUT", _ARGUMENTS: "$@"}
_TOKEN = re.compile("|".join(map(re.escape, _TOKENS)))

_TRIAL = """\
# STEPS=N trains N measured steps instead of {measured}; OUT is the folder that stands for the trial's.
WARMUP_STEPS={warmup}
STEPS="${{STEPS:-{measured}}}"
whole STEPS 1 999999999
OUT="${{OUT:-$here/out}}"
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)"
[[ ! "$OUT" -ef "$here" ]] || fail "OUT=$OUT is the folder of this script; it must be another one"
"$PYTHON" - "$here" "$OUT" "$STEPS" {files} <<'EOF'
import json, os, sys
here, out, steps, *names = sys.argv[1:]
for name in names:
    with open(os.path.join(here, name)) as file:
        text = file.read()
    if name == "{request}":
        text = json.dumps(json.loads(text) | {{"measured_steps": int(steps)}})
    own = os.path.join(out, f"{{name}}.{{os.uname().nodename}}.{{os.getpid()}}")
    with open(own, "w") as file:
        file.write(text)
    os.replace(own, os.path.join(out, name))
EOF
"""

_PORT = """\
if [[ -n "$MASTER_PORT" ]]; then :
elif (( NNODES > 1 )); then MASTER_PORT=29500
else MASTER_PORT="$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')"
fi
"""

_HOSTS = """\
HOSTS="${HOSTS:-}"
if [[ -z "$HOSTS" ]] && (( NNODES == 1 )); then HOSTS=localhost; fi
if [[ -z "$HOSTS" && -n "${SLURM_JOB_NODELIST:-}" ]]; then
  HOSTS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)"
fi
[[ -n "$HOSTS" ]] || fail "set HOSTS to the names of the $NNODES nodes, with commas"
"""

_MASTER = """\
(( NNODES == 1 )) || [[ -n "$MASTER_ADDR" ]] || fail "set MASTER_ADDR to the address of node 0"
"""

_FIRST_NODE = """\
if (( NODE_RANK > 0 )); then
  echo "the command on node 0 starts the ranks of all nodes; nothing is started here" >&2
  exit 0
fi
"""

_NO_ARGUMENTS = """\
(( $# == 0 )) || fail "the worker is a shell's program, which takes no further arguments: $*"
"""

# as Python's shlex.quote, by which a trial fills in
_QUOTED = """\
quoted() {
  if [[ "$1" =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then printf '%s' "$1"; return; fi
  local mark="'" escape="'\\"'\\"'"
  printf "'%s'" "${1//"$mark"/"$escape"}"
}
"""

_CD = """\
default_cwd={default}
WORKER_CWD="${{WORKER_CWD:-$default_cwd}}"
[[ -d "$WORKER_CWD" ]] || fail "the worker's folder $WORKER_CWD is not here: set WORKER_CWD to the one it runs in"
cd -- "$WORKER_CWD"
"""


def trial_request(job: Job) -> TrialRequest:
    """What a worker reads to run the plan: plan, schedule, model, cluster and training."""
    space = job.space
    return TrialRequest(
        trial=job.trial,
        plan=job.plan,
        schedule=job.schedule,
        model=space.model,
        cluster=space.cluster,
        training=space.training,
        warmup_steps=space.trial.warmup_steps,
        measured_steps=space.trial.measured_steps,
    )


def own_worker_files(job: Job, settings: WorkerSettings, python: str) -> dict[str, str]:
    """`train.sh`, which runs the command of the section `worker` with the plan filled into its placeholders.

    Beside it what a trial's folder holds: `request.json`, `plan.json`, and `schedule.csv` where torchtitan needs it.

    Raises:
        UserError: the trainer whose arguments the command takes can't run the plan.
    """
    worker, request = worker_of(settings), trial_request(job)
    files = {
        REQUEST_FILE: json.dumps(request.to_dict(), indent=1) + "\n",
        PLAN_FILE: json.dumps(job.plan.to_dict(), indent=1) + "\n",
    }
    for name in _AT_RUN_TIME:
        worker = worker.given(name, f"@autotune-{name}@")
    passes_arguments = not worker.shell
    if (trainer := worker.trainer_arguments) is not None:
        words, named = trainer_arguments(trainer, job, Path(_FOLDER))
        files |= named
        if trainer == "torchtitan_args" and not worker.shell and f"{{{trainer}}}" in worker.argv:
            # its overrides end with a subcommand, so what else is given goes before them
            words, passes_arguments = (_ARGUMENTS, *words), False
        worker = worker.given(trainer, words)
    body = _body(worker, request, tuple(files), passes_arguments)
    remarks = [f"Runs the study's own worker `{job.own_worker}` with this plan filled in."]
    if settings.cwd is None:
        remarks.append("It runs in the folder that you start it from, as it did in the search.")
    by_torchrun = worker.starter == "torchrun"
    script = launch_script(job, "train.sh", python, body, remarks, by_torchrun, not worker.shell)
    return {"train.sh": script, **files}


def _body(worker: WorkerCommand, request: TrialRequest, files: tuple[str, ...], passes_arguments: bool) -> str:
    used = set(placeholders_in(" ".join((*worker.argv, *(text for _, text in worker.env)))))
    steps = {"warmup": request.warmup_steps, "measured": request.measured_steps}
    parts = [_TRIAL.format(**steps, files=" ".join(files), request=REQUEST_FILE)]
    by_torchrun = worker.starter == "torchrun"
    if not worker.starts_on_every_node:
        parts.append(_FIRST_NODE)
    needed = {"port": _PORT, "hosts": _HOSTS, "master_addr": "" if by_torchrun else _MASTER}
    parts += [text for name, text in needed.items() if name in used]
    if worker.shell:
        parts += [_NO_ARGUMENTS, _QUOTED]
    words = [_word(word, worker.shell) for word in worker.fill(request, Path(_FOLDER))]
    parts.append(shell_array("worker", _grouped([*words, '"$@"'] if passes_arguments else words)))
    if env := worker.fill_env(request, Path(_FOLDER)):
        parts.append(shell_array("environment", [_word(f"{name}={value}") for name, value in env.items()]))
        parts.append('export "${environment[@]}"\n')
    if worker.cwd is not None:
        parts.append(_CD.format(default=shlex.quote(worker.cwd)))
    start = '"${torchrun[@]}" --no-python ' if by_torchrun else ""
    return "".join([*parts, f'exec {start}"${{worker[@]}}"\n'])


def _word(text: str, in_shell: bool = False) -> str:
    """A word of bash: the text as it stands, but for the tokens, which are filled in when the script runs.

    Args:
        in_shell: the word is a program, in which what is filled in must be quoted once more.
    """
    pieces, end = [], 0
    for match in _TOKEN.finditer(text):
        if match.start() > end:
            pieces.append(shlex.quote(text[end : match.start()]))
        value = _TOKENS[match[0]]
        pieces.append(f'"$(quoted "{value}")"' if in_shell else f'"{value}"')
        end = match.end()
    if text[end:] or not pieces:
        pieces.append(shlex.quote(text[end:]))
    return "".join(pieces)


def _grouped(words: list[str]) -> list[str]:
    """Lines of words: an option stands with its value."""
    lines: list[str] = []
    for word in words:
        if lines and lines[-1].startswith("-") and " " not in lines[-1] and not word.startswith(("-", '"$@"')):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
