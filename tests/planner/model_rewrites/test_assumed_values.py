"""`AssumedValues`: forwards on the meta device whose shapes depend on values."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from planner.model_rewrites.assumed_values import AssumedValues


def test_what_follows_from_sizes_has_its_values() -> None:
    with AssumedValues():
        steps = torch.arange(6, device="meta") * 2
        steps[1:3] += 1
        assert steps.tolist() == [0, 3, 5, 6, 8, 10]
        assert steps[steps > 5].shape == (3,)
        assert torch.nonzero(steps == 8).item() == 4


def test_each_token_has_its_experts() -> None:
    with AssumedValues():
        tokens = torch.empty(64, 8, device="meta")
        _, chosen = F.linear(tokens, torch.empty(4, 8, device="meta")).topk(2, -1)
        sizes = [len(torch.where(chosen == expert)[0]) for expert in range(4)]
    assert sum(sizes) == 128
    assert min(sizes) > 16  # balanced, as random numbers are


def test_one_mask_selects_as_many_each_time() -> None:
    with AssumedValues():
        rows = torch.empty(50, 8, device="meta", requires_grad=True)
        picked = rows[rows.sum(1) > 0]
        rows = rows.index_put((rows.sum(1) > 0,), picked)
        (gradient,) = torch.autograd.grad(rows.sum(), picked)
    assert gradient.shape == picked.shape


def test_a_loop_until_a_change_is_small_ends() -> None:
    turns = 0
    with AssumedValues():
        x = torch.empty(4, device="meta")
        while x.abs().max().item() > 1e-3:
            x, turns = x / 2, turns + 1
        if x.sum() > 0:
            turns += 1
    assert turns == 2  # numbers are 1 and nearly 0 in turns, and then again


def test_numbers_are_read_from_the_host_as_well() -> None:
    with AssumedValues():
        lengths = torch.full((3,), 5, device="meta")
        scores = torch.empty(9, 3, 4, device="meta", requires_grad=True).log_softmax(-1)
        loss = F.ctc_loss(scores, torch.empty(3, 5, dtype=torch.long, device="meta"), lengths + 4, lengths)
    assert lengths.is_meta
    assert loss.shape == ()
