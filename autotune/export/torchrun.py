"""Export to torchrun: a script that trains the plan with our own worker."""

from __future__ import annotations

import json

from autotune.export.job import Job
from autotune.export.script import launch_script
from autotune.profiling.protocol import TrialRequest

__all__ = ["torchrun_files", "trial_request"]

_BODY = """\
# STEPS=N trains N measured steps instead of {steps}; OUT is the folder of the ranks' reports.
OUT="${{OUT:-$here/out}}"
request="$here/plan.json"
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


def trial_request(job: Job) -> TrialRequest:
    """What our worker reads to run the plan: plan, schedule, model, cluster and training."""
    space = job.space
    return TrialRequest(
        trial=0,
        plan=job.plan,
        schedule=job.schedule,
        model=space.model,
        cluster=space.cluster,
        training=space.training,
        warmup_steps=space.trial.warmup_steps,
        measured_steps=space.trial.measured_steps,
    )


def torchrun_files(job: Job, python: str) -> dict[str, str]:
    """`train.sh`, which runs our worker on every rank, and `plan.json`, the request the worker reads."""
    request = trial_request(job)
    tokens = job.space.training.global_batch_size * job.space.model.sequence_length
    body = _BODY.format(steps=request.measured_steps, tokens=tokens)
    return {
        "train.sh": launch_script(job, "train.sh", python, body),
        "plan.json": json.dumps(request.to_dict(), indent=1) + "\n",
    }
