"""Private sums: noise that is as large as epsilon asks for and no larger, masks that cancel to the last bit and tell
nothing before, and an audit that sees the difference."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flyby
from factories import call, done, make_npz, one_line
from flyby.data.site import Part, Site
from flyby.data.sources import load
from flyby.errors import BadInput
from flyby.fusion import FUSIONS
from flyby.fusion.closed.base import Contributions
from flyby.fusion.closed.kept import region_of, taken_out
from flyby.fusion.closed.masked import unmasked
from flyby.models import ModelSpec
from flyby.models.features import features_of
from flyby.parcels import masks, parcel, signing
from flyby.parcels.gate import Gate
from flyby.parcels.inbox import Inbox
from flyby.parcels.masks import Masking, Participant, Round
from flyby.parcels.parcel import Parcel
from flyby.rng import generator
from flyby.statistics.catalogue import computed, examined
from flyby.statistics.feature_sums import NAME, Choice, Sums, blurred, noised_sums, sums_of, usual_norm
from flyby.statistics.masked_sums import masked, words_of
from flyby.statistics.noised import FLOOR, MOST, SHARES, Noise, delta_of, multiplier
from flyby.study.audit import Told, audit, target
from flyby.training.privacy import draws

SPEC = ModelSpec(name="mlp", classes=10, channels=1, size=(8, 8), widths={"fc1": 40, "fc2": 24})
DIGITS = tuple("0123456789")
NETWORK = SPEC.build(generator("eyes")).eval()
IMAGES, LABELS = load("digits").train.tensors()
RULES = ("ridge", "lda", "nb", "fishermix")


def site(name: str, rows: Sequence[int] | range | Tensor) -> Site:
    kept = torch.as_tensor(list(rows))
    none = Part(IMAGES[:0], LABELS[:0])
    return Site(name, Part(IMAGES[kept], LABELS[kept]), none, none, DIGITS)


def sending(one: Site, made: dict[str, Tensor], **facts: Any) -> Parcel:
    return parcel.make(
        sender=one.id,
        method="ridge",
        spec=SPEC,
        class_names=DIGITS,
        samples=len(one.train),
        weights=NETWORK.state_dict(),
        extras=made,
        **facts,
    )


def plain(one: Site, send: str = f"{NAME}:dtype=float64;least=1") -> Parcel:
    return sending(one, computed(send, NETWORK, one, 0), counts=one.counts)


def noised(one: Site, epsilon: float, seed: int = 0, norm: float | None = None, dtype: str = "float32") -> Parcel:
    draw = draws(generator(seed, one.id, "noise"))
    made = noised_sums(NETWORK, one, {"dtype": dtype}, (epsilon, 1e-5), norm, draw)
    told = {"counts": blurred(made["counts"]), "counts_kind": "noisy"}
    return sending(one, {f"{NAME}.{part}": value for part, value in made.items()}, **told)


# -- how much noise


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-3), (1.0, 1e-5), (3.0, 1e-5), (8.0, 1e-6), (20.0, 1e-9)])
def test_the_noise_is_calibrated_exactly(epsilon: float, delta: float) -> None:
    """Delta is the integral of what of N(1, z^2) lies above e^epsilon N(0, z^2), taken by a sum over a fine grid."""
    z = multiplier(epsilon, delta)
    x = np.linspace(-40 * z, 40 * z + 1, 4_000_001)
    here, there = (np.exp(-(((x - mean) / z) ** 2) / 2) / (z * math.sqrt(2 * math.pi)) for mean in (1, 0))
    integral = float(np.maximum(here - math.exp(epsilon) * there, 0).sum() * (x[1] - x[0]))
    assert integral == pytest.approx(delta, rel=1e-3)
    assert delta_of(epsilon, z) <= delta * (1 + 1e-9)
    assert delta_of(epsilon, 0.999 * z) > delta, "no less would do"


def test_the_classical_bound_and_impossible_budgets() -> None:
    z = multiplier(0.5, 1e-5)
    assert 0.7 < z / (math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.5) < 1, (
        "below Dwork and Roth's, which holds for epsilon < 1"
    )
    assert multiplier(1.0, 1e-5) == pytest.approx(3.7306, abs=1e-3), "as Balle and Wang's own tables have it"
    with pytest.raises(BadInput, match="no amount of noise gives epsilon 1e-09 at delta 1e-12"):
        multiplier(1e-9, 1e-12)


def test_one_image_moves_the_scaled_sums_by_at_most_one() -> None:
    """The joint sensitivity, by brute force: what one image contributes to all that is sent, each number in units of
    its own noise, times z. Features along an axis and others alike reach 1, none passes it."""
    z, width, norm = 1.7, 24, 3.0
    noise = Noise.planned(100, norm, z)
    rng = generator("features")
    features = [*torch.eye(width).double(), *torch.randn(50, width, generator=rng).double(), torch.ones(width).double()]
    rows, columns = torch.triu_indices(width, width)
    spread = torch.where(rows == columns, 1.0, 0.5).double().sqrt() * noise.second
    moved = []
    for x in features:
        x = norm * x / x.norm()
        outer = torch.outer(x, x)[rows, columns]
        moved.append(
            (1 / noise.counts) ** 2 + float((x / noise.first).square().sum() + (outer / spread).square().sum())
        )
    assert [z * math.sqrt(one) for one in moved] == pytest.approx([1.0] * len(moved), rel=1e-9)
    assert sum(SHARES) == pytest.approx(1.0)


def test_the_noise_that_is_drawn_is_the_noise_that_is_told() -> None:
    width, classes = 120, 10
    noise = Noise.planned(100, 2.0, 1.3)
    zero = torch.zeros(classes, width, dtype=torch.float64)
    counts, first, second = noise.added(
        torch.zeros(classes, dtype=torch.int64),
        zero,
        torch.zeros(width, width, dtype=torch.float64),
        draws(generator(1)),
    )
    assert torch.equal(second, second.T)
    off = second[tuple(torch.triu_indices(width, width, 1))]
    assert float(first.std()) == pytest.approx(noise.first, rel=0.1)
    assert float(off.std()) == pytest.approx(noise.second * math.sqrt(0.5), rel=0.05)
    assert float(second.diagonal().std()) == pytest.approx(noise.second, rel=0.25)
    assert 0.3 < float(counts.double().std()) / noise.counts < 2
    assert float(torch.linalg.eigvalsh(second)[-1]) == pytest.approx(noise.radius(width), rel=0.1)


def test_features_are_shortened_and_nothing_is_left_out_by_exact_counts() -> None:
    one = site("a", [*range(30), int((LABELS == 7).nonzero()[-1])])
    norm = 0.5 * float(features_of(NETWORK, one.train.images).norm(dim=1).min())
    short = sums_of(NETWORK, one, Choice(least=1), norm)
    assert float(short.second.diagonal().sum()) == pytest.approx(31 * norm**2)
    quiet = noised_sums(NETWORK, one, {"dtype": "float64", "least": 9}, (1e6, 0.5), norm, draws(generator(0)))
    assert quiet["choice"].tolist() == [0, 0, 1], "whatever was asked for"
    assert torch.allclose(quiet["first"] * 31, short.first, atol=0.1)
    assert quiet["counts"].tolist() == one.counts
    again = noised_sums(NETWORK, one, {}, (1.0, 1e-5), None, draws(None))["first"]
    assert not torch.equal(again, noised_sums(NETWORK, one, {}, (1.0, 1e-5), None, draws(None))["first"])
    assert usual_norm(NETWORK, Choice()) == usual_norm(NETWORK, Choice()) > 0


# -- what a server makes of it


def accuracy(model: Any) -> float:
    with torch.no_grad():
        return float((model(IMAGES[1200:]).argmax(1) == LABELS[1200:]).double().mean())


@pytest.mark.parametrize("rule", RULES)
def test_noisy_sums_are_solved_and_less_noise_is_better(rule: str) -> None:
    found = []
    for epsilon in (0.3, 3.0, 30.0):
        items = [noised(site(f"s{k}", range(k, 1200, 3)), epsilon) for k in range(3)]
        found.append(accuracy(FUSIONS[rule]().fuse(Inbox(items))))
    assert found[0] + 0.1 < found[1] < found[2] - 0.02
    assert found[2] > 0.5
    drowned = [noised(site(f"s{k}", range(k, 1200, 3)), 0.01, seed=1) for k in range(3)]
    with pytest.raises(BadInput, match="the noise is larger than the count of every class"):
        FUSIONS[rule]().fuse(Inbox(drowned))


def test_settled_sums_are_those_of_images() -> None:
    items = [noised(site(f"s{k}", range(k, 1200, 3)), 1.0, dtype="float64") for k in range(3)]
    sums = Contributions(Inbox(items), "ridge")
    assert sums.sent.noise is not None
    assert sums.sent.noise.counts == pytest.approx(math.sqrt(3) * multiplier(1.0, 1e-5) / math.sqrt(SHARES[0]))
    assert float(torch.linalg.eigvalsh(sums.sent.within())[0]) < 0, "noise alone leaves no covariance"
    least = float(torch.linalg.eigvalsh(sums.total.within())[0])
    assert least == pytest.approx(FLOOR * sums.sent.noise.radius(24), rel=1e-6)
    assert sums.total.images == 1200
    with pytest.raises(BadInput, match="choose=sites needs sums without noise"):
        FUSIONS["ridge"](FUSIONS["ridge"].settings_type(choose="sites")).fuse(Inbox(items))


def test_regions_add_noise_up_and_take_it_out() -> None:
    a, b, c = (noised(site(f"s{k}", range(k, 600, 3)), 3.0, dtype="float64") for k in range(3))
    free = plain(site("t", range(600, 700)))
    region = region_of(Inbox([a, b, free]), "north", "ridge")
    assert region.manifest.counts is None
    assert examined(region, None, "cpu", used={NAME})
    whole = Contributions(Inbox([region, c]), "ridge").sent
    flat = Contributions(Inbox([a, b, c, free]), "ridge").sent
    for one, other in ((whole.first, flat.first), (whole.second, flat.second)):
        assert torch.allclose(one, other, rtol=1e-9)
    assert whole.noise == pytest.approx(flat.noise)
    back = taken_out(region, b)
    rest = Contributions(Inbox([a, free]), "ridge").sent
    left = Contributions(Inbox([back]), "ridge").sent
    assert left.noise == pytest.approx(rest.noise, rel=1e-6)
    assert torch.allclose(left.second, rest.second, rtol=1e-6, atol=1e-6)


# -- the gate


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 8.0])
def test_the_gate_takes_honest_noise(epsilon: float) -> None:
    items = [noised(site(f"s{k}", range(20 * k, 20 * k + 20 + 100 * k)), epsilon, seed=k) for k in range(6)]
    gate = Gate()
    for item in items:
        gate.check(item)
    assert len(gate.settle(beside=partial(examined, used={NAME}), needs={NAME})) == 6
    assert gate.refused == []


def test_the_gate_takes_no_nonsense_that_calls_itself_noise() -> None:
    item = noised(site("a", range(300)), 3.0, dtype="float64")
    noise = Noise(*item.extras[f"{NAME}.noise"].tolist())

    def refusal(**changed: Any) -> str:
        fields = {f"{NAME}.{part}": value for part, value in changed.items()}
        with pytest.raises(BadInput) as caught:
            examined(
                parcel.make(weights=item.weights, extras=item.extras | fields, **item.manifest.facts),
                None,
                "cpu",
                used={NAME},
            )
        return str(caught.value)

    def told(**changed: float) -> Tensor:
        return torch.tensor(noise._replace(**changed), dtype=torch.float64)

    first, moments = item.extras[f"{NAME}.first"], item.extras[f"{NAME}.moments"]
    assert "more noise than any epsilon asks for" in refusal(noise=told(counts=8 * MOST))
    assert "more noise than any epsilon asks for" in refusal(noise=told(first=noise.norm * 2 * MOST))
    assert "on other images than its 300" in refusal(noise=told(images=301.0))
    assert "it is of no image" in refusal(noise=told(images=0.0))
    assert "sums are larger than its images could make them" in refusal(first=20 * first)
    assert "squares are larger" in refusal(moments=20 * moments)
    assert "squares are larger" in refusal(moments=-20 * moments)
    assert "counts are not the parcel's own" in refusal(counts=item.extras[f"{NAME}.counts"] + 1)
    width = first.shape[1]
    indefinite = Sums.unpacked(item.extras).second
    indefinite[0, 1] = indefinite[1, 0] = 300 * noise.norm**2
    rows, columns = torch.triu_indices(width, width)
    assert "those of no images" in refusal(moments=indefinite[rows, columns] / 300)
    assert "noise is F64 [4]" in refusal(noise=told()[:4])


# -- masks


def keys(folder: Path, names: Sequence[str] = ("site-a", "site-b", "site-c")) -> dict[str, Path]:
    return {name: signing.new_key(name, folder)[0] for name in names}


def held(paths: dict[str, Path], name: str = "spring", **room: Any) -> Round:
    everyone = [masks.participant(signing.read_private(path)) for path in paths.values()]
    return Round.of(everyone, name, room.get("images", 1000), room.get("largest", 64.0))


PARTS = {"site-a": range(0, 400), "site-b": range(400, 500), "site-c": range(500, 900)}


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    return keys(tmp_path)


def hidden(paths: dict[str, Path], one: Round) -> dict[str, Parcel]:
    return {name: masked(plain(site(name, PARTS[name])), Masking.at(one, path)) for name, path in paths.items()}


def test_masked_sums_equal_plain_ones_bit_for_bit(paths: dict[str, Path]) -> None:
    one = held(paths)
    items = hidden(paths, one)
    open_words = [words_of(Sums.unpacked(plain(site(n, PARTS[n])).extras), one) for n in PARTS]
    total = np.sum([item.extras["masked-sums.words"].numpy().view(np.uint64) for item in items.values()], axis=0)
    assert np.array_equal(total, np.sum(open_words, axis=0))
    made = unmasked(Inbox(list(items.values())[::-1]), "ridge")
    wanted = Contributions(Inbox([plain(site(n, PARTS[n])) for n in PARTS]), "ridge").sent
    got = Sums.unpacked(made.extras)
    assert torch.equal(got.counts, wanted.counts)
    assert float((got.first - wanted.first).abs().max()) <= 3 * 2.0 ** -(one.bits + 1) * 1.01, "half a step per site"
    assert float((got.second - wanted.second).abs().max()) <= 3 * 2.0 ** -(one.bits + 1) * 1.01
    assert (made.manifest.sender, made.manifest.sites, made.manifest.samples) == ("spring", 3, 900)
    models = [FUSIONS["ridge"]().fuse(Inbox(x)) for x in ([made], [plain(site(n, PARTS[n])) for n in PARTS])]
    with torch.no_grad():
        assert torch.allclose(models[0](IMAGES), models[1](IMAGES), atol=1e-4)


def test_a_masked_parcel_looks_like_chance(paths: dict[str, Path]) -> None:
    """Bytes are uniform by chi-square, and words follow neither the plain ones nor those of the partners. The same
    tests see through words without masks, and through masks that were used twice."""
    one = held(paths)
    items = hidden(paths, one)
    words = {name: item.extras["masked-sums.words"].numpy().view(np.uint64) for name, item in items.items()}
    bare = {name: words_of(Sums.unpacked(plain(site(name, PARTS[name])).extras), one) for name in PARTS}

    def chi_square(given: np.ndarray[Any, Any]) -> float:
        seen = np.bincount(given.view(np.uint8), minlength=256)
        return float(((seen - seen.mean()) ** 2 / seen.mean()).sum())

    def alike(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
        """Correlation in standard errors."""
        return (
            abs(float(np.corrcoef(x.view(np.int64).astype(float), y.view(np.int64).astype(float))[0, 1]))
            * len(x) ** 0.5
        )

    for name in words:
        assert chi_square(words[name]) < 255 + 5 * math.sqrt(2 * 255)
        assert chi_square(bare[name]) > 1000
        assert alike(words[name], bare[name]) < 5
    assert alike(bare["site-a"], bare["site-b"]) > 5
    pair = words["site-a"] + words["site-b"]  # two of three: all that is left is the masks towards the third
    assert chi_square(pair) < 255 + 5 * math.sqrt(2 * 255)
    assert alike(pair, bare["site-a"] + bare["site-b"]) < 5
    assert alike(words["site-a"], words["site-b"]) < 5
    again = masked(plain(site("site-a", PARTS["site-a"])), Masking.at(held(paths, "autumn"), paths["site-a"]))
    fresh = again.extras["masked-sums.words"].numpy().view(np.uint64)
    assert chi_square(fresh - words["site-a"]) < 255 + 5 * math.sqrt(2 * 255), "another round, other masks"


def test_nothing_else_in_a_masked_parcel_follows_from_the_images(paths: dict[str, Path], tmp_path: Path) -> None:
    one, texts = held(paths), set()
    for k, rows in enumerate((range(300), range(300, 1000))):
        masking = Masking.at(one, paths["site-a"])._replace(memory=tmp_path / f"{k}.json")
        item = masked(plain(site("site-a", rows)), masking)
        told = json.loads(item.manifest.to_bytes())
        told["tensors"]["extra::masked-sums.words"].pop("sha256")
        texts.add(json.dumps(told, sort_keys=True))
    assert len(texts) == 1
    assert (told["samples"], told["counts"]) == (0, None)


def test_a_missing_site_fails_loudly_and_the_others_can_go_on(paths: dict[str, Path]) -> None:
    one = held(paths)
    items = hidden(paths, one)
    two = [items["site-a"], items["site-b"]]
    with pytest.raises(
        BadInput, match=r"site-c of the round spring did not send.* have site-a, site-b run: flyby keys"
    ):
        unmasked(Inbox(two), "ridge")
    told = [Masking.at(one, paths[name]).reveal(["site-c"]) for name in ("site-a", "site-b")]
    with pytest.raises(BadInput, match=r"have site-b run"):
        unmasked(Inbox(two), "ridge", told[:1])
    got = Sums.unpacked(unmasked(Inbox(two), "ridge", told).extras)
    wanted = Contributions(Inbox([plain(site(n, PARTS[n])) for n in ("site-a", "site-b")]), "ridge").sent
    assert torch.equal(got.counts, wanted.counts)
    assert float((got.second - wanted.second).abs().max()) < 2.0**-one.bits * 1.01
    with pytest.raises(BadInput, match="revealed its seed towards site-c, and a parcel of site-c is here"):
        unmasked(Inbox([*two, items["site-c"]]), "ridge", told)
    with pytest.raises(BadInput, match="is of another round than spring"):
        unmasked(Inbox(two), "ridge", [told[0], told[1].model_copy(update={"round": "0" * 64})])
    with pytest.raises(BadInput, match="site-z revealed seeds, and its own parcel is not here"):
        unmasked(Inbox(two), "ridge", [*told, told[1].model_copy(update={"sender": "site-z"})])
    wrong = told[1].model_copy(update={"seeds": {"site-c": "0" * 64}})
    with pytest.raises(BadInput, match="the sum of the round spring is not one of images"):
        unmasked(Inbox(two), "ridge", [told[0], wrong])
    with pytest.raises(BadInput, match="fewer than two sites would be left"):
        Masking.at(one, paths["site-a"]).reveal(["site-b"])
    seed = masks.seed(one, signing.read_private(paths["site-a"]), "site-a", "site-c")
    assert told[0].seeds == {"site-c": seed.hex()}, "and no other seed"
    assert seed == masks.seed(one, signing.read_private(paths["site-c"]), "site-c", "site-a")


def test_other_rounds_keys_and_sums_are_refused(paths: dict[str, Path], tmp_path: Path) -> None:
    one = held(paths)
    items, other = hidden(paths, one), hidden(paths, held(paths))
    with pytest.raises(BadInput, match="masked for different rounds"):
        unmasked(Inbox([items["site-a"], other["site-b"], items["site-c"]]), "ridge")
    with pytest.raises(BadInput, match="has sent other sums in the round spring"):
        masked(plain(site("site-a", range(50))), Masking.at(one, paths["site-a"]))
    again = masked(plain(site("site-a", PARTS["site-a"])), Masking.at(one, paths["site-a"]))
    assert parcel.to_bytes(again) == parcel.to_bytes(items["site-a"]), "the same sums are the same parcel"
    (tmp_path / "new").mkdir()
    stranger = signing.new_key("site-a", tmp_path / "new")[0]
    with pytest.raises(BadInput, match="the round spring does not have this key of site-a"):
        masked(plain(site("site-a", range(50))), Masking.at(one, stranger))
    with pytest.raises(BadInput, match="site-z is not in the round spring"):
        Masking.at(one, paths["site-a"]).check("site-z")
    loud = hidden(paths, held(paths, largest=63.0))
    assert parcel.to_bytes(loud["site-a"]) != parcel.to_bytes(items["site-a"])
    liar = items["site-b"].extras | {"masked-sums.words": items["site-b"].extras["masked-sums.words"] + 2**50}
    bent = parcel.make(weights=items["site-b"].weights, extras=liar, **items["site-b"].manifest.facts)
    with pytest.raises(BadInput, match="is not one of images: a site used another key or sent something else"):
        unmasked(Inbox([items["site-a"], bent, items["site-c"]]), "ridge")


def test_what_does_not_fit_is_refused_and_what_fits_cannot_overflow(paths: dict[str, Path]) -> None:
    with pytest.raises(BadInput, match="has room for 99 images per site, and there are 100"):
        masked(plain(site("site-b", PARTS["site-b"])), Masking.at(held(paths, images=99), paths["site-b"]))
    with pytest.raises(BadInput, match=r"a sum of features is .*, beyond the 1 that the round"):
        masked(
            plain(site("site-b", PARTS["site-b"])), Masking.at(held(paths, images=100, largest=0.01), paths["site-b"])
        )
    with pytest.raises(BadInput, match="do not fit into 64 bits"):
        held(paths, images=10**9, largest=1e6)
    for images, largest in ((1, 1.0), (1000, 64.0), (10**6, 8.0)):
        one = held(paths, images=images, largest=largest)
        most = one.fixed(np.array([one.limit, -one.limit])).view(np.int64)
        assert abs(int(most[0])) * len(one.names) < 2**63
        assert int(most[0]) == -int(most[1]) > 2**60 // len(one.names), "and little room is left unused"


def test_a_round_holds_its_keys_to_their_owners(paths: dict[str, Path], tmp_path: Path) -> None:
    one = held(paths)
    forged = one.participants[0].model_copy(update={"mask": one.participants[1].mask})
    with pytest.raises(BadInput, match="its signature does not fit its content"):
        forged.check(None)
    unsigned = one.participants[0].model_copy(update={"signature": ""})
    with pytest.raises(BadInput, match="is not signed"):
        Round.of([unsigned, *one.participants[1:]], "x", 10, 1.0)
    trust = signing.Trust()
    for path in paths.values():
        key = signing.read_private(path)
        trust.add(str(key.sender), key.public)
    one.check(trust)
    (tmp_path / "server").mkdir()
    made_up: Participant = masks.participant(signing.read_private(signing.new_key("site-b", tmp_path / "server")[0]))
    evil = Round.of([one.participants[0], made_up], "evil", 10, 1.0)
    with pytest.raises(BadInput, match=r"not the key that site-b is trusted with"):
        evil.check(trust)
    with pytest.raises(BadInput, match="two sites at the least"):
        Round.of(one.participants[:1], "x", 10, 1.0)
    with pytest.raises(BadInput, match="a site stands twice"):
        Round.of([*one.participants, one.participants[0]], "x", 10, 1.0)


# -- the commands


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites' data, keys and a round."""
    folder = tmp_path_factory.mktemp("round")
    for k, name in enumerate("abc"):
        rows = np.arange(k, 900, 3)
        make_npz(
            folder / f"{name}.npz",
            images=IMAGES.numpy()[rows],
            labels=LABELS.numpy()[rows],
            class_names=np.array(DIGITS),
        )
        done("keys", "new", name, "--out", folder)
        done("keys", "mask", folder / f"{name}.key")
        done("keys", "trust", folder / "trust.json", folder / f"{name}.pub")
    rest = slice(900, None)
    make_npz(
        folder / "rest.npz", images=IMAGES.numpy()[rest], labels=LABELS.numpy()[rest], class_names=np.array(DIGITS)
    )
    public = [folder / f"{name}.mask" for name in "abc"]
    done("keys", "round", *public, "--out", folder / "spring.json", "--trust", folder / "trust.json")
    return folder


