"""What tests of `parallelize_module` share: a small module, and steps compared with the unsharded module's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping

import torch
from support.case_table import Case, run_cases
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
)

from executor import parallelize_module

RANKS = 4
ALL_GATHERED = ColwiseParallel(output_layouts=Replicate())
all_reduce = torch.ops.c10d_functional.all_reduce
all_gather = torch.ops.c10d_functional.all_gather_into_tensor
reduce_scatter = torch.ops.c10d_functional.reduce_scatter_tensor


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Check that two tensors are equal to 1e-5; elements near zero to 1e-5 of the largest."""
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        whole(actual), expected, rtol=1e-5, atol=1e-5 * scale, msg=lambda text: f"{what}: {text}"
    )


def equal_steps(
    local: nn.Module, sharded: nn.Module, x: torch.Tensor, own: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
) -> None:
    """Check the results, gradients and parameters of two steps against the unsharded module's."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.25) for module in (local, sharded)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, output = local(x), sharded(own(x))
        close(output, expected, "output")
        expected.square().sum().backward()
        whole(output).square().sum().backward()
        for name, parameter in local.named_parameters():
            close(sharded.get_parameter(name).grad, parameter.grad, f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in local.named_parameters():
            close(sharded.get_parameter(name), parameter, name)


def parallelized(local: nn.Module, mesh: DeviceMesh, styles: object, **options: object) -> nn.Module:
    return parallelize_module(copy.deepcopy(local), mesh, styles, **options)


def run_on_one_axis(cases: Mapping[str, Case]) -> dict[str, str]:
    """Return case -> its traceback or nothing, on a mesh of all ranks; a warning is an error."""
    warnings.simplefilter("error")
    # Of CommDebugMode, where the inputs need no gradient.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    return run_cases(cases, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)))
