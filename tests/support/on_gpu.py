"""Run the tests of the executor on CUDA: ``SHARDPLAN_TEST_DEVICE=cuda``, with as many ranks as the test has on one GPU.

NCCL refuses two ranks of one host on one GPU. Each rank says that it is a host of its own (``NCCL_HOSTID``), so that
ranks exchange their data over sockets: slow, but the kernels and the collectives are NCCL's.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

VARIABLE = "SHARDPLAN_TEST_DEVICE"
_init_mesh = DeviceMesh.__init__


def is_chosen() -> bool:
    """Return whether the ranks of tests run on CUDA."""
    return os.environ.get(VARIABLE, "cpu") == "cuda"


def backend() -> str:
    """Return the backend of the ranks' process group."""
    return "cpu:gloo,cuda:nccl" if is_chosen() else "gloo"


def start(rank: int) -> None:
    """Make new tensors of this process, and its meshes, be on CUDA, if that is chosen."""
    if not is_chosen():
        return
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.backends.cudnn.allow_tf32 = False  # matmuls are exact by default, convolutions are not
    DeviceMesh.__init__ = _init_cuda_mesh
    _OnCuda().__enter__()


def on_cpu(results: Any) -> Any:
    """Return ``results`` with their tensors on the CPU, for a process that looks at them."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu() if tensor.is_cuda else tensor, results)


def _init_cuda_mesh(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
    _init_mesh(self, "cuda" if device_type == "cpu" else device_type, *args, **kwargs)


class _OnCuda(TorchFunctionMode):
    """New tensors are on CUDA where no device is named; those drawn by a generator of the CPU are moved there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type == "cpu":
            return func(*args, **kwargs).to("cuda")
        return func(*args, **kwargs | {"device": "cuda"})
