"""What the report knows of a run: the files of its folder, read with care."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flyby.drawing import clean
from flyby.errors import BadInput
from flyby.files import read_json
from flyby.fusion.quality import SURE, wilson
from flyby.names import natural
from flyby.report.page import number
from flyby.runs.answers import Answers
from flyby.runs.folder import Run
from flyby.runs.paired import mean_error


@dataclass(frozen=True)
class RunData:
    """What the report knows of one run: its name (the folder's) and the contents of its files, empty where a file is
    absent."""

    name: str
    result: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    ledger: dict[str, Any] = field(default_factory=dict)
    extra: list[dict[str, Any]] = field(default_factory=list)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: Answers | None = None

    @classmethod
    def read(cls, folder: Path) -> RunData:
        run = Run(folder)
        result = read_as(run.result_path, dict)
        judged = result.get("per_client")
        return cls(
            folder.resolve().name,
            result,
            config=_whole(run.config, dict),
            split=_whole(run.split, dict),
            metrics=read_rows(run.metrics),
            ledger=_whole(run.ledger, dict),
            extra=_whole(run.extra, list),
            nodes=read_nodes(run.nodes, judged if isinstance(judged, dict) else ()),
            answers=Answers.load(run.right),
        )

    @property
    def split_hash(self) -> str:
        return clean(self.result.get("split_hash") or self.split.get("hash") or "")

    @property
    def accuracy(self) -> float | None:
        return number(self.result.get("accuracy"))

    @property
    def images(self) -> int | None:
        """How many test images the accuracy is of."""
        return int(found) if (found := number(self.result.get("test_images"))) else None

    @property
    def met(self) -> bool:
        """Whether its nodes met, and there is no server."""
        return bool(self.nodes) or self.result.get("rounds") is not None

    def interval(self, share: float | None = None) -> tuple[float, float] | None:
        """Where the accuracy (or another share of the same test images) lies with 95 % certainty: Wilson's interval
        over the images; of nodes that met, their mean and 1.96 standard errors of it."""
        if self.met:
            own = [one for one in self.scores("per_client").values() if one is not None]
            return around(own) if share is None else None
        share = self.accuracy if share is None else share
        return None if share is None or self.images is None else wilson(round(share * self.images), self.images)

    @property
    def seconds(self) -> float | None:
        seconds = self.result.get("seconds")
        return number(seconds.get("total") if isinstance(seconds, dict) else seconds)

    def scores(self, key: str) -> dict[str, float | None]:
        """One of the result's name-to-accuracy tables, in natural order."""
        table = self.result.get(key)
        return {name: number(table[name]) for name in sorted(table, key=natural)} if isinstance(table, dict) else {}

    def counts(self) -> dict[str, list[int]]:
        counts = self.split.get("counts") or {}
        return {site: [int(n) for n in counts[site]] for site in sorted(counts, key=natural)}

    def class_names(self) -> list[str]:
        width = max((len(row) for row in self.counts().values()), default=0)
        names = [str(name) for name in self.split.get("class_names") or []]
        return names + [str(index) for index in range(len(names), width)]

    def per_class(self) -> dict[str, float | None]:
        """Accuracy by class name; a result may key its classes by name or by index."""
        scores, names = self.scores("per_class"), self.class_names()
        if all(key in names for key in scores):
            return {name: scores[name] for name in names if name in scores}
        return {
            names[int(key)] if key.isdigit() and int(key) < len(names) else key: value for key, value in scores.items()
        }


def runs_in(folder: Path) -> list[RunData]:
    """The finished run of a folder, or of a folder of runs all of them."""
    run = Run(folder)
    if run.finished:
        return [RunData.read(folder)]
    children = sorted(folder.iterdir(), key=lambda child: natural(child.name)) if folder.is_dir() else []
    runs = [RunData.read(child) for child in children if not child.name.startswith(".") and Run(child).finished]
    if not runs:
        raise BadInput(
            f"{folder} holds neither {run.result_path.name} nor run folders; name the --out folder of a finished run,"
            " or a folder of them"
        )
    return runs


def around(shares: Sequence[float]) -> tuple[float, float] | None:
    """The mean of several shares and 1.96 standard errors of it to either side; None of fewer than two."""
    if len(shares) < 2:
        return None
    mean, error = mean_error(shares)
    return max(0.0, mean - SURE * (error or 0.0)), min(1.0, mean + SURE * (error or 0.0))


def read_as(path: Path, kind: type) -> Any:
    value = read_json(path)
    if not isinstance(value, kind):
        raise BadInput(
            f"{path} does not hold a JSON {'object' if kind is dict else 'list'}; run `flyby run` again to write it"
            " anew"
        )
    return value


def _whole(path: Path, kind: type) -> Any:
    return read_as(path, kind) if path.exists() else kind()


def read_nodes(folder: Path, judged: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What was measured at the judged nodes of a population, in the result's order."""
    there = {path.stem: path for path in folder.glob("*.json")}
    return {name: read_as(there[name], dict) for name in judged if name in there}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file; a last line cut short (an interrupted run) is passed over, any other damage is an
    error."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    rows = []
    for i, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except ValueError:
            if i == len(lines):
                break
            raise BadInput(f"{path} line {i} is not JSON; mend or remove that line") from None
        if isinstance(row, dict):
            rows.append(row)
    return rows
