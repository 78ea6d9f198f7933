"""``load_weights``: reads a checkpoint into a sharded module; each rank reads only the slices that it stores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from executor.torch_internals.weights import adopt_all_parameters, materialize, reshard
from executor.weights.lazy_tensors import LazyTensor, read_into
from executor.weights.local_shards import local_indices
from executor.weights.matching import Match, match_names
from executor.weights.pretrained import ignored_in_checkpoint, in_module_names, is_pretrained, skeleton_of
from executor.weights.ranks import Ranks
from executor.weights.sources import Source, open_source
from executor.weights.targets import Target, targets_of
from executor.weights.unsaved_buffers import Buffers, UnsavedTensor, values_of_unsaved
from planner.errors import WeightsError


def load_weights(
    module: nn.Module, source: Source, *, strict: bool = True, buffers: Buffers | None = None
) -> nn.Module:
    """Return ``module``, with the weights of ``source`` read into its shards. All ranks call this together.

    Parameters may be on meta, or have values already. Each rank reads only the slices that it stores, a block of rows
    at a time, and casts them to the parameter's dtype. Tied parameters are read once. Names are those of the unsharded
    module; fused projections take their parts. Checkpoints of transformers' models are converted as by
    ``from_pretrained``: prefixes, renamed layers, experts in files of their own, weights in MXFP4 and in 8 bits.

    Tensors on meta that no checkpoint holds (rotary tables, masks) are made as the module makes them. After this call
    nothing of the module is on meta. Call it before the optimizer is made.

    Args:
        module: the module, after ``shard_module``.
        source: a safetensors file, a folder that ``save_pretrained`` or ``save_weights`` wrote, or a folder with a DCP
            checkpoint: a path that every rank can read. Or a state dict, on every rank or on one of them; the others
            pass None.
        strict: whether all names have to match. False ignores names of the source that the module lacks, and names that
            the source lacks where the module has values.
        buffers: name -> values of tensors that no checkpoint holds, or a function that builds the unsharded module, for
            modules that are not of transformers.

    Raises:
        WeightsError: a source that cannot be read, names or shapes that differ, or buffers that nothing gives; on every
            rank, before anything is loaded. A file that fails while it is read; then some parameters have new values.
    """
    ranks = Ranks(module)
    names = {name for target in targets_of(module) for name in target.names}
    load_tensors(module, open_source(source, ranks, names), ranks, strict=strict, buffers=buffers)
    return module


def load_tensors(
    module: nn.Module,
    tensors: dict[str, LazyTensor],
    ranks: Ranks,
    *,
    strict: bool = True,
    buffers: Buffers | None = None,
) -> None:
    """Read ``tensors``, by name, into ``module``; otherwise as ``load_weights``."""
    reshard(module)
    with ranks.agreeing(what="matching names of weights"):
        matches, unsaved = _match(module, tensors, strict=strict, buffers=buffers)
    _check_ties(matches, ranks)
    with ranks.agreeing(what="reading weights"):
        for item, values in unsaved:
            item.assign(values, ranks.device)
        locals_ = _materialize(module, [match.target for match in matches], ranks.device)
        _read(matches, locals_)
        _check_no_meta(module)


def _match(
    module: nn.Module, tensors: dict[str, LazyTensor], *, strict: bool, buffers: Buffers | None
) -> tuple[list[Match], list[tuple[UnsavedTensor, torch.Tensor]]]:
    """Return the matches, and the values of tensors that no checkpoint holds."""
    targets = targets_of(module)
    is_ignored = _never
    skeleton = skeleton_of(module) if is_pretrained(module) else None
    if skeleton is not None:
        names = {name: target for target in targets for name in (*target.names, *target.unfused_names)}
        tensors = in_module_names(module, skeleton, names, tensors)

        def is_ignored(name: str) -> bool:
            return ignored_in_checkpoint(skeleton, name)

    matches = match_names(targets, tensors, strict=strict, is_ignored=is_ignored)
    return matches, values_of_unsaved(module, buffers, skeleton)


def _never(name: str) -> bool:
    return False


def _check_ties(matches: Sequence[Match], ranks: Ranks) -> None:
    """Raise an error if the source has different values under the names of one tied parameter."""
    differing: list[str] = []
    for match in matches:
        indices = local_indices(match.target.tensor) if match.others else ()
        for other in match.others:
            first, second = (tensor.prepared().read(indices) for tensor in (match.values, other))
            if not torch.equal(first, second):
                differing.append(" and ".join(match.target.names))
    differs = [name for names in ranks.gathered(differing) for name in names]
    if differs:
        raise WeightsError(
            f"The module ties parameters for which the source has different values: {'; '.join(sorted(set(differs)))}. "
            "Nothing has been loaded.",
            what_to_do="Untie them in the config (tie_word_embeddings=False), or keep one of them in the source.",
        )


def _materialize(module: nn.Module, targets: Sequence[Target], device: torch.device) -> list[torch.Tensor]:
    """Return what this rank stores of each target; those on meta get memory. Parameters stay the same objects."""
    buffers: dict[int, torch.Tensor] = {}
    on_meta = [target for target in targets if target.tensor.is_meta]
    for target in on_meta:
        if isinstance(target.tensor, nn.Parameter):
            materialize(target.tensor, device)
            continue
        buffers[id(target)] = torch.empty_like(target.tensor, device=device)
        for name in target.names:
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner)._buffers[attribute] = buffers[id(target)]
    if on_meta:
        adopt_all_parameters(module)
    return [buffers.get(id(target), target.local) for target in targets]


@torch.no_grad()
def _read(matches: Sequence[Match], locals_: Sequence[torch.Tensor]) -> None:
    """Read every match into what this rank stores. A rank that fails goes on with what the others need of it."""
    error: Exception | None = None
    for match, local in zip(matches, locals_, strict=True):
        values = match.values.prepared()
        if error is not None:
            continue
        try:
            read_into(local, values, local_indices(match.target.tensor))
        except Exception as raised:  # noqa: BLE001  raised below
            error = raised
    if error is not None:
        raise WeightsError(
            f"Reading weights failed: {type(error).__name__}: {error}. Some parameters have new values.",
            what_to_do="Check the file, and load again.",
        ) from error


def _check_no_meta(module: nn.Module) -> None:
    left = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]
    if left:
        raise WeightsError(
            f"These are still on meta: {', '.join(left)}.", what_to_do="Report this as a fault of shardplan."
        )
