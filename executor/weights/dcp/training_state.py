"""``save_training_state`` and ``load_training_state``: parameters, optimizer, scheduler and random state of a run.

The folder is a checkpoint of ``torch.distributed.checkpoint`` (DCP) with the entries ``model.NAME`` and
``optimizer.state.NAME.KEY``, and a file with what is no tensor of a parameter's shape. A run with another plan, another
number of ranks, or with projections fused in one of the two runs, reads the slices that it stores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from executor.torch_internals.weights import reshard
from executor.weights.dcp.opened_state import OPTIMIZER, OTHER_FILE, STATE, VERSION, OpenedState
from executor.weights.dcp.optimizer_state import fill_optimizer, optimizer_contents, options_of_groups
from executor.weights.dcp.shards import SavePlanner, for_dcp
from executor.weights.dcp.source import MODEL
from executor.weights.load import load_tensors
from executor.weights.ranks import Ranks
from executor.weights.replaced_folder import replaced_folder
from executor.weights.targets import Target, check_values, targets_of
from executor.weights.unsaved_buffers import Buffers
from planner.errors import WeightsError


class Scheduler(Protocol):
    """Anything with a state dict, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state."""


def save_training_state(
    folder: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Scheduler | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the state of a training run to ``folder``. All ranks call this together, between two steps.

    Every rank writes its own shards. A new folder beside the old one takes its place when it is whole, so that
    ``folder`` holds one whole state whatever happens.

    Args:
        folder: a folder on a file system that all ranks share.
        module: the module, after ``shard_module``: its parameters and persistent buffers.
        optimizer: the optimizer, made of the module's parameters: their states, and the options of its groups.
        scheduler: its state is written by rank 0.
        extra: anything else to find again, such as the step: numbers, texts, tensors, lists, dicts; that of rank 0.

    Raises:
        WeightsError: tensors on meta, an optimizer of other parameters, or a folder that holds something else; on every
            rank. Nothing has been written.
    """
    reshard(module)
    ranks = Ranks(module)
    with ranks.agreeing(what="preparing a training state"):
        state, other = _contents(module, optimizer, scheduler, extra)
    other["random"] = ranks.gathered(_random_state())
    with replaced_folder(folder, ranks, is_ours=_is_ours, keeps_others=False) as new_folder:
        with ranks.agreeing(what="writing the options of a training state"):
            if ranks.rank == 0:
                _write_other(new_folder / OTHER_FILE, other)
        save(
            state,
            checkpoint_id=new_folder,
            planner=SavePlanner(),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


def _contents(
    module: nn.Module, optimizer: Optimizer | None, scheduler: Scheduler | None, extra: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what DCP writes, and what it does not, of a training state.

    Raises:
        WeightsError: tensors on meta, or an optimizer of other parameters.
    """
    targets = targets_of(module)
    check_values(targets)
    state: dict[str, Any] = {MODEL: {target.names[0]: for_dcp(target.tensor) for target in targets}}
    other: dict[str, Any] = {
        "version": VERSION,
        "fused": {target.names[0]: _as_data(target) for target in targets if target.fused is not None},
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "extra": dict(extra or {}),
        "groups": None,
    }
    if optimizer is not None:
        states, other["values"], other["groups"] = optimizer_contents(optimizer, targets)
        if states:
            state[OPTIMIZER] = {STATE: states}
    return state, other


def load_training_state(
    folder: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Scheduler | None = None,
    buffers: Buffers | None = None,
) -> dict[str, Any]:
    """Return the ``extra`` of ``save_training_state``, and take over the rest. All ranks call this together.

    The plan, the number of ranks and the fusing of projections may differ from those of the run that wrote the state.
    Random states are restored where the number of ranks is the same.

    Args:
        folder: what ``save_training_state`` wrote.
        module: the module, after ``shard_module``; its parameters may be on meta.
        optimizer: a new optimizer of the module's parameters. Pass it if the state has one.
        scheduler: a new scheduler. Pass it if the state has one.
        buffers: as in ``load_weights``.

    Raises:
        WeightsError: a folder that cannot be read, names or shapes that differ, or an optimizer or scheduler in one of
            the two only; on every rank, before anything is loaded.
    """
    ranks = Ranks(module)
    with ranks.agreeing(what="opening a training state"):
        opened = OpenedState.of(Path(folder))
        _check_both("optimizer", optimizer is not None, opened.other["groups"] is not None)
        _check_both("scheduler", scheduler is not None, opened.other["scheduler"] is not None)
        if optimizer is not None:
            options_of_groups(optimizer, targets_of(module), opened.other["groups"])
    names = {name for target in targets_of(module) for name in target.names}
    load_tensors(module, opened.of_model(names), ranks, buffers=buffers)
    with ranks.agreeing(what="reading a training state"):
        if optimizer is not None:
            fill_optimizer(optimizer, targets_of(module), opened)
        if scheduler is not None:
            scheduler.load_state_dict(opened.other["scheduler"])
        random = opened.other["random"]
        if len(random) == ranks.size:
            _restore_random_state(random[ranks.rank])
    extra: dict[str, Any] = opened.other["extra"]
    return extra


def _write_other(file: Path, other: Mapping[str, Any]) -> None:
    """Write what is no tensor of a parameter's shape, and read it once, so that it can be read again.

    Raises:
        WeightsError: it has objects that a safe reader refuses.
    """
    torch.save(other, file)
    try:
        torch.load(file, weights_only=True, map_location="cpu")
    except UnpicklingError as error:
        raise WeightsError(
            f"The state of the scheduler, the optimizer's groups or extra has an object that is not read back: {error}",
            what_to_do="Keep to numbers, texts, tensors, lists, tuples and dicts.",
        ) from error


def _is_ours(name: str) -> bool:
    return name.endswith(".distcp") or name in (".metadata", OTHER_FILE)


def _check_both(what: str, here: bool, there: bool) -> None:
    if here != there:
        raise WeightsError(
            f"The training state has {'an' if what[0] in 'aeiou' else 'a'} {what}, and none was passed."
            if there
            else f"The training state has no {what}, and one was passed.",
            what_to_do=f"Pass {what}= to both save_training_state and load_training_state; load_weights reads the "
            "parameters alone.",
        )


def _as_data(target: Target) -> dict[str, Any]:
    assert target.fused is not None
    return {"rows": dict(target.fused.rows), "groups": target.fused.groups}


def _random_state() -> dict[str, torch.Tensor]:
    """Return torch's random states in this process, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_state(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
