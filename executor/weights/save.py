"""``save_weights``: writes a sharded module as a checkpoint that ``from_pretrained`` reads."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.torch_internals.weights import reshard
from executor.weights.gather import whole_on_rank
from executor.weights.pretrained import (
    forget_conversions,
    ignored_on_save,
    is_pretrained,
    remember_conversions,
    saved_names,
    skeleton_of,
    tied_away,
    write_configs,
)
from executor.weights.ranks import Ranks
from executor.weights.replaced_folder import replaced_folder
from executor.weights.safetensors_file import SafetensorsFile, dtype_name
from executor.weights.sources import INDEX_FILE, SINGLE_FILE
from executor.weights.targets import Target, check_values, targets_of
from planner.model_rewrites.fused_projection_modules import split_rows

_OUR_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|(generation_)?config\.json")


def save_weights(module: nn.Module, folder: str | os.PathLike[str], *, max_shard_bytes: float = 5e9) -> None:
    """Write the weights of ``module`` to ``folder``, as ``from_pretrained`` reads them. All ranks call this together.

    The folder gets safetensors files, their index where there are several, and config and generation config where the
    module has them. Names are those of the unsharded module; fused projections are taken apart, and tied parameters
    written once. A model of transformers is written in the form that it was loaded from, as by ``save_pretrained``.

    One tensor at a time is whole, on the rank that writes its file; ranks write the files in turn. A new folder beside
    the old one takes its place when it is whole, so that ``folder`` holds one whole checkpoint whatever happens. Other
    files in ``folder``, such as a tokenizer's, are kept.

    Args:
        module: the module, after ``shard_module``.
        folder: a folder on a file system that all ranks share.
        max_shard_bytes: most bytes of a file; one larger tensor has a file of its own.

    Raises:
        WeightsError: tensors on meta, or a folder that holds something else; on every rank. Nothing has been written.
    """
    reshard(module)
    ranks = Ranks(module)
    with ranks.agreeing(what="preparing a checkpoint"):
        checkpoint = _Checkpoint.of(module, max_shard_bytes)
    with replaced_folder(folder, ranks, is_ours=lambda name: _OUR_FILES.fullmatch(name) is not None) as new_folder:
        _write(checkpoint, module, new_folder, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Targets that are written together, because their names in the checkpoint depend on each other."""

    targets: tuple[Target, ...]
    saved: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    """What a checkpoint will hold.

    Attributes:
        groups: the tensors of the module, and their names in the checkpoint.
        headers: name in the checkpoint -> a tensor on meta.
        files: name of a file -> names in it.
        own_name: target's names -> the name under which it is saved.
        skeleton: a model of transformers without values; None: the module is none.
    """

    groups: tuple[_Group, ...]
    headers: Mapping[str, torch.Tensor]
    files: Mapping[str, tuple[str, ...]]
    own_name: Mapping[tuple[str, ...], str]
    skeleton: Any

    @classmethod
    def of(cls, module: nn.Module, max_shard_bytes: float) -> _Checkpoint:
        """Return what a checkpoint of ``module`` will hold.

        Raises:
            WeightsError: tensors on meta, or of a dtype that safetensors does not have.
        """
        targets = targets_of(module)
        check_values(targets)
        skeleton = None
        dropped: set[str] = set()
        ignored: set[str] = set()
        if is_pretrained(module):
            skeleton = skeleton_of(module)
            remember_conversions(skeleton)
            dropped, ignored = tied_away(skeleton), ignored_on_save(skeleton)
        targets = [target for target in targets if not ignored.issuperset(target.names)]
        own_name = {t.names: next((name for name in t.names if name not in dropped), t.names[0]) for t in targets}
        try:
            groups, headers = _grouped(targets, own_name, skeleton)
        except (LookupError, RuntimeError, ValueError):
            # A few families' experts are converted all at once only; from_pretrained reads the model's own names too.
            forget_conversions(skeleton)
            groups, headers = _grouped(targets, own_name, skeleton)
        for name, tensor in headers.items():
            dtype_name(name, tensor.dtype)
        return cls(
            groups=groups,
            headers=headers,
            files=_files(headers, max_shard_bytes),
            own_name=own_name,
            skeleton=skeleton,
        )


