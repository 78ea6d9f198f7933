"""Internals of torch that the executor uses, to be checked with each new version.

Checked with torch 2.13: ``DTensor._local_tensor`` and ``_spec``, the functional collectives, the dispatcher's flag for
implicit replication, the stack of default hooks on saved tensors, callbacks of the autograd engine, the choice of an
attention kernel, and the names of the operators that communicate.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl
from torch.utils.hooks import RemovableHandle

from cost_model.hardware.collective_kinds import CollectiveKind
from cost_model.layouts.layout import Layout
from cost_model.layouts.mended_torch import mend_torch

mend_torch()
TensorSpec = DTensorSpec
_Wrapper = TypeVar("_Wrapper", bound=DTensor)
SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def local_of(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor of ``tensor``, outside autograd (``to_local`` would be recorded)."""
    return tensor._local_tensor


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """Return the DTensor of global ``shape`` and ``stride`` whose local tensor is ``local``, without any check."""
    if torch.is_grad_enabled():
        return DTensor.from_local(local, mesh, layout, run_check=False, shape=torch.Size(shape), stride=tuple(stride))
    # The same, without a record for autograd and with a remembered spec.
    return like_dtensor(local.detach(), _spec(mesh, layout, tuple(shape), tuple(stride), local.dtype))


_specs: dict[Any, TensorSpec] = {}
"""Specs by mesh, layout, shape, stride and dtype: to make one takes as long as the kernel of a small op."""

_MOST_SPECS = 4096


def _spec(
    mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> TensorSpec:
    # By the object, which the spec keeps alive: an equal mesh may have other process groups.
    key = id(mesh), layout, shape, stride, dtype
    found = _specs.get(key)
    if found is None:
        if len(_specs) >= _MOST_SPECS:
            _specs.clear()
        found = _specs[key] = DTensorSpec(mesh, layout, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))
    return found


def spec_with(spec: TensorSpec, layout: Layout, stride: tuple[int, ...]) -> TensorSpec:
    """Return ``spec`` with another layout and global stride."""
    assert spec.tensor_meta is not None
    return _spec(spec.mesh, layout, tuple(spec.tensor_meta.shape), stride, spec.tensor_meta.dtype)


def like_dtensor(local: torch.Tensor, spec: TensorSpec) -> DTensor:
    """Return the DTensor with the local tensor ``local`` and ``spec``; ``spec`` may have strided shards."""
    return DTensor(local, spec, requires_grad=False)


