"""Weight-gradient store, loss, data and meters, each against independent truth."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autotune.profiling.data import Batch, sample_tokens
from autotune.profiling.loss import cross_entropy
from autotune.profiling.meters import StorageMeter
from autotune.profiling.weight_grad import DeferredLinear, WeightGradStore


def mlp(store: WeightGradStore, depth: int = 3, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [DeferredLinear(width, width, True, store) for _ in range(depth)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.GELU())])


def plain_copy(model: nn.Sequential) -> nn.Sequential:
    twin = nn.Sequential(*[nn.Linear(64, 64) if isinstance(part, nn.Linear) else nn.GELU() for part in model])
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [True, False])
def test_deferred_gradients_equal_autograd_s_over_several_microbatches(dtype, split):
    store = WeightGradStore()
    model = mlp(store).to(dtype)
    twin = plain_copy(model).to(dtype)
    waiting = []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(2, 8, 64, dtype=dtype)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        if split:
            with store.deferred() as tasks:
                model(a).pow(2).sum().backward()
            waiting.append(tasks)
        else:
            model(a).pow(2).sum().backward()
        twin(b).pow(2).sum().backward()
        torch.testing.assert_close(a.grad, b.grad)
    if split:
        assert all(p.grad is None for p in model.parameters()), "B must leave weights alone"
        assert [len(tasks) for tasks in waiting] == [3, 3, 3]
        for tasks in waiting:
            tasks.run()
    # bfloat16 additions differ in order: a fused one rounds once where autograd rounds twice.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **tolerance)
        assert mine.grad is not None
        assert not mine.grad.requires_grad, "a graph on .grad would pin every task's tensors"


def test_b_releases_what_w_does_not_need():
    store = WeightGradStore()
    model = mlp(store)
    x = torch.randn(512, 64, requires_grad=True)
    one = x.numel() * 4
    with StorageMeter(lambda: [*model.parameters(), x]) as meter:
        out = model(x)
        held_after_forward = meter.live_bytes - one * 2  # parameters are small; x and out
        with store.deferred() as tasks:
            out.backward(torch.ones_like(out))
        del out
        x.grad = None
        gc.collect()
        torch.empty(0)
        held_after_b = meter.live_bytes - one
        tasks.run()
        torch.empty(0)
        held_after_w = meter.live_bytes - one
    # Each layer holds its output; GELU's input goes at B, the linear's input and its output's gradient stay until W.
    assert held_after_forward >= 4 * one
    assert 5 * one <= held_after_b < 6.5 * one
    assert held_after_w < 0.5 * one + 4 * sum(p.numel() for p in model.parameters()) * 2


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_equals_torch_s_and_ignores_padding(padding, dtype):
    torch.manual_seed(0)
    logits = (3 * torch.randn(2, 5, 11 + padding)).to(dtype)
    targets = torch.randint(11, (2, 5))
    mine, theirs = logits.clone().requires_grad_(), logits[..., :11].float().clone().requires_grad_()
    loss = cross_entropy(mine, targets, vocab=11)
    truth = F.cross_entropy(theirs.flatten(0, 1), targets.flatten(), reduction="none").view(2, 5)
    torch.testing.assert_close(loss, truth)
    weights = torch.randn(2, 5)
    (loss * weights).sum().backward()
    (truth * weights).sum().backward()
    assert mine.grad is not None
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(mine.grad[..., :11].float(), theirs.grad, **tolerance)
    assert not mine.grad[..., 11:].any()


def test_a_sample_is_the_same_wherever_it_is_read():
    whole = Batch(7, 2, 0, 4, 16, 50, torch.device("cpu"))
    parts = [Batch(7, 2, first, 1, 16, 50, torch.device("cpu")) for first in range(4)]
    assert torch.equal(whole.inputs(0), torch.cat([part.inputs(0) for part in parts]))
    assert torch.equal(whole.targets(0)[:, :-1], whole.inputs(0)[:, 1:])
    assert torch.equal(whole.inputs(0)[3], sample_tokens(7, 2, 3, 16, 50)[:-1])
    assert not torch.equal(sample_tokens(7, 2, 3, 16, 50), sample_tokens(7, 3, 3, 16, 50))


def test_the_meter_finds_the_peak_of_a_known_course_and_what_of_it_lasts():
    weight = torch.zeros(1000)
    lasting = [weight]
    meter = StorageMeter(lambda: lasting)
    with meter:
        a = torch.zeros(500)  # 1500 floats
        b = a + 1  # 2000
        del a  # 1500
        gradient = b * 2  # 2000, will turn out to last
        lasting.append(gradient)
        meter.refresh()
        c = torch.zeros(200)  # 2200
        view = c[:100]  # shares its storage
        del b, c
        torch.zeros(10)
        assert view.numel() == 100
    peak = meter.peak()
    assert peak.total_bytes == 4 * 2200
    assert peak.activation_bytes == 4 * 1000  # a and b; the gradient never counted


def test_the_meter_follows_storages_that_are_emptied_and_filled_without_an_operation():
    gathered = torch.zeros(1000)
    gathered.untyped_storage().resize_(0)
    meter = StorageMeter(list, lambda: [gathered])
    with meter:
        torch.zeros(10)
        gathered.untyped_storage().resize_(4000)
        torch.zeros(10)
        gathered.untyped_storage().resize_(0)
        torch.zeros(1100)
    assert meter.peak().total_bytes == 4 * 1100
    assert meter.peak().activation_bytes == 4 * 1100
