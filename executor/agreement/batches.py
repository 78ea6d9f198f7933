"""A check of inputs: in some calls of a sharded module its ranks compare checksums of what they pass."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, sharded_dim
from executor.agreement.exchange import Exchange
from executor.agreement.statement import minority, rank_list, values_by_rank
from executor.resolve.batch import global_tensor_of, layout_like
from executor.resolve.fqns import positional_names
from executor.resolve.tensor_paths import change_arguments
from executor.runtime.whole_batches import BatchForm
from planner.errors import RanksError, UnmatchedKeyError
from planner.model_rewrites.image_sizes.tables import size_tables
from planner.model_rewrites.image_sizes.values import is_numbers
from planner.model_rewrites.tree_paths import path_text
from planner.plan.ports import Port

_logger = logging.getLogger("shardplan")

_PATIENCE_S = 10.0
"""Seconds that ranks wait for each other in a check, before they go on without it."""

_SAME_ROWS = (
    "Give each rank the rows of data_shard(plan, mesh), in one order: DistributedSampler(dataset, num_replicas=size, "
    "rank=rank, seed=...)."
)
_SAME_BATCH = "Give every rank the same loader of global batches: no DistributedSampler, one seed."
_SAME_CALL = "Call the module with the same arguments on every rank."


def attach_batch_check(module: nn.Module, ports: Mapping[str, Port], device_mesh: DeviceMesh, form: BatchForm) -> None:
    """Hook the root ``module``, so that ranks which pass other inputs than the plan needs raise an error on all ranks.

    Calls number 1, 2, 4, 8 and so on are checked, counted apart in training and in evaluation: a check copies the
    inputs to the CPU. Call this after all other hooks, so that the check comes first.

    Args:
        module: the root.
        ports: argument of the root -> its port; without any, nothing is known of the inputs.
        device_mesh: mesh of the ranks.
        form: whether batches are whole.
    """
    if ports and Exchange.of(device_mesh) is not None:
        hook = _BatchCheck(ports, positional_names(module), device_mesh, form)
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


class _BatchCheck:
    """A forward pre-hook on the root that compares the inputs of all ranks."""

    def __init__(
        self, ports: Mapping[str, Port], positional: tuple[str, ...], device_mesh: DeviceMesh, form: BatchForm
    ) -> None:
        self._ports, self._positional, self._mesh, self._form = ports, positional, device_mesh, form
        self._calls = {True: 0, False: 0}
        self._replicated: Layout = (Replicate(),) * device_mesh.ndim

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self._calls[module.training] += 1
        calls = self._calls[module.training]
        if calls & (calls - 1):
            return
        leaves = list(self._leaves(args, kwargs))
        if any(isinstance(leaf, FakeTensor) or leaf.is_meta for _, leaf in leaves if isinstance(leaf, torch.Tensor)):
            return
        exchange = Exchange.of(self._mesh)
        assert exchange is not None
        statement = json.dumps(self._statement(leaves, args, kwargs))
        try:
            text = exchange.verdict("the check of inputs", statement, _judge, timeout_s=_PATIENCE_S, what_to_do="")
        except RanksError as error:
            # The ranks are far apart, or some have ended. The next collective waits as long as the process group says.
            _logger.warning("Inputs are not checked in call %d: %s", calls, error)
            return
        verdict = json.loads(text)
        if verdict["error"] is not None:
            raise RanksError(verdict["error"], ranks=verdict["ranks"], what_to_do=verdict["what_to_do"])
        if verdict["are_equal"] and exchange.rank == exchange.ranks[0]:
            _logger.warning(
                "All ranks pass the same values of %s, of which each needs rows of its own: the samples are repeated. "
                "Cut global batches with local_batch, or read the rows of data_shard(plan, mesh).",
                ", ".join(verdict["are_equal"]),
            )

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of each argument that is compared: plain tensors and simple values."""
        for path, leaf in pytree.tree_leaves_with_path((args, kwargs)):
            head, *rest = (path_text((key,)) for key in path[1:])
            if path[0] == pytree.SequenceKey(0) and int(head) < len(self._positional):
                head = self._positional[int(head)]
            is_plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
            if is_plain or isinstance(leaf, (bool, int, float, str)):
                yield ".".join((head, *rest)), leaf

    def _statement(
        self, leaves: Sequence[tuple[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        planned: dict[int, tuple[Sequence[int], Layout]] = {}

        def note(leaf: Any, port: Port, name: str) -> Any:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                planned[id(leaf)] = (leaf.shape, port.layout if port.from_local is None else port.from_local)
            return leaf

        change_arguments(self._ports, self._positional, note, args, kwargs)
        tensors = [leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor)]
        # All samples have images of the same sizes, so that the parts of a table are equal as well.
        equal = {id(table.tensor) for table in size_tables(tensors) if id(table.tensor) not in planned}
        equal |= {id(tensor) for tensor in tensors if is_numbers(tensor)}
        statement: dict[str, Any] = {"is_whole": self._form.is_whole, "values": {}, "tensors": {}}
        for name, leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                statement["values"][name] = repr(leaf)
                continue
            layout = self._replicated if id(leaf) in equal else self._layout(leaf, name, planned)
            if layout is not None:
                source = global_tensor_of(leaf)
                statement["tensors"][name] = _checksum(leaf) | {
                    "piece": self._piece(layout),
                    "source": None if source is None else _checksum(source)["checksum"],
                }
        return statement

    def _layout(
        self, leaf: torch.Tensor, name: str, planned: Mapping[int, tuple[Sequence[int], Layout]]
    ) -> Layout | None:
        """Return the layout of an argument; None if it is not known, which a later hook complains of."""
        if self._form.is_whole or not planned:
            return self._replicated
        if id(leaf) in planned:
            return planned[id(leaf)][1]
        try:
            return layout_like(leaf.shape, planned.values(), name, self._ports) if leaf.dim() else self._replicated
        except UnmatchedKeyError:
            return None

    def _piece(self, layout: Layout) -> list[int]:
        """Return the index of this rank's shard along each axis that shards the tensor; equal ones are one shard."""
        coordinate = self._mesh.get_coordinate()
        assert coordinate is not None
        return [
            index for index, placement in zip(coordinate, layout, strict=True) if sharded_dim(placement) is not None
        ]


def _checksum(tensor: torch.Tensor) -> dict[str, Any]:
    """Return shape and dtype of ``tensor``, a CRC-32 of its values, and whether they are not all equal."""
    data = tensor.detach().cpu().contiguous().reshape(-1)
    return {
        "form": f"{tuple(tensor.shape)} {tensor.dtype}",
        "checksum": zlib.crc32(data.view(torch.uint8).numpy().data),
        "varies": bool((data != data[:1]).any()),
    }


def _judge(texts: Mapping[int, str]) -> str:
    """Return, as JSON, the first fault of the inputs that ranks state, and the tensors that are equal everywhere."""
    statements = {rank: json.loads(text) for rank, text in texts.items()}
    fault = _fault_of_call(statements) or _fault_of_tensors(statements)
    if fault is None:
        return json.dumps({"error": None, "are_equal": _equal_everywhere(statements)})
    error, ranks, what_to_do = fault
    return json.dumps({"error": error, "ranks": ranks, "what_to_do": what_to_do})


_Fault = tuple[str, list[int], str]
"""(what is wrong, ranks at fault, what to do)"""


def _fault_of_call(statements: Mapping[int, Any]) -> _Fault | None:
    """Return the fault of ranks that pass other arguments, simple values or shapes; None if there is none."""
    names = {rank: ", ".join([*item["tensors"], *item["values"]]) for rank, item in statements.items()}
    if len(set(names.values())) > 1:
        return f"The ranks pass different arguments: {values_by_rank(names)}.", minority(names), _SAME_CALL
    first = next(iter(statements.values()))
    for name in first["values"]:
        values = {rank: item["values"][name] for rank, item in statements.items()}
        if len(set(values.values())) > 1:
            return (
                f"The ranks pass different values of {name!r}: {values_by_rank(values)}.",
                minority(values),
                _SAME_CALL,
            )
    for name in first["tensors"]:
        forms = {rank: item["tensors"][name]["form"] for rank, item in statements.items()}
        if len(set(forms.values())) > 1:
            what_to_do = "All ranks pass slices of one shape: drop or pad the last batch of an epoch on all of them."
            return f"The ranks pass {name!r} in different shapes: {values_by_rank(forms)}.", minority(forms), what_to_do
    return None


def _fault_of_tensors(statements: Mapping[int, Any]) -> _Fault | None:
    """Return the fault of ranks that pass other values where they need equal ones; None if there is none."""
    first = next(iter(statements.values()))
    for name in first["tensors"]:
        tensors = {rank: item["tensors"][name] for rank, item in statements.items()}
        if first["is_whole"]:
            checksums = {rank: str(item["checksum"]) for rank, item in tensors.items()}
            if len(set(checksums.values())) > 1:
                error = f"{_apart(checksums, 'pass another batch')}, but batches are whole here ({name!r} differs)."
                return error, minority(checksums), _SAME_BATCH
        sources = {rank: str(item["source"]) for rank, item in tensors.items() if item["source"] is not None}
        if len(set(sources.values())) > 1:
            error = f"{_apart(sources, f'cut {name!r} from another global batch')}."
            return error, minority(sources), _SAME_BATCH
        pieces: dict[tuple[int, ...], dict[int, str]] = {}
        for rank, item in tensors.items():
            pieces.setdefault(tuple(item["piece"]), {})[rank] = str(item["checksum"])
        for alike in pieces.values():
            if len(set(alike.values())) > 1:
                error = (
                    f"{_apart(alike, f'pass other values of {name!r}')}, but the plan gives {rank_list(list(alike))} "
                    "the same ones."
                )
                return error, minority(alike), _SAME_ROWS
    return None


def _equal_everywhere(statements: Mapping[int, Any]) -> list[str]:
    """Return the names of the tensors that are split, if each of them has one value in all of its pieces."""
    first = next(iter(statements.values()))
    names = []
    for name in first["tensors"]:
        tensors = [item["tensors"][name] for item in statements.values()]
        if len({tuple(item["piece"]) for item in tensors}) < 2 or not tensors[0]["varies"]:
            continue
        # Slices of one global batch may be equal by chance.
        if len({item["checksum"] for item in tensors}) > 1 or tensors[0]["source"] is not None:
            return []
        names.append(name)
    return names


def _apart(values: Mapping[int, str], do: str) -> str:
    """Return "Ranks 1, 2 <do> than rank 0"."""
    ranks = minority(values)
    usual = next(rank for rank in values if rank not in ranks)
    return f"{rank_list(ranks).capitalize()} {do} than rank {usual}"
