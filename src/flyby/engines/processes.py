"""Engine ``processes``: as many sites at once as there are cores, one thread each, the images shared through one memory map.

Workers are spawned, never forked. A worker that loses its parent ends by itself; a worker that dies fails the run with its name,
and ``--resume`` goes on from what the others finished.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from flyby.engines.jobs import Job, one_thread, perform
from flyby.errors import FlybyError
from flyby.training import Row

_events: Any = None


def run_processes(jobs: Sequence[Job], on_epoch: Callable[[Row], None], workers: int | None = None) -> None:
    """Largest share of the machine, same bytes as ``inline``: jobs are independent and each runs on one thread."""
    if not jobs:
        return
    context = multiprocessing.get_context("spawn")
    events = context.Queue()
    workers = min(len(jobs), workers or os.cpu_count() or 1)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(events, os.getpid()))
    waiting: dict[Future[float], Job] = {}
    try:
        with _without_interrupts():
            waiting = {pool.submit(_work, job.model_dump_json()): job for job in jobs}
        while waiting:
            done, _ = wait(waiting, timeout=0.05, return_when=FIRST_COMPLETED)
            _drain(events, on_epoch)
            for future in done:
                job = waiting.pop(future)
                try:
                    future.result()
                except BrokenProcessPool:
                    raise FlybyError(
                        f"a worker process died (killed, or out of memory) with {job.site} unfinished; run again with --resume to go on"
                    ) from None
        _drain(events, on_epoch)
        pool.shutdown()
    finally:
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        events.close()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started in here never see Ctrl-C, not even while they still import: it is the parent's to handle, which ends them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _drain(events: Any, on_epoch: Callable[[Row], None]) -> None:
    while True:
        try:
            on_epoch(events.get_nowait())
        except queue.Empty:
            return


def _start(events: Any, parent: int) -> None:
    global _events
    _events = events
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    one_thread()
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _work(raw: str) -> float:
    return perform(Job.model_validate_json(raw), _events.put)
