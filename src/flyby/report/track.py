"""TensorBoard: a run's rows as event files while it trains, one folder per site, every number a scalar over epochs.
Extra ``track``.

What a run finds trained already (its uploads are shared, or it goes on after an interruption) comes from its
``metrics.jsonl`` when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyby.errors import BadInput
from flyby.files import atomic_folder
from flyby.report.page import number
from flyby.report.read import read_rows
from flyby.runs.folder import Run

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Row = dict[str, Any]


def check_tracking() -> None:
    """Refuse ``--track`` where TensorBoard is absent, before anything is trained."""
    if find_spec("tensorboard") is None:
        raise BadInput(
            "--track needs TensorBoard, which is not installed; pip install 'flyby[track]', or leave --track out"
        )


class Events:
    """The event files of one run, in ``folder``: a file is made when its site's first row comes, and each row can be
    seen at once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.writers = folder, dict[str, "SummaryWriter"]()
        self.seen: set[tuple[str, int]] = set()

    def add(self, row: Row) -> None:
        """One row of one site's epoch; lists are passed over."""
        from torch.utils.tensorboard import SummaryWriter

        site, epoch = str(row.get("site", "")), number(row.get("epoch"))
        if not site or epoch is None:
            return
        if site not in self.writers:
            self.writers[site] = SummaryWriter(str(self.folder / site))
        for name, value in row.items():
            if name != "epoch" and (scalar := number(value)) is not None:
                self.writers[site].add_scalar(name, scalar, int(epoch))
        self.writers[site].flush()
        self.seen.add((site, int(epoch)))

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()
        self.writers.clear()


class Live:
    """What ``Options.follow`` wants: called with a run's folder, it gives what to do with each row of its training."""

    def __init__(self) -> None:
        check_tracking()
        self.runs: dict[Path, Events] = {}

    def __call__(self, folder: Path) -> Callable[[Row], None]:
        self.runs[folder] = Events(Run(folder).events)
        return self.runs[folder].add

    def finish(self, folders: Iterable[Path]) -> None:
        """Close the files; a run of which rows were not seen while it trained gets all of them anew."""
        for folder in folders:
            events = self.runs.get(folder)
            if events is not None:
                events.close()
            rows = {
                (str(row.get("site", "")), int(number(row.get("epoch")) or 0)) for row in read_rows(Run(folder).metrics)
            }
            if events is None or not rows <= events.seen:
                write_events(folder)


def write_events(folder: Path) -> Path:
    """Write ``folder/tensorboard/SITE/`` from the rows in ``folder`` and return it; events of an earlier call are
    replaced."""
    check_tracking()
    run = Run(folder)
    with atomic_folder(run.events) as place:
        events = Events(place)
        for row in read_rows(run.metrics):
            events.add(row)
        events.close()
    return run.events
