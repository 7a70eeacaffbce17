"""``flyby compare``: finished runs in one table, with what may be concluded from it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from factories import call, done, one_line
from flyby.runs.answers import Answers
from flyby.runs.folder import Run


def folder(place: Path, **changes: Any) -> Path:
    """A finished run, as far as a table asks."""
    facts = {
        **{"method": "fafi", "fusion": "experts", "data": "digits", "model": "mlp", "split": "dirichlet"},
        **{"split_hash": "abc", "clients": 2, "alpha": 0.1, "epochs": 1, "accuracy": 0.8, "test_images": 100},
        **{"per_client": {"a": 0.8, "b": 0.7}, "uploads": 2, "bytes_up": 2_500_000, "seconds": 3.2, "seed": 0},
    }
    place.mkdir(parents=True)
    (place / "result.json").write_text(json.dumps(facts | changes))
    return place


def table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")]


def test_runs_on_one_split(tmp_path: Path) -> None:
    one = folder(tmp_path / "one")
    two = folder(tmp_path / "two", method="fedavg", fusion="fedavg", accuracy=0.9)
    said = done("compare", one, two).out
    head, _, first, second = table(said)
    assert head[4:6] == ["accuracy, %", "95 % interval"]
    # Wilson: 90 of 100 gives .826 to .945, 80 of 100 gives .711 to .867.
    assert first == [
        *("two", "fedavg", "fedavg", "digits", "90.00", "82.6 – 94.5", "2.50", "3.2", "2", "abc"),
    ]
    assert second[4:6] == ["80.00", "71.1 – 86.7"]
    assert "same split (abc)" in said
    assert "only these means can be compared" in said


def test_a_folder_of_runs_and_the_formats(tmp_path: Path) -> None:
    for name, accuracy in (("one", 0.8), ("two", 0.9)):
        folder(tmp_path / "all" / name, accuracy=accuracy)
    rows = list(csv.DictReader(io.StringIO(done("compare", tmp_path / "all", "--format", "csv").out)))
    assert [(row["run"], row["mean"], row["bytes_up"]) for row in rows] == [
        ("two", "90", "2500000"),
        ("one", "80", "2500000"),
    ]
    assert r"\toprule" in done("compare", tmp_path / "all", "--format", "latex").out
    found = done("compare", tmp_path / "all", "--json").json
    assert [run["mean"] for run in found["runs"]] == [90.0, 80.0]
    assert len(found["notes"]) == 3
    made = done("compare", tmp_path / "all", "--format", "markdown,html", "--out", tmp_path / "x").out
    assert made == f"table written to {tmp_path / 'x.md'}, {tmp_path / 'x.html'}\n"
    assert "2 runs compared" in (tmp_path / "x.html").read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"split_hash": "other"}, "on 2 different splits: a difference between two is partly the luck"),
        ({"data": "cifar10", "split_hash": "other"}, "on different data: their accuracies cannot be compared"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    text = done("compare", folder(tmp_path / "one"), folder(tmp_path / "two", **change)).out
    assert said in text
    assert "same split" not in text


def test_nodes_that_met_are_paired(tmp_path: Path) -> None:
    """Differences of -.1, -.2 and -.3: mean -.2, deviation .1, error .1 / sqrt(3); 2 of 8 sign flips are as far."""
    better = {"a": 0.8, "b": 0.9, "c": 1.0}
    one = folder(tmp_path / "one", rounds=1, fusion=None, per_client=better, accuracy=0.9)
    other = {"a": 0.7, "b": 0.7, "c": 0.7}
    two = folder(tmp_path / "two", rounds=1, fusion=None, per_client=other, accuracy=0.7)
    said = done("compare", two, one).out
    assert [row[-1] for row in table(said)[2:]] == ["", "-20.00 ± 5.77, p 0.250"]
    assert "pairs nodes" in said
    assert "only these means" not in said


def answers(run: Path, wrong: set[int], count: int = 20, images: str = "digest") -> Path:
    """The run's answers: all right but these."""
    Answers.of(images, torch.tensor([i not in wrong for i in range(count)])).save(Run(run).right)
    return run


def two(tmp_path: Path) -> tuple[Path, Path]:
    one, other = folder(tmp_path / "one", accuracy=0.9), folder(tmp_path / "two", accuracy=0.55, method="local")
    return answers(one, {0, 1}), answers(other, {1, *range(10, 18)})


def test_images_are_paired(tmp_path: Path) -> None:
    """Of 20 images both have 10 right and 1 wrong; the first alone 8, the second alone 1. McNemar's exact p is
    2 (C(9, 0) + C(9, 1)) / 2^9 = .0390625; of 9 tosses with 1 head, Clopper and Pearson's interval is .00281 to
    .482497, and 9 / 20 (2 t - 1) of it -44.75 to -1.58 points."""
    said = done("compare", *two(tmp_path)).out
    assert [row[-1] for row in table(said)[2:]] == ["", "-35.00 [-44.75, -1.58], 1 : 8, p 0.039"]
    assert "pairs 20 test images" in said
    assert "only these means" not in said
    best, other = done("compare", tmp_path, "--json").json["runs"]
    assert "p" not in best
    assert (other["p"], other["difference"], other["right_alone"], other["wrong_alone"]) == (0.0390625, -35.0, 1, 8)


@pytest.mark.parametrize("change", ["older", "other images", "fewer images"])
def test_runs_that_cannot_be_paired_are_compared_by_their_means(tmp_path: Path, change: str) -> None:
    one, other = two(tmp_path)
    if change == "older":
        Run(other).right.unlink()
    else:
        answers(other, {3}, 19 if change == "fewer images" else 20, "digest" if change == "fewer images" else "others")
    said = done("compare", one, other).out
    assert len(table(said)[0]) == 10
    assert "only these means can be compared" in said
    third = answers(folder(tmp_path / "three", accuracy=0.95), {0})
    said = done("compare", one, other, third).out
    assert [row[-1] for row in table(said)[2:]] == ["", "-5.00 [-5.00, +4.75], 0 : 1, p 1.000", ""]
    assert "without answers per image: two." in said


def test_damaged_answers_are_one_line(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    for text in ('{"images": "a", "count": 20, "right": "ff"}', '{"images": "a", "count": 8, "right": "xy"}', "[]"):
        Run(other).right.write_text(text)
        assert "right.json" in one_line(call("compare", one, other))


def test_one_run_or_none_is_refused(tmp_path: Path) -> None:
    one = folder(tmp_path / "one")
    assert "name two run folders or more" in one_line(call("compare", one))
    assert "name two run folders or more" in one_line(call("compare", one, one))
    assert "holds neither result.json nor run folders" in one_line(call("compare", one, tmp_path / "nowhere"))