def trained(field: Path, name: str, out: Path, *more: object) -> Path:
    words = ("--method", "ridge", "--model", "mlp", "-q", "--key", field / f"{name}.key")
    done("train", "--data", field / f"{name}.npz", *words, "--out", out, *more)
    return out


def test_a_masked_round_by_command(field: Path, tmp_path: Path) -> None:
    trust = ("--trust", field / "trust.json")
    made = [trained(field, n, tmp_path / f"{n}.parcel", "--mask", field / "spring.json", *trust) for n in "abc"]
    said = done("fuse", *made, "--out", tmp_path / "masked", "--no-export", *trust, "--json").json
    assert (said["sites"], said["refused"], sorted(said["signers"])) == (3, [], ["a", "b", "c"])
    bare = [trained(field, n, tmp_path / f"{n}-plain.parcel") for n in "abc"]
    done("fuse", *bare, "--out", tmp_path / "plain", "--no-export")
    right = [
        done("evaluate", tmp_path / kind, "--data", field / "rest.npz", "--json").json["accuracy"]
        for kind in ("masked", "plain")
    ]
    assert right[0] == right[1] > 0.7
    assert "c of the round spring did not send" in one_line(call("fuse", *made[:2], "--out", tmp_path / "two"))
    files = []
    for name in "ab":
        files += ["--revealed", tmp_path / f"{name}.json"]
        words = ("--missing", "c", "--key", field / f"{name}.key", "--out", tmp_path / f"{name}.json")
        answer = done("keys", "reveal", field / "spring.json", *words)
        assert "nothing of its own sums" in answer.out
    done("fuse", *made[:2], *files, "--out", tmp_path / "two", "--no-export")
    region = tmp_path / "region.parcel"
    done("fuse", "--partial", region, *made[:2], *files)
    done("fuse", region, bare[2], "--out", tmp_path / "mixed", "--no-export")
    assert "a revealed its seed towards c" in one_line(call("fuse", *made, *files, "--out", tmp_path / "late"))
    mixed = one_line(call("fuse", made[0], bare[1], "--out", tmp_path / "odd"))
    assert "some parcels are masked and some are not" in mixed
    audited = call("audit", made[0], "--members", field / "a.npz", "--others", field / "rest.npz")
    assert (audited.code, "audit the fused model" in audited.err) == (2, True)
    assert "a.parcel is masked" in call("evaluate", made[0], "--data", field / "rest.npz").err
    assert "a masked one cannot" in one_line(call("fuse", "--remove", "a", tmp_path / "masked"))
    assert "a new round without it" in one_line(call("fuse", "--remove", made[0], tmp_path / "masked"))
    alone = done("evaluate", bare[0], "--data", field / "rest.npz", "--json").json["accuracy"]
    assert flyby.load_model(bare[0]).evaluate(flyby.load(field / "rest.npz", holdout=0).train).accuracy == alone > 0.7
    no_key = ("train", "--data", field / "a.npz", "--method", "ridge", "--out", tmp_path / "x.parcel")
    assert "--mask needs --key" in one_line(call(*no_key, "--mask", field / "spring.json"))
    assert "exists already" in one_line(call("keys", "round", field / "a.mask", "--out", field / "spring.json"))


