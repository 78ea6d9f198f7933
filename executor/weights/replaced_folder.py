"""A folder that is written beside the old one, and takes its place when it is whole."""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from executor.weights.ranks import Ranks
from planner.errors import WeightsError

_PARTIAL = ".partial"
_OLD = ".old"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""Constants of Linux's renameat2(2)."""


@contextmanager
def replaced_folder(
    folder: str | os.PathLike[str], ranks: Ranks, *, is_ours: Callable[[str], bool], keeps_others: bool = True
) -> Iterator[Path]:
    """Return a context that yields a new folder beside ``folder``, which it replaces when all ranks have left it.

    If a rank raises an error or is killed, ``folder`` stays as it was. All ranks enter and leave together; they see the
    same file system.

    Args:
        folder: path of the result; its parents are made.
        ranks: the ranks that write together.
        is_ours: whether a file of an existing folder, by its name, is replaced.
        keeps_others: whether the other files of an existing folder are kept; otherwise they are an error.

    Raises:
        WeightsError: ``folder`` exists and is no folder of this kind, or a rank does not see the new folder.
    """
    path = Path(os.path.abspath(folder))
    partial: Path | None = None
    with ranks.agreeing(what="making a folder for a checkpoint"):
        if ranks.rank == 0:
            _check(path, is_ours, keeps_others)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_PARTIAL}")
            partial.mkdir()
    partial = ranks.from_rank(partial, 0)
    assert partial is not None
    try:
        with ranks.agreeing(what="writing a checkpoint"):
            if not partial.is_dir():
                raise WeightsError(
                    f"This rank does not see {str(partial)!r}, which rank 0 has made.",
                    what_to_do="Write checkpoints to a file system that all ranks share.",
                )
            yield partial
        with ranks.agreeing(what="replacing a checkpoint"):
            if ranks.rank == 0:
                _replace(path, partial, is_ours)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _check(path: Path, is_ours: Callable[[str], bool], keeps_others: bool) -> None:
    """Raise an error if ``path`` must not be replaced."""
    if not path.exists():
        return
    names = [item.name for item in path.iterdir()] if path.is_dir() else []
    others = [name for name in names if not is_ours(name)]
    if path.is_symlink() or not path.is_dir() or (others and (not keeps_others or len(others) == len(names))):
        what = f"with {', '.join(sorted(others)[:8])}" if others else "and no plain folder"
        raise WeightsError(
            f"{str(path)!r} exists already, {what}: it is not a checkpoint that this call would replace.",
            what_to_do="Give a new folder, or one that holds an older checkpoint.",
        )


def _replace(path: Path, partial: Path, is_ours: Callable[[str], bool]) -> None:
    """Put ``partial`` in the place of ``path``, with the files of ``path`` that are not ours."""
    if path.exists():
        for item in path.iterdir():
            if not is_ours(item.name) and not (partial / item.name).exists():
                _link(item, partial / item.name)
        old = partial
        if not _exchange(partial, path):
            old = path.with_name(partial.name.removesuffix(_PARTIAL) + _OLD)
            path.rename(old)
            partial.rename(path)
        _sync(path.parent)
        shutil.rmtree(old)
    else:
        partial.rename(path)
        _sync(path.parent)
    # What killed runs have left.
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{_PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)


def _exchange(path: Path, other: Path) -> bool:
    """Exchange two folders in one step, and return True; False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not Linux
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _link(item: Path, target: Path) -> None:
    if item.is_dir():
        shutil.copytree(item, target, symlinks=True)
        return
    try:
        os.link(item, target)
    except OSError:  # a file system without hard links
        shutil.copy2(item, target)


def _sync(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
