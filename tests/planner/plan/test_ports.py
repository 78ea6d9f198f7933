"""Keys of module boundaries: which module they mean, and that none can be misread."""

import pytest
from torch.distributed.tensor import Replicate, Shard

from planner.errors import PlanKeyError
from planner.plan.ports import Port, input_key, output_key, resolve_input_ports, resolve_output_ports

MODULES = ["", "layer", "layer.0", "layer.0.output", "layer.0.dense", "head"]
PORT = Port(layout=(Shard(0), Replicate()))


@pytest.mark.parametrize("fqn", MODULES)
def test_keys_of_ports_lead_back_to_their_module(fqn: str) -> None:
    assert resolve_input_ports({input_key(fqn): PORT}, MODULES) == {fqn: PORT}
    assert resolve_output_ports({output_key(fqn): PORT}, MODULES) == {fqn: PORT}


def test_keys_of_ports_may_be_patterns_and_name_the_root_in_two_ways() -> None:
    assert resolve_input_ports({"layer.0.*.input": PORT}, MODULES) == {"layer.0.output": PORT, "layer.0.dense": PORT}
    assert resolve_input_ports({"": PORT}, MODULES) == resolve_input_ports({"input": PORT}, MODULES) == {"": PORT}
    assert resolve_output_ports({"output": PORT}, MODULES) == {"": PORT}
    assert resolve_output_ports({"head.output": PORT}, MODULES) == {"head": PORT}


def test_a_key_that_can_be_read_in_two_ways_is_an_error() -> None:
    with pytest.raises(PlanKeyError, match="that is a module, and also the output of"):
        resolve_output_ports({"layer.0.output": PORT}, MODULES)
    with pytest.raises(PlanKeyError, match=r"'head.input'"):
        resolve_input_ports({"head": PORT}, MODULES)
    with pytest.raises(PlanKeyError, match="twice"):
        resolve_output_ports({"head": PORT, "head.output": Port(layout=(Replicate(), Replicate()))}, MODULES)
