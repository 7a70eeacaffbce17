"""IFFI, experts and what they need: each rule against plain loops, the scraps by hand, and an expert that must be
silenced."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from factories import train_site
from flyby.data.dataset import DataBundle
from flyby.data.site import Part, Site, part_of
from flyby.data.views import PLAIN
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, Inbox, load_predictor, save_predictor
from flyby.fusion.base import Server
from flyby.fusion.ensembles.experts import USUAL, ExpertsPredictor, ExpertsSettings, expert_votes
from flyby.fusion.ensembles.iffi import Iffi, IffiSettings, class_votes
from flyby.fusion.predictor import Predictor
from flyby.models import ModelSpec, Network
from flyby.objectives.anchored import AnchorSettings
from flyby.objectives.aurora import Aurora, AuroraSettings
from flyby.objectives.base import Objective
from flyby.objectives.etf import BalancedEtf
from flyby.objectives.salt import Salt, SaltSettings
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel
from flyby.rng import generator
from flyby.statistics import calibration
from flyby.statistics.calibration import Scraps, calibrate, calibrated, patch_orders, scraps, shuffle_patches
from flyby.training.loop import shared_counts
from flyby.training.settings import Counts, TrainSettings

CNN = ModelSpec(
    name="cnn-small", classes=3, channels=1, size=(8, 8), widths={"conv1": 4, "conv2": 5, "conv3": 6}, head="prototype"
)
MLP = ModelSpec(name="mlp", classes=3, channels=1, size=(8, 8), widths={"fc1": 6, "fc2": 6}, head="prototype")
NAMES = ("ant", "bee", "cat")
COUNTS = ((40, 10, 0), (0, 30, 50), (5, 0, 10))
FORMS = {"experts": "cosine", "experts-softmax": "softmax", "experts-gate": "gate", "experts-calibrated": "calibrated"}


def made(
    k: int = 0, spec: ModelSpec = MLP, counts: Sequence[int] | None = None, table: Tensor | None = None, **changes: Any
) -> Parcel:
    weights = dict(spec.build(generator(k, "weights")).state_dict())
    for i, (name, value) in enumerate(weights.items()):  # biases and statistics as training leaves them
        if "running" in name or name.endswith("bias"):
            weights[name] = torch.empty_like(value).uniform_(0.5, 1.5, generator=generator(k, i))
    counts = COUNTS[k] if counts is None else counts
    if table is None:
        means = torch.empty(2, 3).uniform_(-0.5, 0.5, generator=generator(k, "table")).sort(0, descending=True).values
        table = torch.cat((means, torch.empty(1, 3).uniform_(0.01, 0.4, generator=generator(k, "spread"))))
    settings = {
        "sender": f"site-{k}",
        "method": "x",
        "class_names": NAMES,
        "samples": sum(counts),
        "counts": counts,
        "extras": {"calibration": table},
    }
    return parcel.make(spec=spec, weights=weights, **(settings | changes))


def images(count: int = 5, size: int = 8, channels: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, size, size, channels), generator=generator(seed, "images"), dtype=torch.uint8)


def scores(predictor: Predictor, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = predictor(x)
    return out


def features_of(network: Network, x: Tensor) -> list[list[float]]:
    with torch.no_grad():
        found: list[list[float]] = network.features(network.spec.prepare(x)).double().tolist()
    return found


def rows_of(item: Parcel) -> list[list[float]]:
    """The class directions of an upload, straight from its weights."""
    for name in ("head.prototypes", "head.anchors", "head.weight"):
        if name in item.weights:
            rows: list[list[float]] = item.weights[name].double().tolist()
            return rows
    raise AssertionError(item.weights.keys())


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


# -- IFFI


@pytest.mark.parametrize("weights", ["size", "uniform", "noise"])
@pytest.mark.parametrize("prototypes", ["uniform", "counts"])
@pytest.mark.parametrize("head", ["prototype", "linear", "etf"])
def test_iffi_against_a_plain_loop(weights: Any, prototypes: Any, head: str) -> None:
    parcels = [made(k, CNN.replace(head=head)) for k in range(3)]
    x = images(4)
    x[:2, :5], x[2:, :, 3:] = 0, 255  # unlike noise, so that 1 - cos keeps its digits in float32
    found = scores(Iffi(IffiSettings(weights=weights, prototypes=prototypes)).fuse(Inbox(parcels), Server(seed=7)), x)

    networks = [item.network() for item in parcels]
    every = [features_of(net, x) for net in networks]
    total, dim = sum(map(sum, COUNTS)), 6
    pixels = torch.randint(0, 256, (64, 8, 8, 1), dtype=torch.uint8, generator=generator(7, "server", "noise"))
    noise = [np.mean(features_of(net, pixels), axis=0).tolist() for net in networks]
    fused_rows = []
    for c in range(3):
        held = [counts[c] for counts in COUNTS]
        v = [1 / 3] * 3 if prototypes == "uniform" else [n / sum(held) for n in held]
        fused_rows.append([sum(v[k] * rows_of(parcels[k])[c][j] for k in range(3)) for j in range(dim)])
    for n in range(4):
        w = {
            "size": [sum(counts) / total for counts in COUNTS],
            "uniform": [1 / 3] * 3,
            "noise": [1 - cosine(every[k][n], noise[k]) for k in range(3)],
        }[weights]
        w = [value / sum(w) for value in w]
        fused = [sum(w[k] * every[k][n][j] for k in range(3)) for j in range(dim)]
        length = math.sqrt(dot(fused, fused))
        for c in range(3):
            assert float(found[n, c]) == pytest.approx(
                dot(fused, fused_rows[c]) / length, abs=1e-4 if weights == "noise" else 1e-5
            )


def test_votes_by_hand() -> None:
    counts = torch.tensor([[4.0, 0.0, 0.0], [12.0, 9.0, 0.0]], dtype=torch.float64)
    assert class_votes(counts).tolist() == [[0.25, 0.0, 0.5], [0.75, 1.0, 0.5]]
    assert expert_votes(counts, 1.0).tolist() == [[0.25, 0.0, 0.0], [0.75, 1.0, 0.0]]
    assert expert_votes(counts, 0.0).tolist() == [
        [0.5, 0.0, 0.0],
        [0.5, 1.0, 0.0],
    ], "one voice for each that holds the class"
    half = expert_votes(counts, 0.5)[:, 0].tolist()
    assert half == pytest.approx([2 / (2 + math.sqrt(12)), math.sqrt(12) / (2 + math.sqrt(12))])


def test_iffi_refuses_features_of_different_widths_and_mixes_architectures_of_one() -> None:
    with pytest.raises(
        BadInput,
        match=r"iffi adds features up, but site-\d sends \d dimensions and site-\d \d; use ensemble or experts",
    ):
        Iffi().fuse(Inbox([made(0), made(1, MLP.replace(widths={"fc1": 6, "fc2": 4}))]))
    mixed = Iffi().fuse(
        Inbox([made(0, CNN), made(1, MLP), made(2, MLP.replace(head="linear", mean=(0.2,), std=(0.3,)))])
    )
    assert bool(scores(mixed, images()).isfinite().all())


def test_iffis_noise_depends_on_the_seed_alone() -> None:
    parcels = [made(k) for k in range(3)]
    one, two, other = (
        scores(Iffi(IffiSettings(weights="noise")).fuse(Inbox(parcels), Server(seed=s)), images()) for s in (0, 0, 1)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


# -- experts


def experts_by_loops(
    form: str, parcels: Sequence[Parcel], x: Tensor, power: float, sharpness: float
) -> list[list[float]]:
    counts = [list(p.manifest.counts or ()) for p in parcels]
    every = [features_of(p.network(), x) for p in parcels]
    clients, classes = range(len(parcels)), range(3)
    result = []
    for n in range(len(x)):
        cos = [[cosine(every[k][n], rows_of(parcels[k])[c]) for c in classes] for k in clients]
        best = [max((cos[k][c] for c in classes if counts[k][c] > 0), default=-1.0) for k in clients]
        gate = [math.exp(sharpness * b) for b in best]
        line = []
        for c in classes:
            voices = [counts[k][c] ** power if counts[k][c] > 0 else 0.0 for k in clients]
            score = 0.0
            for k in clients:
                if voices[k] == 0:
                    continue
                if form == "cosine":
                    said = cos[k][c]
                elif form == "softmax":
                    said = math.exp(sharpness * cos[k][c]) / sum(
                        math.exp(sharpness * cos[k][e]) for e in classes if counts[k][e] > 0
                    )
                elif form == "gate":
                    said = cos[k][c] * len(parcels) * gate[k] / sum(gate)
                else:
                    high, low, spread = parcels[k].extras["calibration"][:, c].tolist()
                    clear = (high - low) / max(spread, 1e-3)
                    said = (
                        0.0
                        if high - low < 1e-3
                        else math.sqrt(clear / (1 + clear)) * min(1.2, max(0.0, (cos[k][c] - low) / (high - low)))
                    )
                    said += 1e-3 * cos[k][c]  # the whisper that decides where every expert is silent
                score += voices[k] / sum(voices) * said
            line.append(score if sum(voices) else -float(len(parcels)))
        result.append(line)
    return result


@pytest.mark.parametrize("rule", FORMS)
@pytest.mark.parametrize("head", ["prototype", "linear", "etf"])
@pytest.mark.parametrize("settings", [{}, {"power": 0.0, "sharpness": 3.0}, {"power": 2.0}])
def test_experts_against_a_plain_loop(rule: str, head: str, settings: dict[str, float]) -> None:
    # Three sites, three networks: mixed architectures, widths and normalisations. One table has a gap that is too
    # small.
    narrow = torch.tensor([[0.3000, 0.2, 0.2], [0.2995, 0.1, 0.1], [0.1, 0.0, 0.2]])
    specs = (
        CNN.replace(head=head),
        MLP.replace(head=head),
        MLP.replace(head=head, widths={"fc1": 9, "fc2": 4}, mean=(0.1,), std=(0.9,)),
    )
    parcels = [made(k, spec, table=narrow if k == 0 else None) for k, spec in enumerate(specs)]
    x = images(6)
    predictor = FUSIONS[rule](ExpertsSettings(**settings)).fuse(Inbox(parcels))
    power = settings.get("power", 0.5 if rule == "experts-calibrated" else 1.0)
    by_hand = experts_by_loops(FORMS[rule], parcels, x, power, settings.get("sharpness", 16.0))
    assert np.allclose(scores(predictor, x).numpy(), by_hand, atol=1e-5)


def test_calibration_by_hand() -> None:
    # (m+, m-, s-) of four classes. d' = .8/.2 = 4, r = sqrt(.8); d' = .1/.3, r = sqrt(.25); a gap under .001; a class
    # that is not held.
    table = torch.tensor([[[0.9, 0.5, 0.3005, 0.0], [0.1, 0.4, 0.3000, 0.0], [0.2, 0.3, 0.0, 0.0]]])
    cos = torch.tensor([[[0.5, 0.6, 0.9, 0.9], [0.0, 0.45, -1.0, 0.0], [0.98, 0.4, 0.3, 1.0]]])
    r = math.sqrt(0.8)
    wanted = [[0.5 * r, 1.2 * 0.5, 0.0, 0.0], [0.0, 0.5 * 0.5, 0.0, 0.0], [1.1 * r, 0.0, 0.0, 0.0]]
    assert torch.allclose(calibrated(cos, table), torch.tensor([wanted]), atol=1e-6)


@pytest.mark.parametrize("rule", FORMS)
def test_a_class_nobody_holds_is_never_the_answer_and_a_client_without_classes_has_no_voice(rule: str) -> None:
    parcels = [
        made(0, counts=(9, 0, 4)),
        made(1, counts=(3, 0, 0)),
        made(2, counts=(0, 0, 0), samples=5, counts_kind="noisy"),
    ]
    found = scores(FUSIONS[rule]().fuse(Inbox(parcels)), images(40))
    assert bool(found.isfinite().all())
    assert 1 not in found.argmax(1).tolist()
    power = 0.5 if rule == "experts-calibrated" else 1.0
    assert np.allclose(found.numpy(), experts_by_loops(FORMS[rule], parcels, images(40), power, 16.0), atol=1e-5)


def test_experts_ask_for_what_they_need_by_name() -> None:
    silent = made(1, extras={})
    with pytest.raises(
        BadInput,
        match=r"site-1 sent no calibration; use --fusion experts",
    ):
        FUSIONS["experts-calibrated"]().fuse(Inbox([made(0), silent]))
    with pytest.raises(BadInput, match=r"that site-1 sent .* is F32 \[3, 4\] and must be F32 \[3, 3\]"):
        FUSIONS["experts-calibrated"]().fuse(Inbox([made(0), made(1, table=torch.zeros(3, 4))]))
    assert bool(scores(FUSIONS["experts"]().fuse(Inbox([made(0), silent])), images()).isfinite().all())
    with pytest.raises(BadInput, match=r"unknown form of experts 'gates'; did you mean 'gate'"):
        ExpertsPredictor([MLP], NAMES, form="gates")


# -- the expert that is sure of everything

HALVES = ModelSpec(name="mlp", classes=3, channels=1, size=(8, 8), widths={"fc1": 2, "fc2": 2}, head="prototype")


def halves(label: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Class 1 is bright on its left half, class 2 on its right, class 0 in the middle of both; all with some grain."""
    x = torch.randint(0, 130, (count, 8, 8, 1), generator=generator("halves", label, seed), dtype=torch.uint8)
    bright = {0: slice(2, 6), 1: slice(0, 4), 2: slice(4, 8)}[label]
    x[:, :, bright] = torch.randint(
        200, 256, (count, 8, 4, 1), generator=generator("bright", label, seed), dtype=torch.uint8
    )
    return x, torch.full((count,), label)


