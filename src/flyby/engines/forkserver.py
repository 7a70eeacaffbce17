"""A fork server that imports torch once, for all workers of engine ``processes``; without it each would spend seconds
importing.

This file imports nothing heavy, so that the command line can start the server first and import torch itself meanwhile.
The server never has a second thread (a fork would lose it, and with it any lock it held) and never touches a GPU; other
systems than Linux spawn.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext

PRELOAD = "flyby.engines.preload"
SINGLE = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def context_for(device: str) -> BaseContext:
    """How to start workers for this device: forked from the server where that is safe, else spawned."""
    if device != "cpu" or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    start()
    return multiprocessing.get_context("forkserver")


def start() -> None:
    """Have the server begin its imports now; harmless where it runs already, or where workers are spawned."""
    if sys.platform != "linux":
        return
    from multiprocessing import forkserver

    forkserver.set_forkserver_preload([PRELOAD])
    before = {name: os.environ.get(name) for name in SINGLE}
    os.environ.update(dict.fromkeys(SINGLE, "1"))  # numpy's BLAS would start its threads when it is imported
    try:
        with without_interrupts():
            forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def stop() -> None:
    """End the server at once, imports or not: it holds this process's output open, and whoever reads that would wait
    for it."""
    from multiprocessing import forkserver

    if pid := getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def worth_starting(engine: str | None, device: str) -> bool:
    """Whether a run with these words will likely use workers on the CPU; asked before torch, which would know, is
    imported."""
    if engine is None:
        return (
            device in ("auto", "cpu")
            and (os.cpu_count() or 1) > 1
            and not (device == "auto" and os.path.exists("/dev/nvidiactl"))
        )
    return engine == "processes" and device in ("auto", "cpu")


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes started in here never see Ctrl-C, not even while they still import: it is the parent's to handle, which
    ends them. One that comes in here is raised at the end: the mask alone would let another thread take it, and the
    process that is just being started would be nobody's."""
    resource_tracker.ensure_running()  # were it started in here, it would lift the block
    heard: list[int] = []
    mine = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number)) if mine else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if mine:
            signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


@contextmanager
def without_main() -> Iterator[None]:
    """Processes started in here do not import the caller's script again: workers need nothing of it, and a script
    without a ``__main__`` guard would run a second time in each."""
    main = sys.modules["__main__"]
    names: tuple[str, ...] = ("__file__", "__spec__")
    kept = {name: main.__dict__.pop(name) for name in names if name in main.__dict__}
    main.__dict__["__spec__"] = None  # as in a notebook
    try:
        yield
    finally:
        main.__dict__.update(kept)
