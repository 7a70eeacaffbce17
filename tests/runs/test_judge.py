"""Nodes judged by common images that weigh as their own classes: figures by hand, which nodes, and what a run says."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from factories import call, done, make_npz, one_line, result_of, stripes
from flyby.data.dataset import DataBundle, Dataset
from flyby.data.sources import load
from flyby.errors import BadInput
from flyby.files import read_json
from flyby.fusion.evaluation import LOOKS, Looks, own_accuracy, per_class, recall_at, scores_of, weighted_figures
from flyby.fusion.predictor import load_predictor
from flyby.runs.config import make_config
from flyby.runs.judge import Common, series
from flyby.runs.paired import EXACT, Paired, mean_error, sign_flip
from flyby.runs.pipeline import Options, run
from flyby.runs.population import evaluated

# -- figures


def test_figures_by_hand() -> None:
    """Class 0: 2 of 4 right; class 1: 1 of 1. A node of nine images of class 0 and one of class 1."""
    chances = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6], [0.2, 0.8]])
    labels = torch.tensor([0, 0, 0, 0, 1])
    found = weighted_figures(chances, labels, [9, 1])
    assert found["accuracy"] == pytest.approx(0.9 * 0.5 + 0.1)
    assert found["accuracy"] == own_accuracy(per_class(chances, labels, 2), [9, 1])
    logs = [math.log(p) for p in (0.9, 0.8, 0.3, 0.4, 0.8)]
    assert found["log_loss"] == pytest.approx(-(0.9 * sum(logs[:4]) / 4 + 0.1 * logs[4]))
    # Confidences .9 and .8 are right, .7 and .6 wrong, .8 right; each of class 0 weighs .225, the other .1. Both of .8
    # are in one bin.
    gap = 0.225 * 0.1 + (0.225 + 0.1) * 0.2 + 0.225 * 0.7 + 0.225 * 0.6
    assert found["calibration_error"] == pytest.approx(gap)
    assert found["recall"] == 1.0, "no false alarm is allowed of four, and the one alarm is surer than any"
    assert weighted_figures(chances, labels, [9, 0])["accuracy"] == 0.5
    assert weighted_figures(chances[:4], labels[:4], [0, 3]) == {}, "none of its classes was asked about"
    assert "recall" not in weighted_figures(torch.eye(3), torch.arange(3), [1, 1, 1])


def test_a_sure_and_a_surer_wrong_answer_are_finite() -> None:
    found = weighted_figures(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]), [1, 1])
    assert found["log_loss"] == pytest.approx(0.5 * -math.log(1e-12))
    assert found["recall"] == 0.0, "level with a false alarm is not above it"
    assert all(math.isfinite(value) for value in found.values())


def test_recall_at_a_rate_of_false_alarms() -> None:
    others, wanted = torch.arange(40.0), torch.tensor([39.0, 38.5, 37.5, 36.5, 0.0])
    scores = torch.cat([others, wanted])
    mask = torch.arange(45) >= 40
    assert recall_at(scores, mask, 0.05) == 3 / 5, "two of forty may lie above: the threshold is 37"
    assert recall_at(scores, mask, 0.0) == 0 / 5
    assert recall_at(scores, mask, 0.025) == 2 / 5


# -- the common images


def dataset(labels: list[int], first: int, classes: int = 2) -> Dataset:
    images = np.arange(first, first + len(labels), dtype=np.uint8).reshape(-1, 1, 1, 1)
    return Dataset(images, np.array(labels), tuple("abc"[:classes]), "d")


def test_common_images_are_what_came_for_testing_and_validating() -> None:
    train, test, val = dataset([0, 1], 0), dataset([0] * 30 + [1] * 10, 10), dataset([0] * 30 + [1] * 10, 60)
    whole = Common.of(DataBundle("d", train, test, val), "cpu")
    assert whole is not None
    assert whole.part.images.flatten().tolist() == [*range(10, 50), *range(60, 100)], "test images come first"
    some = Common.of(DataBundle("d", train, test, val), "cpu", most=20, seed=3)
    assert some is not None
    assert torch.bincount(some.part.labels).tolist() == [15, 5], "every class keeps its share"
    assert some.name != whole.name
    again = [Common.of(DataBundle("d", train, test, val), "cpu", most=20, seed=seed) for seed in (3, 4)]
    assert [one is not None and one.name == some.name for one in again] == [True, False]
    assert Common.of(DataBundle("d", train), "cpu") is None
    only = Common.of(DataBundle("d", train, None, val), "cpu")
    assert only is not None
    assert len(only) == 40


def test_a_named_image_set_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from factories import random_parcel, small_spec
    from flyby.fusion import evaluation
    from flyby.fusion.predictor import Single

    monkeypatch.setattr(evaluation, "LOOKS", Looks())
    taken: list[int] = []
    monkeypatch.setattr(evaluation, "digest_of", lambda images: taken.append(1) or str(len(taken)))
    item = random_parcel("a", small_spec("mlp", width=0.1))
    images = torch.zeros(4, 8, 8, 3, dtype=torch.uint8)
    spec = item.manifest.spec
    images = torch.zeros(4, *spec.size, spec.channels, dtype=torch.uint8)
    for _ in range(3):
        scores_of(Single([spec], item.manifest.class_names, [item.network()]), images, "cpu", "a name")
    assert taken == [], "the name stands for the digest"
    assert len(evaluation.LOOKS.seen) == 1
    assert LOOKS is not evaluation.LOOKS


# -- which nodes


def test_nodes_by_quantiles_of_size() -> None:
    sizes = {f"site-{i}": size for i, size in enumerate([50, 10, 40, 20, 30, 60])}
    assert evaluated(["quantiles:3"], sizes) == ["site-3", "site-2", "site-5"], "the middles of 10 20, 30 40, 50 60"
    assert evaluated(["quantiles:6"], sizes) == ["site-1", "site-3", "site-4", "site-2", "site-0", "site-5"]
    assert evaluated(["quantiles:1", "1", "site-1"], sizes) == ["site-2", "site-1"]
    assert evaluated(["all"], sizes) == evaluated([], sizes) == list(sizes)
    assert evaluated(["quantiles:2"], dict.fromkeys(sizes, 7)) == ["site-1", "site-4"], "ties in their order"
    for wrong in ("quantiles:0", "quantiles:7", "quantiles:x", "quantiles:"):
        with pytest.raises(BadInput, match="write quantiles:N with N from 1 to 6"):
            evaluated([wrong], sizes)


# -- paired differences


@pytest.mark.parametrize("count", [1, 2, 3, 6, 9])
def test_the_sign_flip_test_counts_all_signs(count: int) -> None:
    gaps = [round(float(g), 2) for g in np.random.RandomState(count).normal(0.2, 0.5, count)]
    sums = [
        abs(sum(s * g for s, g in zip(signs, gaps, strict=True))) for signs in itertools.product((1, -1), repeat=count)
    ]
    assert sign_flip(gaps) == pytest.approx(np.mean([s >= abs(sum(gaps)) - 1e-9 for s in sums]))
    assert sign_flip([*gaps, 0.0, 0.0]) == sign_flip(gaps) == sign_flip([-g for g in gaps])


def test_the_sign_flip_test_by_hand() -> None:
    assert sign_flip([0.1] * 5) == 2 / 32
    assert sign_flip([0.0, 0.0]) == 1.0
    many = np.random.RandomState(0).normal(0, 1, EXACT).tolist()
    assert sign_flip(many) == pytest.approx(sign_flip([*many, 1e-12]), abs=0.02), "the normal limit goes on from there"


def test_a_paired_comparison() -> None:
    gap = Paired.of([0.9, 0.8, 0.7], [0.8, 0.8, 0.8])
    assert (gap.mean, gap.up, gap.down, gap.p) == (pytest.approx(0), 1, 1, 1.0)
    assert gap.error == pytest.approx(0.1 / math.sqrt(3))
    assert mean_error([0.5]) == (0.5, None)


# -- in a run

QUICK = ("--model", "mlp", "--epochs", 3, "--engine", "inline", "--device", "cpu", "--quiet")
FOL = ("--split", "fol", "--min-size", 20, "--clients", 8, "--alpha", 5, "--set", "split.seed=1")
MEET = ("--rounds", 2, "--buffer", 3, "--top", 2, *("--set", "orient.epochs=1"))
MEET += ("--set", "orient.distill_epochs=1", "--set", "orient.distill_steps=0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = {}
    for name, count, seed in (("train", 400, 0), ("val", 30, 1), ("test", 60, 2)):
        parts |= dict(zip((f"x_{name}", f"y_{name}"), stripes(count, seed=seed), strict=True))
    return make_npz(tmp_path_factory.mktemp("judge") / "stripes.npz", **parts)


def test_a_population_is_judged_by_common_images(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "run"
    done("run", "--method", "fol-an", "--data", data, *FOL, *MEET, *QUICK, "--eval-nodes", "quantiles:2", "--out", out)
    result, split = result_of(out), read_json(out / "split.json")
    bundle = load(str(data))
    assert bundle.test is not None
    assert bundle.validation is not None
    images = torch.cat([bundle.test.tensors()[0], bundle.validation.tensors()[0]])
    labels = torch.cat([bundle.test.tensors()[1], bundle.validation.tensors()[1]])
    assert len(result["by_round"]) == 2
    for node, one in result["by_round"].items():
        assert one["common"]["images"] == 90
        for where, value in (
            (out / "parcels" / f"{node}.parcel", one["common"]["local"]),
            (out / "personal" / node, one["common"]["teacher"][-1]),
        ):
            scores = scores_of(load_predictor(where), images)
            assert value == pytest.approx(own_accuracy(per_class(scores, labels, 3), split["counts"][node]))
        assert {key: len(who["student"]) for key, who in one["more"].items()} == {
            "log_loss": 2,
            "calibration_error": 2,
        }, "recall is of two classes"
    ends = [one["common"]["teacher"][-1] for one in result["by_round"].values()]
    assert result["accuracy_common"] == pytest.approx(sum(ends) / 2)
    assert result["accuracy"] == pytest.approx(sum(one["teacher"][-1] for one in result["by_round"].values()) / 2)
    page = (out / "report.html").read_text()
    assert "On common images" in page
    assert "More than accuracy" in page


@pytest.mark.usefixtures("undrawn")
def test_a_server_rule_is_judged_by_them_too(tmp_path: Path, data: Path) -> None:
    done("run", "--method", "fedavg,local", "--data", data, *FOL, *QUICK, "--out", tmp_path / "runs")
    fused, alone = (result_of(tmp_path / "runs" / name) for name in ("fedavg", "local"))
    assert set(fused["by_round"]) == set(fused["per_client"])
    for node, one in fused["by_round"].items():
        assert one["student"] == [fused["per_client"][node]]
        assert one["common"]["images"] == 90
        assert "teacher" not in one
        other = alone["by_round"][node]
        assert one["local"] == other["local"] == other["student"][0] == alone["per_client"][node]
        assert one["common"]["local"] == other["common"]["student"][0]
    means = [one["common"]["student"][0] for one in fused["by_round"].values()]
    assert fused["accuracy_common"] == pytest.approx(sum(means) / len(means))
    done("run", "--method", "fedavg", "--data", data, "--clients", 3, "--alpha", 5, *QUICK, "--out", tmp_path / "plain")
    plain = result_of(tmp_path / "plain")
    assert not {"by_round", "accuracy_common"} & set(plain), "without own test images these are all there is"


def test_without_common_images_nothing_is_said_of_them(tmp_path: Path) -> None:
    x, y = stripes(300)
    bare = make_npz(tmp_path / "bare.npz", images=x, labels=y)
    words = ("--data", bare, *FOL, *MEET, *QUICK, "--set", "data.holdout=0", "--eval-nodes", 0)
    done("run", "--method", "gossip", *words, "--out", tmp_path / "run")
    result = result_of(tmp_path / "run")
    assert "accuracy_common" not in result
    assert set(result["by_round"]["site-0"]) == {"images", "local", "student", "teacher"}
    few = call("run", "--method", "fol", *words, "--set", "judge_images=50", "--out", tmp_path / "few")
    assert "orient.judge_images" in one_line(few)


def test_a_series_has_one_shape() -> None:
    figures = {"accuracy": 0.5, "log_loss": 1.0}
    found = series(7, 90, {"local": (0.1, figures)}, [{"student": (0.2, figures)}, {"student": (0.3, figures)}])
    assert found == {
        "images": 7,
        "local": 0.1,
        "student": [0.2, 0.3],
        "common": {"images": 90, "local": 0.5, "student": [0.5, 0.5]},
        "more": {"log_loss": {"local": 1.0, "student": [1.0, 1.0]}},
    }


# -- own first weights


@pytest.mark.usefixtures("undrawn")
def test_every_site_may_start_from_weights_of_its_own(tmp_path: Path, data: Path) -> None:
    from flyby.parcels import parcel

    still = ("--set", "train.lr=1e-12", "--set", "train.weight_decay=0")
    first = {}
    for init in ("shared", "own"):
        out = tmp_path / init
        done(
            "run",
            "--method",
            "fedavg",
            "--data",
            data,
            *FOL,
            *QUICK,
            *still,
            "--set",
            f"train.init={init}",
            "--out",
            out,
        )
        weights = [
            next(iter(parcel.read(path).weights.values())) for path in sorted((out / "parcels").glob("*.parcel"))
        ]
        first[init] = [torch.allclose(weights[0], one, atol=1e-6) for one in weights[1:]]
        assert ("drift" in result_of(out)["consistency"]) == (init == "shared"), "from a start that nobody had"
    assert all(first["shared"])
    assert not any(first["own"])


def test_a_site_that_sent_sums_is_judged_by_what_they_give(tmp_path: Path) -> None:
    """The network in such an upload learned nothing and answers by chance."""
    words = {"data": {"name": "digits"}, "split": {"clients": 2, "alpha": 100.0}}
    result = run(make_config("ridge", model="mlp", **words), tmp_path / "run", Options(quiet=True, keep=False))
    alone = result.to_json()["local_accuracy"]
    assert min(alone.values()) > 0.7
    assert min(alone.values()) > result.accuracy - 0.15
