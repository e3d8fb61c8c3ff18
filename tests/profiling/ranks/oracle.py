"""One rank of the differential test: torch's own pipeline runtime executes the same tables on the same weights.

Started by torchrun: `oracle.py OUT SCHEDULE...`; writes `OUT/oracle-RANK.json`, per schedule the largest relative
difference of any gradient.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from autotune.profiling.device import CpuDevice
from autotune.profiling.init import initialise
from autotune.profiling.mesh import MeshCache
from autotune.profiling.model import Stage, StageContext
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.training import Training
from autotune.profiling.weight_grad import DeferredLinear, WeightGradStore

TORCH_NAMES = {
    "F": _ComputationType.FORWARD,
    "B": _ComputationType.BACKWARD_INPUT,
    "W": _ComputationType.BACKWARD_WEIGHT,
    "BW": _ComputationType.FULL_BACKWARD,
}


class PlainStage(nn.Module):
    """A stage with torch's own linear layers that gives logits, as torch's runtime wants it."""

    def __init__(self, request: TrialRequest, index: int) -> None:
        super().__init__()
        self.stage = Stage(request.model, request.plan.layer_split, index, StageContext(WeightGradStore()))
        initialise(self.stage, request.model, request.training.seed)
        for module in self.stage.modules():
            if isinstance(module, DeferredLinear):
                module.__class__ = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        if self.stage.embedding is not None:
            x = self.stage._embed(x)
        for block in self.stage.layers.values():
            x = block(x, self.stage.rotary)
        return x if self.stage.head is None else self.stage.head(self.stage.norm(x))


def torch_gradients(request: TrialRequest, training: Training) -> dict[str, Tensor]:
    """Gradients of this rank's parameters after one step of torch's runtime."""
    schedule, rank = request.schedule, dist.get_rank()
    spec, size = request.model, request.plan.micro_batch_size
    modules = {index: PlainStage(request, index) for index in schedule.device_stages(rank)}
    tokens = torch.zeros(size, spec.sequence_length, dtype=torch.long)
    hidden = torch.zeros(size, spec.sequence_length, spec.hidden, requires_grad=True)
    logits = torch.zeros(size, spec.sequence_length, spec.vocab, requires_grad=True)
    last = schedule.stages - 1
    stages = [
        PipelineStage(
            module,
            index,
            schedule.stages,
            torch.device("cpu"),
            input_args=(tokens if index == 0 else hidden,),
            output_args=(logits if index == last else hidden,),
        )
        for index, module in modules.items()
    ]
    table = {
        device: [_Action(item.stage, TORCH_NAMES[item.kind], item.microbatch) for item in passes]
        for device, passes in enumerate(schedule.order)
    }
    runtime = _PipelineScheduleRuntime(
        stages, schedule.microbatches, loss_fn=lambda y, target: F.cross_entropy(y.flatten(0, 1), target.flatten())
    )
    runtime._prepare_schedule_with_comms(table)
    batch = training.batch(0)
    x = torch.cat([batch.inputs(k) for k in range(schedule.microbatches)])
    y = torch.cat([batch.targets(k) for k in range(schedule.microbatches)])
    runtime.step(*([x] if 0 in modules else []), target=y if last in modules else None, return_outputs=False)
    return {name: p.grad for module in modules.values() for name, p in module.stage.named_parameters()}


def compare(schedule: str, device: CpuDevice, meshes: MeshCache) -> float:
    request = Case(schedule, 2, 1, 1, "llama").request()
    training = Training(request, device, meshes)
    theirs = torch_gradients(request, training)
    differences: list[float] = []

    def difference() -> None:
        for name, parameter in training.model.named_parameters():
            truth = theirs.pop(name)
            assert parameter.grad is not None
            differences.append(float((parameter.grad - truth).abs().max() / truth.abs().max()))

    training.step(0, before_update=difference)
    assert not theirs, f"only torch trained {sorted(theirs)}"
    return max(differences)


def main() -> None:
    out, schedules = Path(sys.argv[1]), sys.argv[2:]
    timeout = timedelta(seconds=60)
    device = CpuDevice()
    dist.init_process_group("gloo", timeout=timeout)
    meshes = MeshCache("cpu", timeout)
    found = {schedule: compare(schedule, device, meshes) for schedule in schedules}
    (out / f"oracle-{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
