"""One rank of the gradient proof: trains a step of every case of its world size and compares it with the reference.

Started by torchrun: `prove.py OUT CASE...`; writes `OUT/proof-RANK.json`, per case what this rank found.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Case, all_cases, controls
from reference import Reference, reference
from torch import Tensor
from torch.distributed.tensor import DTensor

from autotune.profiling.device import CpuDevice
from autotune.profiling.mesh import MeshCache
from autotune.profiling.training import Training
from autotune.profiling.weight_grad import local_tensor

LEARNING_RATE, BETAS, EPSILON, DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative_error(found: Tensor, truth: Tensor, largest: float) -> float:
    """Largest difference over the parameter's largest gradient; rows beyond the truth's are padding and must be 0.

    A gradient that is 0 in exact arithmetic (a key bias without rope) is compared with the model's largest one.
    """
    padding = found[truth.shape[0] :]
    if padding.numel() and float(padding.abs().max()) != 0.0:
        return float("inf")
    scale = float(truth.abs().max())
    difference = float((found[: truth.shape[0]].double() - truth).abs().max())
    return difference / (scale if scale > 1e-12 * largest else largest)


def adamw_error(before: Tensor, gradient: Tensor, after: Tensor) -> float:
    """How far AdamW's first step (Loshchilov and Hutter 2019, algorithm 2) is from its formula, in steps."""
    before, gradient = before.double(), gradient.double()
    step = gradient / (gradient.abs() + EPSILON) + DECAY * before
    return float(((before - LEARNING_RATE * step) - after.double()).abs().max()) / LEARNING_RATE


def prove(case: Case, device: CpuDevice, meshes: MeshCache) -> dict[str, Any]:
    request = case.request()
    truth: Reference = reference(request.model, request.training.seed, request.training.global_batch_size)
    largest = max(float(g.abs().max()) for g in truth.gradients.values())
    training = Training(request, device, meshes)
    if case.perturbed and dist.get_rank() == 0:
        parameter = next(p for name, p in training.model.named_parameters() if name.endswith("mlp.up.weight"))
        local_tensor(parameter.data).view(-1)[0] += 1e-3
    errors: dict[str, float] = {}
    before: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}

    def compare() -> None:
        for name, parameter in training.model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            source = "embedding.weight" if name == "head.weight" and request.model.tied_embeddings else name
            errors[name] = relative_error(whole(parameter.grad), truth.gradients[source], largest)
            before[name] = local_tensor(parameter.detach()).clone()
            gradients[name] = local_tensor(parameter.grad).clone()

    step = training.step(0, before_update=compare)
    loss = training.global_loss(step.loss)
    after = {name: local_tensor(parameter.detach()) for name, parameter in training.model.named_parameters()}
    updates = [adamw_error(before[n], gradients[n], after[n]) for n in after if after[n].numel()]
    return {
        "errors": errors,
        "update_error": max(updates, default=0.0),
        "loss": loss,
        "reference_loss": truth.loss,
        "parameters": training.parameters,
    }


def main() -> None:
    out, world = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=60)
    device = CpuDevice()
    dist.init_process_group("gloo", timeout=timeout)
    meshes = MeshCache("cpu", timeout)
    found = {case.name: prove(case, device, meshes) for case in all_cases() + controls() if case.world == world}
    path = out / f"proof-{dist.get_rank()}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
