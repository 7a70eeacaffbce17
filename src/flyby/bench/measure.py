"""``flyby bench``: how fast the real training loop is, against two yardsticks taken in the same run.

The **limit** is the bare step of the same network, batch and precision on tensors that are on the device already: no
data, no views, no loss but cross-entropy. The **script** is what people usually write: a DataLoader with Pillow
transforms (``flyby.bench.script``). All loops take turns, each in a process of its own; every number is a median over
the rounds, every ratio the median of the rounds' ratios.
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyby.bench.loops import WORK, Case, Loop, Turn, Way, default_workers, loops
from flyby.errors import BadInput, unknown
from flyby.files import write_bytes, write_json, write_text
from flyby.machine import hardware, pick_device, versions

ROUNDS = 5
WAYS: tuple[Way, ...] = ("limit", "flyby", "script")
# AURORA's bare step and ordinary script are SALT's: the same views of the same network.
STANDS_FOR = {"aurora": "salt"}
Rates = dict[tuple[str, str], list[Turn]]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What is to be measured; None stands for a default that depends on the device: a ResNet-18 on 32x32 images and
    batches of 512 on a GPU, a small CNN on 16x16 images and 64 on a CPU."""

    device: str = "auto"
    model: str | None = None
    size: int | None = None
    batch: int | None = None
    precision: str = "auto"
    compile: str = "auto"
    workers: int | None = None
    steps: int | None = None

    def cases(self, only: Sequence[str] = ()) -> list[Case]:
        """The loops to measure; what cannot be built is refused before any of them starts."""
        device = pick_device(self.device)
        gpu = device.startswith("cuda")
        for name in only:
            if name not in WORK:
                raise unknown("work to measure", name, WORK)
        for name, least in (("batch", 2), ("size", 2), ("steps", 2), ("workers", 0)):
            number = getattr(self, name)
            if number is not None and number < least:
                raise BadInput(f"--{name} {number} is too small; give at least {least}")
        common: dict[str, Any] = {
            "device": device,
            "model": self.model or ("resnet18" if gpu else "cnn-small"),
            "size": self.size or (32 if gpu else 16),
            "batch": self.batch or (512 if gpu else 64),
            "precision": self.precision,
            "compile": self.compile,
            "workers": default_workers() if self.workers is None else self.workers,
            "steps": self.steps or 20,
            "script_steps": self.steps or (100 if gpu else 20),
        }
        made = [
            Case(work=name, way=way, **common)
            for name in only or WORK
            for way in WAYS
            if way == "flyby" or name not in STANDS_FOR or STANDS_FOR[name] not in (only or WORK)
        ]
        for case in made:
            case.spec()
        return made


def measure(todo: Sequence[Case], seconds: float, rounds: int = ROUNDS) -> Rates:
    """Turns of all loops, round by round; a loop has about ``seconds`` in all, and one epoch a round at the least."""
    turns: Rates = {}
    with loops(list(todo)) as running:
        for number in range(rounds):
            log.info("bench: round %d of %d", number + 1, rounds)
            # There and back: a drifting clock speed favours nobody.
            for loop in running if number % 2 == 0 else running[::-1]:
                turns.setdefault(key_of(loop), []).append(loop.run(seconds / rounds))
    return turns


def key_of(loop: Loop) -> tuple[str, str]:
    return loop.case.work, loop.case.way


def table(turns: Rates) -> list[dict[str, Any]]:
    """One row a loop: samples (images) a second, milliseconds a step, and the speed relative to the limit and to the
    script of the same work."""
    rows = []
    for (work, way), mine in turns.items():
        rows.append(
            {
                "work": work,
                "way": way,
                "samples_per_second": statistics.median(t.samples / t.seconds for t in mine),
                "ms_per_step": statistics.median(1000 * t.seconds / t.steps for t in mine),
                "of_limit": ratio(mine, beside(turns, work, "limit")),
                "of_script": ratio(mine, beside(turns, work, "script")),
            }
        )
    return rows


