"""Run functions on real gloo processes: ``run_on_gloo(fn, 4, ...)`` or ``GlooRanks(4)``, without ports or a GPU."""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import multiprocessing.connection
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.fast_process import make_fast
from support.fork_server import preload

from executor.torch_internals.gloo import run_one_worker_per_gloo_group

preload()


class RankError(AssertionError):
    """What a rank raised: its traceback as text, since an exception itself need not be picklable."""


def run_on_gloo(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Return ``fn(rank, *args, **kwargs)`` of every rank; each rank is a process in one gloo process group.

    The processes are forked from one that has imported torch and what most of them need, once for all calls.

    Args:
        fn: at the top level of its file.
        world_size: number of processes.
        *args: picklable, as are the results.
        timeout_s: of each collective, so that a rank that waits in vain fails and does not hang.
        **kwargs: picklable.

    Raises:
        RankError: a rank raised; holds the traceback of the first that did.
    """
    call = pickle.dumps((args, kwargs))
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
        # Test files are no importable modules, so a rank loads fn's file by its path, under the same name.
        source = (fn.__module__, inspect.getfile(fn), fn.__qualname__)
        try:
            arguments = (source, world_size, folder, timeout_s, call)
            mp.start_processes(_rank_main, arguments, nprocs=world_size, start_method="forkserver")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            # A failing rank makes the others fail too, with less to say: the cause is with one that died of a signal,
            # or with the first to fail.
            failed = [path for path in Path(folder).glob("crash-*") if path.stat().st_size]
            failed += sorted(Path(folder).glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
            cause = f"{failed[0].name}:\n{failed[0].read_text()}" if failed else str(error)
            raise RankError(cause) from None
        # Our own pickles, written by the processes above.
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world_size)]  # noqa: S301


class GlooRanks:
    """Processes of one gloo process group that stay for many calls; use it as a context.

    After a call that fails, in which ranks may wait for each other, they are ended; the next call starts others.
    """

    def __init__(self, world_size: int, timeout_s: float = 120.0) -> None:
        self._world_size, self._timeout_s = world_size, timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> GlooRanks:
        return self

    def __exit__(self, *unused: object) -> None:
        self._end()

    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Return ``fn(rank, *args)`` of every rank; ``fn`` and ``args`` are as for `run_on_gloo`.

        Raises:
            RankError: a rank raised, or did not answer in time.
        """
        if not self._processes:
            self._start()
        task = ((fn.__module__, inspect.getfile(fn), fn.__qualname__), pickle.dumps(args))
        for pipe in self._pipes:
            pipe.send(task)
        results: dict[Any, Any] = {}
        while len(results) < len(self._pipes):
            waiting = [pipe for pipe in self._pipes if pipe not in results]
            ready = multiprocessing.connection.wait(waiting, self._timeout_s + 30)
            for pipe in ready:
                try:
                    is_right, result = pipe.recv()
                except (EOFError, ConnectionError):
                    is_right, result = False, self._crashes()
                if not is_right:
                    self._end()
                    raise RankError(result)
                results[pipe] = pickle.loads(result)  # noqa: S301
            if not ready:
                self._end()
                raise RankError("ranks have not answered")
        return [results[pipe] for pipe in self._pipes]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-")
        context = mp.get_context("forkserver")
        for rank in range(self._world_size):
            here, there = context.Pipe()
            arguments = (rank, self._world_size, self._folder.name, self._timeout_s, there)
            process = context.Process(target=_serve_calls, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def _crashes(self) -> str:
        """Return the tracebacks of ranks that died of a signal."""
        assert self._folder is not None
        crashes = [path for path in sorted(Path(self._folder.name).glob("crash-*")) if path.stat().st_size]
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in crashes) or "a rank died without a word"

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()


def _serve_calls(rank: int, world_size: int, folder: str, timeout_s: float, pipe: Any) -> None:
    _watch_for_crashes(rank, folder)
    _initialize(rank, world_size, folder, timeout_s)
    while True:
        try:
            source, args = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            result = pickle.dumps(_load(*source)(rank, *pickle.loads(args)))  # noqa: S301
            pipe.send((True, result))
        except Exception:  # noqa: BLE001 - whatever it is, the caller hears of it
            pipe.send((False, f"error-{rank}:\n{traceback.format_exc()}"))


def _watch_for_crashes(rank: int, folder: str) -> None:
    """Let a process that dies of a signal write its tracebacks to a file: it leaves no others."""
    faulthandler.enable((Path(folder) / f"crash-{rank}").open("w"))


def _initialize(rank: int, world_size: int, folder: str, timeout_s: float) -> None:
    torch.set_num_threads(1)
    make_fast()
    run_one_worker_per_gloo_group()
    # A file store, because ports clash.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def _rank_main(
    rank: int, source: tuple[str, str, str], world_size: int, folder: str, timeout_s: float, call: bytes
) -> None:
    _watch_for_crashes(rank, folder)
    _initialize(rank, world_size, folder, timeout_s)
    try:
        fn = _load(*source)
        args, kwargs = pickle.loads(call)  # noqa: S301
        result = pickle.dumps(fn(rank, *args, **kwargs))
        (Path(folder) / f"result-{rank}").write_bytes(result)
        dist.barrier()
    except BaseException:
        (Path(folder) / f"error-{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def _load(module: str, file: str, qualname: str) -> Callable[..., Any]:
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        # Before it runs: pickles of its classes name it.
        sys.modules[module] = loaded
        spec.loader.exec_module(loaded)
    fn: Any = sys.modules[module]
    for name in qualname.split("."):
        fn = getattr(fn, name)
    found: Callable[..., Any] = fn
    return found
