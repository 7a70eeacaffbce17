"""``flyby study``: a grid of runs as a typed value. Cells are keyed by a hash of their full configuration: finished
ones are never redone, uploads are shared by all server rules, and rows from several machines merge by concatenation.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flyby.data.splits import SPLITS, Split, SplitSettings
from flyby.engines.engine import engine_named
from flyby.errors import BadInput, Diverged, unknown
from flyby.files import digest, write_text
from flyby.fusion import FUSIONS
from flyby.fusion.base import Fusion
from flyby.machine import hardware, pick_device, versions
from flyby.objectives import OBJECTIVES
from flyby.runs.config import RunConfig, concerning, make_config, rule_of
from flyby.runs.folder import Run
from flyby.runs.methods import METHODS
from flyby.runs.pipeline import Options, run
from flyby.settings import build
from flyby.statistics.catalogue import named
from flyby.study.catalogue import SUFFIX, Study, packaged
from flyby.study.rounds import RoundSettings, round_settings, run_rounds
from flyby.study.strengths import strengths

log = logging.getLogger(__name__)
BETWEEN = re.compile(r";(?![^\[]*\])")  # the settings of a variant; what stands in brackets is one value


@dataclass(frozen=True)
class Cell:
    """One row to be: a configuration, its key, and how it is called in tables."""

    config: RunConfig
    key: str
    data: str
    rule: str
    former: tuple[str, ...] = ()
    attack: str = ""
    admission: str = ""
    variant: str = ""
    rounds: RoundSettings | None = None

    def __str__(self) -> str:
        drawn = "" if self.config.server_seed is None else f", server {self.config.server_seed}"
        threats = "".join(f" / {threat}" for threat in (self.attack, self.admission, self.variant) if threat)
        return (
            f"{self.config.method} / {self.rule} / {self.data} a={self.config.split.alpha:g} seed"
            f" {self.config.seed}{drawn}{threats}"
        )


World = tuple[int, str, str, int, float, str]  # seed, data, split, clients, alpha, variant


def cells(study: Study, data_root: Path | None = None) -> Iterator[Cell]:
    """All cells, seeds outermost: breadth before repetition. Keys do not depend on where the data lies."""
    parts = parts_of(study)
    found = (cell for part in parts for cell in _cells(part, data_root))
    yield from found if len(parts) == 1 else sorted(found, key=lambda cell: cell.config.seed)


def parts_of(study: Study) -> list[Study]:
    """The grids that make up a study: itself, or its parts, each with the keys of its own."""
    whole = study.model_dump(exclude={"parts"}, exclude_unset=True)
    return [build(Study, {**whole, **part}, "study part") for part in study.parts] or [study]


def _cells(study: Study, data_root: Path | None) -> Iterator[Cell]:
    axes = study.seeds, study.data, study.splits, study.clients, study.alphas, study.variants or [""]
    for world in itertools.product(*axes):
        _, data, split, _, alpha, variant = world
        if alpha != study.alphas[0] and not SplitSettings(name=split).uses_alpha:
            continue  # it would be the same split again
        for method, attack, admission in itertools.product(
            study.methods, study.attacks or [""], study.admissions or [""]
        ):
            for rule in study.fusions or [""]:
                for drawn in server_draws(study, method, rule):
                    asked = threats(attack, admission)
                    logical, config, made = _configs(study, data_root, world, method, rule, drawn, asked)
                    equal = [logical, *lean(logical, made)]
                    key, *former = [key_of(one) for one in equal]
                    if not (attack or admission or editions(logical)):
                        former += [old for one in equal for old in former_keys(one)]
                    yield Cell(config, key, data, rule or "own", tuple(former), attack, admission, variant)
        for words in study.rounds:
            many = round_settings(words)
            logical, config, _ = _configs(study, data_root, world, "fedavg", "", [], [])
            key = digest([key_of(logical), many.model_dump(exclude_unset=True)])
            yield Cell(config, key, data, many.said(config), variant=variant, rounds=many)


def _configs(
    study: Study,
    data_root: Path | None,
    world: World,
    method: str,
    rule: str,
    drawn: list[str],
    threats: list[str],
) -> tuple[RunConfig, RunConfig, Fusion | None]:
    """What is asked for, with the data's name as the study has it, which the key is made of; with its place; and the
    rule."""
    seed, data, split, clients, alpha, variant = world
    name, _, settings = rule.partition(":")
    words: dict[str, Any] = {
        "seed": seed,
        "model": study.model,
        "epochs": study.epochs,
        "fusion": name or None,
        "assignments": [
            *drawn,
            *concerning(method, study.methods, study.settings),
            *(v.strip() for v in BETWEEN.split(variant) if v),
            *(f"fusion.{s}" for s in settings.split(",") if s),
            *threats,
        ],
    }
    shape = {"name": split, "clients": clients, "alpha": alpha}
    place = str((data_root / data).resolve()) if data_root is not None and (data_root / data).exists() else data
    logical = make_config(method, data={"name": data}, split=shape, **words)
    config = logical if place == data else make_config(method, data={"name": place}, split=shape, **words)
    return logical, config, check_cell(config)


def server_draws(study: Study, method: str, rule: str) -> list[list[str]]:
    """The assignments of a rule's server seeds: one cell for each where the rule draws, else one without any."""
    used = FUSIONS.get(rule.partition(":")[0] or METHODS[method].fusion or "")
    draws = used is not None and used.draws and study.server_seeds
    return [[f"server_seed={seed}"] for seed in study.server_seeds] if draws else [[]]


