"""Which test images a run had right, and the exact test of two runs on the same ones, against scipy's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from factories import done, make_stripes, result_of
from flyby.data import sources
from flyby.fusion.evaluation import evaluate_dataset
from flyby.fusion.predictor import load_predictor
from flyby.runs.answers import Answers, Discord, coin, sign_test
from flyby.runs.folder import Run


@given(st.lists(st.booleans(), min_size=1, max_size=50))
def test_bits_survive_their_file(bits: list[bool]) -> None:
    made = Answers.of("digest", torch.tensor(bits))
    assert Answers.model_validate_json(made.model_dump_json()).bits().tolist() == bits


@pytest.mark.parametrize(("heads", "tosses"), [(1, 9), (0, 5), (5, 5), (12, 20), (480, 1000), (1, 3000), (2900, 5000)])
def test_the_test_and_the_interval_are_scipy_s(heads: int, tosses: int) -> None:
    theirs = binomtest(heads, tosses)
    assert sign_test(heads, tosses - heads) == sign_test(tosses - heads, heads) == pytest.approx(theirs.pvalue)
    ends = theirs.proportion_ci(0.95, method="exact")
    assert coin(heads, tosses) == pytest.approx((ends.low, ends.high), abs=1e-9)
    found = Discord(heads, tosses - heads, 10_000)
    low, high = found.interval()
    assert low <= found.difference <= high
    assert (low > 0 or high < 0) == (found.p < 0.05), "the interval and the test agree"


def test_who_never_differ_are_the_same_as_far_as_one_knows() -> None:
    same = Discord(0, 0, 50)
    assert (same.difference, same.p, coin(0, 0)) == (0, 1, (0, 1))
    assert same.interval() == (0, 0)
    assert sign_test(6, 0) == 2 / 64
    assert sign_test(3, 3) == 1


def test_a_run_keeps_what_its_model_had_right(tmp_path: Path) -> None:
    data = make_stripes(tmp_path / "stripes.npz")
    small = ("--clients", 2, "--epochs", 1, "--model", "mlp", "--engine", "inline", "-q", "--out", tmp_path / "runs")
    done("run", "--method", "local,fedavg,ensemble", "--data", data, *small)
    test = sources.load(str(data)).test
    assert test is not None
    kept, right = {}, {}
    for name in ("fedavg", "ensemble"):
        run = Run(tmp_path / "runs" / name)
        scores, part = evaluate_dataset(load_predictor(run.model), test)
        right[name] = scores.argmax(1) == part.labels
        kept[name] = Answers.load(run.right)
        assert kept[name].bits().tolist() == right[name].tolist()
        assert kept[name].bits().mean() == pytest.approx(result_of(run.path)["accuracy"])
    found = Discord.of(kept["fedavg"], kept["ensemble"])
    assert found is not None
    assert found.first == int((right["fedavg"] & ~right["ensemble"]).sum())
    assert found.second == int((right["ensemble"] & ~right["fedavg"]).sum())
    assert not Run(tmp_path / "runs" / "local").right.exists(), "no one model was shown all images"
    assert f"{found.first} : {found.second}" in done("compare", tmp_path / "runs").out or (
        f"{found.second} : {found.first}" in done("compare", tmp_path / "runs").out
    )


def test_a_small_chance_is_said_to_be_small() -> None:
    assert str(Discord(36, 82, 359)).endswith("36 : 82, p < 0.001")
    assert str(Discord(46, 73, 359)).endswith("46 : 73, p 0.017")
