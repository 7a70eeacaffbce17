"""Studies of several parts, rows borrowed from other studies, and the further tables: each from numbers made up by
hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flyby.errors import BadInput
from flyby.study.catalogue import Study, published, read_study
from flyby.study.grid import cells, standing
from flyby.study.measures import draw
from flyby.study.strengths import strengths
from flyby.study.tables import render

WORDS: dict[str, Any] = {"title": "T", "methods": ["fedavg"], "model": "mlp", "epochs": 1, "settings": ["locals=false"]}


def grid(**changes: Any) -> Study:
    return Study(**{**WORDS, **changes})


def row(cell: Any, **more: Any) -> dict[str, Any]:
    config = cell.config
    return {
        "key": cell.key,
        "study": "made up",
        "method": config.method,
        "fusion": cell.rule,
        "data": cell.data,
        "split": config.split.name,
        "alpha": config.split.alpha,
        "seed": config.seed,
        "accuracy": 0.5,
        "split_hash": f"s{config.seed}",
        "model": "mlp",
        "epochs": config.train["epochs"],
        "clients": config.split.clients,
        "hardware": "none",
        **({"variant": cell.variant} if cell.variant else {}),
        **more,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


# -- parts


def test_parts_take_what_they_do_not_say_from_the_study_and_seeds_stay_outermost() -> None:
    study = grid(
        alphas=[0.1], seeds=[0, 1], parts=[{"alphas": [0.3, 0.5]}, {"methods": ["fafi"], "epochs": 3, "seeds": [0]}]
    )
    found = [(c.config.method, c.config.split.alpha, c.config.seed, c.config.train["epochs"]) for c in cells(study)]
    assert found == [
        ("fedavg", 0.3, 0, 1),
        ("fedavg", 0.5, 0, 1),
        ("fafi", 0.1, 0, 3),
        ("fedavg", 0.3, 1, 1),
        ("fedavg", 0.5, 1, 1),
    ]
    alone = {c.key for c in cells(grid(alphas=[0.3, 0.5], seeds=[0, 1]))}
    assert alone <= {c.key for c in cells(study)}, "a part's cells are those of a study that says the same"


def test_a_bad_part_is_one_sentence() -> None:
    with pytest.raises(BadInput, match="unknown study part setting 'alpha'; did you mean 'alphas'"):
        list(cells(grid(parts=[{"alpha": [0.1]}])))


# -- rows of other studies


def test_rows_of_other_studies_count_where_the_cell_is_the_same(tmp_path: Path) -> None:
    study = grid(seeds=[0, 1], rows=["other", "absent"])
    mine = list(cells(study))
    strange = next(cells(grid(epochs=2)))
    write(tmp_path / "other.jsonl", [row(mine[0], accuracy=0.9), row(strange, accuracy=0.1)])
    place = tmp_path / "mine.jsonl"
    assert [cell.config.seed for cell in standing(study, place).missing] == [1]
    assert [one["accuracy"] for one in standing(study, place).rows.values()] == [0.9]
    text = render(study, place, [])
    assert "| fedavg | fedavg | 90.00 (n=1) |" in text
    assert "left out" not in text, "what another study has besides is its own business"
    write(place, [row(mine[0], accuracy=0.7), row(strange)])
    assert [one["accuracy"] for one in standing(study, place).rows.values()] == [0.7], "one's own row comes first"
    assert standing(study, place).others == 1
    assert "1 rows that were run under other settings are left out" in render(study, place, [])
    assert len(standing(grid(seeds=[0, 1]), tmp_path / "absent.jsonl").missing) == 2, (
        "without the key nothing is borrowed"
    )


def test_a_row_of_sites_that_sent_less_counts_where_the_rule_would_not_have_read_more(tmp_path: Path) -> None:
    rules = ["fedavg", "best"]
    plain = list(cells(grid(methods=["fedavg"], fusions=rules)))
    place = write(tmp_path / "mine.jsonl", [row(cell, accuracy=0.5) for cell in plain])
    asked = grid(methods=["fedavg"], fusions=rules, settings=["objective.send=[moments]"])
    assert [cell.rule for cell in standing(asked, place).missing] == ["best"], "best hears moments, fedavg does not"
    both = list(cells(asked))
    write(place, [row(cell, accuracy=0.6) for cell in both])
    assert standing(grid(methods=["fedavg"], fusions=rules), place).rows == {}, "not the other way: its bytes are more"
    write(place, [row(plain[0], accuracy=0.5), row(both[0], accuracy=0.6)])
    assert {one["accuracy"] for one in standing(asked, place).rows.values()} == {0.6}, "the row of the cell itself wins"
    write(place, [row(both[0], accuracy=0.6), row(plain[0], accuracy=0.5)])
    assert {one["accuracy"] for one in standing(asked, place).rows.values()} == {0.6}, "whichever comes first"


def test_the_grids_of_auroras_tables_find_the_rows_that_were_run_before() -> None:
    """Which rows of the repository are cells of the new grids: a changed setting in one of them would lose these."""
    results = Path(__file__).parents[2] / "results"
    for name, rows in (("aurora-table1", 9), ("aurora-table1b", 3), ("aurora-table2", 24), ("aurora-table7", 9)):
        assert len(standing(read_study(name)[1], results / f"{name}.jsonl").rows) >= rows


# -- further tables


def lines_with(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_bytes_stand_beside_accuracies(tmp_path: Path) -> None:
    study = grid(methods=["fedavg"], fusions=["fedavg"], alphas=[0.1, 0.5], shows=["bytes"])
    rows = [
        row(c, bytes_up=n, accuracy=a) for c, n, a in zip(cells(study), (2_000_000, 4_000_000), (0.5, 0.7), strict=True)
    ]
    text = render(study, write(tmp_path / "b.jsonl", rows), [])
    assert "| clients' method | server rule | MB up | MB down | α = 0.1 | α = 0.5 |" in text
    assert "| fedavg | fedavg | 3.000 | 0.000 | 50.00 | 70.00 |" in text


def test_seconds_stand_beside_accuracies_in_one_table_of_trainings_of_any_length(tmp_path: Path) -> None:
    study = grid(
        methods=["fafi"],
        fusions=["experts", "fedavg"],
        variants=["train.epochs=9", "train.epochs=3"],
        shows=["seconds"],
    )
    rows = [
        row(c, timings={"train": 2.0 * c.config.train["epochs"]}, trained=2 - (i == 0), clients=2, accuracy=0.1 * i)
        for i, c in enumerate(cells(study))
    ]
    text = render(study, write(tmp_path / "s.jsonl", rows), [])
    assert lines_with(text, "## ") == ["## digits: mlp, 2 clients, `dirichlet` split"]
    assert "| clients' method | α | epochs | seconds | experts | fedavg |" in text
    assert "| fafi, train.epochs=9 | 0.1 | 9 | 18 | 0.00 | 10.00 |" in text, "of the run that was timed whole"
    assert "| fafi, train.epochs=3 | 0.1 | 3 | 6 | 20.00 | 30.00 |" in text


def test_likeness_is_told_once_for_all_rules_over_one_set_of_uploads(tmp_path: Path) -> None:
    study = grid(methods=["aurora"], fusions=["experts", "fedavg"], seeds=[0, 1], shows=["prototypes"], data=["digits"])
    rows = [row(c, consistency={"proto_matrix_std": 0.25 + 0.5 * c.config.seed, "drift": 1.0}) for c in cells(study)]
    figures = [
        {
            "data": "digits",
            "alpha": 0.1,
            "measure": "proto_matrix_std",
            "method": "FAFI",
            "value": 1.007,
            "source": "P",
            "caveat": "C",
        }
    ]
    text = render(study, write(tmp_path / "p.jsonl", rows), figures)
    assert lines_with(text, "| aurora | 0.1 |") == ["| aurora | 0.1 | 0.500 |  |  | 2 |"]
    assert "| *FAFI: P [1]* | 0.1 | *1.007* |" in text
    assert "- [1] C" in text
    assert "published: P" not in text, "it is no accuracy"


def test_peaks_are_those_of_the_snapshots(tmp_path: Path) -> None:
    study = grid(methods=["aurora"], fusions=["experts"], shows=["peak"])
    points = [{"epoch": 10, "accuracy": 0.4}, {"epoch": 20, "accuracy": 0.6}, {"epoch": 30, "accuracy": 0.5}]
    rows = [row(c, checkpoints=points, accuracy=0.5) for c in cells(study)]
    text = render(study, write(tmp_path / "k.jsonl", rows), [])
    assert "| aurora | experts | 0.1 | 60.00 | 20 | 50.00 |" in text


# -- lambda


def history(tmp_path: Path, epochs: int) -> Path:
    """lambda = epoch at one site and twice that at the other, the peak half as much again; above a bound of 50 in all
    steps of the epochs in which lambda is."""
    rows = [
        {"site": site, "epoch": e, "lambda": k * e, "lambda_peak": 1.5 * k * e, "lambda_bound": float(k * e > 50)}
        for site, k in (("site-0", 1), ("site-1", 2))
        for e in range(1, epochs + 1)
    ]
    return write(tmp_path / "metrics.jsonl", rows)


def test_a_history_becomes_part_of_a_row(tmp_path: Path) -> None:
    found = strengths(history(tmp_path, 100))["lambda"]
    assert found["epochs"] == [1, *range(2, 101, 2)]
    one, two = found["sites"]["site-0"], found["sites"]["site-1"]
    assert one["lambda"][:3] == [1, 2, 4]
    assert (one["peak"][-1], one["largest"], one["share"]) == (150, 150, 0.5)
    assert (two["largest"], two["share"]) == (300, 0.75)
    assert two["bound"][found["epochs"].index(26)] == 0.5, "of epochs 25 and 26 the second is above"
    assert strengths(tmp_path / "absent.jsonl") == {}
    assert strengths(write(tmp_path / "fafi.jsonl", [{"site": "a", "epoch": 1, "loss": 1.0}])) == {}


def test_lambda_in_a_table_and_a_figure(tmp_path: Path) -> None:
    study = grid(methods=["aurora", "aurora-no-stability"], fusions=["experts"], shows=["lambda"], epochs=100)
    told = strengths(history(tmp_path, 100))
    rows = [row(cell, **told) for cell in cells(study)]
    figures = [
        {
            "data": "digits",
            "alpha": 0.1,
            "measure": "lambda",
            "at": 0.3,
            "method": "By hand",
            "value": 12.6,
            "source": "P",
        }
    ]
    place = write(tmp_path / "l.jsonl", rows)
    text = render(study, place, figures)
    assert "| aurora | 0.1 | site-1 | 2 | 20 | 60 | 100 | 120 | 140 | 160 | 180 | 200 | 300 | 75.0 % |" in text, (
        "at the start, and at tenths of the training"
    )
    assert "| *By hand: P* | 0.1 |  |  |  | *12.6* |" in text
    assert draw(standing(study, place).rows, tmp_path / "l.svg") == [tmp_path / "l.svg"]
    svg = (tmp_path / "l.svg").read_text()
    assert svg.startswith("<svg")
    assert "bound 50" in svg
    assert "aurora-no-stability, digits, 100 epochs" in svg
    assert not (tmp_path / "l.svg").read_text().count("nan")


def test_figures_of_a_measure_have_what_their_table_prints() -> None:
    wanted = {"lambda": {"at"}, "peak": {"final", "epoch"}, "proto_matrix_std": set[str]()}
    found = [figure for figure in published() if "measure" in figure]
    assert {figure["measure"] for figure in found} == wanted.keys()
    for figure in found:
        assert wanted[figure["measure"]] <= figure.keys()
