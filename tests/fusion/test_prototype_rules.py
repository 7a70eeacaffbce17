"""Class means, FedProto, FedTGP and FedCVAE: each formula by hand, sampling by its promises, and the four rules end to
end on digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from factories import train_site
from flyby.data.dataset import DataBundle
from flyby.data.site import Part, Site, part_of, site_of
from flyby.data.splits import SplitSettings, make_split
from flyby.data.views import PLAIN
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, Inbox, load_predictor, save_predictor
from flyby.fusion.base import Server
from flyby.fusion.distilled import fedcvae as cvae_rule
from flyby.fusion.distilled.fedcvae import (
    FedCvae,
    FedCvaeKd,
    FedCvaeKdSettings,
    FedCvaeSettings,
    Painter,
    apportion,
    draw,
    truncated_normal,
)
from flyby.fusion.ensembles.prototypes import (
    FedProto,
    FedProtoSettings,
    FedTgp,
    FedTgpSettings,
    averaged,
    distances,
    margin_loss,
    margin_of,
    train_prototypes,
)
from flyby.fusion.predictor import Predictor
from flyby.models import ModelSpec
from flyby.models.decoder import Decoder, DecoderSpec, Encoder, build
from flyby.objectives import OBJECTIVES
from flyby.objectives.base import Batch
from flyby.objectives.cvae import Cvae, CvaeSettings, gaussian_kl, reconstruction
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel
from flyby.rng import generator
from flyby.runs.methods import METHODS, catalogue, check_pair, upload_bytes
from flyby.statistics.class_means import class_means
from flyby.training.settings import TrainSettings

MLP = ModelSpec(name="mlp", classes=3, channels=1, size=(8, 8), widths={"fc1": 6, "fc2": 5})
NAMES = ("ant", "bee", "cat")
HELD = ((0, 1), (1, 2), (2,))


def images(count: int = 5, size: tuple[int, int] = (8, 8), channels: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, *size, channels), generator=generator(seed, "images"), dtype=torch.uint8)


def site_of_labels(
    labels: Sequence[int], size: tuple[int, int] = (8, 8), channels: int = 1, names: Sequence[str] = NAMES
) -> Site:
    part = Part(images(len(labels), size, channels), torch.tensor(labels))
    none = Part(part.images[:0], part.labels[:0])
    return Site("site-0", part, none, none, tuple(names))


def sent(k: int, spec: ModelSpec = MLP, held: Sequence[int] | None = None, **extras: Tensor) -> Parcel:
    """An upload with random weights and random class means."""
    held = HELD[k] if held is None else held
    means = torch.rand(len(held), spec.skeleton().feature_dim, generator=generator(k, "means"))
    counts = [10 * (c + 1) if c in held else 0 for c in range(3)]
    tensors = {"class-means.means": means, "class-means.classes": torch.tensor(held, dtype=torch.int64)} | extras
    weights = spec.build(generator(k, "weights")).state_dict()
    return parcel.make(
        sender=f"site-{k}",
        method="x",
        spec=spec,
        class_names=NAMES,
        weights=weights,
        samples=sum(counts),
        counts=counts,
        extras=tensors,
    )


def scores(predictor: Predictor, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = predictor(x)
    return out


# -- class means


def test_class_means_by_hand() -> None:
    network = MLP.build(generator("any")).eval()
    site = site_of_labels((2, 0, 2, 2, 0))
    found = class_means(network, site, 0)
    with torch.no_grad():
        features = network.features(MLP.prepare(site.train.images)).double()
    assert found["classes"].tolist() == [0, 2], "a class that is not held is not sent"
    assert found["means"].dtype == torch.float32
    assert found["means"][0].tolist() == pytest.approx(((features[1] + features[4]) / 2).tolist(), abs=1e-6)
    assert found["means"][1].tolist() == pytest.approx(
        ((features[0] + features[2] + features[3]) / 3).tolist(), abs=1e-6
    )


def test_class_means_in_several_pieces_are_the_same() -> None:
    network = MLP.build(generator("any")).eval()
    site = site_of_labels([i % 3 for i in range(1200)])
    with torch.no_grad():
        features = network.features(MLP.prepare(site.train.images)).double()
    for c, mean in enumerate(class_means(network, site, 0)["means"]):
        assert torch.allclose(mean.double(), features[site.train.labels == c].mean(0), atol=1e-6)


def test_class_means_travel_when_they_are_asked_for() -> None:
    site = site_of_labels((0, 1, 1, 0))
    for wanted in ((), ("class-means",)):
        objective = Supervised(SupervisedSettings(send=wanted))
        item = train_site(site, MLP, objective, TrainSettings(epochs=1), PLAIN, 0).parcel
        found = {name: tuple(t.shape) for name, t in item.extras.items() if name != "calibration"}
        assert found == ({"class-means.means": (2, 5), "class-means.classes": (2,)} if wanted else {})


# -- FedProto


@pytest.mark.parametrize("scale", ["none", "means"])
def test_fedproto_against_a_plain_loop(scale: Any) -> None:
    wide = MLP.replace(widths={"fc1": 4, "fc2": 7})  # another feature space
    parcels = [sent(0), sent(1, wide), sent(2)]
    x = images(4)
    found = scores(FedProto(FedProtoSettings(scale=scale)).fuse(Inbox(parcels)), x)
    for n in range(4):
        for c in range(3):
            away = []
            for item in parcels:
                classes, means = item.extras["class-means.classes"].tolist(), item.extras["class-means.means"].double()
                if c in classes:
                    with torch.no_grad():
                        f = item.network().features(item.manifest.spec.prepare(x[n : n + 1])).double()[0]
                    length = (
                        sum(math.dist([0.0] * len(m), m.tolist()) for m in means) / len(means)
                        if scale == "means"
                        else 1.0
                    )
                    away.append(math.dist(f.tolist(), means[classes.index(c)].tolist()) / length)
            assert float(found[n, c]) == pytest.approx(-sum(away) / len(away), rel=1e-4)


def test_fedproto_in_the_shared_space_against_a_plain_loop() -> None:
    parcels = [sent(k) for k in range(3)]
    x = images(3)
    found = scores(FedProto(FedProtoSettings(space="shared")).fuse(Inbox(parcels)), x)
    with torch.no_grad():
        mean_feature = sum(item.network().features(MLP.prepare(x)).double() for item in parcels) / 3
    assert isinstance(mean_feature, Tensor)
    rows = [
        dict(zip(p.extras["class-means.classes"].tolist(), p.extras["class-means.means"].double(), strict=True))
        for p in parcels
    ]
    for c in range(3):
        of_c = [table[c] for table in rows if c in table]
        centre = torch.stack(of_c).mean(0)
        assert torch.allclose(found[:, c].double(), -(mean_feature - centre).norm(dim=1), atol=1e-5)


@pytest.mark.parametrize(
    "rule", [FedProto(), FedProto(FedProtoSettings(space="shared")), FedTgp()], ids=["own", "shared", "fedtgp"]
)
def test_a_class_nobody_holds_comes_last_and_nothing_is_infinite(rule: Any) -> None:
    found = scores(rule.fuse(Inbox([sent(0, held=(0, 1)), sent(1, held=(1,))])), images(6))
    assert bool(found.isfinite().all())
    assert found.argmin(1).tolist() == [2] * 6


def test_class_means_that_do_not_fit_are_refused() -> None:
    good = torch.rand(2, 5)
    cases = {
        "too narrow": (torch.rand(2, 4), torch.tensor([0, 1])),
        "one too few": (good[:1], torch.tensor([0, 1])),
        "twice the same": (good, torch.tensor([1, 1])),
        "no such class": (good, torch.tensor([0, 3])),
        "negative": (good, torch.tensor([-1, 0])),
        "not whole": (good, torch.tensor([0.0, 1.0])),
        "none": (good[:0], torch.zeros(0, dtype=torch.int64)),
    }
    for name, (means, classes) in cases.items():
        bad = sent(1, **{"class-means.means": means, "class-means.classes": classes})
        for rule in (FedProto(), FedTgp()):
            with pytest.raises(BadInput, match="site-1"):  # a case that passes is named by the line below
                assert rule.fuse(Inbox([sent(0), bad])) is None, name
    plain = parcel.make(
        sender="site-9",
        method="x",
        spec=MLP,
        class_names=NAMES,
        weights=MLP.build().state_dict(),
        samples=1,
        counts=(1, 0, 0),
    )
    with pytest.raises(BadInput, match=r"objective\.send=\[class-means\]"):
        FedProto().fuse(Inbox([plain]))
    with pytest.raises(BadInput, match="use ensemble or experts"):
        FedTgp().fuse(Inbox([sent(0), sent(1, MLP.replace(widths={"fc2": 7}))]))


# -- FedTGP


def test_the_margin_by_hand() -> None:
    # A 3-4-5 triangle: the nearest neighbours are 3, 3 and 4 away, and the largest of these is 4.
    means = {0: torch.tensor([0.0, 0.0]), 1: torch.tensor([3.0, 0.0]), 4: torch.tensor([0.0, 4.0])}
    assert margin_of(means, 100.0) == pytest.approx(4.0)
    assert margin_of(means, 2.5) == 2.5
    assert margin_of({1: torch.ones(2)}, 100.0) == 0.0, "one class has no neighbour"


def test_averaged_means_count_each_holder_once() -> None:
    tables = [{0: torch.tensor([1.0]), 2: torch.tensor([5.0])}, {0: torch.tensor([4.0])}]
    assert {c: m.tolist() for c, m in averaged(tables).items()} == {0: [2.5], 2: [5.0]}


def test_the_margin_loss_by_hand() -> None:
    points, prototypes = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    for label, margin in ((0, 0.0), (0, 2.0), (1, 2.0)):
        away = [5.0 + margin * (label == 0), 1.0 + margin * (label == 1)]
        wanted = -math.log(math.exp(-away[label]) / sum(math.exp(-a) for a in away))
        assert float(margin_loss(points, torch.tensor([label]), prototypes, margin)) == pytest.approx(wanted, rel=1e-5)
    assert distances(points, prototypes).tolist() == [[5.0, 1.0]]


def test_trained_prototypes_stand_apart_more_than_the_averaged_means() -> None:
    """Eight clients' means of four classes, in clouds: every averaged mean is nearest to its own trained prototype, and
    those are farther apart."""
    rng = generator("clouds")
    centres = 2 * torch.randn(4, 6, generator=rng)
    tables = [{c: centres[c] + torch.randn(6, generator=rng) for c in range(4)} for _ in range(8)]
    margin = margin_of(averaged(tables), 100.0)
    trained, losses = train_prototypes(tables, 4, margin, FedTgpSettings(epochs=400), Server())
    assert losses[-1] < losses[0] - 1
    assert distances(torch.stack(list(averaged(tables).values())), trained).argmin(1).tolist() == [0, 1, 2, 3]
    assert margin_of(dict(enumerate(trained)), 1e9) > margin
    again, _ = train_prototypes(tables, 4, margin, FedTgpSettings(epochs=400), Server())
    assert torch.equal(trained, again)


# -- the CVAE


def test_the_kl_term_is_the_closed_form() -> None:
    mean, log_variance = torch.tensor([[0.5, -1.0], [0.0, 0.0]]), torch.tensor([[0.2, -0.7], [0.0, 0.0]])
    normal = torch.distributions.Normal(mean, (log_variance / 2).exp())
    wanted = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum(1).mean()
    assert float(gaussian_kl(mean, log_variance)) == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert float(gaussian_kl(torch.zeros(3, 2), torch.zeros(3, 2))) == 0.0


def test_the_reconstruction_term_by_hand() -> None:
    logits, pixels = (
        torch.tensor([0.0, 2.0, -1.0, 0.0]).view(2, 1, 1, 2),
        torch.tensor([0.25, 1.0, 0.0, 0.5]).view(2, 1, 1, 2),
    )
    p = [1 / (1 + math.exp(-v)) for v in (0.0, 2.0, -1.0, 0.0)]
    x = [0.25, 1.0, 0.0, 0.5]
    bce = sum(-b * math.log(a) - (1 - b) * math.log(1 - a) for a, b in zip(p, x, strict=True)) / 2  # two pictures
    mse = sum((a - b) ** 2 / 2 for a, b in zip(p, x, strict=True)) / 2
    assert float(reconstruction(logits, pixels, "bce")) == pytest.approx(bce, rel=1e-6)
    assert float(reconstruction(logits, pixels, "mse")) == pytest.approx(mse, rel=1e-6)


def test_the_loss_is_the_sum_of_its_parts_and_the_classifier_is_untouched_by_the_vae() -> None:
    site = site_of_labels((0, 1, 2, 2))
    model = MLP.build(generator("one"))
    objective = Cvae(CvaeSettings(beta=0.5, latent=3, width=4))
    objective.prepare(model, site, 0)
    batch = Batch(MLP.prepare(site.train.images), site.train.labels, 1)
    terms = objective.loss(model, batch, torch.ones(()))
    wanted = terms.parts["cross_entropy"] + terms.parts["reconstruction"] + 0.5 * terms.parts["kl"]
    assert float(terms.total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    with torch.no_grad():
        plain = F.cross_entropy(model(batch.images), batch.labels)
    assert float(terms.parts["cross_entropy"].detach()) == pytest.approx(float(plain), rel=1e-6)
    terms.total.backward()  # type: ignore[no-untyped-call]
    own = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    F.cross_entropy(model(batch.images), batch.labels).backward()
    assert all(
        torch.allclose(a, b.grad, atol=1e-7) for a, b in zip(own, model.parameters(), strict=True) if b.grad is not None
    )
    assert all(p.grad is not None for p in objective.parameters())


def test_the_decoder_learns_images_as_they_are_whatever_the_classifier_sees() -> None:
    site, model = site_of_labels((0, 1, 2, 2)), MLP.build(generator("one"))
    terms = []
    for seen in (torch.zeros_like(site.train.images), site.train.images):
        objective = Cvae(CvaeSettings(latent=3, width=4))
        objective.prepare(model, site, 0)
        views = MLP.prepare(seen).repeat(2, 1, 1, 1)  # two views of every image, all black or as they are
        batch = Batch(views, site.train.labels.repeat(2), 2, site.train.images)
        terms.append(
            {name: float(value.detach()) for name, value in objective.loss(model, batch, torch.ones(())).parts.items()}
        )
        once = Batch(MLP.prepare(site.train.images), site.train.labels, 1)
        objective.steps.zero_()
        alone = objective.loss(model, once, torch.ones(())).parts
        assert terms[-1]["reconstruction"] == pytest.approx(float(alone["reconstruction"].detach()), rel=1e-5)
    assert terms[0]["reconstruction"] == terms[1]["reconstruction"]
    assert terms[0]["cross_entropy"] != terms[1]["cross_entropy"]


@pytest.mark.parametrize(
    ("size", "channels"), [((8, 8), 1), ((28, 28), 1), ((32, 32), 3), ((33, 17), 3), ((1, 5), 1), ((64, 96), 3)]
)
def test_encoder_and_decoder_take_any_size(size: tuple[int, int], channels: int) -> None:
    spec = DecoderSpec(classes=4, channels=channels, size=size, latent=3, width=4)
    assert max(spec.grid) <= 8
    x, y = torch.rand(5, channels, *size), torch.tensor([0, 1, 2, 3, 0])
    mean, log_variance = build(Encoder, spec, generator("e")).requires_grad_(False)(x, y)
    assert mean.shape == log_variance.shape == (5, 3)
    decoder = build(Decoder, spec, generator("d")).requires_grad_(False)
    painted = decoder(mean, y)
    assert painted.shape == x.shape
    assert 0 <= float(painted.min()) <= float(painted.max()) <= 1
    assert not torch.allclose(painted[:1], decoder(mean[:1], torch.tensor([3]))), "the label must matter"
    assert not torch.allclose(painted[:1], decoder(mean[:1] + 1, y[:1])), "and z"


def test_training_goes_on_from_a_checkpoint_to_the_same_bytes(tmp_path: Path) -> None:
    site = site_of_labels([i % 3 for i in range(24)])

    def go(epochs_seen: int, folder: Path | None) -> Parcel:
        def stop(row: dict[str, Any]) -> None:
            if row["epoch"] == epochs_seen:
                raise KeyboardInterrupt

        settings = TrainSettings(epochs=4, optimizer="adam", lr=1e-3)
        objective = Cvae(CvaeSettings(latent=3, width=4))
        return train_site(site, MLP, objective, settings, PLAIN, 5, folder=folder, on_epoch=stop).parcel

    whole = go(-1, None)
    with pytest.raises(KeyboardInterrupt):
        go(2, tmp_path)
    assert parcel.to_bytes(go(-1, tmp_path)) == parcel.to_bytes(whole)


def test_a_site_of_colour_photographs_trains_in_half_precision() -> None:
    site = site_of_labels((0, 1, 2, 2, 1, 0), (32, 20), 3)
    spec = ModelSpec(
        name="cnn-small", classes=3, channels=3, size=(32, 20), widths={"conv1": 4, "conv2": 4, "conv3": 4}
    )
    settings = TrainSettings(epochs=2, optimizer="adam", lr=1e-3, precision="bf16")
    item = train_site(
        site, spec, Cvae(CvaeSettings(latent=3, width=4, reconstruction="mse")), settings, PLAIN, 0
    ).parcel
    assert {t.dtype for name, t in item.extras.items() if name.startswith("decoder.")} == {torch.float32}
    assert scores(FedCvae(FedCvaeSettings(**QUICK)).fuse(Inbox([item])), images(2, (32, 20), 3)).shape == (2, 3)


# -- sampling


class Flat(nn.Module):
    """A stand-in decoder that paints its own shade, so that one can see who painted what."""

    def __init__(self, shade: float, latent: int = 2) -> None:
        super().__init__()
        self.spec = DecoderSpec(classes=3, channels=1, size=(2, 2), latent=latent, width=1)
        self.shade = shade

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        return torch.full((len(z), 1, 2, 2), self.shade)


def painter(shade: float, share: float, frequencies: Sequence[float], latent: int = 2) -> Painter:
    flat: Any = Flat(shade, latent)
    return Painter(flat, share, torch.tensor(frequencies, dtype=torch.float64))


def test_each_decoder_paints_its_share_with_its_own_labels() -> None:
    drawn = draw([painter(0.2, 0.25, (0.5, 0.5, 0.0)), painter(0.8, 0.75, (0.0, 0.1, 0.9))], 8000, 2.0, ("k",))
    first = drawn.pixels[:, 0, 0, 0] < 0.5
    assert int(first.sum()) == 2000
    of_first, of_second = (
        drawn.labels[first].bincount(minlength=3) / 2000,
        drawn.labels[~first].bincount(minlength=3) / 6000,
    )
    assert of_first.tolist() == pytest.approx([0.5, 0.5, 0.0], abs=0.04)
    assert of_first[2] == 0
    assert of_second.tolist() == pytest.approx([0.0, 0.1, 0.9], abs=0.02)
    assert of_second[0] == 0
    again = draw([painter(0.2, 0.25, (0.5, 0.5, 0.0)), painter(0.8, 0.75, (0.0, 0.1, 0.9))], 8000, 2.0, ("k",))
    assert torch.equal(again.z, drawn.z)
    assert torch.equal(again.labels, drawn.labels)


def test_latents_of_different_lengths_can_paint_together() -> None:
    drawn = draw([painter(0.1, 0.5, (1, 0, 0), 2), painter(0.9, 0.5, (0, 1, 0), 3)], 10, 2.0, ("k",))
    assert drawn.labels.tolist() == [0] * 5 + [1] * 5


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.integers(1, 500))
def test_apportion_adds_up_and_stays_within_one(sizes: list[int], total: int) -> None:
    shares = [n / sum(sizes) for n in sizes]
    found = apportion(shares, total)
    assert sum(found) == total
    assert all(abs(n - share * total) < 1 + 1e-9 for n, share in zip(found, shares, strict=True))


@pytest.mark.parametrize("limit", [0.5, 2.0, 30.0])
def test_the_truncated_normal_keeps_its_limit_and_its_variance(limit: float) -> None:
    z = truncated_normal((40_000,), limit, generator("z")).double()
    density = math.exp(-limit * limit / 2) / math.sqrt(2 * math.pi)
    mass = math.erf(limit / math.sqrt(2))
    assert float(z.abs().max()) <= limit
    assert bool(z.isfinite().all())
    assert float(z.var()) == pytest.approx(1 - 2 * limit * density / mass, rel=0.04)
    assert abs(float(z.mean())) < 0.02


# -- FedCVAE at the server


def with_decoder(
    k: int, counts: Sequence[int], latent: int = 3, width: int = 4, meta: dict[str, Any] | None = None
) -> Parcel:
    decoder = build(
        Decoder, DecoderSpec(classes=3, channels=1, size=(8, 8), latent=latent, width=width), generator(k, "decoder")
    )
    return parcel.make(
        sender=f"site-{k}",
        method="cvae",
        spec=MLP,
        class_names=NAMES,
        weights=MLP.build(generator(k)).state_dict(),
        samples=sum(counts),
        counts=counts,
        extras={f"decoder.{name}": t for name, t in decoder.state_dict().items()},
        meta={"decoder_latent": latent, "decoder_width": width} if meta is None else meta,
    )


QUICK: dict[str, Any] = {"images": 60, "epochs": 3, "batch": 20}


def test_one_decoder_learns_what_all_know_and_labels_become_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    parcels = [with_decoder(0, (90, 5, 0)), with_decoder(1, (0, 5, 0), width=6)]
    seen: list[cvae_rule.Drawn] = []
    monkeypatch.setattr(
        cvae_rule, "by_class", lambda painted: seen.append(painted) or cvae_rule.as_images(painted.pixels)
    )
    rule = FedCvaeKd(FedCvaeKdSettings(images=600, epochs=1, batch=50, distil_epochs=12, distil_lr=3e-3))
    server = Server()
    rule.fuse(Inbox(parcels), server)
    (table,) = [s["table"]["rows"] for s in server.report if s["title"].startswith("Decoders")]
    assert table[-1][1] < table[0][1] / 2, "the regression must go down"
    shares = seen[0].labels.bincount(minlength=3) / 600
    assert shares.tolist() == pytest.approx([0.5, 0.5, 0.0], abs=0.07), "uniform over the classes that somebody holds"
    plain = FedCvae(FedCvaeSettings(images=600, epochs=1))
    plain.fuse(Inbox(parcels))
    assert (seen[1].labels.bincount(minlength=3) / 600).tolist() == pytest.approx([0.9, 0.1, 0.0], abs=0.04)


@pytest.mark.parametrize("kind", [FedCvae, FedCvaeKd])
def test_an_interrupted_fusion_goes_on_to_the_same_model(
    tmp_path: Path, kind: type[FedCvae], monkeypatch: pytest.MonkeyPatch
) -> None:
    parcels = Inbox([with_decoder(0, (9, 5, 0)), with_decoder(1, (0, 5, 3))])

    def rule() -> FedCvae:
        return kind(kind.settings_type(**QUICK, **({"distil_epochs": 3} if kind is FedCvaeKd else {})))

    whole = scores(rule().fuse(parcels, Server(seed=3)), images())
    real, calls = cvae_rule.Clock.tick, 0

    def tick(self: Any, state: Any, loss: float) -> None:
        nonlocal calls
        calls += 1
        if calls == (5 if kind is FedCvaeKd else 2):  # in the middle of the classifier
            raise KeyboardInterrupt
        real(self, state, loss)

    monkeypatch.setattr(cvae_rule.Clock, "tick", tick)
    with pytest.raises(KeyboardInterrupt):
        rule().fuse(parcels, Server(seed=3, work=tmp_path))
    before = calls
    assert torch.equal(scores(rule().fuse(parcels, Server(seed=3, work=tmp_path)), images()), whole)
    assert calls - before == 1, "only what was missing was done again"


def test_the_report_gets_a_grid_and_another_student_may_learn() -> None:
    rule = FedCvae(FedCvaeSettings(**QUICK, student="cnn-small"))
    server = Server()
    predictor = rule.fuse(Inbox([with_decoder(0, (9, 5, 0)), with_decoder(1, (0, 5, 3), latent=5)]), server)
    assert predictor.specs[0].name == "cnn-small"
    assert not predictor.training
    assert server.report[0]["images"]["shape"] == [24, 8, 8, 1], "up to eight of three classes"
    assert {s["title"] for s in server.report} == {"Synthetic images", "Classifier trained on synthetic images"}


def test_what_the_server_refuses() -> None:
    good = with_decoder(0, (9, 5, 0))
    with pytest.raises(BadInput, match="site-1 sent no decoder"):
        FedCvae().fuse(Inbox([good, sent(1)]))
    for meta in ({"decoder_latent": 4, "decoder_width": 4}, {"decoder_latent": 3, "decoder_width": 5}):
        with pytest.raises(BadInput, match=r"decoder that site-1 sent cannot be used.* must be"):
            FedCvae().fuse(Inbox([good, with_decoder(1, (1, 1, 1), meta=meta)]))
    for bad in (0, 10**9, "3", 2.5, [1]):
        with pytest.raises(BadInput, match="no decoder has the latent"):
            FedCvae().fuse(Inbox([good, with_decoder(1, (1, 1, 1), meta={"decoder_latent": bad, "decoder_width": 4})]))
    with pytest.raises(BadInput, match="use --fusion fedcvae"):
        FedCvaeKd().fuse(Inbox([good, with_decoder(1, (1, 1, 1), latent=4)]))
    with pytest.raises(BadInput, match="unknown student"):
        FedCvaeSettings(student="cnn-smal")
    with pytest.raises(BadInput, match="needs decoder"):
        check_pair(OBJECTIVES["supervised"], FUSIONS["fedcvae"])


# -- whole

SMALL = ModelSpec(name="mlp", classes=10, channels=1, size=(8, 8), widths={"fc1": 64, "fc2": 32})


@pytest.fixture(scope="module")
def uploads(digits: DataBundle) -> list[Parcel]:
    """Five uneven sites whose uploads serve all four rules: classifier, class means and decoder."""
    split = make_split(digits.train, SplitSettings(clients=5, alpha=0.3), 0)
    settings = TrainSettings(epochs=8, optimizer="adam", lr=3e-3, weight_decay=0.0)
    objective = CvaeSettings(send=("class-means",), width=16, latent=8)
    return [
        train_site(site_of(digits, split, name), SMALL, Cvae(objective), settings, PLAIN, 0).parcel
        for name in split.shares
    ]


RULES: dict[str, Any] = {
    "fedproto": FedProto(),
    "fedtgp": FedTgp(),
    "fedcvae": FedCvae(FedCvaeSettings(images=1500, epochs=8)),
    "fedcvae-kd": FedCvaeKd(FedCvaeKdSettings(images=1500, epochs=8, distil_epochs=10, distil_lr=3e-3)),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_beats_the_sites_alone(digits: DataBundle, uploads: list[Parcel], rule: str, tmp_path: Path) -> None:
    assert digits.test is not None
    test = part_of(digits.test)

    def right(found: Tensor) -> float:
        return float((found.argmax(1) == test.labels).double().mean())

    with torch.no_grad():
        alone = sum(right(item.network()(SMALL.prepare(test.images))) for item in uploads) / len(uploads)
    predictor = RULES[rule].fuse(Inbox(uploads))
    found = right(scores(predictor, test.images))
    assert found > alone + 0.1, (found, alone)
    save_predictor(predictor, tmp_path / "model")
    assert torch.equal(scores(load_predictor(tmp_path / "model"), test.images[:9]), scores(predictor, test.images[:9]))
    program = torch.export.load(tmp_path / "model" / "model.pt2").module()
    with torch.no_grad():
        assert torch.allclose(program(test.images[:3]), scores(predictor, test.images[:3]), atol=1e-4)


def test_the_same_upload_serves_plain_rules(uploads: list[Parcel]) -> None:
    for rule in ("ensemble", "fedavg", "experts-calibrated"):
        assert bool(scores(FUSIONS[rule]().fuse(Inbox(uploads)), images(3)).isfinite().all())


# -- the catalogue


def test_the_catalogue_is_complete() -> None:
    rows = {row["method"]: row for row in catalogue()}
    assert list(rows) == list(METHODS)
    for name, row in rows.items():
        assert row["about"], name
        assert row["exchanges"] in ("nothing", "one upload per site", "one model per meeting")
        assert isinstance(row["data_free"], bool)
        assert isinstance(row["mixed_architectures"], bool)
        assert set(row["needs"]) <= set(row["provides"]), "a recipe must send what its own server needs"
        assert (row["weight_bytes"] > 100_000) == (row["exchanges"] != "nothing")
    assert [name for name, row in rows.items() if not row["data_free"]] == [n for n in ("feddf",) if n in rows]
    assert rows["fedproto"]["extra_bytes"] - rows["fedavg"]["extra_bytes"] == 10 * 128 * 4 + 10 * 8
    assert rows["fedcvae"]["mixed_architectures"]
    assert not rows["fedtgp"]["mixed_architectures"]


def test_extra_bytes_are_those_of_a_real_upload() -> None:
    spec = ModelSpec(name="cnn-small", classes=10, channels=1, size=(8, 8))
    site = site_of_labels([i % 10 for i in range(20)], names=tuple("0123456789"))
    settings = CvaeSettings(send=("class-means",))
    item = train_site(site, spec, Cvae(settings), TrainSettings(epochs=1), PLAIN, 0).parcel
    weights, extras = upload_bytes("cvae", settings)
    assert extras == sum(t.nbytes for t in item.extras.values())
    assert weights == sum(t.nbytes for t in item.weights.values())
    assert 0 < item.size - weights - extras < 20_000, "what is left is the manifest"
