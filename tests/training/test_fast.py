"""The pieces of a faster training, each by numbers worked out by hand: the mean of weights, Muon, phases, rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from factories import small_spec, striped_site, train_site
from flyby.data.views import STANDARD
from flyby.errors import BadInput
from flyby.models import ModelSpec
from flyby.objectives import OBJECTIVES
from flyby.objectives.base import Batch
from flyby.objectives.salt import PRESETS, Salt, SaltSettings
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.parcels import parcel
from flyby.rng import generator
from flyby.runs.config import make_config
from flyby.runs.like import Like
from flyby.runs.pipeline import Options, run
from flyby.settings import build
from flyby.training.average import Average
from flyby.training.loop import Session, check_phases
from flyby.training.muon import Muon, orthogonal
from flyby.training.optim import make_optimizer, set_learning_rate
from flyby.training.recipe import Recipe
from flyby.training.settings import Phase, TrainSettings, batch_size, phase_of

DIGITS = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8), widths={"conv1": 4, "conv2": 5, "conv3": 6})


# -- the mean of weights


def test_the_mean_of_weights_by_hand() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1))
    model[0].weight.data.fill_(4.0)
    average = Average(model, 0.5)
    kept, moment = 4.0, 0.0
    for step, value in enumerate((8.0, 0.0, 10.0, 6.0), 1):
        model[0].weight.data.fill_(value)
        model[1].running_mean.fill_(-value)
        average.update()
        decay = min(0.5, (1 + step) / (10 + step))  # 2/11, 3/12, 4/13, 5/14
        kept, moment = decay * kept + (1 - decay) * value, decay * moment - (1 - decay) * value
    found = dict(zip((n for n, t in model.state_dict().items() if t.is_floating_point()), average.means, strict=True))
    assert float(found["0.weight"]) == pytest.approx(kept)
    assert float(found["1.running_mean"]) == pytest.approx(moment)
    with average.in_place():
        assert model[0].weight.item() == pytest.approx(kept)
        assert float(model[1].running_mean) == pytest.approx(moment)  # type: ignore[arg-type]
    assert model[0].weight.item() == 6.0


def test_the_first_decays_are_small() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    average = Average(model, 0.999)
    model.weight.data.fill_(1.0)
    average.update()
    assert float(average.means[0]) == pytest.approx(9 / 11)


def recipe(**train: Any) -> Recipe:
    settings = SupervisedSettings()
    return Recipe(
        spec=small_spec(),
        objective="supervised",
        objective_settings=settings,
        train=TrainSettings(**{"epochs": 3, "batch": 16, **train}),
        views=STANDARD,
        seed=1,
    )


def test_what_is_sent_is_the_mean_and_the_training_goes_on_with_the_weights() -> None:
    work = Session(striped_site("a", count=40), recipe(ema=0.9), torch.device("cpu"), None, "")
    for _ in work.epoch():
        pass
    before = {name: t.clone() for name, t in work.model.state_dict().items()}
    item = work.pack(1)
    names = [name for name, t in before.items() if t.is_floating_point()]
    assert work.average is not None
    for name, mean in zip(names, work.average.means, strict=True):
        assert torch.equal(item.weights[name], mean)
    assert any(not torch.equal(item.weights[name], before[name]) for name in names)
    assert all(torch.equal(work.model.state_dict()[name], before[name]) for name in before)


FAST: dict[str, dict[str, Any]] = {
    "ema": {"ema": 0.9},
    "muon": {"optimizer": "muon"},
    "small images": {"resolution": (0.5, 1.0)},
    "one view": {"one_view": 0.5},
    "rates": {"lr_batch": 8, "warmup": 0.5},
}


@pytest.mark.parametrize("piece", FAST)
def test_a_training_that_goes_on_gives_the_same_bytes(piece: str, tmp_path: Path) -> None:
    site, chosen = striped_site("a", count=40), recipe(epochs=4, **FAST[piece])
    chosen = chosen.model_copy(update={"views": STANDARD.model_copy(update={"views": 2})})

    def upto(work: Session, epochs: int) -> Session:
        while work.state.epoch < epochs:
            going = work.epoch()
            try:
                while True:
                    next(going)
            except StopIteration as end:
                work.state.advance(end.value, None)
        return work

    whole = upto(Session(site, chosen, torch.device("cpu"), None, ""), 4).pack(4)
    first = upto(Session(site, chosen, torch.device("cpu"), tmp_path, ""), 3)
    first.state.save()
    rest = upto(Session(site, chosen, torch.device("cpu"), tmp_path, ""), 4).pack(4)
    assert parcel.to_bytes(rest) == parcel.to_bytes(whole)
    plain = upto(Session(site, recipe(epochs=4), torch.device("cpu"), None, ""), 4).pack(4)
    assert not torch.equal(plain.weights["head.weight"], whole.weights["head.weight"]), "it does something"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs, and there is no GPU here")
@pytest.mark.parametrize("objective", ["supervised", "salt", "bearings", "fedsra"])
@pytest.mark.parametrize("piece", [*FAST, "none"])
def test_every_piece_can_be_recorded_on_a_gpu(piece: str, objective: str) -> None:
    kind = OBJECTIVES[objective]
    settings = kind.settings_type(**({"test": False} if objective == "bearings" else {}))
    chosen = recipe(epochs=4, **FAST.get(piece, {})).model_copy(
        update={
            "spec": kind.adapt_spec(small_spec(), settings),
            "objective": objective,
            "objective_settings": settings,
            "views": STANDARD.model_copy(update={"views": 2}),
        }
    )
    work = Session(striped_site("a", count=80), chosen, torch.device("cuda"), None, "")
    for _ in range(4):
        going = work.epoch()
        try:
            while True:
                next(going)
        except StopIteration as end:
            work.state.advance(end.value, None)
    assert work.step.captured is not None
    assert work.step.captured.refused == ""
    assert work.step.captured.graph is not None


def test_what_is_off_is_not_in_any_dump() -> None:
    new = {"ema", "muon_lr", "lr_batch", "warmup", "resolution", "one_view"}
    assert not new & TrainSettings().model_dump().keys()
    assert new & TrainSettings(ema=0.9).model_dump().keys() == {"ema"}
    assert "label_smoothing" not in SaltSettings().model_dump()
    assert SaltSettings(label_smoothing=0.1).model_dump()["label_smoothing"] == 0.1
    for preset in PRESETS.values():
        build(TrainSettings, preset, "train")


# -- Muon


@pytest.mark.parametrize("shape", [(3, 6, 6), (2, 4, 9), (2, 9, 4)])
def test_newton_schulz_against_the_svd(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=generator("muon", *shape), dtype=torch.float64)
    u, values, v = torch.linalg.svd(matrices, full_matrices=False)
    found = orthogonal(matrices)
    # The iteration changes singular values alone, each by the same odd polynomial of its share of the norm.
    bent = values / matrices.norm(dim=(1, 2))[:, None]
    for _ in range(5):
        bent = 3.4445 * bent - 4.7750 * bent**3 + 2.0315 * bent**5
    assert torch.allclose(found, u @ torch.diag_embed(bent) @ v, atol=1e-9)
    large = values / matrices.norm(dim=(1, 2))[:, None] > 0.02
    assert bool(((bent > 0.6) & (bent < 1.3))[large].all())
    assert bool((orthogonal(torch.zeros(1, 2, 3)) == 0).all())


def test_muon_s_steps_by_hand() -> None:
    matrix = torch.nn.Parameter(torch.randn(4, 2, 1, 1, generator=generator(1), dtype=torch.float64))
    vector = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    groups = [
        {"params": [matrix], "muon": True, "weight_decay": 0.1, "lr": 0.5},
        {"params": [vector], "weight_decay": 0.1, "lr": 0.2},
    ]
    optimizer = Muon(groups, 1.0, 0.9)
    w, v = matrix.detach().clone(), vector.detach().clone()
    b, m = torch.zeros_like(w), torch.zeros_like(v)
    for step in range(3):
        g, h = (torch.randn(t.shape, generator=generator(step, t.ndim), dtype=torch.float64) for t in (w, v))
        matrix.grad, vector.grad = g.clone(), h.clone()
        optimizer.step()
        b = 0.9 * b + g
        ahead = orthogonal((g + 0.9 * b).reshape(1, 4, 2))[0].reshape(w.shape)
        w = w * (1 - 0.5 * 0.1) - 0.5 * (4 / 2) ** 0.5 * ahead
        m = 0.9 * m + h + 0.1 * v
        v = v - 0.2 * m
        assert torch.allclose(matrix.detach(), w, atol=1e-12)
        assert torch.allclose(vector.detach(), v, atol=1e-12)


def test_muon_takes_filters_and_leaves_heads_to_sgd() -> None:
    model, objective = DIGITS.build(generator(0)), Supervised(SupervisedSettings())
    optimizer = make_optimizer(model, objective, TrainSettings(optimizer="muon", muon_lr=0.3, epochs=2))
    names = {id(p): name for name, p in model.named_parameters()}
    turned = [names[id(p)] for group in optimizer.param_groups if group["muon"] for p in group["params"]]
    assert turned == [f"backbone.conv{i}.weight" for i in (1, 2, 3)]
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == names.keys()
    set_learning_rate(optimizer, TrainSettings(optimizer="muon", muon_lr=0.3, lr=0.05, epochs=2), 1)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == pytest.approx([0.025, 0.15])


# -- phases and rates


def test_phases_by_hand() -> None:
    settings = TrainSettings(epochs=9, resolution=(0.5, 0.75, 1.0), one_view=0.7)
    found = [phase_of(settings, (32, 30), 2, epoch) for epoch in range(9)]
    assert found == [
        *[Phase((16, 16), 2)] * 3,  # 15 is no multiple of 4
        *[Phase((24, 24), 2)] * 3,  # 22.5 neither
        Phase((32, 30), 2),
        *[Phase((32, 30), 1)] * 2,
    ]
    assert {phase_of(TrainSettings(epochs=5), (32, 32), 2, epoch) for epoch in range(5)} == {Phase((32, 32), 2)}
    tiny = TrainSettings(epochs=2, resolution=(0.1, 1.0))
    assert phase_of(tiny, (8, 8), 1, 0).size == (4, 4)


def test_small_images_are_what_the_network_sees() -> None:
    work = Session(striped_site("a", count=40), recipe(epochs=4, resolution=(0.5, 1.0)), torch.device("cpu"), None, "")
    sizes: list[tuple[int, ...]] = []

    def look(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if module.training:
            sizes.append(tuple(inputs[0].shape[1:]))

    work.model.backbone.register_forward_pre_hook(look)
    for _ in range(4):
        going = work.epoch()
        try:
            while True:
                next(going)
        except StopIteration as end:
            work.state.advance(end.value, None)
    channels = work.spec.channels
    assert sizes == [(channels, 4, 4)] * 6 + [(channels, 8, 8)] * 6


def test_a_network_of_one_size_refuses_small_images() -> None:
    settings = TrainSettings(epochs=4, resolution=(0.5, 1.0))
    with pytest.raises(BadInput, match=r"mlp takes images of one size, and train\.resolution asks for 16x16"):
        check_phases(ModelSpec(name="mlp", classes=3, size=(32, 32)), settings)
    check_phases(ModelSpec(name="resnet18", classes=3, size=(32, 32)), settings)
    check_phases(ModelSpec(name="mlp", classes=3, size=(32, 32)), TrainSettings(epochs=4))


def test_rates_by_hand() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    settings = TrainSettings(epochs=10, lr=0.1, schedule="constant", warmup=0.4, lr_batch=512)
    found = [set_learning_rate(optimizer, settings, epoch, 2048) for epoch in range(6)]
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert set_learning_rate(optimizer, settings, 9, 128) == pytest.approx(0.025)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_smoothed_labels_by_hand() -> None:
    network = DIGITS.replace(head="prototype").build(generator(0)).train()
    batch = Batch(torch.randn(4, 1, 8, 8, generator=generator(1)), torch.tensor([0, 1, 2, 0]), 1)
    parts = [Salt(SaltSettings(label_smoothing=s)).loss(network, batch, torch.tensor(0.5)).parts for s in (0.0, 0.3)]
    with torch.no_grad():
        logits = network(batch.images)
        uniform = float((logits.logsumexp(1) - logits.mean(1)).mean())
    assert float(parts[1]["cls"]) == pytest.approx(0.7 * float(parts[0]["cls"]) + 0.3 * uniform, rel=1e-5)
    assert float(parts[1]["con"]) == pytest.approx(float(parts[0]["con"]), rel=1e-6)


def test_a_mean_of_weights_has_no_best_epoch() -> None:
    with pytest.raises(BadInput, match="a mean of weights \\(ema\\) has no best epoch"):
        build(TrainSettings, {"ema": 0.9, "patience": 2}, "train")


def test_everything_at_once_learns() -> None:
    settings = TrainSettings(
        epochs=12, batch=16, optimizer="muon", muon_lr=0.02, ema=0.9, resolution=(0.5, 1.0), one_view=0.8, warmup=0.2
    )
    site = striped_site("a", count=60)
    made = train_site(site, small_spec(), Supervised(SupervisedSettings()), settings, STANDARD, 0).parcel
    network = made.network()
    with torch.no_grad():
        right = network(network.spec.prepare(site.train.images)).argmax(1) == site.train.labels
    assert float(right.double().mean()) > 0.8


def test_the_fast_preset_takes_smaller_batches_and_fewer_at_a_small_site() -> None:
    def taken(preset: str, samples: int) -> int:
        settings = SaltSettings.model_validate({"preset": preset})
        return batch_size(TrainSettings(), OBJECTIVES["bearings"].preferred_batch(settings), samples)

    assert [taken(preset, 10_000) for preset in ("paper", "as-run", "fast")] == [512, 512, 128]
    assert (taken("fast", 300), taken("fast", 20)) == (64, 16)
    assert batch_size(TrainSettings(batch=256), 128, 300) == 256, "what the user asks for is taken"
    assert OBJECTIVES["fedsra"].preferred_batch(OBJECTIVES["fedsra"].settings_type()) == 128


def test_a_site_that_trains_alike_chooses_its_own_batch(tmp_path: Path) -> None:
    """It follows from the preset and the number of images: nobody chose it, so ``--like`` does not hand it on."""
    asked = ["objective.test=false", "locals=false"]
    split = {"name": "iid", "clients": 1}  # of 1,438 images: with the preset paper it would take 256
    config = make_config("best", data={"name": "digits"}, split=split, seed=0, epochs=1, assignments=asked)
    run(config, tmp_path, Options(engine="inline", device="cpu", quiet=True))
    like = Like.at(sorted(tmp_path.rglob("*.parcel"))[0])
    assert like.manifest.provenance["train"]["batch"] == 128  # type: ignore[index, call-overload]
    assert 'objective.preset="fast"' in like.words
    assert not [word for word in like.words if word.startswith("train.batch")]
