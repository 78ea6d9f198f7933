"""A configuration by its degrees prints in the order of a plan."""

from __future__ import annotations

import pytest

from api.render.configuration import configuration_lines
from api.requests.price_configuration import price_configuration
from api.requests.run_cost import RunCost


@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    [
        ("llama-3.1-70b", "fsdp=2,tp=8,pp=8", {"ac": "full", "sequence_parallel": True, "batch": 64}),
        ("mixtral-8x7b", "dp=2,fsdp=64,ep=8", {"batch": 128}),
        ("llama-3.1-70b", "dp=128", {}),
    ],
)
def test_every_axis_has_a_line_and_no_line_is_too_wide(model: str, mesh: str, options: dict[str, object]) -> None:
    priced = price_configuration(model, cluster="16x8xh100-sxm-80gb", mesh=mesh, **options)  # type: ignore[arg-type]
    lines = configuration_lines(priced, RunCost(tokens=1e12, price=2.5))
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"{model} on 128 x H100-SXM-80GB (16 nodes of 8)"
    for part in mesh.split(","):
        axis, _, degree = part.partition("=")
        assert any(line.startswith(f"  {axis} = {degree} ") for line in lines)
    assert any(line.startswith("  1e12 tokens") for line in lines)
    assert any("does not fit" in line for line in lines) == (not priced.fits)
    assert f"{100 * priced.model_flops_share:.1f}"[:2] in next(line for line in lines if "MFU" in line)
