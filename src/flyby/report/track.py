"""TensorBoard: a finished run's ``metrics.jsonl`` as event files, one folder a site, every number a scalar over epochs.
Extra ``track``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from flyby.errors import BadInput
from flyby.files import atomic_folder
from flyby.report.page import number
from flyby.report.read import read_rows
from flyby.runs.folder import Run


def check_tracking() -> None:
    """Refuse ``--track`` where TensorBoard is absent, before anything is trained."""
    if find_spec("tensorboard") is None:
        raise BadInput(
            "--track needs TensorBoard, which is not installed; pip install 'flyby[track]', or leave --track out"
        )


def write_events(folder: Path) -> Path:
    """Write ``folder/tensorboard/SITE/`` from the rows in ``folder`` and return it; events of an earlier call are
    replaced, lists passed over."""
    check_tracking()
    from torch.utils.tensorboard import SummaryWriter

    run = Run(folder)
    writers: dict[str, SummaryWriter] = {}
    with atomic_folder(run.events) as place:
        for row in read_rows(run.metrics):
            site, epoch = str(row.get("site", "")), number(row.get("epoch"))
            if not site or epoch is None:
                continue
            if site not in writers:
                writers[site] = SummaryWriter(str(place / site))
            for name, value in row.items():
                if name != "epoch" and (scalar := number(value)) is not None:
                    writers[site].add_scalar(name, scalar, int(epoch))
        for writer in writers.values():
            writer.close()
    return run.events
