"""The figures that people act on: numbers worked out by hand, and a second way (scikit-learn) where there is one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import random_parcel, small_spec
from flyby.fusion.predictor import Ensemble, Single, load_predictor, save_predictor
from flyby.fusion.quality import by_class, calibration_error, matrix, quality_of, ranked_auc, summary, wilson
from flyby.rng import generator
from flyby.statistics.temperature import FEWEST, LEAST, MOST, fused_temperature, temperature_of, told


@pytest.mark.parametrize(
    ("right", "images", "low", "high"),
    [
        # z = 1.96: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), by hand
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (0, 4, 0.0, 0.4899),
        (357, 359, 0.9799, 0.9985),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_s_interval(right: int, images: int, low: float, high: float) -> None:
    assert wilson(right, images) == pytest.approx((low, high), abs=1e-4)


@given(st.integers(1, 500), st.data())
@settings(max_examples=40, deadline=None)
def test_the_ends_of_the_interval_are_just_as_unlikely_as_they_should_be(images: int, data: st.DataObject) -> None:
    """What defines it: at either end p the share seen is z standard errors away, by p's own standard error."""
    right = data.draw(st.integers(0, images))
    low, high = wilson(right, images)
    assert 0 <= low <= right / images <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            error = math.sqrt(end * (1 - end) / images)
            assert abs(right / images - end) == pytest.approx(1.959964 * error, rel=1e-6, abs=1e-9)


def test_auc_by_hand_with_a_tie() -> None:
    """Wanted .9 and .4, others .4 and .1: of four pairs three are right and one is a tie, 3.5 / 4."""
    scores, wanted = torch.tensor([0.9, 0.4, 0.4, 0.1]), torch.tensor([True, True, False, False])
    assert ranked_auc(scores, wanted) == 3.5 / 4
    assert ranked_auc(scores, torch.ones(4, dtype=torch.bool)) is None


def test_calibration_error_by_hand() -> None:
    """15 bins: .95 and .97 in the last (0.9333 .. 1], one right: |.96 - .5| * 2/4; .60 right, on the upper edge of its
    bin (.5333 .. .6]: .4 * 1/4; .55 wrong in the same bin, so together |.575 - .5| * 2/4."""
    sure = torch.tensor([0.95, 0.97, 0.60, 0.55], dtype=torch.float64)
    right = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    assert calibration_error(sure, right, weights) == pytest.approx(0.46 * 0.5 + 0.075 * 0.5)


def test_all_figures_of_six_answers_by_hand() -> None:
    shares = torch.tensor(
        [[0.8, 0.1, 0.1], [0.5, 0.4, 0.1], [0.3, 0.6, 0.1], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8], [0.6, 0.2, 0.2]]
    )
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    found = quality_of(shares, labels, ("a", "b", "never"))
    assert found.confusion == [[2, 1, 0], [1, 1, 1], [0, 0, 0]]
    assert found.accuracy == 0.5
    assert found.confidence == pytest.approx(4.0 / 6)
    assert found.log_loss == pytest.approx(-sum(math.log(p) for p in (0.8, 0.5, 0.3, 0.7, 0.1, 0.2)) / 6)
    a, b, never = found.classes
    assert (a.sensitivity, a.specificity, a.precision) == pytest.approx((2 / 3, 2 / 3, 2 / 3))
    assert (b.sensitivity, b.specificity, b.precision) == pytest.approx((1 / 3, 2 / 3, 1 / 2))
    assert (never.sensitivity, never.specificity, never.auc) == (None, pytest.approx(5 / 6), None)
    assert a.auc == pytest.approx((3 + 2 + 2) / 9)  # .8, .5, .3 against .2, .1, .6
    assert [one.images for one in found.bins if one.images] == [1, 2, 1, 2]
    assert "accuracy 0.5000 on 6 images (95 % interval 0.1876 to 0.8124)" in summary(found)
    assert len(by_class(found)) == 3, "a head and the two classes that have images"
    assert matrix(found)[1].split() == ["a", "2", "1", "0"]


def test_the_same_as_scikit_learn() -> None:
    from sklearn.metrics import confusion_matrix, log_loss, roc_auc_score

    rng = generator("quality")
    labels = torch.randint(0, 4, (300,), generator=rng)
    shares = (torch.randn(300, 4, generator=rng, dtype=torch.float64) + torch.eye(4)[labels]).mul(2).softmax(1)
    shares = (shares * 50).round() / 50 + 1e-3  # ties
    shares /= shares.sum(1, keepdim=True)
    found = quality_of(shares, labels, tuple("abcd"))
    for c, one in enumerate(found.classes):
        assert one.auc == pytest.approx(roc_auc_score((labels == c).numpy(), shares[:, c].numpy()))
    assert found.log_loss == pytest.approx(log_loss(labels.numpy(), shares.numpy()))
    assert np.array_equal(found.confusion, confusion_matrix(labels.numpy(), shares.argmax(1).numpy()))
    gap = sum(one.images * abs(one.confidence - one.accuracy) for one in found.bins) / 300
    assert found.calibration_error == pytest.approx(gap)


# -- temperatures


