"""One plan made ready to train on this rank: model, executor and optimizer, stepped together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from autotune.errors import UserError
from autotune.profiling.data import Batch
from autotune.profiling.device import Device, Seconds
from autotune.profiling.executor import Executor
from autotune.profiling.init import initialise
from autotune.profiling.mesh import MeshCache
from autotune.profiling.optimizer import LocalAdamW
from autotune.profiling.parallel import DeviceModel, build_device_model
from autotune.profiling.protocol import TrialRequest
from autotune.schedules.schedule import Pass
from autotune.space.model import ModelSpec

__all__ = ["StepResult", "Training"]


@dataclass(frozen=True)
class StepResult:
    """One optimizer step on this rank.

    Attributes:
        passes: every pass with its times.
        loss: mean loss per token of this replica's part of the batch; None without the last stage.
        wall_s: time from the first to the last instruction of the step, the device's queue drained.
        optimizer_cpu_s: CPU time outside of the passes that is spent once a step: clearing gradients, gathering sharded
            parameters, reducing gradients, AdamW.
    """

    passes: list[tuple[Pass, Seconds]]
    loss: Tensor | None
    wall_s: float
    optimizer_cpu_s: float


class Training:
    """A plan on one of its ranks. Making one is collective over all ranks, and so is every step."""

    def __init__(
        self,
        request: TrialRequest,
        device: Device,
        meshes: MeshCache,
        fill: Callable[[nn.Module, ModelSpec, int], None] = initialise,
    ) -> None:
        """Build this rank's part of the plan.

        Args:
            fill: gives the parameters of a stage their initial values, from the model and the seed.

        Raises:
            UserError: plan, schedule, model and batch don't fit each other or the number of ranks.
        """
        _require_consistent(request, meshes.ranks)
        plan, spec, training = request.plan, request.model, request.training
        self.request, self.device = request, device
        self.mesh = meshes.get(plan.pp, plan.dp, plan.tp)
        self.model: DeviceModel = build_device_model(
            spec, plan, request.schedule.placement, training, self.mesh, meshes, device.torch_device, fill
        )
        self.parameters = self.model.parameter_count
        self.optimizer = LocalAdamW(parameter for _, parameter in self.model.named_parameters())
        self.executor = Executor(
            self.model.module,
            self.model.store,
            request.schedule,
            self.mesh.pp_rank,
            self.mesh.group("pp") if plan.pp > 1 else None,
            device,
            (plan.micro_batch_size, spec.sequence_length // plan.tp, spec.hidden),
            self.model.dtype,
            after_backward=self.model.collect_gradients,
        )

    def batch(self, step: int) -> Batch:
        """This replica's part of the global batch of `step`."""
        plan = self.request.plan
        return Batch(
            seed=self.request.training.seed,
            step=step,
            first=self.mesh.dp_rank * plan.microbatches * plan.micro_batch_size,
            micro_batch_size=plan.micro_batch_size,
            length=self.request.model.sequence_length,
            vocab=self.request.model.vocab,
            device=self.device.torch_device,
        )

    def step(self, index: int, before_update: Callable[[], None] | None = None) -> StepResult:
        """Train on the global batch number `index`.

        Args:
            before_update: called when gradients are those the optimizer sees, just before it changes the parameters.
        """
        begun = time.perf_counter()
        cpu = time.thread_time()
        self.model.prepare_step()
        cpu_s = time.thread_time() - cpu
        passes = self.executor.run(self.batch(index))
        cpu = time.thread_time()
        self.model.finish_gradients()
        if before_update is not None:
            before_update()
        self.optimizer.step()
        cpu_s += time.thread_time() - cpu
        self.device.synchronize()
        wall_s = time.perf_counter() - begun
        loss = sum(passes.losses.values()) if passes.losses else None
        assert loss is None or isinstance(loss, Tensor)
        return StepResult(passes.passes, loss, wall_s, cpu_s)

    def axis_groups(self) -> dict[str, dist.ProcessGroup]:
        """Groups of this rank by the axis their collectives are counted under: `tp`, `dp` and `tied`."""
        groups = {axis: self.mesh.group(axis) for axis in ("tp", "dp")}
        return groups | ({"tied": self.model.tied_copy[1]} if self.model.tied_copy else {})

    def lasting_tensors(self) -> list[Tensor]:
        """This rank's own tensors that live beyond a step: parameters, gradients, optimizer state."""
        return self.model.lasting_tensors() + self.optimizer.state_tensors()

    def global_loss(self, loss: Tensor | None) -> float | None:
        """Mean loss per token of the whole global batch, from every replica's `StepResult.loss`. Collective over dp."""
        if loss is None:
            return None
        mean = loss.detach().clone()
        if self.request.plan.dp > 1:
            dist.all_reduce(mean, group=self.mesh.group("dp"))
            mean /= self.request.plan.dp
        return float(mean)


def _require_consistent(request: TrialRequest, ranks: int | None) -> None:
    """A request whose parts disagree would train another model or batch than its row in the results says."""
    plan, spec, schedule = request.plan, request.model, request.schedule
    samples, batch = plan.dp * plan.micro_batch_size * plan.microbatches, request.training.global_batch_size
    length, positions = spec.sequence_length, spec.max_positions
    problems = [
        (ranks not in (None, plan.devices), f"{ranks} ranks run a plan of {plan.devices} devices"),
        (schedule.devices != plan.pp, f"the schedule has {schedule.devices} devices, the plan pp {plan.pp}"),
        (
            schedule.stages != len(plan.layer_split),
            f"the schedule has {schedule.stages} stages, the layer split {len(plan.layer_split)}",
        ),
        (
            schedule.microbatches != plan.microbatches,
            f"the schedule has {schedule.microbatches} microbatches, the plan {plan.microbatches}",
        ),
        (sum(plan.layer_split) != spec.layers, f"{plan.layer_split} doesn't add up to {spec.layers} layers"),
        (samples != batch, f"the plan trains {samples} samples a step, the global batch has {batch}"),
        (length % plan.tp != 0, f"sequence length {length} is not a multiple of tp {plan.tp}"),
        (
            spec.positions == "learned" and positions < length,
            f"{positions} learned positions are fewer than the sequence length {length}",
        ),
    ]
    for wrong, message in problems:
        if wrong:
            raise UserError(message)
