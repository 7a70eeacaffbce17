"""Progress for long work: a live bar on a terminal, plain lines elsewhere (one every few seconds, and one a finished
site)."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any

from flyby.data.cache import bars
from flyby.training.loop import Row

log = logging.getLogger(__name__)


class Progress:
    """Counts site-epochs. ``on_epoch`` is what engines call; use as a context manager around the work."""

    def __init__(self, title: str, epochs: int, sites: int, quiet: bool = False) -> None:
        self.title, self.total, self.epochs, self.sites, self.quiet = title, epochs * sites, epochs, sites, quiet
        self.done, self.samples, self.started, self.spoken = 0, 0.0, time.perf_counter(), time.perf_counter()
        self._bar: Any = None
        self._task: Any = None

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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            bars.remove(self.title)

    def on_epoch(self, row: Row) -> None:
        self.done += 1
        note = (
            f"{row['site']} epoch {row['epoch']}/{self.epochs} loss {row['loss']:.3f} {row['samples_per_second']:,.0f}"
            " img/s"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, note=note)
        elif not self.quiet and (row["epoch"] == self.epochs or time.perf_counter() - self.spoken > 5):
            self.spoken = time.perf_counter()
            left = (self.spoken - self.started) / self.done * (self.total - self.done)
            log.info("%s: %s, %.0f%%, about %.0f s left", self.title, note, 100 * self.done / self.total, left)
