"""Progress for long work: a live bar on a terminal, plain lines elsewhere (one every few seconds, and one per finished
site). Around the training of one real site and the round of one real node there is never a silent minute: a line comes
at least every ten seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from flyby.data.cache import bars
from flyby.training.loop import Row

log = logging.getLogger(__name__)

SILENT = 10.0  # seconds after which a real site says where it stands


@contextmanager
def lasting(work: str) -> Iterator[None]:
    """Whatever takes long inside this block, somebody is told that it goes on."""
    ended, started = threading.Event(), time.perf_counter()

    def beat() -> None:
        while not ended.wait(SILENT):
            log.info("%s: %.0f s so far", work, time.perf_counter() - started)

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class Progress:
    """Counts site-epochs. ``on_epoch`` is what engines call; use as a context manager around the work. With ``images``
    (of one site) it also counts inside an epoch, as ``on_batch`` tells it."""

    def __init__(self, title: str, epochs: int, sites: int, quiet: bool = False, images: int = 0) -> None:
        self.title, self.total, self.epochs, self.sites, self.quiet = title, epochs * sites, epochs, sites, quiet
        self.done, self.samples, self.started, self.spoken = 0, 0.0, time.perf_counter(), time.perf_counter()
        self.images, self.seen, self.first = images, 0, 0.0  # images seen, and when the first of them were
        self.begun: set[str] = set()
        self.before = 0  # site-epochs of an earlier, interrupted training
        self._bar: Any = None
        self._task: Any = None
        self._ended = threading.Event()

    def __enter__(self) -> Progress:
        if not self.quiet and self.total and sys.stderr.isatty() and not bars:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            bars.append(self.title)
            self._task = self._bar.add_task(self.title, total=self.total, note="")
        elif self.images and not self.quiet:
            threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()
            bars.remove(self.title)

    def on_batch(self, images: int) -> None:
        """So many more images of the epoch are on their way."""
        self.first = self.first or time.perf_counter()
        self.seen += images
        if self._bar is not None:
            inside = min(1.0, self.seen / self.images - self.done)
            self._bar.update(self._task, completed=self.done + inside)

    def on_epoch(self, row: Row) -> None:
        if row["site"] not in self.begun:
            self.begun.add(row["site"])
            self.before += row["epoch"] - 1
            self.done += row["epoch"] - 1
        self.done += 1
        self.seen = self.done * self.images
        held = f" held-out {row['val_accuracy']:.3f}" if self.images and "val_accuracy" in row else ""
        note = (
            f"{row['site']} epoch {row['epoch']}/{self.epochs} loss {row['loss']:.3f}{held}"
            f" {row['samples_per_second']:,.0f} img/s"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, note=note)
        elif not self.quiet and (row["epoch"] == self.epochs or time.perf_counter() - self.spoken > 5):
            self.spoken = time.perf_counter()
            left = (self.spoken - self.started) / (self.done - self.before) * (self.total - self.done)
            log.info("%s: %s, %.0f%%, about %.0f s left", self.title, note, 100 * self.done / self.total, left)

    def standing(self) -> str:
        """Where one site's training is now, inside its epoch."""
        now = time.perf_counter()
        if not self.seen or now <= self.first:
            return f"{self.title}: {now - self.started:.0f} s so far, looking at {self.images:,} images"
        share = min(1.0, self.seen / (self.images * self.total))
        if share == 1:
            return f"{self.title}: trained, now measuring what it will send"
        epoch = min(self.epochs, self.seen // self.images + 1)
        rate = max(1, self.seen - self.before * self.images) / (now - self.first)  # seen in this run
        left = (self.images * self.total - self.seen) / rate
        told = f"{self.title}: epoch {epoch}/{self.epochs}, {rate:,.0f} img/s"
        return f"{told}, {100 * share:.0f}%, about {left:.0f} s left"

    def _beat(self) -> None:
        """In a thread of its own: whatever takes long, somebody is told that it goes on."""
        while not self._ended.wait(0.5):
            if time.perf_counter() - self.spoken > SILENT:
                self.spoken = time.perf_counter()
                log.info("%s", self.standing())
