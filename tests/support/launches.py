"""`Launch` values as hypothesis strategies, for the frameworks that read and write files, and published recipes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from api.frameworks.launch import Framework, Launch, Reading

RECIPES = Path(__file__).parents[1] / "api" / "frameworks" / "recipes"

DEGREES = st.sampled_from((1, 2, 3, 4, 8))
"""Degrees, of which any product is drawn."""


def launches(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Launch]:
    """Return launches with the fields drawn, whose batch is none or some number of micro-batches."""
    steps = st.one_of(st.none(), st.integers(1, 16))
    return st.builds(_launch, st.fixed_dictionaries(fields), steps)


def _launch(fields: dict[str, Any], steps: int | None) -> Launch:
    launch = Launch(**fields)
    batch = None if steps is None else steps * launch.micro_batch * launch.data
    return Launch(**fields, batch=batch)


SCRIPT: dict[str, st.SearchStrategy[Any]] = {
    "micro_batch": st.integers(1, 64),
    "seq": st.one_of(st.none(), st.integers(1, 200_000)),
    "checkpointing": st.sampled_from(("none", "full")),
}
"""Fields that training scripts say."""


def recipe(framework: Framework, name: str) -> Reading:
    """Return what a published recipe says, on the devices that it was published for."""
    path = next(path for path in RECIPES.glob(f"{name}.*") if path.suffix != ".source")
    text = path.read_text()
    source = path.with_suffix(".source").read_text() if path.suffix == ".json" else text
    devices = re.search(r"devices: (\d+)", source)
    assert devices is not None
    assert framework.recognises(text)
    return framework.read(text, int(devices[1]))


def check_round_trip(framework: Framework, launch: Launch) -> None:
    """Fail unless the framework's file says the launch, without a fault, and names its version."""
    text = framework.write(launch, "Llama-3.1-8B")
    reading = framework.read(text, launch.ranks)
    assert framework.recognises(text)
    assert reading.faults == ()
    assert reading.version == framework.version
    assert reading.launch == launch