def test_epsilon_stands_in_the_parcel_and_exact_counts_do_not(field: Path, tmp_path: Path) -> None:
    out = trained(field, "a", tmp_path / "a.parcel", "--dp-epsilon", 3, "--dp-delta", 1e-5)
    manifest = parcel.read_manifest(out)
    privacy = manifest.provenance["privacy"]
    assert isinstance(privacy, dict)
    assert [privacy[key] for key in ("epsilon", "delta", "total_epsilon", "counts_epsilon")] == [3.0, 1e-5, 3.0, 0.0]
    assert privacy["noise"] == pytest.approx(multiplier(3.0, 1e-5))
    assert (privacy["randomness"], privacy["accountant"]) == ("operating system", "analytic gaussian")
    assert manifest.counts_kind == "noisy"
    exact = np.bincount(LABELS.numpy()[np.arange(0, 900, 3)], minlength=10).tolist()
    assert list(manifest.counts or ()) != exact
    assert manifest.extras == tuple(f"{NAME}.{part}" for part in ("choice", "counts", "first", "moments", "noise"))
    words = ("train", "--data", field / "a.npz", "--method", "ridge", "--dp-epsilon", 3, "--out", tmp_path / "b.parcel")
    assert "exact class counts are not private" in one_line(call(*words, "--set", "counts=exact"))
    more = "objective.send=[feature-sums,class-means]"
    assert "only feature-sums can be private" in one_line(call(*words, "--set", more))
    both = (*words, "--mask", field / "spring.json", "--key", field / "a.key", "--trust", field / "trust.json")
    assert "the default delta would tell how many images" in one_line(call(*both))


