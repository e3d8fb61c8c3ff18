"""Export to torchrun, or to what ran the plan in the study: the space's own worker, or else the built-in one."""

from __future__ import annotations

import json

from autotune.export.job import Job, own_worker_note
from autotune.export.own_worker import own_worker_files, trial_request
from autotune.export.script import launch_script

__all__ = ["torchrun_files", "worker_files"]

_BODY = """\
# STEPS=N trains N measured steps instead of {steps}; OUT is the folder of the ranks' reports.
OUT="${{OUT:-$here/out}}"
request="$here/plan.json"
[[ -z "${{STEPS:-}}" ]] || whole STEPS 1 999999999
mkdir -p "$OUT"
rm -f "$OUT"/rank-*.json
if [[ -n "${{STEPS:-}}" ]]; then
  "$PYTHON" - "$request" "$OUT/request.json" "$STEPS" <<'EOF'
import json, sys
with open(sys.argv[1]) as file:
    request = json.load(file)
request["measured_steps"] = int(sys.argv[3])
with open(sys.argv[2], "w") as file:
    json.dump(request, file)
EOF
  request="$OUT/request.json"
fi
"${{torchrun[@]}}" -m autotune.profiling.worker --request "$request" --out "$OUT" "$@"

"$PYTHON" - "$OUT" <<'EOF'
import glob, json, statistics, sys
reports = []
for path in glob.glob(sys.argv[1] + "/rank-*.json"):
    with open(path) as file:
        reports.append(json.load(file))
steps = [max(times) for times in zip(*(report["step_wall_s"] for report in reports))]
losses = next((report["losses"] for report in reports if report["losses"]), [])
if steps:
    step = statistics.median(steps)
    rate = {tokens} / step
    print(f"{{len(reports)}} ranks, {{len(steps)}} steps, median {{step:.4g}} s, {{rate:,.0f}} tokens/s (wall clock)")
if losses:
    print("loss", " ".join(f"{{loss:.4f}}" for loss in losses))
EOF
"""


def torchrun_files(job: Job, python: str) -> dict[str, str]:
    """The space's own worker if torchrun starts its ranks; else the built-in one, and the script says so."""
    worker = job.space.worker
    if worker is not None and worker.starter == "torchrun":
        return own_worker_files(job, worker, python)
    return _built_in(job, python)


def worker_files(job: Job, python: str) -> dict[str, str]:
    """What ran the plan in the study: the command of the space's section `worker`, or else the built-in worker."""
    worker = job.space.worker
    return _built_in(job, python) if worker is None else own_worker_files(job, worker, python)


def _built_in(job: Job, python: str) -> dict[str, str]:
    """`train.sh`, which runs our worker on every rank, and `plan.json`, the request the worker reads."""
    request = trial_request(job)
    tokens = job.space.training.global_batch_size * job.space.model.sequence_length
    body = _BODY.format(steps=request.measured_steps, tokens=tokens)
    note = own_worker_note(job)
    remarks = ["Trains with the built-in worker of autotune.", *([] if note is None else [note])]
    return {
        "train.sh": launch_script(job, "train.sh", python, body, remarks),
        "plan.json": json.dumps(request.to_dict(), indent=1) + "\n",
    }
