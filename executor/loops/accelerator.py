"""``prepare_accelerator``: accelerate's ``Accelerator`` with a sharded module, fed with whole batches by every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.data import DistributedSampler

from executor.loops.adoption import refuse_mixed_precision, take_whole_batches
from executor.loops.whole_state import whole_state_dict
from executor.resolve.sharded_as import plan_of
from executor.runtime.root.sharded_root import find_root, root_of
from executor.weights.dcp.training_state import load_training_state, save_training_state
from planner.errors import LoopError

_STATE_FOLDER = "training_state"
"""Name of the folder in a checkpoint that has the shards of all ranks."""


def prepare_accelerator(accelerator: Any, module: nn.Module) -> Any:
    """Return ``accelerator``, changed in place to run the sharded ``module``; call it before ``accelerator.prepare``.

    ``accelerator.prepare(module, optimizer, loader, scheduler)`` then wraps nothing around the module, and gives every
    rank all rows of the loader's batches, in one order. ``backward``, ``accumulate``, ``clip_grad_norm_`` and
    ``gather_for_metrics`` work as in one process. ``save_state`` writes the shards of all ranks, and ``load_state``
    reads them under any plan. ``get_state_dict`` returns whole tensors on rank 0, and nothing on the others.

    Args:
        accelerator: an ``Accelerator`` of any age; the process group has the ranks of the plan and no others.
        module: the result of ``shard_module``, or peft's model around it.

    Raises:
        PlanMismatchError: ``module`` is not sharded.
        LoopError: the accelerator has mixed precision or a plugin, such as FSDP, that shards modules itself.
    """
    sharded, _ = root_of(module)
    precision, dtype = str(accelerator.mixed_precision), plan_of(sharded).job.dtype
    refuse_mixed_precision(precision, dtype, option="Make the Accelerator without mixed_precision")
    kind = accelerator.distributed_type.value
    if not kind.startswith("MULTI_") and kind != "NO":
        raise LoopError(
            f"The accelerator's distributed type is {kind}, which shards modules itself.",
            what_to_do="Make the Accelerator without a plugin for FSDP, DeepSpeed or Megatron-LM.",
        )
    take_whole_batches(module)
    if not isinstance(accelerator, _WholeBatches):
        adopted = type(type(accelerator).__name__, (_WholeBatches, type(accelerator)), {})
        accelerator.__class__ = adopted
        # Ranks draw the order of the rows from one state.
        accelerator.rng_types = ["torch", *(kind for kind in accelerator.rng_types or [] if kind != "torch")]
    return accelerator


class _WholeBatches:
    """The parts of an ``Accelerator`` that see all ranks together as one process."""

    num_processes = 1
    split_batches = True
    """The loader's batch is the whole batch of a step, and a scheduler makes one step with it."""
    dispatch_batches = False

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Return a sharded ``model`` as it is."""
        if find_root(model) is None:
            parent: Any = super()
            return parent.prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        take_whole_batches(model)
        models: list[nn.Module] = vars(self)["_models"]
        if all(model is not other for other in models):
            models.append(model)
        return model

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a loader that gives every rank all rows of each batch, in the order of rank 0."""
        if isinstance(data_loader.sampler, DistributedSampler):
            raise LoopError(
                "The loader has a DistributedSampler, which gives each rank its own rows, but batches are whole here.",
                what_to_do="Give accelerator.prepare a loader of global batches; the module cuts them to the plan.",
            )
        workers = data_loader.worker_init_fn
        if isinstance(workers, partial) and "rank" in workers.keywords:
            # Trainer's seed of a worker; augmentations are to be the same on all ranks.
            data_loader.worker_init_fn = partial(workers, rank=0)
        parent: Any = super()
        loader = parent.prepare_data_loader(data_loader, *args, **kwargs)
        sampler: Any = getattr(loader.batch_sampler, "sampler", None)
        if sampler is not None and hasattr(sampler, "initial_seed"):
            seed = [sampler.initial_seed]
            dist.broadcast_object_list(seed, src=0)
            sampler.initial_seed = seed[0]
        return loader

    def gather(self, tensor: Any) -> Any:
        """Return ``tensor``, which is whole; a DTensor in it is gathered."""
        return pytree.tree_map_only(DTensor, lambda leaf: leaf.full_tensor(), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return ``input_data``, which is whole, as ``gather`` does."""
        if not use_gather_object and all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(input_data)):
            parent: Any = super()
            return parent.gather_for_metrics(input_data)
        return input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return ``scale * tensor``: over the one process that all ranks are together, there is nothing to reduce."""
        return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf * scale, self.gather(tensor))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the whole state dict of ``model`` on rank 0, and an empty one on the others. All ranks call it."""
        if find_root(model) is None:
            parent: Any = super()
            return parent.get_state_dict(model, unwrap=unwrap)
        return whole_state_dict(model)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Write accelerate's state, and the shards of all ranks beside it."""
        parent: Any = super()
        with self._without_shards() as states:
            folder = parent.save_state(output_dir, *args, **kwargs)
        for name, (model, optimizer) in states.items():
            save_training_state(Path(folder) / name, model, optimizer)
        return folder

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Read what ``save_state`` wrote, under this plan or another."""
        parent: Any = super()
        with self._without_shards() as states:
            parent.load_state(input_dir, *args, **kwargs)
        folder = input_dir
        if folder is None:  # accelerate found the latest checkpoint
            folder = max(Path(vars(self)["project_configuration"].project_dir, "checkpoints").iterdir(), key=_number)
        for name, (model, optimizer) in states.items():
            load_training_state(Path(folder) / name, model, optimizer)

    @contextmanager
    def _without_shards(self) -> Iterator[dict[str, tuple[nn.Module, Any]]]:
        """Return a context in which accelerate sees only what is not sharded; it gives name -> model, optimizer."""
        fields = vars(self)
        models, optimizers = fields["_models"], fields["_optimizers"]
        sharded = [model for model in models if find_root(model) is not None]
        states: dict[str, tuple[nn.Module, Any]] = {}
        taken: list[Any] = []
        for number, model in enumerate(sharded):
            parameters = set(model.parameters())
            own = [optimizer for optimizer in optimizers if parameters & set(optimizer.param_groups[0]["params"])]
            if len(own) > 1:
                raise LoopError(
                    f"{len(own)} optimizers have parameters of one sharded {type(model).__name__}.",
                    what_to_do="Give the parameters to one optimizer, in several groups.",
                )
            states[_STATE_FOLDER if number == 0 else f"{_STATE_FOLDER}_{number}"] = (model, own[0] if own else None)
            taken += own
        fields["_models"] = [model for model in models if all(model is not other for other in sharded)]
        fields["_optimizers"] = [one for one in optimizers if all(one is not other for other in taken)]
        try:
            yield states
        finally:
            fields["_models"], fields["_optimizers"] = models, optimizers


def _number(folder: Path) -> int:
    """Return N of a folder ``checkpoint_N``."""
    return int(folder.name.rpartition("_")[2])
