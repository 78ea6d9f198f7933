"""A torch that was not tried is refused, with what to do."""

import pytest

from planner.errors import UnsupportedTorchError
from planner.strategies.dtensor_rules import check_torch_version


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cpu", "3.0.0"])
def test_another_torch_is_refused_by_name(version: str) -> None:
    with pytest.raises(UnsupportedTorchError, match=rf"found {version.split('+')[0]}.*pip install"):
        check_torch_version(version)


def test_the_pinned_torch_is_accepted() -> None:
    check_torch_version("2.13.0+cpu")
