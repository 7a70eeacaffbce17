"""Engine ``processes``: as many sites at once as there are cores, one thread each, the images shared through one memory
map.

Workers come from a fork server that has imported torch and has no threads (``flyby.engines.forkserver``); on a GPU they
are spawned. A worker that loses its parent ends by itself; a worker that dies fails the run with its name, and
``--resume`` goes on from what the others finished.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from flyby import files
from flyby.engines import forkserver
from flyby.engines.jobs import Job, perform, samples_of
from flyby.errors import FlybyError
from flyby.machine import one_thread
from flyby.training.loop import Row

_events: Any = None
_peaks: dict[int, float] = {}  # megabytes, by worker, of the last run


def run_processes(jobs: Sequence[Job], on_epoch: Callable[[Row], None], workers: int | None = None) -> None:
    """Same bytes as ``inline``: jobs are independent and each runs on one thread. The largest sites go first, so that
    none is left to the end."""
    _peaks.clear()
    if not jobs:
        return
    context = forkserver.context_for(jobs[0].device)
    events = context.Queue()
    workers = min(len(jobs), workers or os.cpu_count() or 1)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(events, dict(os.environ)))
    waiting: dict[Future[tuple[int, float]], Job] = {}
    ended_well = False
    try:
        with forkserver.without_interrupts(), forkserver.without_main():
            largest_first = sorted(jobs, key=samples_of, reverse=True)
            waiting = {pool.submit(_work, job.model_dump_json()): job for job in largest_first}
        while waiting:
            done, _ = wait(waiting, timeout=0.05, return_when=FIRST_COMPLETED)
            _drain(events, on_epoch)
            for future in done:
                job = waiting.pop(future)
                try:
                    worker, megabytes = future.result()
                    _peaks[worker] = megabytes
                except BrokenProcessPool:
                    raise FlybyError(
                        f"a worker process died (killed, or out of memory) with {job.site} unfinished; run again with"
                        " --resume to go on"
                    ) from None
        _drain(events, on_epoch)
        pool.shutdown()
        ended_well = True
    finally:
        workers_left = list((getattr(pool, "_processes", None) or {}).values())
        for process in workers_left:
            process.terminate()
        for process in workers_left if not ended_well else ():
            process.join(5)  # before the pool's semaphores go, which one that is just starting still looks for
        pool.shutdown(wait=False, cancel_futures=True)
        events.close()
        if not ended_well:  # what the ended ones were writing goes too, all the more where the disk is full
            files.sweep(
                path for folder in {job.folder for job in jobs} if folder.is_dir() for path in folder.rglob(".*.part")
            )


def _drain(events: Any, on_epoch: Callable[[Row], None]) -> None:
    while True:
        try:
            on_epoch(events.get_nowait())
        except queue.Empty:
            return


def _start(events: Any, environment: dict[str, str]) -> None:
    global _events
    _events = events
    os.environ.update(environment)  # the fork server's are from when it started
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(
        signal.SIGTERM, signal.SIG_DFL
    )  # the parent's way to end a worker: no handler that came with the fork may delay it
    one_thread()
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(raw: str) -> tuple[int, float]:
    """Do a job; returns which worker this is and the most memory it has had, in megabytes."""
    perform(Job.model_validate_json(raw), _events.put)
    return os.getpid(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def workers_peak_mb() -> float:
    """The peaks of the last run's workers, added up: what they held at the same time was no more."""
    return sum(_peaks.values())
