"""Studies of FOL: variants as an axis, tables by node and round, statistics with options, stems that fit the images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from factories import make_npz, random_parcel, small_spec, striped_site
from flyby.errors import BadInput
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.runs.config import make_config, plan
from flyby.statistics.catalogue import computed, named
from flyby.study.catalogue import Study
from flyby.study.grid import cells
from flyby.study.orient_tables import node_tables
from flyby.study.tables import render
from flyby.study.writers import markdown_table


def node_lines(rows: list[dict[str, Any]], figures: list[dict[str, Any]]) -> list[str]:
    return [line for table in node_tables(rows, figures) for line in markdown_table(table)]


def row(
    method: str, seed: int, nodes: dict[str, tuple[float, list[float], list[float]]], variant: str = ""
) -> dict[str, Any]:
    by_round = {
        name: {"images": 20, "local": local, "student": s, "teacher": t} for name, (local, s, t) in nodes.items()
    }
    return {"method": method, "seed": seed, "by_round": by_round, "seconds": 12.3, "hardware": "an abacus"} | (
        {"variant": variant} if variant else {}
    )


def test_a_row_is_compared_with_the_local_models_it_began_from() -> None:
    nodes = {f"n{i}": (0.5, [0.6], [0.7]) for i in range(7)}
    again = {name: (0.4, [0.6], [0.7]) for name in nodes}
    lines = node_lines([row("fol", 0, nodes), row("fol-n", 0, again)], [])
    table = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in lines if line.startswith("| FOL")}
    assert table["FOL (E=1)"].startswith("+10.00")
    assert table["FOL-N (E=1)"].startswith("+20.00")
    assert any("FOL-N, FOL-AN began from local models that were pretrained again" in line for line in lines)
    assert not any("pretrained again" in line for line in node_lines([row("fol", 0, nodes)], []))


def test_a_node_table_by_hand() -> None:
    rows = [
        row("fol", 0, {"a": (0.5, [0.6, 0.7], [0.8, 0.9]), "b": (0.7, [0.7, 0.7], [0.7, 0.8])}),
        row("fol", 1, {"a": (0.6, [0.6, 0.9], [0.8, 0.9]), "b": (0.7, [0.7, 0.7], [0.7, 0.8])}),
        row("gossip", 0, {"a": (0.5, [0.1, 0.2], [0.1, 0.2]), "b": (0.7, [0.3, 0.4], [0.3, 0.4])}),
    ]
    figures = [
        {"method": "FOL (E=2)", "node": n, "value": v, "source": "Table 1"} for n, v in ((13, 96.32), (28, 95.75))
    ]
    lines = node_lines(rows, figures)
    assert lines[0] == "| method | a (20 images) | b (20 images) | mean | published |"
    table = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in lines[2:]
        if line.startswith("|")
    }
    assert table == {
        "Local": ["55.00", "70.00", "62.50", ""],
        "FOL (E=1)": ["60.00", "70.00", "65.00", ""],
        "FOL (E=2)": ["80.00", "70.00", "75.00", "96.32 / 95.75"],
        "FOL-A (E=1)": ["80.00", "70.00", "75.00", ""],
        "FOL-A (E=2)": ["90.00", "80.00", "85.00", ""],
        "FedAvg (E=1)": ["10.00", "30.00", "20.00", ""],
        "FedAvg (E=2)": ["20.00", "40.00", "30.00", ""],
    }
    assert "seeds 0, 1; fol 12 s, gossip 12 s (an abacus)" in lines[-2]
    assert lines[-1] == "Published, for its own nodes 13, 28: Table 1."


def judged(local: float, student: float, common: tuple[float, float], more: dict[str, Any] | None = None) -> Any:
    """One node of one round: on its own 20 images, and on 1,000 common ones."""
    one: dict[str, Any] = {"images": 20, "local": local, "student": [student], "teacher": [student]}
    one["common"] = {"images": 1000, "local": common[0], "student": [common[1]], "teacher": [common[1]]}
    return one | ({"more": more} if more else {})


def table_of(lines: list[str]) -> dict[str, dict[str, str]]:
    head, _, *body = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    heads = [f"{name}{head[:place].count(name) or ''}" for place, name in enumerate(head)]
    return {cells[0]: dict(zip(heads, cells, strict=True)) for cells in body}


def test_many_nodes_by_hand() -> None:
    """Six nodes, each ten points above its local model on the common images: 2 of 2^6 sign flips are as far from 0."""
    nodes = {f"n{i}": judged(0.5, 0.5 + 0.1 * (-1) ** i, (0.6, 0.7)) for i in range(6)}
    fol = row("fol", 0, {}) | {"by_round": nodes}
    figures = [
        {"method": "FOL (E=1)", "node": n, "value": v, "source": "Table 1", "caveat": "theirs."}
        for n, v in ((13, 96.0), (28, 95.0))
    ]
    lines = node_lines([fol], figures)
    assert lines[0].startswith("| method | own, % | own − local | p | up / down | common, % | common − local | p |")
    table = table_of(lines)
    assert table["Local"]["own, %"] == "50.00 ± 0.00"
    assert table["Local"]["common − local"] == ""
    line = table["FOL (E=1)"]
    assert (line["own, %"], line["own − local"], line["up / down"]) == ("50.00 ± 4.47", "+0.00 ± 4.47", "3 / 3")
    assert (line["common, %"], line["common − local"], line["p1"]) == ("70.00 ± 0.00", "+10.00 ± 0.00", "0.031")
    assert line["up / down1"] == "6 / 0"
    assert line["published, mean"] == "95.50 (n=2)"
    said = "\n".join(lines)
    assert "6 nodes, seed 0: n = 6." in said
    assert "20 to 20 test images (median 20, 120 in all)" in said
    assert "1,000 images that no node trains on" in said
    assert lines[-1] == "Published, for its own nodes 13, 28: Table 1 (theirs)."


def test_seeds_have_their_own_nodes_and_a_server_rule_stands_beside_them() -> None:
    """Nodes are picked by size, so each seed has others; a server's row has all sites, and only theirs count."""
    more = {"log_loss": {"local": 0.4, "student": [0.3], "teacher": [0.2]}}
    rows = []
    for seed in (0, 1):
        mine = {f"n{5 * seed + i}": judged(0.5, 0.6, (0.6, 0.65), more) for i in range(5)}
        every = {f"n{i}": judged(0.1, 0.4, (0.2, 0.3)) for i in range(20)}
        for one in every.values():
            del one["teacher"]
        rows += [row("fol", seed, {}) | {"by_round": mine}]
        rows += [row("dense", seed, {}) | {"by_round": every, "fusion": "own"}]
    lines = node_lines(rows, [])
    table = table_of(lines)
    assert list(table) == ["Local", "FOL (E=1)", "FOL-A (E=1)", "DENSE"]
    assert table["Local"]["common, %"] == "60.00 ± 0.00", "of the nodes that meet, not of the server's sites"
    assert table["DENSE"]["common − local"] == "-30.00 ± 0.00"
    assert table["DENSE"]["up / down1"] == "0 / 10"
    assert (table["FOL (E=1)"]["log-loss"], table["DENSE"]["log-loss"]) == ("0.300 ± 0.000", "")
    assert any("5 nodes, seeds 0, 1: n = 10." in line for line in lines)


