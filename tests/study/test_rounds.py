"""Rounds beside one upload: R = 1 is the one-shot method to the byte, mu = 0 is FedAvg, SCAFFOLD of one site is plain
SGD and its control variates are what can be worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from factories import make_stripes
from flyby.data.site import site_of
from flyby.data.splits import make_split
from flyby.errors import BadInput
from flyby.parcels import parcel
from flyby.runs.config import RunConfig, data_of, make_config, plan
from flyby.runs.folder import Run
from flyby.runs.pipeline import Options, run
from flyby.study.catalogue import Study
from flyby.study.grid import cells, read_rows, run_study
from flyby.study.rounds import Client, RoundSettings, _recipe, round_settings, run_rounds, together
from flyby.study.tables import render
from flyby.training.loop import Session, at_once

QUICK: dict[str, Any] = {"engine": "inline", "device": "cpu", "quiet": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rounds") / "stripes.npz"
    make_stripes(path)
    return path


def config_of(data: Path, clients: int = 2, epochs: int = 2, *more: str) -> RunConfig:
    words = {"seed": 3, "model": "mlp", "epochs": epochs, "assignments": ["train.batch=16", *more]}
    return make_config("fedavg", data={"name": str(data)}, split={"clients": clients, "alpha": 1.0}, **words)  # type: ignore[arg-type]


def clients_of(config: RunConfig, settings: RoundSettings) -> tuple[list[Client], int]:
    bundle = data_of(config).load()
    split = make_split(bundle.train, config.split, config.seed)
    recipe = plan(config, bundle).recipe
    local = settings.local(recipe.train.epochs)
    recipe = _recipe(recipe, settings, local)
    sites = [site_of(bundle, split, name) for name in split.shares]
    return [Client(Session(site, recipe, torch.device("cpu"), None, ""), settings) for site in sites], local


def weights_of(config: RunConfig, words: str) -> dict[str, torch.Tensor]:
    settings = round_settings(words)
    clients, local = clients_of(config, settings)
    return dict(together(clients, settings, local).networks[0].state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_one_round_of_fedavg_is_one_shot_to_the_byte(data: Path, tmp_path: Path) -> None:
    from flyby.fusion.predictor import load_predictor

    config = config_of(data)
    result = run(config, tmp_path / "run", Options(engine="inline", device="cpu", quiet=True))
    once = dict(load_predictor(tmp_path / "run" / "global").networks[0].state_dict())
    assert same(once, weights_of(config, "fedavg:rounds=1"))
    rounds = run_rounds(config, round_settings("fedavg:rounds=1"), Run(tmp_path / "rounds"), "cpu")
    assert (rounds["accuracy"], rounds["split_hash"]) == (result.accuracy, result.split_hash)
    assert rounds["per_client"] == result.per_client
    assert (tmp_path / "rounds" / "split.json").read_bytes() == (tmp_path / "run" / "split.json").read_bytes()
    sites = [parcel.read(path) for path in sorted((tmp_path / "run" / "parcels").glob("*.parcel"))]
    model = sum(t.numel() * t.element_size() for t in sites[0].weights.values())
    assert rounds["bytes_up"] == rounds["bytes_down"] == 2 * model


def test_fedprox_without_a_pull_is_fedavg_and_with_one_stays_nearer(data: Path) -> None:
    config = config_of(data, 2, 4)
    start, plain = weights_of_start(config), weights_of(config, "fedavg:rounds=2")
    assert same(plain, weights_of(config, "fedprox:rounds=2,mu=0"))
    near = weights_of(config, "fedprox:rounds=2,mu=5")

    def far(found: dict[str, torch.Tensor]) -> float:
        return sum(
            float((found[name] - start[name]).square().sum()) for name in start if found[name].dtype.is_floating_point
        )

    assert far(near) < 0.9 * far(plain)


def weights_of_start(config: RunConfig) -> dict[str, torch.Tensor]:
    clients, _ = clients_of(config, round_settings("fedavg:rounds=1"))
    return {name: t.clone() for name, t in clients[0].session.model.state_dict().items()}


def test_scaffold_of_one_site_is_plain_sgd(data: Path) -> None:
    """c and c_k are equal then, and cancel; without momentum to forget between rounds, nothing tells of the rounds."""
    config = config_of(data, 1, 3, "train.momentum=0")
    one = weights_of(config, "scaffold:rounds=3")
    alone, _ = clients_of(config, round_settings("fedavg:rounds=1"))
    for _ in range(3):
        row = at_once(alone[0].session.epoch)()
        alone[0].session.state.advance(row, None)
    plain = alone[0].session.model.state_dict()
    for name, value in one.items():
        torch.testing.assert_close(value, plain[name], rtol=0, atol=1e-6)


def test_scaffolds_control_variates_by_hand(data: Path) -> None:
    """A constant gradient g: with momentum m, step t moves by lr (1 - m^t) / (1 - m) g, so that (start - end) / r is g
    whatever m (here r = .1 x 1 + .1 x 1.5 + .05 x 1.75 = .3375, and weights move by 7 x .3375); c_k - c is added."""
    settings = round_settings("scaffold:rounds=1")
    clients, _ = clients_of(config_of(data, 2, 1, "train.momentum=0.5"), settings)
    client = clients[0]
    mine = client.corrected
    assert mine is not None
    control = [torch.full_like(p, 2.0) for p in mine.weights]
    for own in client.own:
        own.fill_(3.0)
    torch._foreach_copy_(mine.start, [p.detach() for p in mine.weights])
    rates, gradient, speed = [0.1, 0.1, 0.05], 7.0, 0.0
    with torch.no_grad():
        for rate in rates:
            speed = 0.5 * speed + gradient
            for weight in mine.weights:
                weight.sub_(rate * speed)
    client._learn(control, rates)
    for own in client.own:
        torch.testing.assert_close(own, torch.full_like(own, 3.0 - 2.0 + 7.0), rtol=0, atol=1e-4)


def test_the_correction_is_a_gradient(data: Path) -> None:
    """mu (w - start) + shift is added to the gradient of the loss, and nothing else changes."""
    clients, _ = clients_of(config_of(data), round_settings("fedprox:rounds=1,mu=0.5"))
    work, mine = clients[0].session, clients[0].corrected
    assert mine is not None
    rows = torch.arange(8)
    from flyby.objectives.base import Batch

    batch = Batch(work.view(work.train.images[rows]), work.train.labels[rows], 1)
    for start, shift in zip(mine.start, mine.shift, strict=True):
        start.fill_(0.25)
        shift.fill_(-0.125)
    work.rng.manual_seed(0)
    plain = torch.autograd.grad(work.objective.loss(work.model, batch, work.step.progress).total, mine.weights)
    moved = torch.autograd.grad(mine.loss(work.model, batch, work.step.progress).total, mine.weights)
    for weight, a, b in zip(mine.weights, plain, moved, strict=True):
        torch.testing.assert_close(b - a, 0.5 * (weight.detach() - 0.25) - 0.125, rtol=1e-4, atol=1e-5)


def test_a_study_with_rounds_says_that_they_are_not_one_shot(data: Path, tmp_path: Path) -> None:
    study = Study(
        title="Rounds",
        data=[str(data)],
        methods=["fedavg"],
        rounds=["fedavg:rounds=2", "scaffold:rounds=2,epochs=1"],
        clients=[2],
        alphas=[1.0],
        model="mlp",
        epochs=2,
        shows=["bytes"],
    )
    place = tmp_path / "results" / "rounds.jsonl"
    assert run_study(study, place, tmp_path / "work", **QUICK) == (3, 0)
    assert run_study(study, place, tmp_path / "work", **QUICK) == (0, 0)
    one, two, scaffold = read_rows(place)
    assert "one_shot" not in one
    assert [(row["one_shot"], row["rounds"]) for row in (two, scaffold)] == [(False, 2)] * 2
    assert scaffold["bytes_up"] == scaffold["bytes_down"] == 2 * two["bytes_up"]
    assert two["split_hash"] == one["split_hash"]
    text = render(study, place, [])
    assert text.count("(not one-shot)") == 4, "in the table of accuracies and in that of bytes"
    assert "| fedavg | fedavg, 2 rounds of 1 epoch (not one-shot) |" in text


def test_rounds_that_diverge_are_a_row_in_the_same_table(data: Path, tmp_path: Path) -> None:
    study = Study(
        **{"title": "Lost", "data": [str(data)], "methods": ["fedavg"], "rounds": ["scaffold:rounds=3"], "epochs": 2},
        **{"clients": [2], "alphas": [1.0], "model": "mlp", "settings": ["train.lr=1e4"], "shows": ["bytes"]},
    )
    place = tmp_path / "results" / "lost.jsonl"
    assert run_study(study, place, tmp_path / "work", **QUICK) == (2, 0)
    assert [row["accuracy"] for row in read_rows(place)] == [None, None]
    assert render(study, place, []).count("| diverged |") == 2
    assert render(study, place, []).count("## ") == 1


def test_keys_of_rounds_are_their_own_and_last() -> None:
    words: dict[str, Any] = {"title": "T", "methods": ["fedavg"], "epochs": 20}
    found = list(cells(Study(**words, rounds=["fedavg:rounds=5", "fedavg:rounds=5,epochs=2", "fedprox:rounds=5"])))
    assert len({cell.key for cell in found}) == 4
    assert found[0].key == next(cells(Study(**words))).key
    assert [cell.rule for cell in found[1:]] == [
        "fedavg, 5 rounds of 4 epochs (not one-shot)",
        "fedavg, 5 rounds of 2 epochs (not one-shot)",
        "fedprox mu=0.01, 5 rounds of 4 epochs (not one-shot)",
    ]


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        ("fedsgd:rounds=5", (), "rounds.kind = 'fedsgd' will not do"),
        ("fedavg", (), "rounds does not say its rounds"),
        ("fedavg:rounds=0", (), "rounds.rounds = 0 will not do"),
        ("fedavg:rounds=2,epoch=1", (), "unknown rounds setting 'epoch'; did you mean 'epochs'"),
        ("scaffold:rounds=2", ("train.optimizer=adam",), "scaffold corrects the steps of sgd"),
        ("fedavg:rounds=2", ("codec=int8",), "rounds know no patience, ema, dp_epsilon or codec"),
    ],
)
def test_what_cannot_be_is_refused(data: Path, words: str, more: tuple[str, ...], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        weights_of(config_of(data, 2, 2, *more), words)
