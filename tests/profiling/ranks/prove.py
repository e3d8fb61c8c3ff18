"""One rank of the gradient proof: trains every case of its world size and compares it with the reference.

Two steps each, the first with a learning rate of 0, so that the second shows that nothing is left over from a step.
Started by torchrun: `prove.py OUT`; writes `OUT/proof-RANK.json`, per case what this rank found.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Case, all_cases, bfloat16_cases, controls, searched_cases
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


def adamw_error(before: Tensor, gradients: list[Tensor], after: Tensor) -> float:
    """How far AdamW's last step (Loshchilov and Hutter 2019, algorithm 2) is from its formula, in learning rates."""
    first, second = torch.zeros_like(before).double(), torch.zeros_like(before).double()
    for gradient in gradients:
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient.double()
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient.double() ** 2
    first = first / (1 - BETAS[0] ** len(gradients))
    second = second / (1 - BETAS[1] ** len(gradients))
    step = first / (second.sqrt() + EPSILON) + DECAY * before.double()
    return float(((before.double() - LEARNING_RATE * step) - after.double()).abs().max()) / LEARNING_RATE


def prove(case: Case, device: CpuDevice, meshes: MeshCache) -> dict[str, Any]:
    request = case.request()
    spec, seed, samples = request.model, request.training.seed, request.training.global_batch_size
    training = Training(request, device, meshes)
    if case.perturbed and dist.get_rank() == 0:
        parameter = next(p for name, p in training.model.named_parameters() if name.endswith("mlp.up.weight"))
        local_tensor(parameter.data).view(-1)[0] += 1e-3
    errors: dict[str, float] = defaultdict(float)
    gradients: dict[str, list[Tensor]] = defaultdict(list)
    before: dict[str, Tensor] = {}
    losses = []

    def compare(truth: Reference) -> None:
        largest = max(float(g.abs().max()) for g in truth.gradients.values())
        for name, parameter in training.model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            source = "embedding.weight" if name == "head.weight" and spec.tied_embeddings else name
            error = relative_error(whole(parameter.grad), truth.gradients[source], largest)
            errors[name] = max(errors[name], error)
            before[name] = local_tensor(parameter.detach()).clone()
            gradients[name].append(local_tensor(parameter.grad).clone())

    for index, learning_rate in enumerate((0.0, LEARNING_RATE)):
        truth = reference(spec, seed, samples, index)
        training.optimizer.adamw.param_groups[0]["lr"] = learning_rate
        step = training.step(index, before_update=functools.partial(compare, truth))
        losses.append((training.global_loss(step.loss), truth.loss))
    after = {name: local_tensor(parameter.detach()) for name, parameter in training.model.named_parameters()}
    updates = [adamw_error(before[name], gradients[name], after[name]) for name in after if after[name].numel()]
    return {
        "errors": errors,
        "update_error": max(updates, default=0.0),
        "losses": [found for found, _ in losses if found is not None],
        "reference_losses": [true for _, true in losses],
        "parameters": training.parameters,
    }


def main() -> None:
    out, world = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=60)
    device = CpuDevice()
    dist.init_process_group("gloo", timeout=timeout)
    meshes = MeshCache("cpu", timeout)
    cases = all_cases() + searched_cases() + bfloat16_cases() + controls()
    found = {case.name: prove(case, device, meshes) for case in cases if case.world == world}
    path = out / f"proof-{dist.get_rank()}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
