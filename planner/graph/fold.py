"""Equal blocks in a row, of which three stand for all: what is traced of a deep model.

The whole model is run once on meta tensors, and of every block in a numbered list of modules it is noted which ops run
on which tensors. Blocks that do the same, to what comes from outside or from the block before alike, are *repeats*: the
first three are kept and the model runs again without the others. Only where it then does what it did before, block for
block and around them, is the shorter model traced in its place; `unroll` puts the others back into its graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.graph.capture import ExampleInputs, path_text
from planner.graph.meta_ops import makes_one_tensor, seen_on_meta
from planner.model_rewrites.eager_masks import unpacked_sequences
from planner.model_rewrites.experts import experts_as_one_op
from planner.model_rewrites.mla import mla_keys_concatenated

TRACED_BLOCKS = 3
"""Blocks that stand for a repeat: one that the outside feeds, one that it feeds, and one that shows what goes on."""

_FEWEST_BLOCKS = TRACED_BLOCKS + 2
"""Repeats of fewer blocks are traced as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBlocks:
    """Equal blocks in a row.

    Attributes:
        container: FQN of the list that they are in.
        first: index of the first of them.
        length: how many there are.
    """

    container: str
    first: int
    length: int


def repeats_of(module: nn.Module, inputs: ExampleInputs) -> tuple[RepeatedBlocks, ...]:
    """Return what of ``module`` need not be traced in full; nothing where the shorter model would differ in any way."""
    lists = _lists(module)
    if not lists:
        return ()
    try:
        whole = _record(module, inputs, lists)
        repeats = tuple(repeat for container in lists for repeat in _repeats(container, whole))
        if not repeats:
            return ()
        with without_repeats(module, repeats):
            short = _record(module, inputs, lists)
    except Exception:  # noqa: BLE001  whatever forward raises, tracing in full will report
        return ()
    return repeats if _agree(whole, short, repeats) else ()


@contextmanager
def without_repeats(module: nn.Module, repeats: Sequence[RepeatedBlocks]) -> Iterator[None]:
    """Take all but the first `TRACED_BLOCKS` blocks of each repeat out of ``module`` for as long as this lasts."""
    with ExitStack() as stack:
        for container in dict.fromkeys(repeat.container for repeat in repeats):
            blocks = module.get_submodule(container)._modules
            stack.callback(_put_back, blocks, dict(blocks))
            kept = [blocks[str(index)] for index in kept_indices(len(blocks), repeats, container)]
            blocks.clear()
            blocks.update({str(index): block for index, block in enumerate(kept)})
        yield


def _put_back(blocks: dict[str, nn.Module | None], original: Mapping[str, nn.Module | None]) -> None:
    blocks.clear()
    blocks.update(original)


def kept_indices(length: int, repeats: Sequence[RepeatedBlocks], container: str) -> list[int]:
    """Return which blocks of a list of ``length`` are kept."""
    dropped = {
        index
        for repeat in repeats
        if repeat.container == container
        for index in range(repeat.first + TRACED_BLOCKS, repeat.first + repeat.length)
    }
    return [index for index in range(length) if index not in dropped]


def _lists(module: nn.Module) -> list[str]:
    """Return the FQNs of the lists long enough to fold, those inside another's blocks left out."""
    found: list[str] = []
    for name, submodule in module.named_modules():
        inside = any(re.match(re.escape(outer) + r"\.\d+(\.|$)" if outer else r"\d+(\.|$)", name) for outer in found)
        names = list(submodule._modules)
        if not inside and len(names) >= _FEWEST_BLOCKS and names == [str(index) for index in range(len(names))]:
            found.append(name)
    return found


# --- what a model does ---------------------------------------------------------------------------------------------

_SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})

Block = tuple[str, int]
"""A list's FQN and the index of a block in it."""


@dataclass(slots=True)
class _Doings:
    """What one block does.

    Attributes:
        events: every op, its tensors named from the block's point of view, and what the block returns.
        arguments: path of an argument -> the name of the tensor from the model's point of view.
        calls: how often the block is called.
    """

    events: list[Hashable] = field(default_factory=list)
    arguments: dict[str, Hashable] = field(default_factory=dict)
    calls: int = 0


@dataclass(slots=True)
class _Recording:
    """What a model does: in its blocks, and around them."""

    blocks: dict[Block, _Doings] = field(default_factory=dict)
    around: list[Hashable] = field(default_factory=list)


