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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from flyby import files
from flyby.engines import forkserver
from flyby.engines.jobs import Job, perform, samples_of
from flyby.errors import BadInput, FlybyError
from flyby.machine import one_thread
from flyby.training.loop import Row

WORKERS = "FLYBY_WORKERS"  # how many at most; default: as many as there are cores

_events: Any = None
_peaks: dict[int, float] = {}  # megabytes, by worker, of the last run


def run_processes(jobs: Sequence[Job], on_epoch: Callable[[Row], None], workers: int | None = None) -> None:
    """Same bytes as ``inline``: jobs are independent and each runs on one thread. The largest sites go first, so that
    none is left to the end."""
    largest_first = sorted(jobs, key=samples_of, reverse=True)
    device, ended_well = jobs[0].device if jobs else "cpu", False
    try:
        for _ in spread(_train, largest_first, device, lambda job: job.site, on_epoch, workers):
            pass
        ended_well = True
    finally:
        if not ended_well:  # what the ended ones were writing goes too, all the more where the disk is full
            files.sweep(
                path for folder in {job.folder for job in jobs} if folder.is_dir() for path in folder.rglob(".*.part")
            )


def spread(
    function: Callable[[Any], Any],
    items: Sequence[Any],
    device: str,
    name: Callable[[Any], str] = str,
    on_epoch: Callable[[Row], None] = lambda row: None,
    workers: int | None = None,
) -> Iterator[tuple[Any, Any]]:
    """``(item, function(item))`` as they end, from as many workers as there are cores. Items and answers are pickled;
    ``name`` says whose work was lost where a worker dies."""
    _peaks.clear()
    if not items:
        return
    context = forkserver.context_for(device)
    workers = min(len(items), workers or most_workers())
    with forkserver.without_interrupts():  # a semaphore that is half made is one nobody takes away
        events = context.Queue()
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(events, dict(os.environ)))
    ended_well = False
    try:
        with forkserver.without_interrupts(), forkserver.without_main():
            waiting = {pool.submit(_work, function, item): item for item in items}
        while waiting:
            done, _ = wait(waiting, timeout=0.05, return_when=FIRST_COMPLETED)
            _drain(events, on_epoch)
            for future in done:
                item = waiting.pop(future)
                try:
                    worker, megabytes, answer = future.result()
                except BrokenProcessPool:
                    raise FlybyError(
                        f"a worker process died (killed, or out of memory) with {name(item)} unfinished; run again with"
                        " --resume to go on"
                    ) from None
                _peaks[worker] = megabytes
                yield item, answer
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


def most_workers() -> int:
    asked = os.environ.get(WORKERS) or str(os.cpu_count() or 1)
    if not (asked.isdecimal() and int(asked) > 0):
        raise BadInput(f"{WORKERS}={asked} is not a number of worker processes; set it to 1 or more, or leave it out")
    return int(asked)


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


def _train(job: Job) -> None:
    perform(job, _events.put)


def _work(function: Callable[[Any], Any], item: Any) -> tuple[int, float, Any]:
    """Do one piece; returns which worker this is, the most memory it has had, in megabytes, and the answer."""
    answer = function(item)
    return os.getpid(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, answer


def workers_peak_mb() -> float:
    """The peaks of the last run's workers, added up: what they held at the same time was no more."""
    return sum(_peaks.values())