def _grouped(
    targets: list[Target], own_name: Mapping[tuple[str, ...], str], skeleton: Any
) -> tuple[tuple[_Group, ...], dict[str, torch.Tensor]]:
    """Return the groups of ``targets``, and name in the checkpoint -> a tensor on meta."""
    group_of: dict[str, int] = {}
    members: dict[int, list[Target]] = {}
    for number, target in enumerate(targets):
        members[number] = [target]
        for name in _saved(_parts(target, own_name, _on_meta(target)), skeleton):
            # Two targets that are converted to one tensor are converted together.
            other = group_of.setdefault(name, number)
            if other != number and number in members:
                members[other] += members.pop(number)
    headers: dict[str, torch.Tensor] = {}
    groups = []
    for together in members.values():
        parts = {name: part for t in together for name, part in _parts(t, own_name, _on_meta(t)).items()}
        saved = _saved(parts, skeleton)
        headers.update(saved)
        groups.append(_Group(targets=tuple(together), saved=tuple(saved)))
    return tuple(groups), headers


def _on_meta(target: Target) -> torch.Tensor:
    return torch.empty(target.tensor.shape, dtype=target.tensor.dtype, device="meta")


def _parts(target: Target, own_name: Mapping[tuple[str, ...], str], whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return name in the unfused module -> tensor, of a target whose values are ``whole``."""
    if target.fused is None:
        return {own_name[target.names]: whole}
    return split_rows(whole, target.fused.rows, target.fused.groups)


def _saved(parts: Mapping[str, torch.Tensor], skeleton: Any) -> dict[str, torch.Tensor]:
    """Return name in the checkpoint -> tensor."""
    return dict(parts) if skeleton is None else saved_names(skeleton, parts)


def _files(headers: Mapping[str, torch.Tensor], max_shard_bytes: float) -> dict[str, tuple[str, ...]]:
    """Return name of a file -> names of its tensors, in order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in headers.items():
        nbytes = tensor.numel() * tensor.dtype.itemsize
        if shards[-1] and filled + nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    if len(shards) == 1:
        return {SINGLE_FILE: tuple(shards[0])}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": tuple(names)
        for number, names in enumerate(shards, start=1)
    }


def _write(checkpoint: _Checkpoint, module: nn.Module, folder: Path, ranks: Ranks) -> None:
    """Write the files of ``checkpoint``: file by file in turn over the ranks, tensor by tensor."""
    writer_of = {file: number % ranks.size for number, file in enumerate(checkpoint.files)}
    file_of = {name: file for file, names in checkpoint.files.items() for name in names}
    failures: list[Exception] = []
    with contextlib.ExitStack() as stack:
        opened: dict[str, SafetensorsFile] = {}
        with _noting(failures):
            for file, names in checkpoint.files.items():
                if writer_of[file] == ranks.rank:
                    headers = {name: checkpoint.headers[name] for name in names}
                    opened[file] = stack.enter_context(SafetensorsFile(folder / file, headers, {"format": "pt"}))
        for group in checkpoint.groups:
            for writer in sorted({writer_of[file_of[name]] for name in group.saved}):
                # A rank that cannot write goes on receiving: the others wait for it.
                wholes = [whole_on_rank(target.tensor, writer, ranks) for target in group.targets]
                if writer != ranks.rank or failures:
                    continue
                with _noting(failures):
                    parts: dict[str, torch.Tensor] = {}
                    for target, whole in zip(group.targets, wholes, strict=True):
                        assert whole is not None
                        parts.update(_parts(target, checkpoint.own_name, whole))
                    for name, tensor in _saved(parts, checkpoint.skeleton).items():
                        if file_of[name] in opened:
                            opened[file_of[name]].write(name, tensor)
                del wholes
        with _noting(failures):
            for file_writer in opened.values():
                file_writer.sync()
            if ranks.rank == 0:
                _write_index(checkpoint, module, folder, file_of)
    if failures:
        raise failures[0]


def _write_index(checkpoint: _Checkpoint, module: nn.Module, folder: Path, file_of: Mapping[str, str]) -> None:
    """Write the index of the files, if there are several, and the configs of the module."""
    if len(checkpoint.files) > 1:
        total = sum(tensor.numel() * tensor.dtype.itemsize for tensor in checkpoint.headers.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if checkpoint.skeleton is not None:
        write_configs(module, checkpoint.skeleton, str(folder))


@contextlib.contextmanager
def _noting(failures: list[Exception]) -> Any:
    """Return a context whose error is appended to ``failures``."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  raised when the other ranks do not wait for this one
        failures.append(error)