class _Recorder(TorchDispatchMode):
    """Notes every op that runs, with what its tensors are.

    From the model's point of view a tensor is an input, a piece of the model's state, or the n-th that a block makes or
    that is made around the blocks. From a block's point of view it may also be one of its arguments.
    """

    def __init__(self, module: nn.Module, inputs: ExampleInputs, lists: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = _Recording()
        self._names: dict[int, Hashable] = {}
        self._kept: list[torch.Tensor] = []
        self._made: dict[Block | None, int] = {}
        self._current: Block | None = None
        self._own: dict[int, Hashable] = {}
        self._known: dict[Hashable, torch.Tensor] = {}
        self._blocks = {
            block: (name, int(index))
            for name in lists
            for index, block in module.get_submodule(name)._modules.items()
            if block is not None
        }
        for path, leaf in pytree.tree_leaves_with_path((inputs.args, dict(inputs.kwargs))):
            if isinstance(leaf, torch.Tensor):
                self._name(leaf, ("given", path_text(path)))
        for state, tensor in (*module.named_parameters(), *module.named_buffers()):
            self._name(tensor, ("state", state, tensor.requires_grad))

    def _name(self, tensor: torch.Tensor, name: Hashable) -> None:
        self._names[id(tensor)] = name
        self._kept.append(tensor)  # so that no other tensor gets its id

    def _seen(self, tensor: torch.Tensor) -> Hashable:
        """Return the tensor's name; one that is new is the next that is made where the model is just now."""
        if id(tensor) not in self._names:
            number = self._made.get(self._current, 0)
            self._made[self._current] = number + 1
            self._name(tensor, ("made", self._current, number))
            if self._current is not None:
                self._own[id(tensor)] = ("made", number)
        return self._names[id(tensor)]

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for block in self._blocks:
                stack.callback(block.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        block = self._blocks[module]
        doings = self.recording.blocks.setdefault(block, _Doings())
        doings.calls += 1
        self._current, self._own = block, {}
        prefix = f"{block[0]}.{block[1]}." if block[0] else f"{block[1]}."
        for state, tensor in (*module.named_parameters(), *module.named_buffers()):
            known = self._names.get(id(tensor), ())
            if known == ("state", prefix + state, tensor.requires_grad):
                self._own[id(tensor)] = ("own state", state, tensor.requires_grad)
        for path, leaf in pytree.tree_leaves_with_path((args, kwargs)):
            text = path_text(path)
            if isinstance(leaf, torch.Tensor):
                doings.arguments[text] = self._seen(leaf)
                self._own.setdefault(id(leaf), ("argument", text))
            else:
                doings.events.append(("argument", text, repr(leaf)))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.recording.blocks[self._blocks[module]].events.append(("returns", self._described(output)))
        self._current, self._own = None, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        event = (func, self._described(args), self._described(kwargs))
        out = self._run(func, args, kwargs)
        current = self._current
        made: list[Hashable] = []
        for leaf in (out,) if isinstance(out, torch.Tensor) else pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._seen(leaf)
                made.append((tuple(leaf.shape), leaf.dtype))
            else:
                made.append(repr(leaf))
        events = self.recording.around if current is None else self.recording.blocks[current].events
        events.append((event, tuple(made)))
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an op makes. Of equal ops that make one new tensor the first is run: on meta no values count."""
        if not makes_one_tensor(func):
            return func(*args, **kwargs)
        key = (func, seen_on_meta(args), seen_on_meta(kwargs))
        known = self._known.get(key)
        if known is not None:
            return torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device=known.device)
        out = func(*args, **kwargs)
        if type(out) is torch.Tensor and out.is_meta and out.storage_offset() == 0:
            self._known[key] = out
        return out

    def _described(self, tree: Any) -> Hashable:
        if isinstance(tree, torch.Tensor):
            name = self._seen(tree)
            return self._own.get(id(tree), name), tuple(tree.shape), tree.dtype
        kind = type(tree)
        if kind in _SCALARS:
            return repr(tree)
        if kind is tuple or kind is list:
            return kind.__name__, tuple([self._described(part) for part in tree])
        if kind is dict:
            return "dict", tuple([(key, self._described(part)) for key, part in tree.items()])
        leaves, spec = pytree.tree_flatten(tree)
        if spec.is_leaf():
            return repr(tree)
        return str(spec), tuple([self._described(leaf) for leaf in leaves])


def _record(module: nn.Module, inputs: ExampleInputs, lists: Sequence[str]) -> _Recording:
    recorder = _Recorder(module, inputs, lists)
    # Inference mode: tensors then stay the objects that ops make, which is how they are told apart.
    with (
        torch.inference_mode(),
        unpacked_sequences(),
        experts_as_one_op(module),
        mla_keys_concatenated(module),
        recorder.attached(),
        recorder,
    ):
        module(*inputs.args, **inputs.kwargs)
    return recorder.recording


# --- which blocks are repeats --------------------------------------------------------------------------------------


def _repeats(container: str, recording: _Recording) -> Iterator[RepeatedBlocks]:
    indices = sorted(index for name, index in recording.blocks if name == container)
    first = 0
    for index in indices:
        if index == first:
            continue
        if index - 1 in indices and _goes_on(container, recording, first, index):
            continue
        if index - first >= _FEWEST_BLOCKS:
            yield RepeatedBlocks(container=container, first=first, length=index - first)
        first = index
    if indices and indices[-1] + 1 - first >= _FEWEST_BLOCKS:
        yield RepeatedBlocks(container=container, first=first, length=indices[-1] + 1 - first)


def _goes_on(container: str, recording: _Recording, first: int, index: int) -> bool:
    """Tell whether a block does what the one before it does, to what comes to it alike; ``first`` begins the repeat."""
    before, block = recording.blocks[container, index - 1], recording.blocks[container, index]
    if block.events != before.events or block.calls != 1 or before.calls != 1:
        return False
    if index - first < TRACED_BLOCKS - 1:
        return block.arguments.keys() == before.arguments.keys()
    return all(
        name == of_before or _relative(container, name, index) == _relative(container, of_before, index - 1)
        for name, of_before in ((name, before.arguments[path]) for path, name in block.arguments.items())
    )


def _relative(container: str, name: Any, index: int) -> Hashable:
    """Return a tensor's name as a block sees it: from how many blocks before it comes."""
    if name[0] == "made" and name[1] is not None and name[1][0] == container:
        return "made", index - name[1][1], name[2]
    return name, index  # not the same for two blocks: what is the same for both is told by the name itself


# --- whether the shorter model does the same -----------------------------------------------------------------------


def _agree(whole: _Recording, short: _Recording, repeats: Sequence[RepeatedBlocks]) -> bool:
    lengths: dict[str, int] = {}
    for container, _ in whole.blocks:
        lengths[container] = lengths.get(container, 0) + 1
    kept = {
        (container, short_index): (container, index)
        for container, length in lengths.items()
        for short_index, index in enumerate(kept_indices(length, repeats, container))
    }
    if set(short.blocks) != set(kept):
        return False

    def in_whole(item: Any, repeat: RepeatedBlocks | None) -> Any:
        """Return what the short model's recording says in the whole model's names, as ``repeat``'s blocks know them."""
        return _renamed(
            item,
            lambda block: _last_of(kept[block], [other for other in repeats if other != repeat]),
            lambda name: _state_in_whole(name, kept),
        )

    if in_whole(short.around, None) != whole.around:
        return False
    for block, original in kept.items():
        ours, theirs = short.blocks[block], whole.blocks[original]
        repeat = _repeat_of(original, repeats)
        if in_whole(ours.events, repeat) != theirs.events or in_whole(ours.arguments, repeat) != theirs.arguments:
            return False
        if ours.calls != theirs.calls:
            return False
    return True


def _repeat_of(block: Block, repeats: Sequence[RepeatedBlocks]) -> RepeatedBlocks | None:
    container, index = block
    return next((r for r in repeats if r.container == container and r.first <= index < r.first + r.length), None)


def _last_of(block: Block, repeats: Sequence[RepeatedBlocks]) -> Block:
    """Return the block that stands where ``block`` does for those after a repeat: the last kept is the last of all."""
    for repeat in repeats:
        if block == (repeat.container, repeat.first + TRACED_BLOCKS - 1):
            return repeat.container, repeat.first + repeat.length - 1
    return block


def _state_in_whole(name: str, kept: Mapping[Block, Block]) -> str:
    return fqn_in_whole(name, {block: original[1] for block, original in kept.items()})


def fqn_in_whole(fqn: str, indices: Mapping[Block, int]) -> str:
    """Return an FQN of the shorter model as it is in the whole: ``indices`` are those of the kept blocks there."""
    for container in {name for name, _ in indices}:
        match = re.match(re.escape(container + "." if container else "") + r"(\d+)(?=\.|$)", fqn)
        if match:
            index = indices[container, int(match[1])]
            return f"{fqn[: match.start(1)]}{index}{fqn[match.end(1) :]}"
    return fqn


def _renamed(item: Any, block: Callable[[Block], Block], state: Callable[[str], str]) -> Any:
    """Return a recorded item with every tensor's name in it renamed."""
    if isinstance(item, tuple):
        if len(item) == 3 and item[0] == "made" and isinstance(item[1], tuple):
            return "made", block(item[1]), item[2]
        if len(item) == 3 and item[0] == "state":
            return "state", state(item[1]), item[2]
        return tuple(_renamed(part, block, state) for part in item)
    if isinstance(item, list):
        return [_renamed(part, block, state) for part in item]
    if isinstance(item, dict):
        return {key: _renamed(part, block, state) for key, part in item.items()}
    return item
