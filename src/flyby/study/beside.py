"""Finished runs in one table: what each reached, with its interval, and what it cost; and what may be concluded from a
difference between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flyby.data.splits import SplitSettings
from flyby.errors import BadInput
from flyby.report import page
from flyby.report.read import RunData, runs_in
from flyby.runs.answers import Discord
from flyby.runs.paired import Paired, p_said
from flyby.study.sheet import Entry, Part, Sheet, Table, plain

Gap = Paired | Discord


def read_runs(folders: Iterable[Path]) -> list[RunData]:
    """The runs of all folders, each once; a folder of runs brings all of its own."""
    places = dict.fromkeys(Path(folder).resolve() for folder in folders)
    runs = [run for place in places for run in runs_in(place)]
    if len(runs) < 2:
        raise BadInput("one run alone compares with nothing; name two run folders or more, or a folder of runs")
    return runs


def beside(runs: list[RunData]) -> Sheet:
    """The most accurate run first; a run is called by its folder."""
    runs = sorted(runs, key=lambda run: -(run.accuracy if run.accuracy is not None else -1.0))
    gaps = [None if run is runs[0] else _paired(run, runs[0]) for run in runs]
    heads = ["run", "method", "rule", "data", "accuracy, %", "95 % interval", "MB up", "seconds", "uploads", "split"]
    heads += ["to the best, points"] if any(gaps) else []
    lines = [_line(run, gap, any(gaps)) for run, gap in zip(runs, gaps, strict=True)]
    align = "llllrrrrrl" + "r" * any(gaps)
    table = Table(heads, align, lines, below=_verdict(runs, gaps))
    return Sheet("compare", f"{len(runs)} runs compared", "", [Part("", [table])])


def _line(run: RunData, gap: Gap | None, paired: bool) -> list[Entry]:
    result, ends = run.result, run.interval()
    number = {name: page.number(result.get(name)) for name in ("bytes_up", "uploads", "seed", "clients", "alpha")}
    shaped = SplitSettings(name=str(result.get("split"))).uses_alpha
    facts: dict[str, Any] = {
        **{name: result.get(name) for name in ("data", "model", "clients", "split", "method", "epochs", "seed")},
        "alpha": number["alpha"] if shaped else None,
        "rule": result.get("fusion"),
        "mean": None if run.accuracy is None else 100 * run.accuracy,
        "n": 1,
        "low": None if ends is None else 100 * ends[0],
        "high": None if ends is None else 100 * ends[1],
        "bytes_up": result.get("bytes_up"),
        "uploads": result.get("uploads"),
        "seconds": run.seconds,
        "split_hash": run.split_hash,
        "run": run.name,
    }
    if isinstance(gap, Discord):
        facts |= gap.facts()
    elif gap is not None:
        facts |= {"difference": 100 * gap.mean, "p": gap.p}
    words = [page.name(result.get(name)) for name in ("method", "fusion", "data")]
    costs = [page.megabytes(number["bytes_up"]), page.seconds(run.seconds), page.count(number["uploads"])]
    accuracy = "-" if run.accuracy is None else f"{100 * run.accuracy:.2f}"
    return [
        *plain(run.name, *words),
        Entry(accuracy, facts=facts),
        *plain(page.interval(ends), *costs, run.split_hash or page.NONE, *([_shown(gap)] if paired else [])),
    ]


def _shown(gap: Gap | None) -> str:
    if gap is None or isinstance(gap, Discord):
        return "" if gap is None else str(gap)
    error = "" if gap.error is None else f" ± {100 * gap.error:.2f}, p {p_said(gap.p)}"
    return f"{100 * gap.mean:+.2f}{error}"


def _paired(run: RunData, best: RunData) -> Gap | None:
    """Image by image, where both keep their answers to the same test images; nodes that met are judged one by one, and
    on the same split their differences can be paired."""
    mine, other = run.scores("per_client"), best.scores("per_client")
    if (images := Discord.of(run.answers, best.answers)) is not None:
        return images
    if not (run.met and best.met) or not run.split_hash or run.split_hash != best.split_hash:
        return None
    both = [(a, b) for name, a in mine.items() if a is not None and (b := other.get(name)) is not None]
    return Paired.of([a for a, _ in both], [b for _, b in both]) if both else None


def _verdict(runs: list[RunData], gaps: Sequence[Gap | None]) -> list[str]:
    """What these runs have in common, and so what a difference between two of them means."""
    return [*_common(runs), *_pairing(runs, gaps)]


def _pairing(runs: list[RunData], gaps: Sequence[Gap | None]) -> list[str]:
    """What the last column pairs, and which runs it cannot."""
    if any(isinstance(gap, Paired) for gap in gaps):
        return ["The last column pairs nodes: mean, its standard error, p of a sign-flip test."]
    left = [run.name for run, gap in zip(runs[1:], gaps[1:], strict=True) if gap is None]
    images = [gap.images for gap in gaps if isinstance(gap, Discord)]
    if images:
        told = (
            f"The last column pairs {images[0]:,} test images with {runs[0].name}'s: difference and its 95 %"
            " interval, how many images the run alone had right and how many it alone had wrong, p of McNemar's exact"
            " test."
        )
        return [told, *([f"Not on the same images, or without answers per image: {', '.join(left)}."] if left else [])]
    if len({(str(run.result.get("data")), run.split_hash) for run in runs}) > 1 or not runs[0].split_hash:
        return []  # that has been said to be another matter
    return [
        "These run folders hold no answers per image (an older flyby's, or no one model for all of them), or not to"
        " the same images, so that only these means can be compared, and no difference has an interval of its own."
    ]


def _common(runs: list[RunData]) -> list[str]:
    data = {str(run.result.get("data")) for run in runs}
    splits = {run.split_hash for run in runs}
    told = ["Intervals are of the test images (Wilson), or over the nodes that met."]
    if len(data) > 1:
        return [*told, "The runs are on different data: their accuracies cannot be compared."]
    if len(splits) > 1 or "" in splits:
        many = f"{len(splits)} different splits" if "" not in splits else "splits that are not all known"
        return [*told, f"The runs are on {many}: a difference between two is partly the luck of the split."]
    return [*told, f"All runs are on the same split ({splits.pop()}): the same images in the same hands."]
