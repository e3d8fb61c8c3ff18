"""One device's part of the model, sharded by tensor and data parallelism, and the once-a-step gradient sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autotune.profiling.init import initialise
from autotune.profiling.mesh import MeshCache, PlanMesh
from autotune.profiling.model import DeviceStages, Stage, StageContext
from autotune.profiling.sequence_parallel import SequenceParallel
from autotune.profiling.weight_grad import WeightGradStore, local_tensor
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import TrainingSpec

__all__ = ["DeviceModel", "build_device_model", "parameter_names"]

# Layers by what a tensor-parallel rank holds of their matrix: some of its outputs, or some of its inputs.
COLUMN_PARALLEL = {"query", "key", "value", "gate", "up", "head", "embedding"}
ROW_PARALLEL = {"output", "down"}
COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class DeviceModel:
    """The stages one rank trains, with what their gradients still need before an optimizer may see them.

    float32 plans without data parallelism train plain parameters. All others go through FSDP2: with bfloat16 the
    sharded parameters, the reduced gradients and the optimizer state are float32 and the passes see bfloat16 copies.

    Attributes:
        partial_over_tp: names of parameters every tensor-parallel rank holds whole but uses on its own part of the
            tokens or heads, so that their gradients are sums to be added up (norms and learned positions).
        parameter_count: parameters of the stages on this rank, before data parallelism shards them.
        tied_copy: name of this device's copy of an embedding that another device shares, and the pair's group.
    """

    module: DeviceStages
    store: WeightGradStore
    mesh: PlanMesh
    dtype: torch.dtype
    partial_over_tp: frozenset[str]
    parameter_count: int
    tied_copy: tuple[str, dist.ProcessGroup] | None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their name in the whole model; a shared one comes once, under the embedding's name."""
        return parameter_names(self.module)

    def prepare_step(self) -> None:
        """Gather sharded parameters and make gradients zero, so that passes and nothing else follow.

        Gradients are float32 and allocated here: passes accumulate in place.
        """
        if isinstance(self.module, FSDPModule):
            for parameter in self.module.parameters():
                parameter.grad = None
            for part in self._fsdp_modules():
                part.unshard()
        if self.dtype != torch.float32:
            self._make_main_gradients()
            return
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                local_tensor(parameter.grad).zero_()

    def collect_gradients(self) -> None:
        """After a backward pass: add what autograd left in `.grad` (norms, embedding) to float32 gradients."""
        if self.dtype == torch.float32:
            return
        for parameter in self._fsdp_parameters():
            parameter.accumulate_unsharded_grad_if_needed()

    def _make_main_gradients(self) -> None:
        """Let FSDP2 sum gradients in float32, as it would after the first backward, and the store in the same place."""
        self.store.main_gradients.clear()
        for parameter in self._fsdp_parameters():
            gradient = torch.zeros_like(parameter.unsharded_param, dtype=torch.float32)
            parameter.unsharded_accumulated_grad = gradient
            self.store.main_gradients[parameter.unsharded_param] = gradient

    def finish_gradients(self) -> None:
        """Make gradients those of the global batch's mean loss: mean over dp, sum over tp and over tied copies."""
        if isinstance(self.module, FSDPModule):
            self._reduce_over_data()
        gradients = {name: local_tensor(p.grad) for name, p in self.named_parameters() if p.grad is not None}
        partial = [gradients[name] for name in sorted(self.partial_over_tp & gradients.keys())]
        if partial:
            _sum_together(partial, self.mesh.group("tp"))
        if self.tied_copy is not None:
            name, group = self.tied_copy
            dist.all_reduce(gradients[name], group=group)

    def _reduce_over_data(self) -> None:
        assert isinstance(self.module, FSDPModule)
        self.store.main_gradients.clear()
        # FSDP2 itself reduces in a backward's hooks; torch's own pipeline runtime reaches in like this, too.
        root = self.module._get_fsdp_state()
        for state in root._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                group.post_backward()
        root._root_post_backward_final_callback()

    def _fsdp_modules(self) -> Iterable[FSDPModule]:
        return (part for part in self.module.modules() if isinstance(part, FSDPModule))

    def lasting_tensors(self) -> list[Tensor]:
        """This rank's parameters and gradients, as they are now."""
        parameters = [parameter for _, parameter in self.named_parameters()]
        gradients = [parameter.grad for parameter in parameters]
        gradients += [getattr(parameter, "unsharded_accumulated_grad", None) for parameter in self._fsdp_parameters()]
        return [local_tensor(tensor) for tensor in (*parameters, *gradients) if tensor is not None]

    def gathered_parameters(self) -> list[Tensor]:
        """Buffers FSDP resizes when it gathers and frees parameters; storage meters must look at them again."""
        return [
            buffer for parameter in self._fsdp_parameters() for buffer in getattr(parameter, "all_gather_outputs", [])
        ]

    def _fsdp_parameters(self) -> Iterator[Any]:
        for part in self._fsdp_modules():
            for group in part._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