def wrapper_like(cls: type[_Wrapper], tensor: DTensor) -> _Wrapper:
    """Return an instance of ``cls`` that has the shape, dtype and device of ``tensor``, and no values."""
    make: Callable[..., _Wrapper] = torch.Tensor._make_wrapper_subclass
    return make(cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def spec_of(tensor: DTensor) -> TensorSpec:
    """Return the mesh, layout, global shape and global stride of ``tensor``."""
    return tensor._spec


def all_gather(local: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensors of all ranks of ``group``, concatenated along ``dim``."""
    return waited(start_all_gather(local, dim, group))


def start_all_gather(local: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the result of ``all_gather``, which may still be running: see ``waited``."""
    return funcol.all_gather_single(local.contiguous(), dim, group)


def reduce_scatter(local: torch.Tensor, dim: int, reduce_op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's shard along ``dim`` of the sum (or ``reduce_op``) over ranks, which may still be running."""
    return cast(torch.Tensor, funcol.reduce_scatter_single(local.contiguous(), reduce_op, dim, group))


def all_reduce(local: torch.Tensor, reduce_op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum (or ``reduce_op``) over ranks, which may still be running; ``local`` is not changed."""
    return cast(torch.Tensor, funcol.all_reduce(local.contiguous(), reduce_op, group))


def all_to_all(
    local: torch.Tensor,
    group: dist.ProcessGroup,
    received: list[int] | None = None,
    sent: list[int] | None = None,
) -> torch.Tensor:
    """Return the concatenation along dim 0 of the pieces that all ranks send to this one.

    Args:
        local: concatenation along dim 0 of the pieces for each rank.
        group: process group of the ranks.
        received: length along dim 0 of the piece from each rank; None: all are equal.
        sent: length along dim 0 of the piece for each rank; None: all are equal.
    """
    return waited(funcol.all_to_all_single(local.contiguous(), received, sent, group))


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` when its collective is complete; on a GPU, complete for kernels that are launched later."""
    return tensor.wait() if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor


def chosen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> SDPBackend:
    """Return the kernel that ``scaled_dot_product_attention`` would run in training, without mask or dropout.

    The inputs require gradients here: then torch excludes kernels that support the head dim in the forward only.
    """
    with torch.enable_grad():
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
        return SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=True))


_cudnn_before: list[bool] = []
"""Whether cuDNN's attention was enabled before FlashAttention-3 was activated; empty while it is not active."""


def use_flash_attention_3() -> None:
    """Make ``scaled_dot_product_attention`` run FlashAttention-3 in this process, where the kernel supports the call.

    Raises:
        ImportError: the package ``flash_attn_interface`` is not installed.
        RuntimeError: the package is not what torch expects.
    """
    if not _cudnn_before:
        activate_flash_attention_impl("FA3")
        _cudnn_before.append(torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)  # torch prefers cuDNN's kernel on Hopper


def restore_attention() -> None:
    """Undo ``use_flash_attention_3``."""
    if _cudnn_before:
        restore_flash_attention_impl()
        torch.backends.cuda.enable_cudnn_sdp(_cudnn_before.pop())


def allows_implicit_replication() -> bool:
    """Return whether DTensor treats plain tensors as replicated, in this thread."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def allow_implicit_replication(allowed: bool) -> None:
    """Set whether DTensor treats plain tensors as replicated, in this thread; torch's own context cannot be nested."""
    DTensor._op_dispatcher._allow_implicit_replication = allowed


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` once, when the running backward pass ends."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def current_backward_pass() -> int:
    """Return autograd's id of the backward pass that runs in this thread; -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def without_torch_function() -> AbstractContextManager[None]:
    """Return a context in which tensor subclasses do not intercept calls."""
    return torch._C.DisableTorchFunctionSubclass()


class ParameterHooks:
    """Our hooks on one parameter, which a conversion of the parameter (``torch.utils.swap_tensors``) may remove."""

    def __init__(self) -> None:
        """Start with no hooks."""
        self._before: RemovableHandle | None = None
        self._after: RemovableHandle | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterHooks:
        return ParameterHooks()  # torch copies parameters without hooks

    def register(
        self,
        parameter: nn.Parameter,
        before: Callable[[torch.Tensor], None] | None,
        after: Callable[[torch.Tensor], None],
    ) -> None:
        """Register the hooks that are missing: ``before`` and ``after`` a gradient accumulates in ``parameter``.

        Both are methods, whose object the hooks do not keep alive: Python's garbage collector does not see the hooks
        that torch holds after accumulation, so that a parameter whose hooks refer to it would never be freed.
        """
        lacks_before = before is not None and not _is_in(self._before, parameter._backward_hooks)
        lacks_after = not _is_in(self._after, parameter._post_accumulate_grad_hooks)
        if not lacks_before and not lacks_after:
            return
        # torch refuses hooks on frozen parameters, and keeps them when a parameter is frozen later.
        requires_grad, parameter.requires_grad = parameter.requires_grad, True
        if before is not None and lacks_before:
            self._before = parameter.register_hook(_Weakly(before))
        if lacks_after:
            self._after = parameter.register_post_accumulate_grad_hook(_Weakly(after))
        parameter.requires_grad = requires_grad


class _Weakly:
    """A method as a function that does nothing once the object of the method is gone."""

    def __init__(self, method: Callable[[torch.Tensor], None]) -> None:
        self._method = weakref.WeakMethod(method)

    @property
    def __self__(self) -> object:
        """The object of the method; None once it is gone."""
        return getattr(self._method(), "__self__", None)

    def __call__(self, tensor: torch.Tensor) -> None:
        alive = self._method()
        if alive is not None:
            alive(tensor)


def _is_in(handle: RemovableHandle | None, hooks: Any) -> bool:
    return handle is not None and hooks is not None and handle.id in hooks


def run_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return ``function.apply(*args)``, which torch leaves untyped."""
    apply: Callable[..., Any] = function.apply
    return apply(*args)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` compiled by ``torch.compile``, outside autograd; active torch modes do not see its ops."""
    from torch.utils._python_dispatch import _disable_current_modes

    kernel: Callable[..., Any] = torch.compile(function)

    def call(*args: Any) -> Any:
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            return kernel(*args)

    return call


def current_saved_tensor_hooks() -> SavedTensorHooks | None:
    """Return the innermost (pack, unpack) hooks on saved tensors, the only ones that torch runs."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if top is None else (top[0], top[1])


def storage_key(tensor: torch.Tensor) -> int:
    """Return an id of the storage of ``tensor`` (of a DTensor: of its local tensor), unique while the storage lives."""
    return int((local_of(tensor) if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata)


def parameter_on(mesh: DeviceMesh, tensor: DTensor, *, requires_grad: bool) -> nn.Parameter:
    """Return ``tensor`` as a parameter on the object ``mesh``, in place of an equal mesh from torch's cache."""
    parameter = nn.Parameter(tensor, requires_grad=requires_grad)
    assert isinstance(parameter, DTensor)
    parameter._spec = dataclasses.replace(parameter._spec, mesh=mesh)
    return parameter


def flattened_groups(mesh: DeviceMesh) -> dict[tuple[str, ...], str]:
    """Return {names of adjacent axes: name of their process group} for axes that torch has flattened into one."""
    groups, names = {}, mesh.mesh_dim_names or ()
    flattened = mesh._get_root_mesh()._flatten_mapping
    for first in range(len(names)):
        for end in range(first + 2, len(names) + 1):
            flat = flattened.get("_".join(names[first:end]))
            if flat is not None:
                groups[names[first:end]] = str(flat.get_group().group_name)
    return groups


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Return a context in which this process is rank 0 of a fake process group that communicates nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


Buffer = Literal["input", "gathered", "output"]

COLLECTIVES: dict[str, tuple[CollectiveKind, Buffer]] = {
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "gathered"),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "gathered"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "gathered"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "input"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "input"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "_c10d_functional_autograd::all_gather_into_tensor": ("all_gather", "gathered"),
    "_c10d_functional_autograd::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional_autograd::all_to_all_single": ("all_to_all", "input"),
    "_dtensor::shard_dim_alltoall": ("all_to_all", "input"),
    # These write to their first argument, and read the second.
    "c10d::_allgather_base_": ("all_gather", "output"),
    "c10d::allgather_": ("all_gather", "output"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "output"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "input"),
    "c10d::allreduce_": ("all_reduce", "output"),
    "c10d::allreduce_coalesced_": ("all_reduce", "output"),
    "c10d::alltoall_base_": ("all_to_all", "output"),
    "c10d::alltoall_": ("all_to_all", "output"),
    "c10d::broadcast_": ("broadcast", "output"),
}
"""Operator that communicates -> (kind, the buffer that nccl-tests counts); ``gathered``: the input of all ranks."""

NOT_COUNTED = ("wait_tensor", "_wrap_tensor_autograd", "mesh_get_process_group", "barrier", "check_for_nan")
"""Prefixes of the names of operators that are in the same namespaces but move no data."""


def is_communication(func: torch._ops.OpOverload) -> bool:
    """Return whether ``func`` is an operator that moves data between ranks."""
    name = func.name().partition(".")[0]
    namespace, _, op = name.partition("::")
    return namespace in {
        "_c10d_functional",
        "_c10d_functional_autograd",
        "c10d_functional",
        "c10d",
        "_dtensor",
    } and not (op.startswith(NOT_COUNTED))


def collective_of(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[CollectiveKind, int, str]:
    """Return the kind, bytes of the full buffer on one rank, and name of the process group of a call of ``func``.

    Raises:
        NotImplementedError: ``func`` is not in ``COLLECTIVES``.
    """
    name = func.name().partition(".")[0]
    if name not in COLLECTIVES:
        raise NotImplementedError(f"cannot count {name}: add it to executor/torch_internals/dtensor.py")
    kind, buffer = COLLECTIVES[name]
    writes_first = name.startswith("c10d::") and buffer == "input"
    nbytes = _nbytes(args[1] if writes_first else args[0])
    if buffer == "gathered":
        nbytes *= int(args[1])
    return kind, nbytes, _group_name(func, args)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(item) for item in value)


def _group_name(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> str:
    for schema, value in zip(func._schema.arguments, args, strict=False):
        if schema.name in ("group_name", "group", "process_group", "pg"):
            return value if isinstance(value, str) else _name_of(value)
    return "?"


def _name_of(group: Any) -> str:
    if not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return str(group.group_name)