def halves_site(name: str, labels: Sequence[int], count: int = 30, seed: int = 0) -> Site:
    pairs = [halves(label, count, seed) for label in labels]
    part = Part(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]))
    none = Part(part.images[:0], part.labels[:0])
    return Site(name, part, none, none, NAMES)


def sees(network: Network, blind: bool, directions: Sequence[Sequence[float]]) -> Network:
    """Features are the mean brightness of the two halves; those of a blind network are (1, 0) whatever it is shown."""
    state = network.state_dict()
    left = torch.zeros(8, 8)
    left[:, :4] = 1 / 32
    weights = torch.zeros(2, 64) if blind else torch.stack((left.flatten(), left.flip(1).flatten()))
    state["backbone.fc1.weight"], state["backbone.fc1.bias"] = (
        weights,
        (torch.tensor([1.0, 0.0]) if blind else torch.tensor([1.2, 1.2])),
    )
    state["backbone.fc2.weight"], state["backbone.fc2.bias"] = torch.eye(2), torch.zeros(2)
    state["head.prototypes"] = torch.tensor(directions)
    network.load_state_dict(state)
    return network.eval()


def test_calibration_silences_a_client_that_is_sure_of_everything() -> None:
    sites = [halves_site("site-0", [0]), halves_site("site-1", [1, 2])]
    networks = [
        sees(HALVES.build(), True, [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]),  # one class: its cosine is 1 for every image
        sees(HALVES.build(), False, [[-1.0, -1.0], [1.0, 0.0], [0.0, 1.0]]),
    ]
    parcels = []
    for site, network in zip(sites, networks, strict=True):
        parcels.append(
            parcel.make(
                sender=site.id,
                method="x",
                spec=HALVES,
                class_names=NAMES,
                weights=network.state_dict(),
                samples=len(site.train),
                counts=site.counts,
                extras=calibrate(network, site, 0),
            )
        )
    table = parcels[0].extras["calibration"]
    assert table[0].tolist() == pytest.approx([1, 0, 0])
    assert table[1].tolist() == pytest.approx([1, 0, 0]), "scraps are as good to it as its class: a gap of nothing"
    assert table[2].tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert float((parcels[1].extras["calibration"][0] - parcels[1].extras["calibration"][1])[1:].min()) > 0.05

    test = halves_site("test", [1, 2], seed=1).train
    plain, mended = (
        scores(FUSIONS[rule]().fuse(Inbox(parcels)), test.images) for rule in ("experts", "experts-calibrated")
    )
    assert (plain.argmax(1) == test.labels).float().mean() == 0.0, "the blind client outshouts everybody"
    assert float(plain[:, 0].min()) == pytest.approx(1.0)
    assert torch.allclose(mended[:, 0], torch.full((60,), 1e-3), atol=1e-6), "only the whisper is left"
    assert (mended.argmax(1) == test.labels).float().mean() == 1.0


