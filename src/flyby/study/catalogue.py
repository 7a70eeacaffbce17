"""Studies as they are written: YAML files, of the user's own or of the package, with published figures beside them."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from flyby.errors import BadInput, unknown
from flyby.settings import build

PACKAGE = resources.files("flyby.study")
SUFFIX = ".yaml"


class Study(BaseModel):
    """The axes of a grid. A fusion is a rule's name, with settings after a colon: ``iffi:prototypes=counts``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = Field(description="the heading of the table")
    note: str = Field(default="", description="what stands under it: the setting, in words")
    data: list[str] = Field(default=["digits"], description="as --data; names of folders in --data-root too")
    methods: list[str] = Field(description="methods of `flyby methods`")
    fusions: list[str] = Field(default=[], description="server rules for every method; empty: each method's own")
    alphas: list[float] = Field(default=[0.1], description="as --alpha; once for a split that has none")
    splits: list[str] = Field(default=["dirichlet"], description="as --split")
    seeds: list[int] = Field(default=[0], description="as --seed; the outermost axis: breadth before repetition")
    server_seeds: list[int] = Field(
        default=[], description="further draws of rules that draw, on the same uploads; empty: each run's own seed"
    )
    clients: list[int] = Field(default=[5], description="as --clients")
    attacks: list[str] = Field(default=[], description="kinds with settings, `random:share=0.4`; empty: nobody attacks")
    admissions: list[str] = Field(
        default=[], description="gates before the server: none, default, validated; empty: none"
    )
    epochs: int | None = Field(default=None, description="as --epochs, for every cell")
    model: str | None = Field(default=None, description="as --model, for every cell")
    settings: list[str] = Field(default=[], description="as --set on the command line, for every cell")
    variants: list[str] = Field(default=[], description="one more axis: settings that differ, several with semicolons")
    rounds: list[str] = Field(
        default=[], description="what many rounds would give, `fedavg:rounds=5`; fedprox and scaffold too: not one-shot"
    )
    parts: list[dict[str, Any]] = Field(
        default=[], description="grids that differ from this one in some keys and make up the study; empty: this alone"
    )
    rows: list[str] = Field(default=[], description="other studies whose rows count here too, for cells that are equal")
    shows: list[Literal["bytes", "lambda", "peak", "prototypes", "seconds"]] = Field(
        default=[],
        description="further tables: bytes, lambda (and a figure), peak accuracy, likeness of prototypes, seconds",
    )


def read_study(name: str) -> tuple[str, Study]:
    """A study and its name: from a file, or one of those that come with flyby."""
    if Path(name).is_file():
        return Path(name).stem, _read(Path(name))
    known = packaged()
    if name in known:
        return name, _read(known[name])
    if re.search(r"[/\\]|\.ya?ml$", name):
        raise BadInput(f"{name} does not exist; name a {SUFFIX} file, or one that `flyby study --list` shows")
    raise unknown(
        "study", name, known, "`flyby study --list` shows those there are, and a .yaml file is one of your own"
    )


def titles() -> dict[str, str]:
    """The studies that come with flyby, by name."""
    return {name: _read(file).title for name, file in packaged().items()}


def packaged() -> dict[str, Traversable]:
    found = {
        file.name.removesuffix(SUFFIX): file for file in (PACKAGE / "grids").iterdir() if file.name.endswith(SUFFIX)
    }
    return dict(sorted(found.items()))


def published() -> list[dict[str, Any]]:
    """Figures from papers: each with data, alpha, method, value, source and the caveat that goes with it."""
    quick = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # six times as fast, where PyYAML was built with it
    rows: list[dict[str, Any]] = yaml.load((PACKAGE / f"published{SUFFIX}").read_text(encoding="utf-8"), quick)
    return rows


def _read(file: Path | Traversable) -> Study:
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise BadInput(f"{file} must hold a mapping of settings")
    return build(Study, raw, file.name)
