"""Membership inference: AUC and rates by hand and beside scikit-learn, and models that must leak, must not, or leak
less under DP-SGD."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factories import call, done, make_npz, make_stripes, one_line, train_site
from flyby.data.dataset import DataBundle
from flyby.data.site import Part, Site, part_of
from flyby.data.views import PLAIN
from flyby.errors import BadInput
from flyby.fusion.predictor import Single
from flyby.models import ModelSpec
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.parcels import parcel
from flyby.rng import generator
from flyby.study.audit import SCORES, audit, calibrated, judged, verdict
from flyby.training.settings import TrainSettings

MLP = ModelSpec(name="mlp", classes=10, channels=1, size=(8, 8))


# AUC and rates


def floats(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(values, dtype=np.float64)


def test_auc_with_ties_by_hand() -> None:
    """Members 3, 1, 2 against others 1, 0: of six pairs five are right and one (1, 1) is a tie: 5.5 / 6."""
    assert judged(floats(3, 1, 2), floats(1, 0), np.ones(2), resamples=1)["auc"] == pytest.approx(5.5 / 6)
    assert judged(floats(1, 1), floats(1, 1, 1), np.ones(3), resamples=1)["auc"] == 0.5
    assert judged(floats(0, 0), floats(1, 2), np.ones(2), resamples=1)["auc"] == 0.0
    # The other at 1 counts three times the other at 0: (2 * 1 + 1 * (1/4 + 3/8)) / 3.
    assert judged(floats(3, 1, 2), floats(1, 0), floats(3, 1), resamples=1)["auc"] == pytest.approx(
        (2 + 0.25 + 0.375) / 3
    )


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31))
def test_auc_is_scikit_learns(n: int, m: int, seed: int) -> None:
    from sklearn.metrics import roc_auc_score

    random = np.random.RandomState(seed)
    members, others, weights = random.randint(0, 9, n) / 3.0, random.randint(0, 9, m) / 3.0, random.uniform(0.1, 3, m)
    labels, scores = np.r_[np.ones(n), np.zeros(m)], np.r_[members, others]
    assert judged(members, others, np.ones(m), resamples=1)["auc"] == pytest.approx(
        roc_auc_score(labels, scores), abs=1e-12
    )
    expected = roc_auc_score(labels, scores, sample_weight=np.r_[np.ones(n), weights])
    assert judged(members, others, weights, resamples=1)["auc"] == pytest.approx(expected, abs=1e-12)


def test_rates_by_hand() -> None:
    """1,000 others at 0..999 and members at 988.5, 989.5, 998.5 and 2000: ten others lie above 989.5, one above
    998.5."""
    others = np.arange(1000.0)
    found = judged(floats(988.5, 989.5, 998.5, 2000), others, np.ones(1000), resamples=1)
    assert found["tpr_at_1_percent"] == 0.75
    assert found["tpr_at_0.1_percent"] == 0.5
    tied = judged(floats(999, 999, 5), np.r_[np.zeros(980), np.full(20, 999.0)], np.ones(1000), resamples=1)
    assert (
        tied["tpr_at_1_percent"] == 0.0 + 0.0
    )  # twenty others share the top score, so no threshold has so few false alarms and catches it
    few = judged(floats(1, 2), np.arange(500.0), np.ones(500), resamples=1)
    assert few["tpr_at_0.1_percent"] is None, "one of a thousand cannot be seen among 500"
    assert few["tpr_at_1_percent"] is not None


@given(st.integers(0, 2**31))
def test_rates_are_those_of_the_roc_curve(seed: int) -> None:
    from sklearn.metrics import roc_curve

    random = np.random.RandomState(seed)
    members, others = np.round(random.normal(1, 1, 50), 1), np.round(random.normal(0, 1, 300), 1)
    false, true, _ = roc_curve(np.r_[np.ones(50), np.zeros(300)], np.r_[members, others], drop_intermediate=False)
    assert judged(members, others, np.ones(300), resamples=1)["tpr_at_1_percent"] == pytest.approx(
        true[false <= 0.01].max()
    )


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """Scores N(1, 1) against N(0, 1): the true AUC is Phi(1 / sqrt 2) = 0.7602."""
    random, inside = np.random.RandomState(0), 0
    for turn in range(60):
        found = judged(random.normal(1, 1, 60), random.normal(0, 1, 80), np.ones(80), seed=turn, resamples=200)
        assert found["low"] < found["auc"] < found["high"]
        inside += found["low"] <= 0.7602 <= found["high"]
    assert inside >= 50
    assert judged(floats(1, 2, 3), floats(0, 2), np.ones(2), seed=4) == judged(
        floats(1, 2, 3), floats(0, 2), np.ones(2), seed=4
    )


# Scores


def test_scores_by_hand() -> None:
    log_p, labels = np.log(floats(0.5, 0.25, 0.25, 0.1, 0.8, 0.1)).reshape(2, 3), np.array([1, 1])
    assert SCORES["loss"](log_p, labels) == pytest.approx(np.log([0.25, 0.8]))
    assert SCORES["confidence"](log_p, labels) == pytest.approx(np.log([0.5, 0.8]))
    assert SCORES["entropy"](log_p, labels)[0] == pytest.approx(
        -1.5 * np.log(2)
    )  # the entropy of (1/2, 1/4, 1/4) is 1.5 bits


def test_calibration_takes_the_difficulty_of_a_class_out() -> None:
    """Class 1 is ten times as hard. In each class the member is one above the other, yet the plain loss ranks a member
    below an other."""
    members, others, labels = floats(1, -9), floats(0, -10), np.array([0, 1])
    assert judged(members, others, np.ones(2), resamples=1)["auc"] == 0.75
    standard = calibrated(members, others, labels, labels, np.ones(2))
    assert [list(side) for side in standard] == [pytest.approx([1, 1]), pytest.approx([-1, -1])]
    assert judged(*standard, np.ones(2), resamples=1)["auc"] == 1.0


# Models


def site_of(part: Part) -> Site:
    return Site("a", part, Part(part.images[:0], part.labels[:0]), part, tuple("0123456789"))


def predictor_of(made: parcel.Parcel) -> Single:
    return Single([made.manifest.spec], made.manifest.class_names, [made.network()])


@pytest.fixture(scope="module")
def memorised(digits: DataBundle) -> Site:
    """Digits under labels drawn by lot: whatever is known of them beyond chance is memory."""
    part = part_of(digits.train, range(120))
    return site_of(Part(part.images, torch.randint(0, 10, (120,), generator=generator("labels"))))


@pytest.fixture(scope="module")
def strangers(digits: DataBundle) -> Part:
    part = part_of(digits.train, range(120, 620))
    return Part(part.images, torch.randint(0, 10, (500,), generator=generator("other labels")))


@pytest.fixture(scope="module")
def overfitted(memorised: Site) -> parcel.Parcel:
    settings = TrainSettings(epochs=120, lr=0.05, weight_decay=0.0)
    return train_site(memorised, MLP, Supervised(SupervisedSettings(calibrate=False)), settings, PLAIN, 0).parcel


def test_a_model_overfitted_on_purpose_leaks(memorised: Site, strangers: Part, overfitted: parcel.Parcel) -> None:
    found = audit(predictor_of(overfitted), memorised.train, strangers, resamples=100)
    assert found["accuracy"]["members"] > 0.95
    assert found["accuracy"]["others"] < 0.2
    for name in ("loss", "calibrated"):
        assert found["attacks"][name]["auc"] > 0.95
        assert found["attacks"][name]["low"] > 0.9
    assert found["attacks"]["loss"]["tpr_at_1_percent"] > 0.3
    assert "leaks membership strongly" in found["verdict"]


def test_an_untrained_model_does_not_leak(memorised: Site, strangers: Part) -> None:
    found = audit(Single([MLP], tuple("0123456789"), [MLP.build()]), memorised.train, strangers, resamples=100)
    for name, attack in found["attacks"].items():
        assert attack["auc"] == pytest.approx(0.5, abs=0.08), name


def test_a_privately_trained_model_leaks_less(memorised: Site, strangers: Part, overfitted: parcel.Parcel) -> None:
    settings = TrainSettings(epochs=40, lr=0.05, weight_decay=0.0, dp_epsilon=4.0)
    private = train_site(
        memorised, MLP, Supervised(SupervisedSettings(calibrate=False)), settings, PLAIN, 0, counts="noisy"
    ).parcel
    plain, dp = (
        audit(predictor_of(made), memorised.train, strangers, resamples=100)["attacks"]["loss"]
        for made in (overfitted, private)
    )
    assert dp["high"] < plain["low"]
    assert dp["auc"] < 0.7


def test_classes_alone_are_not_taken_for_membership(digits: DataBundle) -> None:
    """A site that holds zeros and ones only answers 0 or 1 to everything: against all digits its loss would tell nearly
    all others apart."""
    labels = digits.train.labels
    part = part_of(digits.train, np.flatnonzero(labels <= 1)[:100])
    made = train_site(
        site_of(part), MLP, Supervised(SupervisedSettings(calibrate=False)), TrainSettings(epochs=5), PLAIN, 0
    ).parcel
    assert digits.test is not None
    found = audit(predictor_of(made), part, part_of(digits.test), resamples=100)
    kept = int((digits.test.labels <= 1).sum())
    assert (found["members"], found["others"], found["left_out"]) == (100, kept, len(digits.test) - kept)
    assert found["attacks"]["loss"]["auc"] < 0.65
    with pytest.raises(BadInput, match="no class in common"):
        audit(predictor_of(made), part, part_of(digits.test, np.flatnonzero(digits.test.labels > 5)))


def test_uneven_classes_are_weighted_alike() -> None:
    """Nine members of class 0 and one of class 1 against one and nine others, the score being the class alone: AUC must
    be one half."""
    spec = ModelSpec(name="mlp", classes=2, channels=1, size=(2, 2), widths={"fc1": 2, "fc2": 2})
    images = torch.zeros(20, 2, 2, 1, dtype=torch.uint8)
    labels = torch.tensor([0] * 9 + [1] + [0] + [1] * 9)
    found = audit(
        Single([spec], ("a", "b"), [spec.build()]),
        Part(images[:10], labels[:10]),
        Part(images[10:], labels[10:]),
        resamples=10,
    )
    assert found["attacks"]["loss"]["auc"] == pytest.approx(0.5)


def test_the_verdict_is_a_sentence_that_says_how_sure_it_is() -> None:
    assert verdict("loss", {"auc": 0.52, "low": 0.49, "high": 0.55}).startswith(
        "No attack does better than chance (strongest: loss, AUC 0.52"
    )
    for auc, word in ((0.55, "slightly"), (0.7, "clearly"), (0.9, "strongly")):
        assert f"leaks membership {word}" in verdict("loss", {"auc": auc, "low": auc - 0.02, "high": auc + 0.02})
    assert "in 90% of cases (95 % interval 0.88 to 0.92" in verdict("loss", {"auc": 0.9, "low": 0.88, "high": 0.92})


# The command


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    data = make_stripes(folder / "d.npz", 120, 60)
    done(
        "run",
        "--method",
        "fedavg",
        "--data",
        data,
        "--clients",
        2,
        "--alpha",
        1,
        "--epochs",
        2,
        "--out",
        folder / "run",
        "-q",
        "--engine",
        "inline",
    )
    return folder


def test_a_run_is_audited_by_its_own_split(run_folder: Path) -> None:
    found = done("audit", run_folder / "run", "--json").json
    assert list(found) == ["site-0", "site-1", "global"]
    assert found["site-0"]["members"] + found["site-1"]["members"] == found["global"]["members"] == 120
    assert found["global"]["others"] == 60
    assert set(found["global"]["attacks"]) == {"loss", "confidence", "entropy", "calibrated"}
    text = done("audit", run_folder / "run").out
    assert text.count("TPR at 1 % FPR") == 3
    assert found["site-0"]["verdict"] in text


def test_a_parcel_and_a_folder_are_audited_by_named_data(run_folder: Path) -> None:
    data = run_folder / "d.npz"
    for model in (run_folder / "run" / "parcels" / "site-0.parcel", run_folder / "run" / "global"):
        found = done("audit", model, "--members", data, "--others", data, "--json").json
        assert (found["members"], found["others"]) == (120, 60)
        noted = [one for one in found["notes"] if "look safer than it is" in one]
        assert bool(noted) == model.is_file(), "one site's parcel never saw the other site's images"
    again = done("audit", run_folder / "run" / "global", "--members", data, "--others", data, "--json").json
    assert again == found
    assert json.loads(json.dumps(again)) == found


def test_what_cannot_be_audited_is_one_line(run_folder: Path) -> None:
    data, model = run_folder / "d.npz", run_folder / "run" / "global"
    assert "name --members" in one_line(call("audit", model))
    assert "name --members" in one_line(call("audit", run_folder / "run", "--members", data))
    with np.load(data) as arrays:
        same = make_npz(
            run_folder / "same.npz",
            images=arrays["x_train"],
            labels=arrays["y_train"],
            class_names=arrays["class_names"],
        )
    done("evaluate", model, "--data", same)  # into the cache, which says so once
    assert "every image of --others is among" in one_line(call("audit", model, "--members", data, "--others", same))