def test_every_psi_has_a_table_and_its_own_figures() -> None:
    nodes = {"a": (0.5, [0.6], [0.8])}
    figures = [{"method": "Local", "node": 1, "value": 10 * a, "alpha": a, "source": "Table 2"} for a in (0.1, 0.5)]
    lines = node_lines([row("fol", 0, nodes) | {"alpha": a} for a in (0.5, 0.1)], figures)
    assert [line for line in lines if line.startswith("###")] == ["### psi = 0.5", "### psi = 0.1"]
    assert [line for line in lines if line.startswith("| Local")] == [
        "| Local | 50.00 | 50.00 | 5.00 |",
        "| Local | 50.00 | 50.00 | 1.00 |",
    ]


def test_variants_have_tables_of_their_own() -> None:
    nodes = {"a": (0.5, [0.6], [0.8])}
    lines = node_lines([row("fol", 0, nodes, "split.replicas=0"), row("fol", 0, nodes, "split.replicas=3")], [])
    assert [line for line in lines if line.startswith("###")] == ["### split.replicas=0", "### split.replicas=3"]


def test_variants_are_an_axis_and_change_the_key() -> None:
    study = Study(
        title="t", methods=["fol"], splits=["fol"], variants=["split.replicas=0", "split.replicas=3;train.lr=0.5"]
    )
    first, second = cells(study)
    assert (first.config.split.replicas, second.config.split.replicas) == (0, 3)
    assert (first.config.train, second.config.train) == ({}, {"lr": 0.5})
    assert (first.variant, second.variant) == tuple(study.variants)
    assert first.key != second.key
    (plain,) = cells(Study(title="t", methods=["fol"], splits=["fol"]))
    assert plain.variant == ""


