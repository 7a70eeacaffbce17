"""``flyby compare``: finished runs in one table, with what may be concluded from it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from factories import call, done, one_line


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


def test_one_run_or_none_is_refused(tmp_path: Path) -> None:
    one = folder(tmp_path / "one")
    assert "name two run folders or more" in one_line(call("compare", one))
    assert "name two run folders or more" in one_line(call("compare", one, one))
    assert "holds neither result.json nor run folders" in one_line(call("compare", one, tmp_path / "nowhere"))