def threats(attack: str, admission: str) -> list[str]:
    """The assignments of a cell's attack and gate; none where nothing is to be asked for, so that such cells keep their
    keys."""
    kind, _, settings = attack.partition(":")
    asked = (
        [f"attack.kind={kind}", *(f"attack.{s}" for s in settings.split(",") if s)] if kind not in ("", "none") else []
    )
    return asked + ([f"admission={admission}"] if admission not in ("", "none") else [])


def check_cell(config: RunConfig) -> Fusion | None:
    """The rule of a cell. What needs no data to be seen to fail is refused here, so that a study stops before its first
    cell and not at its last."""
    if config.split.name not in SPLITS:
        raise unknown("split", config.split.name, SPLITS)
    method = METHODS[config.method]
    objective = OBJECTIVES[method.objective]
    settings = build(objective.settings_type, {**method.objective_settings, **config.objective}, "objective")
    return rule_of(config, method, objective, settings)


def lean(config: RunConfig, rule: Fusion | None) -> list[RunConfig]:
    """The same cell where sites send no more than the rule reads, if they were asked for more: its answer is the same,
    so that such a row counts too."""
    asked = config.objective.get("send", [])
    read = [text for text in asked if rule is None or named(text)[0] in rule.reads]
    if len(read) == len(asked):
        return []
    objective = (
        {**config.objective, "send": read} if read else {k: v for k, v in config.objective.items() if k != "send"}
    )
    return [config.model_copy(update={"objective": objective})]


def key_of(config: RunConfig) -> str:
    """The hash of all that was asked for. What was left to its default stays out, so that a setting added to a later
    flyby redoes nothing; so does ``locals``, which changes no accuracy of a row. Where the defaults themselves were
    changed, the method or the rule says so by its edition."""
    asked = json.loads(config.model_dump_json(exclude={"locals"}, exclude_unset=True)) | {"editions": editions(config)}
    return digest({name: value for name, value in asked.items() if value not in (None, {})})


def editions(config: RunConfig) -> dict[str, int]:
    """Of the method and the rule, those that are no longer the first."""
    method = METHODS[config.method]
    rule = FUSIONS.get(config.fusion_name or method.fusion or "")
    numbers = {"method": method.edition, "rule": rule.edition if rule else 1}
    return {name: number for name, number in numbers.items() if number > 1}


