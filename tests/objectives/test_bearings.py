"""Shifts by hand, SALT on (class, way), the test that a site makes first, and FedSRA's loss in plain numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from factories import train_site
from flyby.data.site import Part, Site
from flyby.data.views import PLAIN
from flyby.errors import BadInput
from flyby.models import ModelSpec
from flyby.models.anchors import simplex_etf
from flyby.models.heads import cosine, directions, shown_directions
from flyby.models.shifts import SHIFTS, WAYS, shifted, spread, ways_of
from flyby.objectives import shifting
from flyby.objectives.base import Batch
from flyby.objectives.bearings import Bearings, BearingsSettings
from flyby.objectives.fedsra import FedSra, FedSraSettings
from flyby.objectives.salt import Salt, SaltSettings, supcon
from flyby.objectives.shifting import told_apart
from flyby.rng import generator
from flyby.training.settings import TrainSettings

SPEC = ModelSpec(name="cnn-small", classes=3, channels=2, size=(8, 8), widths={"conv1": 4, "conv2": 5, "conv3": 6})
NAMES = ("ant", "bee", "cat")


def site_of(images: Tensor, labels: Tensor, classes: tuple[str, ...] = NAMES) -> Site:
    none = Part(images[:0], labels[:0])
    return Site("site-0", Part(images, labels), none, none, classes)


def lamps(count: int = 120) -> Tensor:
    """Noise that is brighter at the top: what is up can be seen."""
    images = torch.randint(0, 120, (count, 8, 8, 2), generator=generator("lamps"), dtype=torch.uint8)
    images[:, :3] += 100
    return images


def noise(count: int = 120) -> Tensor:
    return torch.randint(0, 256, (count, 8, 8, 2), generator=generator("noise"), dtype=torch.uint8)


# -- shifts


def test_shifts_by_hand() -> None:
    image = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])[None]  # [1, 2, 2, 2]
    assert shifted(image, "turns", 1)[0, 0].tolist() == [[2.0, 4.0], [1.0, 3.0]]
    assert shifted(image, "turns", 2)[0, 0].tolist() == [[4.0, 3.0], [2.0, 1.0]]
    assert shifted(image, "patches", 1)[0, 0].tolist() == [[2.0, 1.0], [4.0, 3.0]]
    assert shifted(image, "patches", 2)[0, 0].tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert shifted(image, "colour", 1)[0, 0].tolist() == [[5.0, 6.0], [7.0, 8.0]]
    assert shifted(image, "colour", 2)[0, 0].tolist() == [[-1.0, -2.0], [-3.0, -4.0]]
    for shift in SHIFTS:
        ways = [shifted(image, shift, way) for way in range(WAYS)]
        assert torch.equal(ways[0], image)
        assert len({tuple(way.flatten().tolist()) for way in ways}) == WAYS, shift
    with pytest.raises(ValueError, match="no shift is called 'up'"):
        shifted(image, "up", 1)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("count", [1, 3, 6])
def test_both_views_of_an_image_are_shown_in_the_same_way(shift: str, count: int) -> None:
    images = torch.randn(2 * count, 3, 4, 4, generator=generator(count)).contiguous(memory_format=torch.channels_last)
    before = images.clone()
    shown, ways = spread(images, shift, 2), ways_of(2 * count, 2, images.device)
    assert ways.tolist() == [i % WAYS for i in range(count)] * 2
    for i, way in enumerate(ways.tolist()):
        assert torch.equal(shown[i], shifted(images[i], shift, way))
    assert torch.equal(images, before)
    assert shown.is_contiguous(memory_format=torch.channels_last)


def test_images_that_cannot_be_shown_so_are_refused() -> None:
    flat = SPEC.replace(size=(8, 6))
    for spec, shift, why in (
        (flat, "turns", "quarter turns need square images, and these are 8x6; set objective.shift"),
        (SPEC.replace(channels=1), "colour", "images of one channel have no colours to shift"),
    ):
        with pytest.raises(BadInput, match=why):
            Bearings.adapt_spec(spec, BearingsSettings(shift=shift))
    assert Bearings.adapt_spec(flat, BearingsSettings(shift="patches")).head == "patches"
    assert Bearings.adapt_spec(flat, BearingsSettings(shift="none")).head == "prototype"


def test_a_head_that_knows_turns_answers_for_images_as_they_are() -> None:
    network = SPEC.replace(head="turns").build(generator(1)).eval()
    x = network.spec.prepare(noise(5))
    prototypes = network.head.prototypes.detach()  # type: ignore[operator, union-attr]
    assert prototypes.shape == (12, 6)
    assert torch.equal(directions(network), prototypes[:3])
    assert torch.equal(shown_directions(network)[2], prototypes[6:9])
    with torch.no_grad():
        assert torch.allclose(network(x), F.normalize(network.features(x), dim=1) @ prototypes[:3].T, atol=1e-6)
        by_hand = torch.zeros(5, 3)
        for way in range(WAYS):
            f = network.features(shifted(x, "turns", way))
            by_hand += F.cosine_similarity(f[:, None], prototypes[3 * way : 3 * way + 3][None], dim=2) / WAYS
        assert torch.allclose(cosine(network, network.shown(x)), by_hand, atol=1e-6)
        alone = torch.cat([network.shown(one[None]) for one in x])
        assert torch.allclose(network.shown(x), alone, atol=1e-5)


# -- the loss


def test_it_is_salt_on_class_and_way() -> None:
    """The same images, turned by hand, under SALT on a network that really has twelve classes."""
    objective = Bearings(BearingsSettings())
    network = SPEC.replace(head="turns").build(generator(2)).train()
    twelve = SPEC.replace(head="prototype", classes=12).build(generator(9)).train()
    twelve.load_state_dict(network.state_dict())
    labels, count = torch.tensor([0, 1, 2, 2, 1, 0]), 6
    images = torch.randn(2 * count, 2, 8, 8, generator=generator(3))
    terms = objective.loss(network, Batch(images, labels.repeat(2), 2), torch.tensor(0.5))
    turned = torch.stack([image.rot90(i % count % 4, (1, 2)) for i, image in enumerate(images)])
    joint = torch.tensor([3 * (i % 4) + int(label) for i, label in enumerate(labels)])
    expected = Salt(SaltSettings()).loss(twelve, Batch(turned, joint.repeat(2), 2), torch.tensor(0.5))
    assert terms.total.item() == pytest.approx(expected.total.item(), rel=1e-5)
    assert terms.parts.keys() == expected.parts.keys()


def test_without_a_shift_it_is_salt_byte_for_byte() -> None:
    site = site_of(noise(40), torch.arange(40) % 3)
    settings, spec = TrainSettings(epochs=2, batch=8), SPEC.replace(head="prototype")
    mine = train_site(site, spec, Bearings(BearingsSettings(shift="none")), settings, PLAIN, 0).parcel
    other = train_site(site, spec, Salt(SaltSettings()), settings, PLAIN, 0).parcel
    assert all(torch.equal(mine.weights[name], other.weights[name]) for name in other.weights)
    assert mine.manifest.meta["shift"] == "none"


# -- whether a shift can be learned


def test_turns_of_noise_are_chance_and_those_of_lamps_are_not() -> None:
    for accuracy, judged in told_apart(SPEC, site_of(noise(), torch.zeros(120, dtype=torch.int64)), "turns", 0, 3):
        assert judged == 24
        assert accuracy < 0.42
    ((accuracy, _),) = told_apart(SPEC, site_of(lamps(), torch.zeros(120, dtype=torch.int64)), "turns", 0)
    assert accuracy > 0.9
    few = site_of(lamps(4), torch.zeros(4, dtype=torch.int64))
    assert list(told_apart(SPEC, few, "turns", 0, 3)) == [(0.0, 0)]


def sent(images: Tensor, labels: Tensor, settings: BearingsSettings, classes: tuple[str, ...] = NAMES) -> ModelSpec:
    spec = Bearings.adapt_spec(SPEC.replace(classes=len(classes)), settings)
    site = site_of(images, labels, classes)
    made = train_site(site, spec, Bearings(settings), TrainSettings(epochs=1, batch=32), PLAIN, 0).parcel
    assert made.manifest.meta["shift"] == ("none" if made.manifest.spec.head == "prototype" else "turns")
    assert {name.partition(".")[0] for name in made.extras} == {"calibration", "moments"}
    return made.manifest.spec


def test_a_site_falls_back_and_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.zeros(120, dtype=torch.int64)  # a client of one class
    with caplog.at_level(logging.INFO, logger="flyby"):
        assert sent(noise(), labels, BearingsSettings()).head == "prototype"
        assert "site-0 shows no turns: they were told right in" in caplog.text
        assert sent(lamps(), labels, BearingsSettings()).head == "turns"
        assert sent(noise(), labels, BearingsSettings(test=False)).head == "turns"
        twelve = tuple("abcdefghijkl")
        assert sent(lamps(), torch.arange(120) % 12, BearingsSettings(), twelve).head == "prototype"
        assert "it holds 12 classes, more than most_classes = 10" in caplog.text

    def never(*_: object) -> tuple[float, int]:
        raise AssertionError("nobody needs to look")

    monkeypatch.setattr(shifting, "told_apart", never)
    assert sent(lamps(), labels, BearingsSettings(shift="none")).head == "prototype"


def test_few_images_must_be_told_better(monkeypatch: pytest.MonkeyPatch) -> None:
    for judged, head in ((9, "prototype"), (13, "turns")):  # 1/4 + 2 sqrt(3/16/n) is .539 and .490
        monkeypatch.setattr(shifting, "told_apart", lambda *_, n=judged: [(0.5, n)])
        objective = Bearings(BearingsSettings())
        spec = Bearings.adapt_spec(SPEC, objective.settings)
        assert objective.fitted(spec, site_of(lamps(), torch.zeros(120, dtype=torch.int64)), 0).head == head


def test_a_site_may_try_longer_before_it_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def slow(*words: object) -> Iterator[tuple[float, int]]:
        for n in range(int(str(words[-1]))):
            asked.append(n)
            yield 0.2 + 0.1 * n, 400  # .2, .3, .4: chance is .25, and .32 is asked for

    monkeypatch.setattr(shifting, "told_apart", slow)
    site = site_of(lamps(), torch.zeros(120, dtype=torch.int64))
    for tries, shift, accuracy in ((1, "none", 0.2), (2, "none", 0.3), (3, "turns", 0.4), (9, "turns", 0.4)):
        asked.clear()
        objective = Bearings(BearingsSettings(tries=tries))
        found = objective.decided(Bearings.adapt_spec(SPEC, objective.settings), site, 0)
        assert (found.shift, found.accuracy) == (shift, pytest.approx(accuracy))
        assert asked == list(range(min(tries, 3))), "who has seen enough learns no more"
    assert not {"tries", "label_smoothing"} & BearingsSettings().model_dump().keys(), "its uploads keep their names"


# -- FedSRA


def test_fedsra_by_hand() -> None:
    settings = FedSraSettings(dim=0)
    spec = FedSra.adapt_spec(SPEC, settings)
    network, objective = spec.build(generator(5)).train(), FedSra(settings)
    images, labels = torch.randn(8, 2, 8, 8, generator=generator(6)), torch.tensor([0, 1, 2, 1] * 2)
    objective.prepare(network, site_of(noise(9), torch.arange(9) % 3), 0)
    terms = objective.loss(network, Batch(images, labels, 2), torch.tensor(0.5))
    with torch.no_grad():
        features = F.normalize(network.features(images).double(), dim=1)
    anchors = simplex_etf(3, 6, 0).double()
    ce = con = pull = 0.0
    for i in range(8):
        logits = [float(features[i] @ anchors[c]) / 0.1 for c in range(3)]
        ce += (math.log(sum(map(math.exp, logits))) - logits[labels[i]]) / 8
        pull += (1 - logits[labels[i]] * 0.1) / 8
        others = [float(features[i] @ features[j]) / 0.1 for j in range(8) if j != i]
        alike = [float(features[i] @ features[j]) / 0.1 for j in range(8) if j != i and labels[j] == labels[i]]
        con += (math.log(sum(map(math.exp, others))) - sum(alike) / len(alike)) / 8
    assert float(terms.total) == pytest.approx(ce + 0.5 * con + 0.5 * pull, rel=1e-4)
    assert float(terms.parts["con"]) == pytest.approx(float(supcon(features.float(), labels, 0.1, 3)), rel=1e-4)
    with torch.no_grad():
        logits = network(images)
    assert torch.allclose(logits.double(), 10 * features @ anchors.T, atol=1e-4), "the head's scale is 1 / tau"


def test_a_client_of_one_class_is_only_pulled() -> None:
    settings = FedSraSettings(dim=0)
    network, objective = FedSra.adapt_spec(SPEC, settings).build(generator(5)).train(), FedSra(settings)
    objective.prepare(network, site_of(noise(9), torch.ones(9, dtype=torch.int64)), 0)
    batch = Batch(torch.randn(4, 2, 8, 8, generator=generator(6)), torch.ones(4, dtype=torch.int64), 2)
    terms = objective.loss(network, batch, torch.tensor(0.5))
    with torch.no_grad():
        f = network.features(batch.images)
    expected = 0.5 * float((1 - F.cosine_similarity(f, simplex_etf(3, 6, 0)[1][None])).mean())
    assert float(terms.total) == pytest.approx(expected, rel=1e-5)


def test_fedsra_keeps_its_anchors_and_sends_its_moments() -> None:
    settings = FedSraSettings(dim=5, anchor_seed=3)
    site, spec = site_of(noise(40), torch.arange(40) % 3), FedSra.adapt_spec(SPEC, settings)
    made = train_site(
        site, spec, FedSra(settings), TrainSettings(epochs=2, batch=8, optimizer="adam", lr=1e-3), PLAIN, 0
    )
    item = made.parcel
    assert torch.equal(item.weights["head.anchors"], simplex_etf(3, 5, 3))
    assert float(item.weights["head.scale"]) == pytest.approx(10.0)
    assert item.extras["moments.mean"].shape == (5,)
    assert item.manifest.meta["anchor_seed"] == 3


# -- FedSRA's anchors for every way


WIDE = SPEC.replace(widths={"conv1": 4, "conv2": 5, "conv3": 16})


def test_fedsra_with_turns_is_fedsra_on_class_and_way() -> None:
    """The same images, turned by hand, under FedSRA on a network that really has twelve classes."""
    settings = FedSraSettings(dim=0, shift="turns", anchor_seed=2)
    network, objective = FedSra.adapt_spec(WIDE, settings).build(generator(5)).train(), FedSra(settings)
    site = site_of(lamps(24), torch.ones(24, dtype=torch.int64))  # of one class, and yet it has ways to tell apart
    objective.prepare(network, site, 0)
    plain = FedSraSettings(dim=0, anchor_seed=2)
    twelve, other = FedSra.adapt_spec(WIDE.replace(classes=12), plain).build(generator(9)).train(), FedSra(plain)
    twelve.load_state_dict(
        {**twelve.state_dict(), **{k: v for k, v in network.state_dict().items() if "head" not in k}}
    )
    other.prepare(twelve, site_of(noise(24), torch.arange(24) % 12, tuple("abcdefghijkl")), 0)
    labels, images = torch.tensor([1, 1, 1, 1, 1, 1]), torch.randn(12, 2, 8, 8, generator=generator(3))
    terms = objective.loss(network, Batch(images, labels.repeat(2), 2), torch.tensor(0.5))
    turned = torch.stack([image.rot90(i % 6 % 4, (1, 2)) for i, image in enumerate(images)])
    joint = torch.tensor([3 * (i % 4) + 1 for i in range(6)])
    expected = other.loss(twelve, Batch(turned, joint.repeat(2), 2), torch.tensor(0.5))
    assert terms.total.item() == pytest.approx(expected.total.item(), rel=1e-5)
    assert torch.equal(shown_directions(network).flatten(0, 1), simplex_etf(12, 16, 2))


def test_all_sites_share_one_simplex_whether_they_show_ways_or_not(caplog: pytest.LogCaptureFixture) -> None:
    settings, train = FedSraSettings(dim=0, shift="turns"), TrainSettings(epochs=1, batch=32)
    spec, labels, kept = FedSra.adapt_spec(WIDE, settings), torch.arange(120) % 3, {}
    for name, images in (("turns", lamps()), ("none", noise())):
        made = train_site(site_of(images, labels), spec, FedSra(settings), train, PLAIN, 0).parcel
        assert made.manifest.meta["shift"] == name
        kept[name] = directions(made.network())
    assert torch.equal(kept["turns"], simplex_etf(12, 16, 0)[:3]), "training leaves them where they are"
    assert torch.equal(kept["none"], kept["turns"])
    narrow = FedSra.adapt_spec(SPEC, settings)  # 6 dimensions: a simplex of 12 needs 11
    assert narrow.head == "etf"
    with caplog.at_level(logging.INFO, logger="flyby"):
        made = train_site(site_of(lamps(), labels), narrow, FedSra(settings), train, PLAIN, 0).parcel
    assert "features of 6 dimensions have no room for 12 anchors" in caplog.text
    assert torch.equal(directions(made.network()), simplex_etf(3, 6, 0))


def test_a_fedsra_client_that_is_asked_for_no_ways_says_nothing_of_them() -> None:
    site, settings = site_of(noise(40), torch.arange(40) % 3), FedSraSettings(dim=5)
    spec = FedSra.adapt_spec(SPEC, settings)
    made = train_site(site, spec, FedSra(settings), TrainSettings(epochs=1, batch=8), PLAIN, 0).parcel
    assert "shift" not in made.manifest.meta
    assert not {"shift", "test", "most_classes"} & settings.model_dump().keys()