# -- scraps


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (8, 3), (32, 1), (32, 3), (9, 1)])
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_scraps_are_mixed_joined_and_shuffled(size: int, channels: int, count: int, seed: int) -> None:
    x = images(count, size, channels)
    found = scraps(x, generator(seed))
    assert found.shape == (3 * count, size, size, channels)
    assert found.dtype == torch.uint8
    mixed, joined, shuffled = found.split(count)
    partners = []
    for i in range(count):
        others = [j for j in range(count) if torch.equal(joined[i, :, size // 2 :], x[j, :, size // 2 :])]
        assert len(others) == 1
        partners.append(others[0])
        assert torch.equal(joined[i, :, : size // 2], x[i, :, : size // 2])
        by_hand = [(a + b) // 2 for a, b in zip(x[i].flatten().tolist(), x[others[0]].flatten().tolist(), strict=True)]
        assert mixed[i].flatten().tolist() == by_hand
        assert Counter(map(tuple, shuffled[i].flatten(0, 1).tolist())) == Counter(
            map(tuple, x[i].flatten(0, 1).tolist())
        )
    assert sorted(partners) == list(range(count)), "everybody is someone's other"
    assert count == 1 or all(j != i for i, j in enumerate(partners)), "nobody is mixed with itself"


def patches(image: Tensor, tall: int, wide: int) -> list[bytes]:
    return [
        image[i : i + tall, j : j + wide].contiguous().numpy().tobytes()
        for i in range(0, 8, tall)
        for j in range(0, 8, wide)
    ]


@pytest.mark.parametrize("count", [1, 5])
def test_scraps_made_piece_by_piece_are_the_same(count: int) -> None:
    x = images(count, 9, 3)
    whole = scraps(x, generator(4))
    apart = Scraps(x, generator(4))
    assert len(apart) == len(whole)
    for size in (1, 2, 4, 100):
        assert torch.equal(torch.cat([apart[i : i + size] for i in range(0, len(apart), size)]), whole)


def test_patches_stay_whole_and_every_image_has_an_order_of_its_own() -> None:
    x = images(1).expand(12, -1, -1, -1).clone()  # twelve copies of one image
    shuffled = shuffle_patches(x, 2, 4, patch_orders(x, 2, 4, generator(0)))
    orders = []
    for image in shuffled:
        assert Counter(patches(image, 2, 4)) == Counter(patches(x[0], 2, 4))
        orders.append(tuple(patches(x[0], 2, 4).index(p) for p in patches(image, 2, 4)))
    assert len(set(orders)) == 12
    odd = images(3, 9)
    edge = shuffle_patches(odd, 2, 2, patch_orders(odd, 2, 2, generator(0)))
    assert torch.equal(edge[:, 8], images(3, 9)[:, 8])
    assert torch.equal(edge[:, :, 8], images(3, 9)[:, :, 8])
    assert not torch.equal(edge[:, :8, :8], images(3, 9)[:, :8, :8])


# -- the table of calibration


def site_with(counts: Sequence[int], size: int = 8, channels: int = 1) -> Site:
    labels = torch.tensor([c for c, n in enumerate(counts) for _ in range(n)])
    part = Part(images(len(labels), size, channels), labels)
    none = Part(part.images[:0], labels[:0])
    return Site("site-0", part, none, none, tuple(f"c{i}" for i in range(len(counts))))


@pytest.mark.parametrize("head", ["prototype", "linear", "etf"])
@pytest.mark.parametrize(
    ("name", "size", "channels"), [("mlp", 8, 1), ("cnn-small", 8, 3), ("cnn-small", 32, 1), ("mlp", 32, 3)]
)
def test_the_table_is_what_a_plain_recomputation_gives(head: str, name: str, size: int, channels: int) -> None:
    site = site_with((7, 0, 4, 1), size, channels)
    spec = ModelSpec(name=name, classes=4, channels=channels, size=(size, size), width=0.1, head=head)
    network = spec.build(generator(1))
    network.train()
    network(spec.prepare(images(20, size, channels, seed=9)))  # running statistics that are not the first ones
    network.eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found = calibrate(network, site, 5)
    assert found.keys() == {"calibration"}
    table = found["calibration"]
    assert (table.shape, table.dtype) == ((3, 4), torch.float32)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items()), "BatchNorm included"
    assert not network.training
    assert torch.equal(calibrate(network, site, 5)["calibration"], table), "deterministic"
    assert not torch.equal(calibrate(network, site, 6)["calibration"], table)

    rows = (
        next(t for n, t in network.state_dict().items() if n in ("head.prototypes", "head.anchors", "head.weight"))
        .double()
        .tolist()
    )
    rng = generator(5, "site-0", "calibration")
    order = torch.cat(
        [
            torch.tensor([i for i, y in enumerate(site.train.labels.tolist()) if y == c])[
                torch.randperm(n, generator=rng)
            ]
            for c, n in ((0, 7), (2, 4), (3, 1))
        ]
    )
    odd = features_of(network, scraps(site.train.images[order], rng))
    own = features_of(network, site.train.images)
    for c in range(4):
        mine = [cosine(f, rows[c]) for f, y in zip(own, site.train.labels.tolist(), strict=True) if y == c]
        unlike = [cosine(f, rows[c]) for f in odd]
        low = sum(unlike) / len(unlike)
        spread = math.sqrt(sum((value - low) ** 2 for value in unlike) / len(unlike))
        wanted = [sum(mine) / len(mine), low, spread] if mine else [0.0, 0.0, 0.0]
        assert table[:, c].tolist() == pytest.approx(wanted, abs=1e-5)


def test_at_most_so_many_images_of_a_class_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    plain = calibration.cosines

    def counting(network: Network, x: Tensor) -> Tensor:
        looked.append(len(x))
        return plain(network, x)

    monkeypatch.setattr(calibration, "cosines", counting)
    calibrate(MLP.build(), site_with((250, 3, 0)), 0)
    assert looked == [200 + 3, 3 * (200 + 3)]


# -- class counts that say less


def test_binary_and_noisy_counts_by_hand() -> None:
    site = site_with((7, 0, 4, 1))
    assert shared_counts(site, "exact", 1.0, 0) == [7, 0, 4, 1]
    assert shared_counts(site, "binary", 1.0, 0) == [1, 0, 1, 1]
    assert shared_counts(site, "noisy", 1e9, 0) == [7, 0, 4, 1], "a huge epsilon hides nothing"
    assert shared_counts(site, "noisy", 0.5, 0) == shared_counts(site, "noisy", 0.5, 0)
    assert len({tuple(shared_counts(site, "noisy", 0.01, seed)) for seed in range(5)}) == 5
    assert all(n >= 0 for seed in range(50) for n in shared_counts(site, "noisy", 0.1, seed))


@pytest.mark.parametrize("epsilon", [0.02, 0.1])
def test_noise_of_counts_is_laplace_of_scale_one_over_epsilon(epsilon: float) -> None:
    labels = torch.arange(8).repeat_interleave(2000)
    part = Part(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), labels)
    site = Site("s", part, part, part, tuple("abcdefgh"))
    noise = np.array([shared_counts(site, "noisy", epsilon, seed) for seed in range(400)]) - 2000
    assert np.abs(noise).mean() == pytest.approx(1 / epsilon, rel=0.06)  # E|Laplace(b)| = b
    assert noise.std() == pytest.approx(math.sqrt(2) / epsilon, rel=0.08)
    assert abs(noise.mean()) < 4 * math.sqrt(2) / epsilon / math.sqrt(noise.size)
    assert np.quantile(np.abs(noise), 0.5) == pytest.approx(math.log(2) / epsilon, rel=0.1)


def train(site: Site, objective: Objective, spec: ModelSpec, **options: Any) -> Parcel:
    settings = TrainSettings(**{"epochs": 2, **objective.defaults(objective.settings), **options.pop("train", {})})
    return train_site(
        site, objective.adapt_spec(spec, objective.settings), objective, settings, PLAIN, 0, **options
    ).parcel


def digits_site(digits: DataBundle, keep: Sequence[int], name: str, samples: int = 200) -> Site:
    rows = np.flatnonzero(np.isin(digits.train.labels, keep))[:samples]
    none = part_of(digits.train, rows[:0])
    return Site(name, part_of(digits.train, rows), none, none, digits.train.class_names)


TEN = CNN.replace(classes=10, widths={"conv1": 8, "conv2": 12, "conv3": 16})


@pytest.mark.parametrize("kind", ["exact", "binary", "noisy"])
def test_the_manifest_says_what_its_counts_are_and_experts_take_them(digits: DataBundle, kind: Counts) -> None:
    parcels = []
    for k, keep in enumerate(((0, 1, 2), (2, 3))):
        item = train(digits_site(digits, keep, f"site-{k}", 60), Salt(SaltSettings()), TEN, counts=kind, epsilon=2.0)
        assert item.manifest.counts_kind == kind
        assert item.manifest.samples == 60
        read = parcel.from_bytes(parcel.to_bytes(item)).manifest
        assert (read.counts_kind, read.counts) == (kind, item.manifest.counts)
        parcels.append(item)
    if kind == "binary":
        assert [p.manifest.counts for p in parcels] == [(1, 1, 1, 0, 0, 0, 0, 0, 0, 0), (0, 0, 1, 1, 0, 0, 0, 0, 0, 0)]
    exact = train(digits_site(digits, (0, 1, 2), "site-0", 60), Salt(SaltSettings()), TEN)
    assert all(torch.equal(value, exact.weights[name]) for name, value in parcels[0].weights.items()), (
        "the counts change nothing else"
    )
    for rule in FORMS:
        predictor = FUSIONS[rule]().fuse(Inbox(parcels))
        assert isinstance(predictor, ExpertsPredictor)
        found = scores(predictor, images(30))
        assert bool(found.isfinite().all())
        if kind == "binary":
            assert predictor.votes[:, :4].tolist() == [[1, 1, 0.5, 0], [0, 0, 0.5, 1]]
        if kind != "noisy":
            assert set(found.argmax(1).tolist()) <= {0, 1, 2, 3}


# -- whole


@pytest.mark.parametrize(
    "objective",
    [
        Salt(SaltSettings()),
        Aurora(AuroraSettings()),
        Supervised(SupervisedSettings()),
        BalancedEtf(AnchorSettings()),
    ],
    ids=["salt", "aurora", "supervised", "etf"],
)
def test_sites_with_half_the_classes_each_know_all_of_them_together(digits: DataBundle, objective: Objective) -> None:
    options: dict[str, Any] = {"train": {"epochs": 10, "lr": 0.1, "batch": 50}}
    kind, settings = type(objective), objective.settings
    parcels = [
        train(
            digits_site(digits, range(5 * k, 5 * k + 5), f"site-{k}", 300),
            kind(settings),
            TEN.replace(head="linear"),
            **options,
        )
        for k in (0, 1)
    ]
    assert digits.test is not None
    test = part_of(digits.test)
    right = {
        rule: float(
            (scores(FUSIONS[rule]().fuse(Inbox(parcels)), test.images).argmax(1) == test.labels).double().mean()
        )
        for rule in FORMS
    }
    alone = float((parcels[0].network()(TEN.prepare(test.images)).argmax(1) == test.labels).double().mean())
    assert alone < 0.52
    assert max(right.values()) > 0.65, right
    assert min(right.values()) > 0.3, right
    quiet = kind(settings.model_copy(update={"calibrate": False}))
    assert (
        "calibration"
        not in train(digits_site(digits, range(5), "site-0", 40), quiet, TEN.replace(head="linear")).extras
    )


def fused(rule: str, head: str = "prototype") -> Predictor:
    settings = IffiSettings(weights="noise", prototypes="counts") if rule == "iffi" else None
    specs = (CNN, MLP, MLP) if rule == "iffi" else (CNN, MLP, MLP.replace(widths={"fc1": 7, "fc2": 5}))
    return FUSIONS[rule](settings).fuse(Inbox([made(k, spec.replace(head=head)) for k, spec in enumerate(specs)]))


@pytest.mark.parametrize("rule", ["iffi", *FORMS])
@pytest.mark.parametrize("head", ["prototype", "linear", "etf"])
def test_a_predictor_survives_its_folder(tmp_path: Path, rule: str, head: str) -> None:
    predictor = fused(rule, head)
    wanted = scores(predictor, images(9))
    save_predictor(predictor, tmp_path / "model", export=False)
    loaded = load_predictor(tmp_path / "model")
    assert type(loaded) is type(predictor)
    assert loaded.settings == predictor.settings
    assert torch.equal(scores(loaded, images(9)), wanted)


@pytest.mark.parametrize("rule", ["iffi", "experts", "experts-softmax", "experts-gate", "experts-calibrated"])
def test_the_exported_program_gives_the_same_scores_for_any_number_of_images(tmp_path: Path, rule: str) -> None:
    predictor = fused(rule)
    save_predictor(predictor, tmp_path / "model")
    program = torch.export.load(tmp_path / "model" / "model.pt2").module()
    for count in (1, 2, 7):
        with torch.no_grad():
            assert torch.allclose(program(images(count)), scores(predictor, images(count)), atol=1e-6)


def test_experts_on_any_order_of_arrival() -> None:
    parcels = [made(k) for k in range(3)]
    for rule in ("iffi", *FORMS):
        one, two = (scores(FUSIONS[rule]().fuse(Inbox(order)), images()) for order in (parcels, parcels[::-1]))
        assert torch.equal(one, two)


def test_shares_add_up_to_one_also_where_everything_was_said_against() -> None:
    """Cosines may all be negative: the answer is still the largest score, and not class 0 with no share at all."""
    scores = torch.tensor([[-0.5, -0.1, -0.9], [0.0, 0.0, 0.0], [1.0, 3.0, -2.0]])
    for form, usual in USUAL.items():
        predictor = ExpertsPredictor([MLP], NAMES, [MLP.build()], form=form)
        shares = predictor.chances(scores)
        assert torch.allclose(shares, (scores / usual).softmax(1), atol=1e-6)
        assert shares.argmax(1).tolist()[::2] == [1, 1]
    predictor.temperature = 2.0  # as sites measured it
    assert torch.allclose(predictor.chances(scores), (scores / 2).softmax(1), atol=1e-6)