def former_keys(config: RunConfig) -> tuple[str, ...]:
    """The keys of the first rows ever written: hashes of every field of that time, defaults and all."""
    fields = {"method", "seed", "data", "split", "model", "fusion_name", "objective", "train", "views", "fusion"}
    fields |= {"codec", "counts", "epsilon", "proxy"}
    return tuple(digest(json.loads(config.model_dump_json(include=kept))) for kept in (fields, fields | {"orient"}))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a results file; a line cut off by a crash at the end is ignored, later rows of one key win."""
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            rows[row["key"]] = row
        except (ValueError, KeyError, TypeError):
            continue
    return list(rows.values())


def merge(target: Path, sources: list[Path]) -> int:
    """Bring this study's rows from other machines into ``target``; returns how many are new. Equal keys with different
    split hashes are refused; rows of other studies in the same file are left there."""
    mine = {row["key"]: row for row in read_rows(target)}
    before = len(mine)
    for source in sources:
        if not source.is_file():
            raise BadInput(f"{source} is not a file of rows to merge; name another machine's results/NAME.jsonl")
        for row in read_rows(source):
            if row.get("study", target.stem) != target.stem:
                continue
            old = mine.setdefault(row["key"], row)
            if old.get("split_hash") != row.get("split_hash"):
                raise BadInput(
                    f"{source} and {target} disagree on the split of cell {row['key']}: the data differs; keep them"
                    " apart"
                )
    write_text(target, "".join(json.dumps(row) + "\n" for row in mine.values()))
    return len(mine) - before


@dataclass(frozen=True)
class Standing:
    """How far a study is: its cells, the rows (its own, or other studies' that it names) that belong to it as it
    stands by the key of their cell, and how many rows of its file were run under other settings."""

    name: str
    study: Study
    cells: list[Cell]
    rows: dict[str, dict[str, Any]]
    others: int

    @property
    def missing(self) -> list[Cell]:
        """The cells that have no row yet."""
        return [cell for cell in self.cells if cell.key not in self.rows]

    @property
    def command(self) -> str:
        """What would run them; a study of one's own is named by its file."""
        return f"flyby study {self.name if self.name in packaged() else f'{self.name}{SUFFIX}'}"


def standing(study: Study, path: Path, grid: list[Cell] | None = None, data_root: Path | None = None) -> Standing:
    """``grid`` are the study's cells where they are known: to find them takes a millisecond each."""
    grid = list(cells(study, data_root)) if grid is None else grid
    own = {cell.key: cell.key for cell in grid}
    names = {key: cell.key for cell in grid for key in cell.former} | own
    lent = (row for name in study.rows for row in read_rows(path.with_name(f"{name}.jsonl")) if row["key"] in names)
    found = {row["key"]: row for row in (*lent, *read_rows(path))}.values()  # its own come first
    fitting = sorted((row for row in found if row["key"] in names), key=lambda row: row["key"] in own)
    rows = {names[row["key"]]: row for row in fitting}
    return Standing(path.stem, study, grid, rows, len(found) - len(rows))


def run_study(
    study: Study,
    rows: Path,
    work: Path,
    *,
    data_root: Path | None = None,
    engine: str | None = None,
    device: str = "auto",
    limit: float | None = None,
    quiet: bool = False,
) -> tuple[int, int]:
    """Do what is missing in the file ``rows`` (NAME.jsonl), a row appended as each cell ends; stops before a cell that
    would likely end after ``limit`` seconds. Uploads and runs go to the folder ``work``.

    Returns (rows done now, rows still missing). Cells go one after another, or as many at once as the engine can.
    """
    todo = standing(study, rows, data_root=data_root).missing
    started, longest, done = time.perf_counter(), 0.0, 0
    began: dict[str, float] = {}

    def in_time() -> Iterator[Cell]:
        for cell in todo:
            began[cell.key] = time.perf_counter()
            if limit is not None and began[cell.key] - started + longest > limit:
                return
            yield cell

    each = engine_named(engine or "inline").each
    work_on = partial(attempt, work=work, engine=engine, device=device, quiet=quiet)
    for cell, result in each(work_on, in_time(), lambda cell: cell.config.data):
        spent = time.perf_counter() - began[cell.key]
        if isinstance(result, Diverged):
            result = lost(work / "runs" / cell.key, result, spent, device)
        longest, done = max(longest, spent), done + 1
        append(rows, row_of(rows.stem, cell, result))
        shown = "diverged" if result["accuracy"] is None else f"{result['accuracy']:.4f}"
        log.info("%s: %s (%.1f s)", cell, shown, spent)
    return done, len(todo) - done


def attempt(cell: Cell, *, work: Path, engine: str | None, device: str, quiet: bool) -> dict[str, Any] | Diverged:
    """Run one cell; that it diverged is a result too."""
    options = Options(engine=engine, device=device, resume=True, quiet=quiet, store=work / "uploads", keep=False)
    folder = Run(work / "runs" / cell.key)
    try:
        if cell.rounds is not None:
            return run_rounds(cell.config, cell.rounds, folder, device)
        return run(cell.config, folder.path, options).to_json() | strengths(folder.metrics)
    except Diverged as error:
        return error


def lost(folder: Path, error: Diverged, seconds: float, device: str) -> dict[str, Any]:
    """What there is to say of a cell whose training diverged: all but an accuracy, from what its run wrote before it
    trained."""
    begun = Run(folder)
    split, resolved = Split.load(begun.split), begun.asked()["resolved"]
    recipe = resolved["recipes"][0] if "recipes" in resolved else resolved
    return {
        "accuracy": None,
        "diverged": str(error),
        "split_hash": split.hash,
        "seconds": round(seconds, 3),
        "model": recipe["spec"]["name"],
        "epochs": recipe["train"]["epochs"],
        "clients": len(split.shares),
        "hardware": hardware(pick_device(device)),
        "versions": versions(),
    }


KEPT = (  # of a result, in a row
    "accuracy",
    "accuracy_common",
    "teacher_accuracy",
    "split_hash",
    "seconds",
    "timings",
    "trained",
    "model",
    "epochs",
    "clients",
    "uploads",
    "bytes_up",
    "consistency",
    "hardware",
    "versions",
    "diverged",
    "attack_success",
    "by_round",
    "by_hour",
    "contacts",
    "checkpoints",
    "lambda",
)


def row_of(name: str, cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
    own, alone = result.get("per_client"), result.get("local_accuracy")
    threat: dict[str, Any] = {
        name: value
        for name, value in (("attack", cell.attack), ("admission", cell.admission), ("variant", cell.variant))
        if value
    }
    if cell.rounds is not None:
        threat |= {
            "one_shot": cell.rounds.rounds == 1,
            "rounds": cell.rounds.rounds,
            "bytes_down": result.get("bytes_down"),
        }
    if cell.config.server_seed is not None:
        threat["server_seed"] = cell.config.server_seed
    if cell.config.judge != "test":
        threat["judge"] = cell.config.judge
    if "malicious" in result:
        refused = [one["malicious"] for one in result.get("refused", ())]
        threat |= {
            "malicious": len(result["malicious"]),
            "refused_malicious": sum(refused),
            "refused_honest": len(refused) - sum(refused),
        }
    return {
        "key": cell.key,
        "study": name,
        "method": cell.config.method,
        "fusion": cell.rule,
        "data": cell.data,
        "split": cell.config.split.name,
        "alpha": cell.config.split.alpha,
        "seed": cell.config.seed,
        **{k: result[k] for k in KEPT if k in result},
        "own_accuracy": sum(own.values()) / len(own) if own else None,
        **({"local_accuracy": sum(alone.values()) / len(alone)} if alone else {}),
        **threat,
        "date": time.strftime("%Y-%m-%d"),
    }


def append(path: Path, row: dict[str, Any]) -> None:
    """One line, flushed to disk: a crash loses at most the line being written, and what it left of that line spoils no
    later one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with open(path, "a") as file:
        file.write("\n" * torn + json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