def beside(turns: Rates, work: str, way: str) -> list[Turn] | None:
    return turns.get((work, way)) or turns.get((STANDS_FOR.get(work, work), way))


def ratio(mine: Sequence[Turn], other: Sequence[Turn] | None) -> float | None:
    """The median over rounds of how many times faster, in samples a second."""
    if other is None:
        return None
    return statistics.median(
        (m.samples / m.seconds) / (o.samples / o.seconds) for m, o in zip(mine, other, strict=True)
    )


def bench(todo: Sequence[Case], seconds: float = 5.0, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure and describe: what ``flyby bench --json`` answers."""
    if seconds <= 0:
        raise BadInput("--seconds must be above 0; it is the time each loop is measured for")
    turns = measure(todo, seconds, rounds)
    first = todo[0]
    cost = (
        ratio(turns[("salt", "flyby")], turns[("aurora", "flyby")])
        if {("salt", "flyby"), ("aurora", "flyby")} <= turns.keys()
        else None
    )
    return {
        "kind": "loops",
        "device": hardware(first.device),
        "versions": versions(),
        "threads": first.threads,
        "load": round(os.getloadavg()[0], 2),
        **first.model_dump(
            include={"model", "size", "batch", "precision", "compile", "workers", "steps", "script_steps"}
        ),
        "views": {case.work: case.views.views for case in todo},
        "seconds": seconds,
        "rounds": rounds,
        "aurora_over_salt": cost,
        "rows": table(turns),
    }


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "training": lambda row: row["work"],
    "loop": lambda row: row["way"],
    "samples/s": lambda row: f"{row['samples_per_second']:,.0f}",
    "ms/step": lambda row: f"{row['ms_per_step']:.2f}",
    "of the limit": lambda row: share(row["of_limit"]),
    "of the script": lambda row: share(row["of_script"]),
}


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def markdown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Callable[[Mapping[str, Any]], str]]) -> str:
    """A table that reads well as it is and as Markdown: words to the left, numbers to the right."""
    cells = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    words = [not any(line[i][:1].isdigit() for line in cells[1:]) for i in range(len(columns))]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    rule = ["-" * width if word else "-" * (width - 1) + ":" for width, word in zip(widths, words, strict=True)]
    lines = [
        [c.ljust(w) if word else c.rjust(w) for c, w, word in zip(line, widths, words, strict=True)] for line in cells
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def describe(facts: Mapping[str, Any]) -> str:
    """The answer for people: what was measured, the table, and what its words mean."""
    views = " and ".join(f"{n} for {w}" for w, n in facts["views"].items())
    cost = facts.get("aurora_over_salt")
    aurora = f" One of its steps takes {cost:.3f} of salt's time." if cost else ""
    lines = [
        f"{facts['model']}, {facts['size']}x{facts['size']}, batch {facts['batch']}, views {views}; {facts['device']},"
        f" torch {facts['versions']['torch']}; precision {facts['precision']}, compile {facts['compile']},"
        f" {facts['workers']} DataLoader workers",
        "",
        markdown(facts["rows"], COLUMNS),
        "",
        "Samples are images, not views. limit: the bare step on fixed tensors. flyby: train_site, whole epochs. script:"
        " DataLoader and Pillow, float32.",
        f"aurora is compared with salt's limit and script.{aurora} Medians of {facts['rounds']} interleaved rounds.",
    ]
    return "\n".join(lines)


def keep(facts: Mapping[str, Any], svg: str, png: bytes, text: str, out: Path, name: str) -> list[Path]:
    """The result as files: JSON, the table, and the figure twice."""
    write_json(out / f"{name}.json", facts)
    write_text(out / f"{name}.md", text + "\n")
    write_text(out / f"{name}.svg", svg + "\n")
    write_bytes(out / f"{name}.png", png)
    return [out / f"{name}.{kind}" for kind in ("json", "md", "svg", "png")]
