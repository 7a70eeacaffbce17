"""The nouns ``Run``, a folder that knows its files, and ``Result``, what a run found. Resume = skip what is there."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from flyby import files
from flyby.data.splits import Split
from flyby.engines.jobs import Job
from flyby.errors import BadInput
from flyby.files import read_json, write_json, write_text
from flyby.runs.config import RunConfig
from flyby.settings import build


class Result(BaseModel):
    """What one run found: ``result.json``. ``accuracy`` is on the common test images, so many as ``test_images`` (FOL:
    the mean of the nodes' own), ``per_client`` on each participant's own, ``accuracy_common`` the mean of the nodes' on
    the common images weighted as their own classes, ``teacher_accuracy`` what a distilled model's teacher has,
    ``by_hour`` each node's accuracy over the hours of a contact plan; what a run has no figure for is not in the
    file."""

    model_config = ConfigDict(extra="forbid")
    schema_version: Literal[1] = 1

    method: str
    objective: str
    fusion: str | None
    model: str
    parameters: int
    data: str
    split: str
    split_hash: str
    clients: int
    alpha: float
    epochs: int
    codec: str
    accuracy: float
    test_images: int | None = None
    accuracy_common: float | None = None
    teacher_accuracy: float | None = None
    per_client: dict[str, float]
    per_class: dict[str, float | None]
    local_accuracy: dict[str, float] | None = None
    consistency: dict[str, float] | None = None
    checkpoints: list[dict[str, Any]] | None = None
    malicious: list[str] | None = None
    refused: list[dict[str, Any]] | None = None
    attack_success: float | None = None
    local_per_client: dict[str, float] | None = None
    by_round: dict[str, dict[str, Any]] | None = None
    by_hour: dict[str, list[tuple[float, float]]] | None = None
    contacts: dict[str, Any] | None = None
    rounds: int | None = None
    buffer: int | None = None
    top: int | None = None
    uploads: int
    bytes_up: int
    bytes_down: int
    seconds: float
    timings: dict[str, float]
    engine: str
    trained: int = Field(description="sites that were trained now; the others' uploads were there")
    peak_memory_mb: float
    seed: int
    versions: dict[str, str]
    hardware: str
    command: str = ""

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_unset=True) | {"schema_version": self.schema_version}

    def rows(self) -> list[dict[str, Any]]:
        """One row per participant: its own-test accuracy, and what it had alone where that was measured."""
        alone = self.local_per_client or self.local_accuracy or {}
        return [
            {"method": self.method, "client": name, "accuracy": value, "alone": alone.get(name)}
            for name, value in self.per_client.items()
        ]

    def to_frame(self) -> Any:
        """``rows()`` as a pandas DataFrame, where pandas is installed."""
        try:
            import pandas
        except ImportError:
            raise BadInput("to_frame needs pandas (pip install pandas); rows() gives the same without it") from None
        return pandas.DataFrame(self.rows())

    def line(self, name: str = "") -> str:
        """The run in one line, as the command line prints it, under its method's name or another."""
        own = self.per_client.values()
        sent = f"{self.uploads} uploads, {self.bytes_up / 1e6:.2f} MB" if self.uploads else "nothing sent"
        judged = f"accuracy {self.accuracy:.4f}   own-test mean {sum(own) / len(own):.4f}"
        if self.accuracy_common is not None:
            judged += f"   on common images {self.accuracy_common:.4f}"
        if self.teacher_accuracy is not None:
            judged += f"   its teacher {self.teacher_accuracy:.4f}"
        return f"{name or self.method:<12} {judged}   {sent}   {self.seconds:.1f} s"

    def __str__(self) -> str:
        return self.line()

    def __repr__(self) -> str:
        return f"<Result {' '.join(self.line().split())}>"

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{escape(name)}</td><td>{value:.4f}</td></tr>" for name, value in self.per_client.items()
        )
        return (
            f"<p><b>{escape(self.method)}</b> on {escape(self.data)}: accuracy <b>{self.accuracy:.4f}</b>,"
            f" {self.uploads} uploads, {self.bytes_up / 1e6:.2f} MB, {self.seconds:.1f} s</p>"
            f"<table><tr><th>client</th><th>own test</th></tr>{cells}</table>"
        )


