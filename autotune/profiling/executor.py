"""Runs one device's share of a schedule: passes, and the messages between them, for one optimizer step.

A tensor is dropped as soon as its last reader is done, so the peak memory of a step is the schedule's and doesn't grow
with the number of microbatches:

- a receive allocates its buffer when it is posted, at the peer's send in the schedule's global order;
- a send keeps its tensor until it has left;
- after a forward only the graph's edge is kept, not the output;
- losses are kept by microbatch and detached; the graph goes with the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autotune.profiling.data import Batch
from autotune.profiling.device import Device, PassClock, Seconds, SendKeeper
from autotune.profiling.model import DeviceStages
from autotune.profiling.weight_grad import WeightGradStore, WeightGradTasks
from autotune.schedules.lowering import Receive, Send, lower
from autotune.schedules.schedule import Pass, Schedule

__all__ = ["Executor", "PassesResult"]

Key = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True)
class PassesResult:
    """What one step's passes gave.

    Attributes:
        passes: every pass of the device in the order it ran, with its times, waiting for messages left out.
        losses: scaled loss of every microbatch, empty unless this device holds the last stage.
    """

    passes: list[tuple[Pass, Seconds]]
    losses: dict[int, Tensor]


@dataclass
class _Flight:
    """Tensors of microbatches under way on one device, each under the stage that reads it next."""

    clock: PassClock
    sends: SendKeeper
    received: dict[tuple[str, int, int], tuple[Tensor, dist.Work]] = field(default_factory=dict)
    activations: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    graphs: dict[Key, tuple[Tensor | None, GradientEdge]] = field(default_factory=dict)
    tasks: dict[Key, WeightGradTasks] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def left_over(self) -> int:
        """Tensors and graphs nobody read."""
        held = (self.received, self.activations, self.gradients, self.graphs, self.tasks)
        return sum(len(tensors) for tensors in held)


class Executor:
    """Executes the passes of one device of a valid schedule, whatever its placement."""

    def __init__(
        self,
        module: DeviceStages,
        store: WeightGradStore,
        schedule: Schedule,
        device_index: int,
        group: dist.ProcessGroup | None,
        device: Device,
        boundary: tuple[int, ...],
        dtype: torch.dtype,
        after_backward: Callable[[], None] = lambda: None,
        around_pass: Callable[[Pass | None], None] | None = None,
    ) -> None:
        """Prepare the device's actions.

        Args:
            group: the pipeline's ranks, in the order of the schedule's devices; None for one device.
            boundary: shape of the activation between two stages on one rank: (micro-batch, sequence / tp, hidden).
            after_backward: part of every B and BW pass, once gradients are in the parameters.
            around_pass: told each pass before it runs, and None after it (meters); must be cheap or absent in timed
                steps.

        Raises:
            UserError: the schedule deadlocks.
        """
        self.actions = lower(schedule)[device_index]
        self.last_stage, self.placement, self.here = schedule.stages - 1, schedule.placement, device_index
        self.module, self.store, self.group, self.device = module, store, group, device
        self.boundary, self.dtype = boundary, dtype
        self.after_backward, self.around_pass = after_backward, around_pass

    def with_schedule(self, schedule: Schedule) -> Executor:
        """An executor of the same stages under another schedule with the same placement."""
        assert schedule.placement == self.placement
        return Executor(
            self.module,
            self.store,
            schedule,
            self.here,
            self.group,
            self.device,
            self.boundary,
            self.dtype,
            self.after_backward,
        )

    def run(self, batch: Batch) -> PassesResult:
        """Run all passes of one step; gradients are accumulated in the parameters, not yet summed over ranks."""
        flight = _Flight(self.device.pass_clock(), self.device.send_keeper())
        ran = []
        for action in self.actions:
            if isinstance(action, Pass):
                self._run_pass(flight, action, batch)
                ran.append(action)
            elif isinstance(action, Send):
                self._send(flight, action)
            else:
                self._receive(flight, action)
            flight.sends.poll()
        flight.sends.flush()
        assert flight.left_over() == 0, "a valid schedule reads everything it makes"
        return PassesResult(list(zip(ran, flight.clock.read(), strict=True)), flight.losses)

    def _run_pass(self, flight: _Flight, item: Pass, batch: Batch) -> None:
        if self.around_pass is not None:
            self.around_pass(item)
        if item.kind == "F":
            self._forward(flight, item.stage, item.microbatch, batch)
        elif item.kind == "W":
            self._weights(flight, item.stage, item.microbatch)
        else:
            self._backward(flight, item.stage, item.microbatch, split=item.kind == "B")
        if self.around_pass is not None:
            self.around_pass(None)

    def _forward(self, flight: _Flight, stage: int, microbatch: int, batch: Batch) -> None:
        leaf: Tensor | None = None
        if stage == 0:
            x = batch.inputs(microbatch)
        else:
            x = leaf = self._take(flight, "F", stage, microbatch).requires_grad_()
        targets = batch.targets(microbatch) if stage == self.last_stage else None
        flight.clock.start()
        output = self.module.forward(stage, x, targets)  # without FSDP2's hooks
        flight.clock.stop()
        flight.graphs[stage, microbatch] = (leaf, get_gradient_edge(output))
        if stage == self.last_stage:
            flight.losses[microbatch] = output.detach()
        else:
            # Under the next stage, whether a send or a pass of this device takes it from there.
            flight.activations[stage + 1, microbatch] = output.detach()

    def _backward(self, flight: _Flight, stage: int, microbatch: int, split: bool) -> None:
        leaf, edge = flight.graphs.pop((stage, microbatch))
        gradient = None if stage == self.last_stage else self._take(flight, "B", stage, microbatch)
        if gradient is None:
            gradient = torch.ones_like(flight.losses[microbatch])
        flight.clock.start()
        if split:
            with self.store.deferred() as tasks:
                torch.autograd.backward(edge, gradient)
            flight.tasks[stage, microbatch] = tasks
        else:
            torch.autograd.backward(edge, gradient)
        self.after_backward()
        flight.clock.stop()
        if leaf is not None:
            assert leaf.grad is not None
            flight.gradients[stage - 1, microbatch] = leaf.grad

    def _weights(self, flight: _Flight, stage: int, microbatch: int) -> None:
        tasks = flight.tasks.pop((stage, microbatch))
        flight.clock.start()
        tasks.run()
        flight.clock.stop()

    def _take(self, flight: _Flight, kind: str, stage: int, microbatch: int) -> Tensor:
        """The activation (F) or gradient (B) that `stage` reads, from a message or from a stage on this device."""
        if (kind, stage, microbatch) in flight.received:
            buffer, work = flight.received.pop((kind, stage, microbatch))
            work.wait()
            return buffer
        return (flight.activations if kind == "F" else flight.gradients).pop((stage, microbatch))

    def _send(self, flight: _Flight, send: Send) -> None:
        made = flight.activations if send.kind == "F" else flight.gradients
        tensor = made.pop((send.reader, send.microbatch)).contiguous()
        work = dist.isend(tensor, group=self.group, group_dst=send.peer)
        assert work is not None
        flight.sends.add(work)

    def _receive(self, flight: _Flight, receive: Receive) -> None:
        buffer = torch.empty(self.boundary, dtype=self.dtype, device=self.device.torch_device)
        work = dist.irecv(buffer, group=self.group, group_src=receive.peer)
        assert work is not None
        flight.received[receive.kind, receive.reader, receive.microbatch] = (buffer, work)
