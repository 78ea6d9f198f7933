"""What reads elements that a mask selects: all elements, of which the others count for nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.errors import ModelError
from planner.model_rewrites.selected_rows.trace import masks_keep_all

CLASSES, IGNORED = 8, -100


class Read(nn.Module):
    """Reads features [samples, tokens, CLASSES] where labels [samples, tokens] are not ignored."""

    def __init__(self, read: Callable[[Read, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.head = nn.Sequential(nn.Linear(CLASSES, CLASSES), nn.GELU(), nn.Dropout(0.0), nn.LayerNorm(CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.read(self, x, y)


def places(y: Tensor) -> tuple[Tensor, ...]:
    return torch.where(y != IGNORED)


def put_back(module: Read, x: Tensor, y: Tensor) -> Tensor:
    out = torch.ones_like(x)
    out[y != IGNORED, :] = module.head(x[y != IGNORED, ...])
    return out.pow(2).sum()


def changes_its_mask(module: Read, x: Tensor, y: Tensor) -> Tensor:
    mask = y >= 0
    rows = module.head(x[mask])
    mask[:, 0] = False
    return rows.sum()


def experts(module: Read, x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for chosen in range(CLASSES):
        out[y == chosen] = module.head(x[y == chosen])
    return out.sum()


def drawn_masks(module: Read, x: Tensor, y: Tensor) -> Tensor:
    first, second = (torch.randint_like(y, 2).bool() for _ in range(2))
    return F.mse_loss(x[first], x[second])


def accuracy(module: Read, x: Tensor, y: Tensor) -> Tensor:
    hits = (x[y != IGNORED].argmax(-1) == y[y != IGNORED]).float().mean()
    return hits + F.nll_loss(module.head(x[y != IGNORED]).log_softmax(-1), y[y != IGNORED], reduction="sum")


SAME: dict[str, Callable[[Read, Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda m, x, y: F.cross_entropy(m.head(x[y != IGNORED]), y[y != IGNORED]),
    "smoothed": lambda m, x, y: F.cross_entropy(x[y != IGNORED], y[y != IGNORED], label_smoothing=0.2),
    "weighted": lambda m, x, y: F.cross_entropy(x[y >= 0], y[y >= 0], torch.arange(1.0, 1 + CLASSES)),
    "soft labels": lambda m, x, y: F.cross_entropy(m.head(x)[y >= 0], x.detach().softmax(-1)[y >= 0]),
    "reshaped": lambda m, x, y: F.cross_entropy(m.head(x[y >= 0]).view(-1, x.size(-1)), y[y >= 0].view(-1)),
    "squared error": lambda m, x, y: F.mse_loss(m.head(x[y >= 0]), x[y >= 0] + 1),
    "sum of errors": lambda m, x, y: F.l1_loss(m.head(x[y >= 0]), x[y >= 0] + 1, reduction="sum"),
    "divergence": lambda m, x, y: F.kl_div(
        m.head(x)[y >= 0].log_softmax(-1), x.detach()[y >= 0].softmax(-1), reduction="batchmean"
    ),
    "each error": lambda m, x, y: F.huber_loss(m.head(x)[y >= 0], x[y >= 0] + 1, reduction="none").sum(-1).mean(),
    "mean": lambda m, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none")[y.flatten() >= 0].mean(),
    "mean of features": lambda m, x, y: m.head(x[y >= 0]).mean(0).pow(2).sum(),
    "places": lambda m, x, y: F.cross_entropy(m.head(x[places(y)]), y[places(y)]),
    "a column of places": lambda m, x, y: m.head(x.flatten(0, 1)[(y.flatten() >= 0).nonzero().squeeze(1)]).mean(),
    "masked_select": lambda m, x, y: torch.masked_select(m.head(x), x > 0).mean(),
    "cosines": lambda m, x, y: F.cosine_similarity(m.head(x)[y >= 0], x[y >= 0], dim=-1).mean(),
    "gathered": lambda m, x, y: m.head(x).log_softmax(-1)[y >= 0].gather(1, y[y >= 0][:, None]).squeeze(1).mean(),
    "logarithm of what is positive": lambda m, x, y: m.head(x).relu()[m.head(x) > 0].log().mean(),
    "operators": lambda m, x, y: ((1 - 2 * m.head(x)[y >= 0]) ** 2 / 3).sum(dim=(0, 1)),
    "put back": put_back,
    "accuracy": accuracy,
}

SAME["flat and not"] = lambda m, x, y: F.cross_entropy(m.head(x[y >= 0]), y.view(-1)[(y >= 0).view(-1)])

REFUSED: dict[str, Callable[[Read, Tensor, Tensor], Tensor]] = {
    "branches on how many": lambda m, x, y: x[y >= 0].sum() if x[y >= 0].numel() else x.sum() * 0,
    "asks how many": lambda m, x, y: x[y >= 0].sum() / x[y >= 0].shape[0],
    "asks how many by len": lambda m, x, y: x[y >= 0].sum() / len(x[y >= 0]),
    "mixes rows": lambda m, x, y: (x[y >= 0] @ x[y >= 0].transpose(0, 1)).sum(),
    "softmax over rows": lambda m, x, y: x[y >= 0].softmax(0).pow(2).sum(),
    "largest of all": lambda m, x, y: x[y >= 0].max(),
    "masks that differ": lambda m, x, y: F.mse_loss(x[y >= 0], (x + 1)[y >= 1]),
    "a mask that changes": changes_its_mask,
    "masks that are drawn": drawn_masks,
    "a mask for each expert": experts,
    "attention of what is selected": lambda m, x, y: F.scaled_dot_product_attention(x[y >= 0], x[y >= 0], x[y >= 0]),
}


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(4, 6, CLASSES, requires_grad=True), torch.randint(0, CLASSES, (4, 6))
    return x, torch.where(torch.rand(4, 6) < 0.4, IGNORED, y)


def with_gradients(module: Read, x: Tensor, y: Tensor) -> list[Tensor]:
    result = module(x, y)
    needed = [x, *module.parameters()]
    return [result, *torch.autograd.grad(result, needed, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("name", SAME)
def test_values_and_gradients_are_the_same(name: str) -> None:
    x, y = inputs()
    module = Read(SAME[name])
    expected = with_gradients(module, x, y)
    with masks_keep_all(module):
        torch.testing.assert_close(with_gradients(module, x, y), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_or_counts_them_is_refused(name: str) -> None:
    module = Read(REFUSED[name])
    with masks_keep_all(module), pytest.raises(ModelError):
        module(*inputs())


def checks_its_count(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = x[y >= 0]
    count, width = rows.shape
    assert width == CLASSES
    if count * CLASSES != rows.numel():
        raise ValueError(f"{count} rows have {rows.numel()} elements")
    return F.mse_loss(rows, rows + 1)


def test_a_check_of_how_many_are_selected_passes() -> None:
    x, y = inputs()
    module = Read(checks_its_count)
    expected = module(x, y)
    with masks_keep_all(module):
        assert torch.allclose(module(x, y), expected)


def test_other_rows_go_with_those_that_are_selected() -> None:
    """One for each, in their order, as the features of images that are added to the embeddings of their tokens."""
    x, y = inputs()
    rows = torch.randn(int((y >= 0).sum()), CLASSES)
    module = Read(lambda m, x, y: (x[y >= 0] * rows).sum())
    expected = module(x, y)
    with masks_keep_all(module):
        assert torch.allclose(module(x, y), expected, atol=1e-5)


def test_no_element_is_the_mean_of_none() -> None:
    x, y = inputs()
    module = Read(SAME["cross entropy"])
    with masks_keep_all(module):
        assert module(x, torch.full_like(y, IGNORED)).isnan()


def test_experts_in_a_list_compute_what_chooses_them() -> None:
    x, y = inputs()
    module = Read(SAME["mean of features"])
    with masks_keep_all(nn.ModuleList([module])), pytest.raises(ModelError, match="0 selects elements by a mask"):
        module(x, y)