def test_a_temperature_by_hand() -> None:
    """40 answers, each 90 % sure, 30 of them right. With b = 1 / T the share said is p = 9^b / (1 + 9^b), and the least
    of -30 log p - 10 log(1 - p) + log(b)^2 is where (40 p - 30) log 9 = -2 log(b) / b."""
    shares, labels = torch.tensor([[0.9, 0.1]] * 40), torch.tensor([0] * 30 + [1] * 10)
    found = temperature_of(shares, labels)
    assert found is not None
    b = 1 / found
    p = 9**b / (1 + 9**b)
    assert (40 * p - 30) * math.log(9) == pytest.approx(-2 * math.log(b) / b, abs=0.02)
    assert 1 < found < math.log(9) / math.log(3), "it was too sure, and what is usual pulls a little"


def test_few_right_answers_make_nobody_certain() -> None:
    sure, labels = torch.tensor([[0.6, 0.4], [0.4, 0.6]] * 10), torch.tensor([0, 1] * 10)
    for usual in (1.0, 0.1):
        found = temperature_of(sure, labels, usual)
        assert found is not None
        b, log = 1 / found, math.log(1.5)  # all are right: 20 log(1 + 1.5^-b) + log(b usual)^2 is least
        assert 20 * log / (1 + 1.5**b) == pytest.approx(2 * math.log(b * usual) / b, rel=1e-2)
        assert 1 / 30 < found < usual, "without what is usual nothing would hold it back"
    assert temperature_of(sure[: FEWEST - 1], labels[: FEWEST - 1]) is None
    assert temperature_of(sure, torch.zeros(20, dtype=torch.long)) is None, "one class tells nothing"


def test_many_answers_need_no_usual_temperature() -> None:
    rng = generator("many")
    shares = (2 * torch.randn(5000, 4, generator=rng)).softmax(1)
    labels = torch.multinomial((shares.log() / 2).softmax(1), 1, generator=rng)[:, 0]  # true chances are at T = 2
    assert [temperature_of(shares, labels, usual) for usual in (0.1, 1.0, 10.0)] == [pytest.approx(2, rel=0.06)] * 3


def test_a_class_that_nobody_holds_does_not_count() -> None:
    logits = torch.tensor([[2.0, 0.0, -1000.0], [0.0, 2.0, -1000.0]] * 15)
    labels = torch.tensor([0, 1] * 14 + [1, 0])
    assert temperature_of(logits.softmax(1), labels) == temperature_of(logits[:, :2].softmax(1), labels)


def test_it_is_the_least_loss() -> None:
    rng = generator("temperature")
    labels = torch.randint(0, 5, (400,), generator=rng)
    shares = (6 * (torch.randn(400, 5, generator=rng) + torch.eye(5)[labels])).softmax(1)
    best = temperature_of(shares, labels)
    assert best is not None

    def loss(t: float) -> float:
        right = (shares.double().clamp_min(1e-12).log() / t).log_softmax(1)[torch.arange(400), labels]
        return float(-right.sum()) + math.log(t) ** 2

    assert all(loss(best) <= loss(best * factor) for factor in (0.5, 0.9, 0.98, 1.02, 1.1, 2))
    before, after = (
        quality_of(p, labels, tuple("abcde"))
        for p in (shares, (shares.double().clamp_min(1e-12).log() / best).softmax(1))
    )
    assert after.accuracy == before.accuracy
    assert after.calibration_error < before.calibration_error / 2


def test_sites_weigh_as_their_images() -> None:
    def site(name: str, samples: int, temperature: object) -> object:
        item = random_parcel(name)
        return item.manifest.model_copy(
            update={"samples": samples, "meta": {} if temperature is None else {"temperature": temperature}}
        )

    manifests = [site("a", 300, 4.0), site("b", 100, 0.25), site("c", 1000, None)]
    assert fused_temperature(manifests) == pytest.approx(2.0)  # exp((3 ln 4 - ln 4) / 4)
    assert fused_temperature([manifests[2]]) is None
    lies = ["4", True, None, [1.0], math.nan, LEAST / 2, MOST * 2, -1.0]
    assert [told(site("x", 1, lie)) for lie in lies] == [None] * len(lies)


def test_a_predictor_s_temperature_changes_no_answer_and_survives_the_disk(tmp_path: object) -> None:
    spec = small_spec()
    networks = [spec.build(generator(k)).eval() for k in range(2)]
    names = tuple(f"c{i}" for i in range(spec.classes))
    predictor = Ensemble([spec] * 2, names, networks)
    scores = torch.randn(20, spec.classes, generator=generator("scores"))
    plain = predictor.chances(scores)
    assert torch.equal(plain, scores.softmax(1))
    predictor.temperature = 2.5
    assert torch.allclose(predictor.chances(scores), (scores / 2.5).softmax(1), atol=1e-6)
    assert torch.equal(predictor.chances(scores).argmax(1), plain.argmax(1))
    folder = save_predictor(predictor, f"{tmp_path}/model", export=False)
    assert (load_predictor(folder).temperature, load_predictor(folder).measured) == (2.5, False)
    predictor.temperature, predictor.measured = 1.0, True
    again = load_predictor(save_predictor(predictor, f"{tmp_path}/measured", export=False))
    assert (again.temperature, again.measured) == (1, True)
    assert (
        load_predictor(save_predictor(Single([spec], names, networks[:1]), f"{tmp_path}/one", export=False)).temperature
        == 1
    )
    assert (
        '"temperature"'
        not in (
            save_predictor(Single([spec], names, networks[:1]), f"{tmp_path}/one", export=False) / "model.json"
        ).read_text()
    )
