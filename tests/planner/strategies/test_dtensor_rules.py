"""A torch that was not tried is refused, with what to do."""

import pytest
import torch

from executor.verify import verify
from planner import PlanningSession
from planner.errors import UnsupportedTorchError
from planner.strategies.dtensor_rules import check_torch_version


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cpu", "3.0.0"])
def test_another_torch_is_refused_by_name(version: str) -> None:
    with pytest.raises(UnsupportedTorchError, match=rf"found {version.split('+')[0]}.*pip install"):
        check_torch_version(version)


def test_the_pinned_torch_is_accepted() -> None:
    check_torch_version("2.13.0+cpu")


class Biased(torch.nn.Module):
    """Adds a bias in place to a tensor that some layouts leave whole, and the bias in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bias = torch.nn.Linear(64, 64), torch.nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x) * 2
        h.add_(self.bias)
        return h.square().mean()


@pytest.mark.parametrize("seed", [0, 10, 13])
def test_an_op_in_place_keeps_the_layout_of_what_it_writes(seed: int) -> None:
    inputs = (torch.zeros(8, 64),)
    session = PlanningSession(
        Biased(), cluster="1x4xtoy", example_inputs=inputs, batch=8, dtype="fp32", phase="prefill"
    )
    report = verify(Biased(), session.plan(planner=f"random:{seed}", mesh="tp=4"), inputs)
    assert report.equal, str(report)
