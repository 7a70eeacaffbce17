"""The grids of distilled students: what comes first, and Co-Boosting's own setting."""

from __future__ import annotations

from flyby.fusion.distilled.batchnorm import norms
from flyby.models import ModelSpec
from flyby.study.catalogue import read_study
from flyby.study.grid import cells
from flyby.study.tables import published


def test_the_published_budgets_begin_with_what_decides() -> None:
    grid = list(cells(read_study("distil-cifar10-published")[1]))
    long = [(c.config.split.alpha, c.rule) for c in grid if c.rule.startswith(("dense", "coboosting", "intactofl"))]
    dense = ["dense:bn=0", "dense:bn=0,teacher=probabilities", "dense:bn=0,teacher=experts-calibrated"]
    first = [*dense, "coboosting", "intactofl:bn=0"]
    assert long[:10] == [(alpha, rule) for alpha in (0.1, 0.3) for rule in first]
    assert len({c.key for c in grid}) == len(grid) == 30
    keys = {(c.config.split.alpha, c.rule): c.key for c in grid}
    assert keys[0.1, "dense:bn=0"] == "d49664fbb6f099cd", "rows of other machines are found by it"
    assert keys[0.3, "dense"] == "c316ffeee890589e"


def test_coboosting_has_its_own_setting() -> None:
    grid = list(cells(read_study("distil-coboosting")[1]))
    assert {(c.config.split.name, c.config.split.clients) for c in grid} == {("dirichlet-client", 10)}
    for name in ("lenet", "cnn-fol"):
        ours = [c for c in grid if c.config.model.name == name and c.rule == "coboosting"]
        assert [c.config.split.alpha for c in ours] == [0.1, 0.05]
        assert not norms(ModelSpec(name=name, classes=10, size=(32, 32)).skeleton())
    printed = {f["alpha"]: f["value"] for f in published() if (f["data"], f["method"]) == ("cifar10", "Co-Boosting")}
    assert {alpha: printed[alpha] for alpha in (0.1, 0.05)} == {0.1: 57.09, 0.05: 47.20}
