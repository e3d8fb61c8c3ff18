"""The prediction of a plan from model, cluster and training alone: step time, where it goes, memory of every device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from autotune.cost.activations import StageMemory, stage_memory
from autotune.cost.assumptions import Assumptions, Recomputation, element_bytes, worker_assumptions
from autotune.cost.communication import Layout, group_link, message_s
from autotune.cost.devices import Machine, machine
from autotune.cost.memory import DeviceMemory
from autotune.cost.optimizer_time import dp_seconds, optimizer_seconds
from autotune.cost.parameters import StageShape, padded_rows, stage_parameters
from autotune.cost.pass_time import PassSeconds, pass_seconds
from autotune.cost.pipeline import (
    COMPILE_AFTER_PASSES,
    DeviceBytes,
    Pipeline,
    PipelineRun,
    Ratios,
    adapts,
    order_of,
    pipeline,
)
from autotune.cost.prediction import Breakdown, MeanPasses, Prediction, model_flops, without_rounding
from autotune.cost.work import PassWork, StageWork, embedding_work, head_work, layer_work
from autotune.schedules import registry
from autotune.schedules.costs import PassCosts
from autotune.schedules.placement import shares_ends
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import TrainingSpec

__all__ = ["Breakdown", "MeanPasses", "Prediction", "Predictor", "model_flops", "predict_plan", "predict_plans"]


EXACT_PASSES = 300_000
"""Longer steps are always extrapolated: building, checking and timing so many passes takes a second or a few."""


@dataclass(frozen=True)
class _StageCost:
    forward: PassSeconds
    backward: PassSeconds
    weight: PassSeconds
    memory: StageMemory
    parameters: float


class Predictor:
    """Predicts plans of one model on one cluster.

    Costs of equal stages are worked out once, and each schedule is built once, so the time of a prediction doesn't
    depend on the number of plans before it.

    Args:
        assumptions: what software will run the plans; None: this package's worker.
        machine_figures: the device's figures; None: the catalogue's, by the cluster's device name.
        compiled: simulate by machine code; None: once many passes have been simulated.

    Raises:
        UserError: the catalogue has no figures for the cluster's device.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        training: TrainingSpec,
        assumptions: Assumptions | None = None,
        machine_figures: Machine | None = None,
        compiled: bool | None = None,
    ) -> None:
        self.model, self.cluster, self.training = model, cluster, training
        self.assumptions = worker_assumptions(cluster.device) if assumptions is None else assumptions
        self.machine = machine(cluster.device) if machine_figures is None else machine_figures
        self._flops = model_flops(model, training.global_batch_size)
        self._stages: dict[tuple[int, int, Recomputation, StageShape], _StageCost] = {}
        self._layers: dict[tuple[int, int, Recomputation], tuple[PassSeconds, PassSeconds, PassSeconds]] = {}
        self._hops: dict[tuple[Layout, float], float | tuple[tuple[float, ...], ...]] = {}
        self._compiled = compiled
        self._simulated = 0

    def predict(self, plan: Plan, exact: bool = False, passes: MeanPasses | None = None) -> Prediction:
        """The prediction of one plan.

        Args:
            exact: simulate the whole step even when it has many microbatches, up to `EXACT_PASSES` passes.
            passes: measured means; each kind of pass is scaled to them, so that the model says only how stages differ.

        Raises:
            UserError: the plan's schedule doesn't exist or doesn't allow its numbers.
        """
        stages = self._stage_costs(plan)
        message = self._message_s(plan)
        if passes is not None:
            stages, message = _scaled(stages, plan.pp, passes), passes.message_s
        costs = self._pass_costs(stages, message)
        lines = self._pipeline(plan, costs, exact)
        run = self._run(lines, costs, stages)
        return self._assemble(plan, lines, stages, costs, run)

    def _pipeline(self, plan: Plan, costs: PassCosts, exact: bool) -> Pipeline:
        ratios = Ratios.of(costs) if self.assumptions.adapts_schedules and adapts(plan.schedule) else None
        if exact and 3 * plan.stages * plan.microbatches <= EXACT_PASSES:
            known = None if ratios is None else ratios.costs(plan.stages)
            built = registry.build(plan.schedule, plan.pp, plan.microbatches, plan.stages_per_device, costs=known)
            return Pipeline(plan.microbatches, (order_of(built),))
        return pipeline(plan.schedule, plan.pp, plan.microbatches, plan.stages_per_device, ratios)

    def _run(self, lines: Pipeline, costs: PassCosts, stages: list[_StageCost]) -> PipelineRun:
        self._simulated += lines.passes
        memory = [stage.memory for stage in stages]
        table = DeviceBytes(
            held=tuple(m.held for m in memory),
            kept=tuple(m.kept for m in memory),
            forward=tuple(m.forward for m in memory),
            backward=tuple(m.backward for m in memory),
            weight=tuple(m.weight for m in memory),
            fused=tuple(m.fused for m in memory),
        )
        compiled = self._simulated > COMPILE_AFTER_PASSES if self._compiled is None else self._compiled
        return lines.run(costs, table, compiled)

    # -- costs of stages

    def _stage_costs(self, plan: Plan) -> list[_StageCost]:
        last = len(plan.layer_split) - 1
        recomputation = self.assumptions.recomputation(plan.recompute)
        return [
            self._stage_cost(plan, recomputation, StageShape(layers, stage == 0, stage == last))
            for stage, layers in enumerate(plan.layer_split)
        ]

    def _stage_cost(self, plan: Plan, recomputation: Recomputation, stage: StageShape) -> _StageCost:
        key = (plan.tp, plan.micro_batch_size, recomputation, stage)
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = self._new_stage_cost(plan.tp, plan.micro_batch_size, recomputation, stage)
        return found

    def _new_stage_cost(self, tp: int, samples: int, recomputation: Recomputation, stage: StageShape) -> _StageCost:
        model, training, assumptions = self.model, self.training, self.assumptions
        n, size = samples * model.sequence_length, element_bytes(training.dtype)
        seconds = [part.times(stage.layers) for part in self._layer_seconds(tp, samples, recomputation)]
        ends: list[StageWork] = []
        if stage.embeds:
            ends.append(embedding_work(model, n, size, tp, assumptions))
        if stage.heads:
            ends.append(head_work(model, n, size, tp, assumptions))
        for work in ends:
            parts = (work.forward, work.backward, work.weight)
            seconds = [a + self._seconds(part, tp) for a, part in zip(seconds, parts, strict=True)]
        memory = stage_memory(model, stage, tp, samples, training.dtype, assumptions, recomputation)
        parameters = stage_parameters(model, stage, tp, assumptions.vocab_multiple)
        return _StageCost(seconds[0], seconds[1], seconds[2], memory, parameters)

    def _layer_seconds(
        self, tp: int, samples: int, recomputation: Recomputation
    ) -> tuple[PassSeconds, PassSeconds, PassSeconds]:
        key = (tp, samples, recomputation)
        found = self._layers.get(key)
        if found is None:
            work = layer_work(self.model, tp, samples, self.training.dtype, self.assumptions, recomputation)
            third = self.machine.layer_host_s / 3
            found = self._layers[key] = (
                self._seconds(work.forward, tp, third),
                self._seconds(work.backward, tp, 2 * third if recomputation == "full" else third),
                self._seconds(work.weight, tp, third),
            )
        return found

    def _seconds(self, work: PassWork, tp: int, least_s: float = 0.0) -> PassSeconds:
        link = self._tp_link(tp)
        return pass_seconds(
            work,
            self.machine,
            self.training.dtype,
            tp,
            link,
            least_s=least_s,
            tp_overlap=self.assumptions.tp_overlap,
        )

    def _tp_link(self, tp: int) -> Link:
        layout = Layout(1, 1, tp, self.cluster.devices_per_node)
        return group_link(layout.tp_group(0, 0), layout, self.cluster)

    # -- communication between pipeline devices

    def _layout(self, plan: Plan) -> Layout:
        return Layout(plan.pp, plan.dp, plan.tp, self.cluster.devices_per_node)

    def _message_s(self, plan: Plan) -> float | tuple[tuple[float, ...], ...]:
        """Time of a message between two pipeline devices: one number, or a table when links differ."""
        size = self._message_bytes(plan)
        layout = self._layout(plan)
        key = (layout, size)
        if key not in self._hops:
            self._hops[key] = self._hop_table(layout, size)
        return self._hops[key]

    def _message_bytes(self, plan: Plan) -> float:
        split = plan.tp if self.assumptions.shards_messages or self.assumptions.sequence_parallel else 1
        tokens = plan.micro_batch_size * self.model.sequence_length
        return element_bytes(self.training.dtype) * tokens * self.model.hidden / split

    def _hop_table(self, layout: Layout, size: float) -> float | tuple[tuple[float, ...], ...]:
        inside, outside = (
            message_s(size, link, self.machine.link_efficiency)
            for link in (self.cluster.intra_node, self.cluster.inter_node)
        )
        p = layout.pp
        crossings = {layout.crosses(d, (d + 1) % p) for d in range(p)}
        if len(crossings) == 1:
            return outside if crossings.pop() else inside
        return tuple(tuple(outside if layout.crosses(a, b) else inside for b in range(p)) for a in range(p))

    def _pass_costs(self, stages: list[_StageCost], message: float | tuple[tuple[float, ...], ...]) -> PassCosts:
        """Costs of the schedule's passes; the fixed loss of a stage visit is half in F and half in B."""
        overhead = self.machine.visit_s / 2
        return PassCosts(
            forward=tuple(cost.forward.total + overhead for cost in stages),
            backward=tuple(cost.backward.total + overhead for cost in stages),
            weight=tuple(cost.weight.total for cost in stages),
            hop=message,
            activation=tuple(cost.memory.held for cost in stages),
            kept=tuple(cost.memory.kept for cost in stages),
        )

    # -- the whole step

    def _assemble(
        self,
        plan: Plan,
        lines: Pipeline,
        stages: list[_StageCost],
        costs: PassCosts,
        run: PipelineRun,
    ) -> Prediction:
        on_device: list[list[int]] = [[] for _ in range(plan.pp)]
        for stage, device in enumerate(lines.placement):
            on_device[device].append(stage)
        parameters = [sum(stages[s].parameters for s in held) for held in on_device]
        if self.model.tied_embeddings and len(stages) > 1 and shares_ends(lines.placement):
            rows = padded_rows(self.model.vocab, plan.tp, self.assumptions.vocab_multiple)
            parameters[lines.placement[0]] -= rows * self.model.hidden / plan.tp
        dtype, assumptions = self.training.dtype, self.assumptions
        heaviest = max(parameters)
        dp_s = dp_seconds(heaviest, plan.dp, self._dp_link(plan), self.machine, dtype, assumptions)
        optimizer_s = optimizer_seconds(heaviest, plan.dp, self.machine, dtype, assumptions)
        busiest = max(range(plan.pp), key=lambda d: run.busy_s[d])
        held = on_device[busiest]
        m = plan.microbatches
        pipeline_s = run.span_s if assumptions.rolling_steps else run.makespan_s
        at_once_s = run.instant_span_s if assumptions.rolling_steps else run.instant_makespan_s
        # Orders are made for given latencies; without any, a device's own work still bounds the step.
        messages_s = max(0.0, pipeline_s - max(at_once_s, run.busy_s[busiest]))
        parts = [part for s in held for part in (stages[s].forward, stages[s].backward, stages[s].weight)]
        breakdown = Breakdown(
            compute_s=m * sum(part.compute for part in parts),
            tp_s=m * sum(part.tp for part in parts),
            pp_s=messages_s,
            overhead_s=m * len(held) * self.machine.visit_s,
            bubble_s=without_rounding(pipeline_s - run.busy_s[busiest] - messages_s, pipeline_s),
            dp_s=dp_s,
            optimizer_s=optimizer_s,
        )
        step_time_s = pipeline_s + dp_s + optimizer_s
        tokens = self.training.global_batch_size * self.model.sequence_length
        return Prediction(
            plan=plan,
            step_time_s=step_time_s,
            breakdown=breakdown,
            busiest=busiest,
            memory=self._memory(plan, stages, on_device, parameters, run),
            pass_costs=costs,
            exact=lines.exact,
            tokens_per_s=tokens / step_time_s,
            mfu=self._flops / (step_time_s * plan.devices * self.machine.peak(dtype)),
        )

    def _dp_link(self, plan: Plan) -> Link:
        layout = self._layout(plan)
        return group_link(layout.dp_group(0, 0), layout, self.cluster)

    def _memory(
        self,
        plan: Plan,
        stages: list[_StageCost],
        on_device: list[list[int]],
        parameters: list[float],
        run: PipelineRun,
    ) -> tuple[DeviceMemory, ...]:
        state = self.assumptions.state_bytes(self.training.dtype, plan.dp)
        buffers = float(self.assumptions.workspace_bytes)
        if plan.pp > 1:
            buffers += self.assumptions.message_buffers * self._message_bytes(plan)
        return tuple(
            DeviceMemory.of(
                parameters[device],
                state,
                run.peak_bytes[device],
                run.held_bytes[device],
                buffers + max(stages[s].memory.persistent for s in held),
            )
            for device, held in enumerate(on_device)
        )


