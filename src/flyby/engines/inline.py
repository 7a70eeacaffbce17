"""Engine ``inline``: the sites in this process, one after another; on a GPU several at once, as far as that is
faster."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flyby.engines.jobs import Job, perform, performing, views_by_batch
from flyby.machine import as_a_site
from flyby.training.loop import Pausing, Row
from flyby.training.steps import expecting

MOST = 16  # sites at once
GAIN = 1.1  # twice as many sites must do so much more in a second
ROUNDS = 2  # epochs of every site by which a number of sites is judged


def run_inline(jobs: Sequence[Job], on_epoch: Callable[[Row], None]) -> None:
    if jobs and jobs[0].device.startswith("cuda"):
        with expecting(views_by_batch(jobs)):
            run_side_by_side(jobs, on_epoch)
        return
    with as_a_site("cpu"):
        for job in jobs:
            perform(job, on_epoch)


class Crew:
    """How many sites work at once: twice as many are tried as long as together they take GAIN times as many samples a
    second."""

    def __init__(self) -> None:
        self.size, self.best, self.rate = 1, 1, 0.0
        self.settled = False
        self._clear()

    def _clear(self) -> None:
        self.rounds, self.samples, self.seconds = 0, 0, 0.0

    def note(self, samples: int, seconds: float, full: bool, room: bool = True) -> None:
        """A round in which every site did an epoch. ``full``: as many as wanted were at work, none of them new;
        ``room``: memory for more."""
        if self.settled or not full:
            return
        self.rounds, self.samples, self.seconds = self.rounds + 1, self.samples + samples, self.seconds + seconds
        if self.rounds < ROUNDS:
            return
        rate = self.samples / self.seconds
        better = self.size == 1 or rate > GAIN * self.rate
        if better:
            self.best, self.rate = self.size, rate
        self.settled = not (better and room and self.size < MOST)
        self.size = self.best if self.settled else 2 * self.size
        self._clear()


@dataclass
class Going:
    work: Pausing[float]
    stream: Any
    epochs: int = 0


def run_side_by_side(jobs: Sequence[Job], on_epoch: Callable[[Row], None]) -> None:
    """Every site on a stream of its own; while the device does one site's epoch, the next one's is sent after it."""
    waiting, going, crew = deque(jobs), list[Going](), Crew()
    idle: list[Any] = []  # streams are used again: the allocator keeps memory apart for every one it ever saw
    try:
        while waiting or going:
            while waiting and len(going) < crew.size:
                stream = idle.pop() if idle else torch.cuda.Stream()  # type: ignore[no-untyped-call]
                going.append(Going(performing(waiting.popleft(), on_epoch), stream))
            begun, samples = time.perf_counter(), 0
            full = len(going) == crew.size and all(one.epochs > 1 for one in going)
            for one in list(going):
                with torch.cuda.stream(one.stream):
                    try:
                        samples += next(one.work)
                        one.epochs += 1
                    except StopIteration:
                        going.remove(one)
                        idle.append(one.stream)
                        full = False
            crew.note(samples, time.perf_counter() - begun, full, _room(len(going)))
    finally:
        for one in going:
            with contextlib.suppress(Exception), torch.cuda.stream(one.stream):
                one.work.close()


def _room(going: int) -> bool:
    """Whether as many sites again would find memory."""
    free, _ = torch.cuda.mem_get_info()
    return free > 1.5 * torch.cuda.memory_reserved() * bool(going)
