"""Bytes of optimizer states for one parameter: against torch's own optimizers, and by the rules of the 8-bit ones."""

import pytest
import torch

from cost_model.kernels.optimizers import OPTIMIZERS

SHAPES = [(96,), (64, 48), (3, 64, 48)]
TORCH = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def _state_nbytes_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the states after a step, without counters of steps."""
    return sum(
        state.nbytes
        for states in optimizer.state.values()
        for name, state in states.items()
        if isinstance(state, torch.Tensor) and name != "step"
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", sorted(TORCH))
def test_states_are_those_of_torch(name: str, shape: tuple[int, ...]) -> None:
    parameter = torch.nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    optimizer = TORCH[name]([parameter])
    optimizer.step()
    assert OPTIMIZERS[name].state_nbytes(parameter.numel(), 4, shape=shape) == _state_nbytes_of(optimizer)


def test_muon_has_one_state_for_matrices_of_blocks() -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 48))
    parameter.grad = torch.ones(64, 48)
    optimizer = torch.optim.Muon([parameter])
    optimizer.step()
    muon = OPTIMIZERS["muon"]
    assert muon.state_nbytes(64 * 48, 4, shape=(64, 48), in_block=True) == _state_nbytes_of(optimizer)
    adamw = OPTIMIZERS["adamw"].state_nbytes(64 * 48, 4)
    assert muon.state_nbytes(64 * 48, 4, shape=(64, 48)) == adamw
    assert muon.state_nbytes(64 * 48, 4, shape=(3, 32, 32), in_block=True) == adamw


@pytest.mark.parametrize(
    ("name", "numel", "expected"),
    [
        # measured with torchao 0.18 and bitsandbytes 0.50: bytes of codes, scales and tables after a step on the CPU
        ("adamw-8bit", 4095, 2 * 4 * 4095),
        ("adamw-8bit", 4096, 2 * (4096 + 16 * 4 + 256 * 4)),
        ("adamw-8bit", 4224, 2 * 4 * 4224),  # no whole number of blocks of 256
        ("adamw-8bit", 8192, 2 * (8192 + 32 * 4 + 256 * 4)),
        ("adamw-8bit-bnb", 4095, 2 * 4 * 4095),
        ("adamw-8bit-bnb", 4096, 2 * (4096 + 16 * 4)),
        ("adamw-8bit-bnb", 5000, 2 * (5000 + 20 * 4)),
    ],
)
def test_8_bit_states_of_small_and_odd_tensors(name: str, numel: int, expected: int) -> None:
    assert OPTIMIZERS[name].state_nbytes(numel, 4) == expected