# -- the audit


def test_the_audit_sees_members_in_plain_sums_and_not_in_noisy_ones() -> None:
    """Twenty images in 24 features: all of them lie where the sums are, and hardly any others do."""
    one, others = site("a", range(20)), site("b", range(300, 900)).train
    found = {}
    for epsilon in (None, 1.0):
        item = plain(one) if epsilon is None else noised(one, epsilon, norm=4.0)
        told = Told.by([item])
        model = FUSIONS["ridge"](FUSIONS["ridge"].settings_type(lam=1.0)).fuse(Inbox([plain(one)]))
        found[epsilon] = audit(model, one.train, others, resamples=50, told=told)
    assert found[None]["attacks"]["distance"]["auc"] > 0.95
    assert found[None]["bound"] is None
    assert found[1.0]["attacks"]["distance"]["auc"] < 0.7
    assert found[1.0]["bound"] == pytest.approx(0.5751, abs=2e-3), "Phi(1 / (3.73 sqrt 2))"


def test_the_audit_takes_parcels_and_models_of_sums(tmp_path: Path) -> None:
    path = tmp_path / "a.parcel"
    parcel.write(plain(site("a", range(200))), path)
    predictor, told = target(path)
    assert told is not None
    assert accuracy(predictor) > 0.4, "the head that the sums give, not the random one of the parcel"
    done("fuse", path, "--out", tmp_path / "model", "--no-export")
    predictor, told = target(tmp_path / "model")
    assert told is not None
    assert told.sums.images == 200
