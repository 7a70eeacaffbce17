"""``judge=held-out``: settings are chosen by images that the sites kept back, and no test image takes part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from factories import call, done, make_stripes, one_line, result_of
from flyby.data.site import part_of
from flyby.data.sources import load
from flyby.data.splits import Split
from flyby.fusion import load_predictor
from flyby.fusion.evaluation import accuracy, scores_of
from flyby.runs.folder import Run


@pytest.fixture(scope="module")
def stripes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stripes(tmp_path_factory.mktemp("data") / "stripes.npz", count=90, test=30)


def words(stripes: Path, out: Path) -> tuple[object, ...]:
    shape = ("--clients", 2, "--alpha", 5, "--epochs", 1, "--seed", 3, "--quiet", "--set", "split.val=0.3")
    return ("run", "--method", "fafi", "--data", stripes, *shape, "--set", "judge=held-out", "--out", out)


def test_accuracies_are_those_of_the_sites_validation_images(stripes: Path, tmp_path: Path) -> None:
    done(*words(stripes, tmp_path / "run"))
    run, bundle = Run(tmp_path / "run"), load(str(stripes))
    rows = np.concatenate([share.val for share in Split.load(run.split).shares.values()])
    held = part_of(bundle.train, rows)
    predictor = load_predictor(run.model)
    assert result_of(tmp_path / "run")["accuracy"] == accuracy(scores_of(predictor, held.images), held.labels)
    assert bundle.test is not None
    assert len(held) != len(bundle.test), "not those of the test images"


def test_images_that_judge_are_not_the_server_s_own(stripes: Path, tmp_path: Path) -> None:
    said = one_line(call(*words(stripes, tmp_path / "run"), "--set", "proxy=held-out"))
    assert "the held-out images cannot be the server's own and judge it too" in said
    said = one_line(call(*words(stripes, tmp_path / "none"), "--set", "split.val=0"))
    assert "keep some back with --set split.val=0.1" in said
    assert not list(tmp_path.rglob("*.parcel")), "said before anything is trained"