def parameter_names(module: DeviceStages) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a device by their name in the whole model (`layers.3.mlp.up.weight`)."""
    for name, parameter in module.named_parameters():
        _, _, rest = name.partition("stages.")
        yield rest.partition(".")[2], parameter


def build_device_model(
    spec: ModelSpec,
    plan: Plan,
    placement: tuple[int, ...],
    training: TrainingSpec,
    mesh: PlanMesh,
    meshes: MeshCache,
    device: torch.device,
    fill: Callable[[nn.Module, ModelSpec, int], None] = initialise,
) -> DeviceModel:
    """Build, initialise and shard the stages that `placement` gives to this rank. Collective over all ranks.

    Stages are created without storage, cut by tensor parallelism, and only then allocated and initialised.

    Args:
        fill: gives the parameters of a stage their initial values, from the model and the seed.
    """
    store = WeightGradStore()
    tokens = plan.microbatches * plan.micro_batch_size * spec.sequence_length
    context = StageContext(
        store=store,
        tp=SequenceParallel(mesh.group("tp") if plan.tp > 1 else None),
        recompute=plan.recompute == "full",
        loss_scale=1.0 / tokens,
    )
    stages = {}
    for index, holder in enumerate(placement):
        if holder != mesh.pp_rank:
            continue
        with torch.device("meta"):
            stage = Stage(spec, plan.layer_split, index, context)
        if plan.tp > 1:
            _shard_over_tensor(stage, mesh.mesh["tp"])
        stage.to_empty(device=device)
        fill(stage, spec, training.seed)
        stages[index] = stage
    module = DeviceStages(stages)
    tied_copy = _tie_embeddings(module, spec, placement, mesh, meshes)
    partial = frozenset(name for name, p in parameter_names(module) if plan.tp > 1 and not isinstance(p.data, DTensor))
    count = sum(local_tensor(parameter).numel() for parameter in module.parameters())
    if plan.dp > 1 or training.dtype != "float32":
        _shard_over_data(module, mesh, COMPUTE_DTYPES[training.dtype])
    return DeviceModel(module, store, mesh, COMPUTE_DTYPES[training.dtype], partial, count, tied_copy)


def _shard_over_tensor(stage: Stage, mesh: DeviceMesh) -> None:
    """Turn the parameters of linear layers and of the token table into DTensors, cut as in Megatron.

    Norms and learned positions stay plain: each rank has them whole and applies them to its slice of the sequence.
    """
    for name, layer in stage.named_modules():
        kind = name.rpartition(".")[2]
        if kind not in COLUMN_PARALLEL | ROW_PARALLEL:
            continue
        row = kind in ROW_PARALLEL
        placements = {"weight": Shard(1) if row else Shard(0), "bias": Replicate() if row else Shard(0)}
        for parameter_name, parameter in list(layer.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter, mesh, [placements[parameter_name]], src_data_rank=None)
            layer.register_parameter(parameter_name, nn.Parameter(sharded))


def _tie_embeddings(
    module: DeviceStages, spec: ModelSpec, placement: tuple[int, ...], mesh: PlanMesh, meshes: MeshCache
) -> tuple[str, dist.ProcessGroup] | None:
    """Share the weight when first and last stage are on one device, else name this device's copy and its group."""
    if not spec.tied_embeddings:
        return None
    first, last = placement[0], placement[-1]
    if first != last:
        group = meshes.pair(mesh, first, last)
        if group is None:
            return None
        return ("embedding.weight" if mesh.pp_rank == first else "head.weight"), group
    if mesh.pp_rank == first:
        embedding = module.stages["0"].embedding
        head = module.stages[str(len(placement) - 1)].head
        assert isinstance(embedding, nn.Embedding)
        assert isinstance(head, nn.Linear)
        head.weight = embedding.weight
    return None


def _shard_over_data(module: DeviceStages, mesh: PlanMesh, dtype: torch.dtype) -> None:
    """FSDP2, a group per block and one for the rest, whose gathered parameters stay until the step's end."""
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    dp_mesh = mesh.mesh["dp"]
    for block in module.blocks():
        fully_shard(block, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(module, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=False)
    # Gathering and reducing are done by hand once a step, so modules are run without FSDP2's hooks, of which the first
    # would do this.
    module._get_fsdp_state()._lazy_init()


def _sum_together(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Add up many small tensors over `group` in one collective, in place."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
