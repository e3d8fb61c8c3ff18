"""The shell scripts that exporters write: one head for all, which finds the ranks and their meeting point."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from autotune.export.job import Job

__all__ = ["launch_script", "shell_array"]

_HEAD = """\
#!/usr/bin/env bash
# {summary}
{remarks}#
{usage}set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"

fail() {{
  echo "error: $1" >&2
  exit 2
}}
whole() {{  # NAME LEAST MOST: the variable NAME is a whole number within these
  [[ "${{!1}}" =~ ^(0|[1-9][0-9]{{0,8}})$ ]] && (( ${{!1}} >= $2 && ${{!1}} <= $3 )) ||
    fail "$1=${{!1}} must be a whole number from $2 to $3"
}}

default_python={python}
command -v "$default_python" > /dev/null || default_python=python3
PYTHON="${{PYTHON:-$default_python}}"
NNODES="${{NNODES:-${{SLURM_NNODES:-{nodes}}}}}"
whole NNODES 1 999999999
NPROC_PER_NODE="${{NPROC_PER_NODE:-$(( {devices} % NNODES == 0 ? {devices} / NNODES : {per_node} ))}}"
whole NPROC_PER_NODE 1 999999999
NODE_RANK="${{NODE_RANK:-$(( NNODES == 1 ? 0 : ${{SLURM_NODEID:-0}} ))}}"
ranks=$(( NNODES * NPROC_PER_NODE ))
if (( ranks != {devices} )); then
  fail "this plan needs {devices} ranks; NNODES=$NNODES x NPROC_PER_NODE=$NPROC_PER_NODE makes $ranks"
fi
whole NODE_RANK 0 $(( NNODES - 1 ))
MASTER_PORT="${{MASTER_PORT:-}}"
[[ -z "$MASTER_PORT" ]] || whole MASTER_PORT 1 65535
MASTER_ADDR="${{MASTER_ADDR:-}}"
if (( NNODES > 1 )) && [[ -z "$MASTER_ADDR" && -n "${{SLURM_JOB_NODELIST:-}}" ]]; then
  MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
fi
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"
"""

_TORCHRUN = """\
if (( NNODES == 1 )); then
  rendezvous=(--rdzv-endpoint localhost:0 --local-addr localhost)  # a free port
else
  [[ -n "$MASTER_ADDR" ]] || fail "set MASTER_ADDR to the address of node 0"
  rendezvous=(--rdzv-endpoint "$MASTER_ADDR:${{MASTER_PORT:-29500}}" --node-rank "$NODE_RANK")
fi
# no restarts: they would hide a crash
torchrun=("$PYTHON" -m torch.distributed.run --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE")
torchrun+=(--rdzv-backend c10d --rdzv-id "${{RDZV_ID:-{run_id}}}" "${{rendezvous[@]}}" --max-restarts 0)
"""


def launch_script(
    job: Job,
    name: str,
    python: str,
    body: str,
    remarks: Sequence[str] = (),
    torchrun: bool = True,
    arguments: bool = True,
) -> str:
    """A bash script: `body` runs `"${torchrun[@]}" ...` on this node's ranks.

    Args:
        name: of the script's file, for its help.
        python: interpreter to use unless PYTHON says otherwise; where it doesn't exist, python3.
        remarks: lines for the comment at the top.
        torchrun: whether torch's launcher starts the ranks.
        arguments: whether the body passes on the arguments that the script is given.
    """
    nodes, per_node = _shape(job)
    told = [line for line in (_evaluated(job), *remarks) if line]
    values = {
        "summary": job.summary,
        "remarks": "".join(f"# {line}\n" for line in told),
        "usage": "".join(f"# {line}\n" for line in _usage(name, nodes, per_node, torchrun, arguments)),
        "python": shlex.quote(python),
        "nodes": nodes,
        "per_node": per_node,
        "devices": job.plan.devices,
        "run_id": job.run_id,
    }
    return f"{(_HEAD + (_TORCHRUN if torchrun else '')).format(**values)}\n{body}"


def _shape(job: Job) -> tuple[int, int]:
    """Nodes and devices of each, whose product is the plan's devices."""
    cluster, devices = job.space.cluster, job.plan.devices
    if cluster.devices == devices:
        return cluster.nodes, cluster.devices_per_node
    return (cluster.nodes, devices // cluster.nodes) if devices % cluster.nodes == 0 else (1, devices)


def _evaluated(job: Job) -> str | None:
    """What the figures of the plan are, where the study measured none."""
    return {
        "profiled": "The plan was profiled, not run: its stages were measured, its step was simulated.",
        "predicted": "The plan was predicted by the cost model, not measured.",
        "not evaluated": "The study has no figures of this plan.",
    }.get(job.evaluated or "")


def _usage(name: str, nodes: int, per_node: int, torchrun: bool, arguments: bool) -> list[str]:
    """How the script is called on machines that fit the plan."""
    devices = nodes * per_node
    lines = []
    if nodes == 1:
        lines.append(f"One node:       bash {name}")
        # another way to spread the same devices
        nodes = next((count for count in range(2, devices + 1) if devices % count == 0), 1)
    if nodes > 1:
        lines += [
            f"Several nodes:  on every node  NNODES={nodes} NPROC_PER_NODE={devices // nodes} "
            f"NODE_RANK=<0..{nodes - 1}> MASTER_ADDR=<node 0> bash {name}",
            "                under Slurm, with one task a node, these are read from the allocation.",
        ]
    more = "MASTER_PORT (29500) and RDZV_ID (the run's name) may be set too." if torchrun else ""
    passed = "Further arguments are passed on." if arguments else ""
    return [*lines, *filter(None, [" ".join(filter(None, (more, passed)))])]


def shell_array(name: str, lines: Sequence[str]) -> str:
    """`name=( ... )` with one line of `lines` on each line; the lines are shell words already."""
    return f"{name}=(\n" + "".join(f"  {line}\n" for line in lines) + ")\n"