def _scaled(stages: list[_StageCost], devices: int, passes: MeanPasses) -> list[_StageCost]:
    """The stages with every kind of pass scaled so that its mean over devices is the measured one."""
    kinds = {"forward": passes.forward_s, "backward": passes.backward_s, "weight": passes.weight_s}
    factor = {
        kind: measured * devices / sum(getattr(stage, kind).total for stage in stages)
        for kind, measured in kinds.items()
    }
    return [replace(stage, **{kind: getattr(stage, kind).times(factor[kind]) for kind in kinds}) for stage in stages]


@lru_cache(maxsize=16)
def _predictor(
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    assumptions: Assumptions | None,
    machine_figures: Machine | None,
) -> Predictor:
    return Predictor(model, cluster, training, assumptions, machine_figures)


def predict_plan(
    plan: Plan,
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    assumptions: Assumptions | None = None,
    machine_figures: Machine | None = None,
    *,
    exact: bool = False,
) -> Prediction:
    """What `plan` is expected to take; runs nothing and imports no torch.

    Args:
        assumptions: what software will run it; None: this package's worker.
        machine_figures: figures of one device; None: the catalogue's.
        exact: simulate every microbatch instead of extrapolating long steps.

    Raises:
        UserError: no figures for the device, or the schedule doesn't allow the plan's numbers.
    """
    return _predictor(model, cluster, training, assumptions, machine_figures).predict(plan, exact)


def predict_plans(
    plans: Iterable[Plan],
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    assumptions: Assumptions | None = None,
    machine_figures: Machine | None = None,
) -> Iterator[Prediction]:
    """Predictions of many plans, in their order, one at a time; about a millisecond each."""
    predictor = Predictor(model, cluster, training, assumptions, machine_figures)
    for plan in plans:
        yield predictor.predict(plan)
