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
# One node:       bash {name}
# Several nodes:  on every node  NNODES=4 NPROC_PER_NODE=8 NODE_RANK=<0..3> MASTER_ADDR=<node 0> bash {name}
#                 under Slurm, with one task a node, these are read from the allocation.
# MASTER_PORT (29500) and RDZV_ID (the run's name) may be set too. Further arguments are passed on.
set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"

default_python={python}
command -v "$default_python" > /dev/null || default_python=python3
PYTHON="${{PYTHON:-$default_python}}"
NNODES="${{NNODES:-${{SLURM_NNODES:-{nodes}}}}}"
NPROC_PER_NODE="${{NPROC_PER_NODE:-{per_node}}}"
NODE_RANK="${{NODE_RANK:-${{SLURM_NODEID:-0}}}}"
RDZV_ID="${{RDZV_ID:-{run_id}}}"
ranks=$(( NNODES * NPROC_PER_NODE ))
if (( ranks != {devices} )); then
  echo "this plan needs {devices} ranks; NNODES=$NNODES x NPROC_PER_NODE=$NPROC_PER_NODE makes $ranks" >&2
  exit 2
fi
if (( NNODES == 1 )); then
  rendezvous=(--rdzv-endpoint localhost:0 --local-addr localhost)  # a free port
else
  if [[ -z "${{MASTER_ADDR:-}}" && -n "${{SLURM_JOB_NODELIST:-}}" ]]; then
    MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
  fi
  rendezvous=(--rdzv-endpoint "${{MASTER_ADDR:?set MASTER_ADDR to the address of node 0}}:${{MASTER_PORT:-29500}}")
  rendezvous+=(--node-rank "$NODE_RANK")
fi
# no restarts: they would hide a crash
torchrun=("$PYTHON" -m torch.distributed.run --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE")
torchrun+=(--rdzv-backend c10d --rdzv-id "$RDZV_ID" "${{rendezvous[@]}}" --max-restarts 0)
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"
"""


def launch_script(job: Job, name: str, python: str, body: str, remarks: Sequence[str] = ()) -> str:
    """A bash script: `body` runs `"${torchrun[@]}" ...` on this node's ranks.

    Args:
        name: of the script's file, for its help.
        python: interpreter to use unless PYTHON says otherwise; where it doesn't exist, python3.
        remarks: lines for the comment at the top.
    """
    cluster = job.space.cluster
    head = _HEAD.format(
        summary=job.summary,
        remarks="".join(f"# {line}\n" for line in remarks),
        name=name,
        python=shlex.quote(python),
        nodes=cluster.nodes,
        per_node=cluster.devices_per_node,
        devices=job.plan.devices,
        run_id=job.run_id,
    )
    return f"{head}\n{body}"


def shell_array(name: str, lines: Sequence[str]) -> str:
    """`name=( ... )` with one line of `lines` on each line; the lines are shell words already."""
    return f"{name}=(\n" + "".join(f"  {line}\n" for line in lines) + ")\n"