def test_a_statistic_takes_options_after_a_colon() -> None:
    assert named("kfac:samples=20;half=false") == ("kfac", {"samples": 20, "half": False})
    spec, site = small_spec("mlp", width=0.1), striped_site("a")
    network = random_parcel("a", spec).network()
    some, again, other = (
        computed(text, network, site, 0)
        for text in ("kfac:samples=8;half=false", "kfac:samples=8;half=false", "kfac:half=false")
    )
    assert all(name.startswith("kfac.") for name in some)
    assert all(torch.equal(some[name], again[name]) for name in some)
    assert any(not torch.equal(some[name], other[name]) for name in some)
    assert Supervised.provided(SupervisedSettings(send=("kfac:samples=8",))) >= {"kfac"}


@pytest.mark.parametrize(
    ("text", "said"),
    [("kfak", "did you mean"), ("kfac:sample=3", "samples"), ("class-means:a=1", "class-means has no options")],
)
def test_a_wrong_statistic_or_option_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        named(text)


@pytest.mark.parametrize(
    ("size", "asked", "stem"), [(32, [], "cifar"), (96, [], "imagenet"), (96, ["model.stem=cifar"], "cifar")]
)
def test_large_images_get_the_stem_for_them(tmp_path: Any, size: int, asked: list[str], stem: str) -> None:
    path = make_npz(tmp_path / "data.npz", images=np.zeros((12, size, size, 3), np.uint8), labels=np.arange(12) % 2)
    config = make_config("fedavg", data={"name": str(path)}, model="resnet18", assignments=asked)
    assert plan(config, config.data.load()).recipe.spec.stem == stem


def test_a_semicolon_in_brackets_belongs_to_the_value() -> None:
    variant = "model.looks=mirrored;objective.send=[feature-sums:dtype=float64;least=1];fusion.even=true"
    study = Study(title="t", methods=["ridge"], settings=["model.backbone=efficientnet-lite0"], variants=[variant])
    (cell,) = cells(study)
    assert cell.config.objective["send"] == ["feature-sums:dtype=float64;least=1"]
    assert cell.config.fusion["even"] is True


def test_published_figures_stand_beside_splits_by_alpha_only(tmp_path: Path) -> None:
    study = Study(title="t", data=["cifar10"], methods=["fafi"], splits=["dirichlet", "iid"])
    facts = {"model": "m", "epochs": 1, "clients": 5, "data": "cifar10", "method": "fafi", "accuracy": 0.5}
    facts |= {"alpha": 0.1, "seed": 0, "seconds": 1.0, "timings": {"train": 1.0}, "trained": 5}
    facts |= {"hardware": "h", "fusion": "own"}
    rows = [{**facts, "key": cell.key, "split": cell.config.split.name} for cell in cells(study)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = {"data": "cifar10", "alpha": 0.1, "method": "FAFI", "value": 76.1, "source": "T", "caveat": "c"}
    by_alpha, even = render(study, tmp_path / "t.jsonl", [figure]).split("`iid` split")
    assert "76.10" in by_alpha
    assert "76.10" not in even