class Run:
    """A run's folder. Every file of it has its name here and nowhere else."""

    NAMES: ClassVar[tuple[str, ...]] = ("config.json", "result.json", "split.json")

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config, self.result_path, self.split = (self.path / name for name in self.NAMES)
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = self.path / "ledger.json"
        self.extra = self.path / "extra.json"
        self.right = self.path / "right.json"
        self.schedule = self.path / "schedule.json"
        self.plan = self.path / "plan.csv"
        self.journal = self.path / "journal.jsonl"
        self.hours = self.path / "hours.csv"
        self.crossed = self.path / "crossed"
        self.memory = self.path / "memory"
        self.report = self.path / "report.html"
        self.events = self.path / "tensorboard"
        self.parcels = self.path / "parcels"
        self.model = self.path / "global"
        self.personal = self.path / "personal"
        self.nodes = self.path / "nodes"
        self.server = self.path / "server"
        self.uploads = self.path / "uploads"
        self.lock = self.path / ".lock"

    def node(self, name: str) -> Path:
        """What was measured at one node."""
        return self.nodes / f"{name}.json"

    def parcel(self, name: str) -> Path:
        return self.parcels / f"{name}.parcel"

    @property
    def finished(self) -> bool:
        return self.result_path.exists()

    def result(self) -> Result:
        """What the finished run found; one that an older flyby wrote is read too."""
        return build(Result, read_json(self.result_path), str(self.result_path))

    def finish(self, result: Result) -> Result:
        write_json(self.result_path, result.to_json())
        return result

    def asked(self) -> dict[str, Any]:
        """The configuration as it was asked for, and under ``resolved`` what followed from it."""
        raw: dict[str, Any] = read_json(self.config)
        return raw

    def begin(self, config: RunConfig, resolved: dict[str, Any], split: Split) -> None:
        """Write down what will be done; what was trained before an interruption belongs to the split of that time."""
        if self.split.exists() and Split.load(self.split).hash != split.hash:
            raise BadInput(f"the data changed since the run in {self.path} began; name a new folder with --out")
        split.save(self.split)
        write_json(self.config, {**config.model_dump(mode="json"), "resolved": resolved})

    def already(self, config: RunConfig, resume: bool) -> bool:
        """Whether the folder holds the finished run already; refuses one that holds another run, or anything else."""
        if not self.config.exists():
            kept = (self.split.name,)
            strange = sorted(p.name for p in self.path.iterdir() if p.name not in kept and p.name[0] != ".")
            if strange:
                raise BadInput(
                    f"{self.path} is not empty ({strange[0]!r} is in it) and is not a run; name a new folder with --out"
                )
            return False
        asked = {k: v for k, v in self.asked().items() if k != "resolved"}
        if not resume:
            raise BadInput(
                f"{self.path} already holds a run; add --resume to finish it, or name another folder with --out"
            )
        # Read into the settings of today: what was added to them since the run began has its default there.
        old, new = (json.loads(c.model_dump_json()) for c in (build(RunConfig, asked, str(self.config)), config))
        if old != new:
            changed = sorted(k for k in new if old.get(k) != new[k])
            raise BadInput(
                f"{self.path} holds a run with other settings ({', '.join(changed)}); --resume needs the same command"
            )
        return self.finished

    def write_metrics(self, jobs: Iterable[Job]) -> None:
        lines = (line for job in jobs for line in job.rows_path.read_text().splitlines())
        write_text(self.metrics, "".join(line + "\n" for line in lines))

    def collect(self, jobs: Iterable[Job]) -> list[Path]:
        """The run's own parcels: hard links into the store where there is one, so that a run folder is always whole."""
        paths = []
        for job in jobs:
            path = self.parcel(job.site)
            if path.resolve() != job.parcel_path.resolve():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                try:
                    os.link(job.parcel_path, path)
                except OSError:  # no links here, or another disk
                    with job.parcel_path.open("rb") as source, files.atomic_open(path) as copy:
                        shutil.copyfileobj(source, copy)
            paths.append(path)
        return paths

    def sweep(self, *stores: Path) -> None:
        """Take away what a killed process left and nobody needs; the folder's lock is held, so nobody is writing it:
        half-written files, and checkpoints of sites whose upload is there. A store may be filled by another cell right
        now: what is fresh stays there."""
        for folder in (self.path, *stores):
            left = {*folder.rglob(".*.part"), *folder.rglob(".*.old")}
            own = folder.is_relative_to(self.path)
            files.sweep(left if own else (path for path in left if _settled(path)))
            files.sweep(
                path
                for path in folder.glob("*.ckpt")
                if path.with_suffix(".parcel").exists() and path.with_suffix(".jsonl").exists()
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process per run folder: a second one is told so instead of mixing its files in. A folder that stays empty
        is taken away again."""
        new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = files.open_lock(self.lock)
        except OSError as error:
            if error.errno in files.FULL:
                raise files.unwritable(self.lock, error) from None
            raise BadInput(f"cannot write to {self.path}: {error.strerror}; name another folder with --out") from None
        with handle:
            files.take_lock(handle, self.lock, self.path)
            try:
                yield
            finally:
                if new and [p.name for p in self.path.iterdir()] == [self.lock.name]:
                    shutil.rmtree(self.path)


def _settled(path: Path, seconds: float = 10.0) -> bool:
    try:
        return time.time() - path.stat().st_mtime > seconds
    except OSError:
        return False
