"""Studies as they are written: YAML files, of the user's own or of the package, with published figures beside them."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from flyby.errors import BadInput, unknown
from flyby.settings import build

PACKAGE = resources.files("flyby.study")
SUFFIX = ".yaml"


class Study(BaseModel):
    """The axes of a grid. A fusion is a rule's name, with settings after a colon: ``iffi:prototypes=counts``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    note: str = ""
    data: list[str] = ["digits"]
    methods: list[str]
    fusions: list[str] = Field(default=[], description="server rules for every method; empty: each method's own")
    alphas: list[float] = [0.1]
    splits: list[str] = ["dirichlet"]
    seeds: list[int] = [0]
    server_seeds: list[int] = Field(
        default=[], description="further draws of rules that draw, on the same uploads; empty: each run's own seed"
    )
    clients: list[int] = [5]
    attacks: list[str] = Field(default=[], description="kinds with settings, `random:share=0.4`; empty: nobody attacks")
    admissions: list[str] = Field(
        default=[], description="gates before the server: none, default, validated; empty: none"
    )
    epochs: int | None = None
    model: str | None = None
    settings: list[str] = Field(default=[], description="as --set on the command line, for every cell")
    variants: list[str] = Field(default=[], description="one more axis: settings that differ, several with semicolons")


def read_study(name: str) -> tuple[str, Study]:
    """A study and its name: from a file, or one of those that come with flyby."""
    if Path(name).is_file():
        return Path(name).stem, _read(Path(name))
    known = packaged()
    if name in known:
        return name, _read(known[name])
    if re.search(r"[/\\]|\.ya?ml$", name):
        raise BadInput(f"{name} does not exist; name a {SUFFIX} file, or one that `flyby study --list` shows")
    raise unknown("study", name, known)


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
    rows: list[dict[str, Any]] = yaml.safe_load((PACKAGE / f"published{SUFFIX}").read_text(encoding="utf-8"))
    return rows


def _read(file: Path | Traversable) -> Study:
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise BadInput(f"{file} must hold a mapping of settings")
    return build(Study, raw, file.name)
