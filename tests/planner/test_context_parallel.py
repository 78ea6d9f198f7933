"""What attention with its sequence split costs, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from planner.graph import Op, Value
from planner.strategies.context_parallel import SEQUENCE, ContextWork, Kernel, may_split
from planner.strategies.own_rules import inner_collectives, own_rules

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def attention(*, causal: bool = True, dropout: float = 0.0, mask: bool = False) -> tuple[Op, list[Value]]:
    heads = {"q": 8, "k": 2, "v": 2}
    inputs = [value(name, (2, heads[name], 64, 16)) for name in heads]
    inputs += [value("mask", (1, 1, 64, 64))] if mask else []
    names = tuple(i.name for i in inputs)
    op = Op(
        name="sdpa",
        target=ATTENTION,
        args=(*names, *(() if mask else (None,)), dropout, causal),
        kwargs={},
        inputs=names,
        outputs=("out",),
        call=0,
        crossings=((),) * len(names),
    )
    return op, inputs


def value(name: str, shape: tuple[int, ...], *, requires_grad: bool = True) -> Value:
    return Value(name=name, shape=shape, dtype=torch.bfloat16, kind="activation", requires_grad=requires_grad)


@pytest.mark.parametrize(("rows", "ranks"), [(16, 4), (15, 3), (1, 2), (64, 1)])
def test_all_scores_under_a_causal_mask_are_worked_on_once(rows: int, ranks: int) -> None:
    work = ContextWork((2, 8, rows, 16), (2, 2, rows, 16), (2, 2, rows, 16), 2, ranks, causal=True)
    pairs = sum(k.queries * (k.queries + 1) // 2 if k.causal else k.queries * k.keys for k in work.kernels)
    whole = rows * ranks
    # Where halves differ the larger is rank 0's last: it has at most one row too many.
    assert 0 <= pairs * ranks - whole * (whole + 1) // 2 <= whole * ranks
    if rows % 2 == 0:
        assert pairs * ranks == whole * (whole + 1) // 2


def test_without_a_mask_each_rank_sees_all_keys() -> None:
    work = ContextWork((2, 8, 16, 16), (2, 2, 16, 16), (2, 2, 16, 16), 2, 4, causal=False)
    assert work.kernels == (Kernel(16, 64, causal=False),)


def test_keys_are_gathered_and_halves_exchanged_in_both_passes() -> None:
    op, inputs = attention()
    found = inner_collectives(op, inputs, [(SEQUENCE,)] * 3, (4,))
    keys, queries = 2 * 2 * 64 * 16 * 2, 2 * 8 * 16 * 16 * 2  # whole, and one rank's
    gathers, exchanges = [("all_gather", keys)] * 2, [("all_to_all", queries)] * 2
    assert [(c.kind, c.nbytes) for c in found if c.phase == "forward"] == gathers + exchanges
    scatters = [("reduce_scatter", keys)] * 2
    assert [(c.kind, c.nbytes) for c in found if c.phase == "backward"] == gathers + exchanges + scatters


def test_rule_is_refused_where_it_would_be_wrong() -> None:
    for options in ({"dropout": 0.1}, {"causal": False, "dropout": 0.1}):
        assert not may_split(*attention(**options))
    op, inputs = attention(causal=False, mask=True)
    assert not may_split(op, inputs)  # the mask is learned
    plain = [*inputs[:3], value("mask", (1, 1, 64, 64), requires_grad=False)]
    (rule,) = [rule for rule in own_rules(op, plain) or [] if rule.inputs[0] == SEQUENCE]
    assert rule.inputs[3] == SEQUENCE
    one_row = [*inputs[:3], value("mask", (1, 1, 1, 64), requires_grad=False)]
    (rule,) = [rule for rule in own_rules(op, one_row) or [] if rule.inputs[0] == SEQUENCE]
    assert rule.inputs[3] != SEQUENCE
