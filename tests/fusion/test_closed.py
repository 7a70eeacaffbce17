"""Closed forms from sums of features: the same as one solve over all images, for every split and any tree of hubs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from factories import NAMES, small_spec
from flyby.data.site import Part, Site
from flyby.data.sources import load
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, Server
from flyby.fusion.closed.base import NEVER, ClosedForm, Contributions, Linear, without
from flyby.fusion.closed.kept import Kept, read_kept, region_of, write_kept
from flyby.fusion.closed.ridge import GRID, Centred, cross_validated, left_out, squared_error
from flyby.fusion.predictor import Predictor
from flyby.models import ModelSpec, Network
from flyby.parcels import parcel
from flyby.parcels.gate import Gate
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import Parcel
from flyby.rng import generator
from flyby.runs.server import rule_named
from flyby.statistics.catalogue import computed, examined
from flyby.statistics.feature_sums import Choice, Sums, random_rows, sums_of, widened
from flyby.training.loop import shared_counts
from flyby.training.recipe import check_counts
from flyby.training.settings import Counts

RULES = ("ridge", "lda", "nb", "fishermix")
SPEC = ModelSpec(name="cnn-small", classes=10, channels=1, size=(8, 8), width=0.5)
EXACT = "feature-sums:dtype=float64;least=1"
DIGITS = tuple("0123456789")


class Images:
    """Digits, seen once through a network with random weights: what a server with all images would have."""

    def __init__(self) -> None:
        data = load("digits").train
        self.images, self.labels = data.tensors()
        self.network = SPEC.build(generator("eyes")).eval()

    def site(self, name: str, rows: Sequence[int] | np.ndarray[Any, Any], classes: Sequence[str] = DIGITS) -> Site:
        part = Part(self.images[torch.as_tensor(rows)], self.labels[torch.as_tensor(rows)])
        none = Part(self.images[:0], self.labels[:0])
        return Site(name, part, none, none, tuple(classes))

    @torch.no_grad()
    def features(self) -> Tensor:
        return self.network.features(SPEC.prepare(self.images)).double()


@pytest.fixture(scope="module")
def digits() -> Images:
    return Images()


def parcel_of(network: Network, site: Site, send: str = EXACT, **more: Any) -> Parcel:
    return parcel.make(
        sender=site.id,
        method="ridge",
        spec=network.spec,
        class_names=site.class_names,
        samples=len(site.train),
        counts=shared_counts(site, "exact", 1.0, 0),
        weights=network.state_dict(),
        extras=computed(send, network, site, 0),
        **more,
    )


def split(labels: Tensor, count: int, how: str) -> list[np.ndarray[Any, Any]]:
    """Who holds which images: by class, one with nearly all, or drawn."""
    rng = np.random.RandomState(count)
    if how == "by class":
        return list(np.array_split(np.argsort(labels.numpy(), kind="stable"), count))
    order = rng.permutation(len(labels))
    if how == "uneven":
        return [order[: -3 * (count - 1) or None], *(order[len(order) - 3 * k :][:3] for k in range(1, count))]
    return list(np.array_split(order, count))


def shared(digits: Images, count: int, how: str, send: str = EXACT) -> Inbox:
    parts = split(digits.labels, count, how)
    return Inbox(parcel_of(digits.network, digits.site(f"s{k}", rows), send) for k, rows in enumerate(parts))


def solved(inbox: Inbox, rule: str, *settings: str, seed: int = 0) -> Linear:
    made = rule_named(rule, settings)
    assert isinstance(made, ClosedForm)
    return made.solve(Contributions(inbox, rule), Server(seed=seed))


def far(one: Linear, other: Linear) -> float:
    """The largest difference, in units of the largest number."""
    pairs = ((one.weight, other.weight), (one.bias, other.bias))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


# -- the same as with all images in one place


def dense_ridge(x: Tensor, labels: Tensor, lam: float) -> Linear:
    """Ridge with a constant that is not shrunk, as least squares over all images with rows for the penalty."""
    y = F.one_hot(labels, 10).double()
    unit = float((x - x.mean(0)).square().sum() / x.shape[1])
    penalty = (lam * unit) ** 0.5 * torch.eye(x.shape[1], dtype=torch.float64)
    rows = torch.cat((F.pad(x, (0, 1), value=1.0), F.pad(penalty, (0, 1))))
    whole = torch.linalg.lstsq(rows, torch.cat((y, torch.zeros(x.shape[1], 10, dtype=torch.float64)))).solution
    return Linear(whole[:-1].T, whole[-1])


def dense_lda(x: Tensor, labels: Tensor, diagonal: bool) -> Linear:
    counts = torch.bincount(labels, minlength=10).double()
    means = torch.stack([x[labels == c].mean(0) for c in range(10)])
    rest = x - means[labels]
    sigma = rest.T @ rest / (len(x) - 10)
    sigma = 0.95 * sigma + 0.05 * sigma.diagonal().mean() * torch.eye(len(sigma), dtype=torch.float64)
    sigma = torch.diag(sigma.diagonal()) if diagonal else sigma
    weight = torch.linalg.solve(sigma, means.T).T
    return Linear(weight, (counts / len(x)).log() - (means * weight).sum(1) / 2)


def told_apart(head: Linear, x: Tensor) -> Tensor:
    """What a head says, but for a number that is the same for all classes."""
    return (x @ head.weight.T + head.bias).log_softmax(1)


@pytest.mark.parametrize(
    ("count", "how"), [(1, "drawn"), (3, "by class"), (7, "drawn"), (10, "by class"), (5, "uneven")]
)
def test_ridge_and_lda_equal_the_solve_over_all_images_for_every_split(digits: Images, count: int, how: str) -> None:
    x, labels = digits.features(), digits.labels
    inbox = shared(digits, count, how)
    assert far(solved(inbox, "ridge", "lam=0.01"), dense_ridge(x, labels, 0.01)) < 1e-10
    for rule, diagonal in (("lda", False), ("nb", True)):
        ours, theirs = (told_apart(head, x) for head in (solved(inbox, rule), dense_lda(x, labels, diagonal)))
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-10, rule


def test_all_that_is_chosen_and_drawn_is_the_same_for_every_split(digits: Images) -> None:
    one = shared(digits, 1, "drawn")
    for inbox in (shared(digits, 4, "by class"), shared(digits, 9, "drawn")):
        assert far(solved(inbox, "ridge"), solved(one, "ridge")) < 1e-9, "lambda is chosen from the sums"
        assert far(solved(inbox, "fishermix"), solved(one, "fishermix")) < 1e-5, "a minimum found by steps"
        rounded = shared(digits, 4, "by class", "feature-sums:least=1")
        assert 0 < far(solved(rounded, "ridge", "lam=0.01"), solved(one, "ridge", "lam=0.01")) < 1e-4, "float32"


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_arrival_changes_no_byte_and_the_model_learns(digits: Images, rule: str) -> None:
    sources = shared(digits, 4, "by class", "feature-sums").sources
    made = [
        FUSIONS[rule]().fuse(Inbox(order)) for order in (sources, sources[::-1], [sources[i] for i in (2, 0, 3, 1)])
    ]
    first = {name: value.numpy().tobytes() for name, value in made[0].state_dict().items()}
    assert all({n: v.numpy().tobytes() for n, v in one.state_dict().items()} == first for one in made[1:])
    with torch.no_grad():
        assert float((made[0](digits.images).argmax(1) == digits.labels).double().mean()) > 0.8
    assert made[0].specs[0] == SPEC
    again = FUSIONS[rule]().fuse(Inbox(sources), Server(seed=1)).state_dict()["networks.0.head.weight"]
    assert bool((again != made[0].state_dict()["networks.0.head.weight"]).any()) is (rule == "fishermix")


# -- lambda


def test_cross_validation_is_that_of_the_hat_matrix(digits: Images) -> None:
    rows = np.arange(0, 300)
    total = sums_of(digits.network, digits.site("a", rows), Choice(least=1))
    x, y = digits.features()[:300], F.one_hot(digits.labels[:300], 10).double()
    one = Centred.of(total)
    scores = cross_validated(one)
    for place in (4, 8, 12):
        centred = x - x.mean(0)
        gram = centred.T @ centred + GRID[place] * one.unit * torch.eye(x.shape[1], dtype=torch.float64)
        hat = centred @ torch.linalg.solve(gram, centred.T) + 1 / 300
        rss = float((y - hat @ y).square().sum())
        assert scores[place] == pytest.approx(rss / 300 / (1 - float(hat.trace()) / 300) ** 2, rel=1e-6)


def test_fewer_images_than_features_choose_the_lambda_of_exact_sums(digits: Images) -> None:
    """All is explained there at a small lambda, and what rounding leaves of the difference is no sign that it is
    good."""
    rows = np.arange(0, 12)
    exact = sums_of(digits.network, digits.site("a", rows), Choice(least=1))
    assert exact.width > len(rows)
    rounded = dataclasses.replace(exact, first=exact.first.float().double(), second=exact.second.float().double())
    scores = [cross_validated(Centred.of(one)) for one in (exact, rounded)]
    assert scores[0].index(min(scores[0])) == scores[1].index(min(scores[1])) > 4


def test_even_is_ridge_on_features_of_spread_one_for_every_split(digits: Images) -> None:
    x = digits.features()
    spread = x.std(0, correction=0).clamp_min(1e-3 * float(x.var(0, correction=0).mean()) ** 0.5)
    wanted = dense_ridge(x / spread, digits.labels, 0.01)
    wanted = Linear(wanted.weight / spread, wanted.bias)
    for count, way in ((1, "drawn"), (4, "by class")):
        assert far(solved(shared(digits, count, way), "ridge", "lam=0.01", "even=true"), wanted) < 1e-8
    assert far(solved(shared(digits, 1, "drawn"), "ridge", "lam=0.01"), wanted) > 0.01


def test_leaving_out_sites_is_the_error_on_their_images(digits: Images) -> None:
    inbox, x, y = shared(digits, 3, "drawn"), digits.features(), F.one_hot(digits.labels, 10).double()
    parts = split(digits.labels, 3, "drawn")
    wanted = 0.0
    for k, rows in enumerate(parts):
        rest = np.concatenate([part for j, part in enumerate(parts) if j != k])
        head = dense_ridge(x[rest], digits.labels[rest], GRID[8])
        wanted += float((x[rows] @ head.weight.T + head.bias - y[rows]).square().sum())
    assert left_out(Contributions(inbox, "ridge"), even=False)[8] == pytest.approx(wanted, rel=1e-8)
    chosen = solved(inbox, "ridge", "choose=sites")
    assert far(chosen, solved(inbox, "ridge", "lam=100")) > 0.1
    with pytest.raises(BadInput, match=r"there is one; use --set fusion.choose=gcv"):
        solved(shared(digits, 1, "drawn"), "ridge", "choose=sites")
    perfect = Linear(torch.zeros(10, x.shape[1], dtype=torch.float64), torch.zeros(10, dtype=torch.float64))
    assert squared_error(perfect, Contributions(inbox, "ridge").total) == pytest.approx(len(x)), "one for each image"


def test_columns_are_divided_by_their_norm_where_asked_for(digits: Images) -> None:
    inbox = shared(digits, 2, "drawn")
    plain, unit = solved(inbox, "ridge", "lam=0.1"), solved(inbox, "ridge", "lam=0.1", "normalise=true")
    assert torch.allclose(unit.weight.norm(dim=1), torch.ones(10, dtype=torch.float64))
    assert torch.allclose(unit.bias * plain.weight.norm(dim=1), plain.bias)


# -- random features


def test_random_features_are_part_of_the_network(digits: Images) -> None:
    send = "feature-sums:random=60;draw=7"
    inbox = shared(digits, 3, "drawn", send)
    model = FUSIONS["ridge"]().fuse(inbox)
    head, x = solved(inbox, "ridge"), digits.features()
    d = x.shape[1]
    assert model.specs[0].projector == (60 + 2 * d, 10)
    z = torch.cat((x, (x @ random_rows(60, d, 7).double().T).relu()), dim=1)
    assert torch.equal(z, widened(x, Choice(60, 7)))
    with torch.no_grad():
        assert torch.allclose(model(digits.images).double(), z @ head.weight.T + head.bias, atol=1e-3)
    plain = FUSIONS["ridge"]().fuse(shared(digits, 3, "drawn", "feature-sums"))
    better, worse = (
        float(F.one_hot(digits.labels, 10).sub(one(digits.images)).square().sum().detach()) for one in (model, plain)
    )
    assert better < worse, "more features explain more"
    first = inbox.read(0)
    other = parcel_of(digits.network, digits.site("t", [0, 1, 10, 11]), "feature-sums:random=60;draw=8;least=1")
    with pytest.raises(BadInput, match="t and s0 have other random features"):
        FUSIONS["ridge"]().fuse(Inbox([first, other]))


# -- what is left out, and what is refused


def test_few_images_are_left_out_with_a_note(digits: Images, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*np.flatnonzero(digits.labels == 3)[:5], *np.flatnonzero(digits.labels == 4)[:1]]
    site = digits.site("a", rows)
    with caplog.at_level(logging.WARNING, "flyby"):
        item = parcel_of(digits.network, site, "feature-sums")
    assert "a leaves out classes with fewer than 2 images: 4" in caplog.text
    assert item.extras["feature-sums.counts"].tolist() == [0, 0, 0, 5, 0, 0, 0, 0, 0, 0]
    assert examined(item, None, "cpu", used={"feature-sums"})
    alone = sums_of(digits.network, digits.site("a", rows[:5]), Choice())
    assert torch.equal(alone.second, sums_of(digits.network, site, Choice()).second), "of the one image nothing is told"
    with pytest.raises(BadInput, match="no class of a has 7 images"):
        computed("feature-sums:least=7", digits.network, site, 0)


@pytest.mark.parametrize("rule", RULES)
def test_a_class_without_images_is_never_an_answer(digits: Images, rule: str) -> None:
    rows = np.flatnonzero(digits.labels < 3)
    model = FUSIONS[rule]().fuse(Inbox([parcel_of(digits.network, digits.site("a", rows))]))
    with torch.no_grad():
        answers = model(digits.images)
    assert int(answers.argmax(1).max()) == 2
    assert torch.allclose(answers[:, 3:], answers[:, :3].mean(1, keepdim=True) + NEVER, atol=1e-2)


def test_however_low_the_scores_are_a_class_without_images_is_lower() -> None:
    """Of few images and many features LDA says -5,000 of whatever is like none of them."""
    head = Linear(torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 4.0]]), torch.tensor([-5000.0, 0.0, -7000.0]))
    made = without(head, torch.tensor([3, 0, 5]))
    assert made.weight.tolist() == [[2, 0], [1, 2], [0, 4]]
    assert made.bias.tolist() == [-5000, NEVER - 6000, -7000]


def test_features_that_are_not_finite_name_the_image(digits: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    site, honest = digits.site("a", range(600)), Network.features

    def spoilt(self: Network, x: Tensor) -> Tensor:
        features = honest(self, x)
        return features.clone().index_fill_(0, torch.tensor([17]), torch.nan) if len(x) == 88 else features

    monkeypatch.setattr(Network, "features", spoilt)
    with pytest.raises(BadInput, match="the features of image 529 of a are not finite"):
        computed("feature-sums", digits.network, site, 0)


@pytest.mark.parametrize("wrong", ["dtype=half", "random=-1", "random=1e3", "least=0", "random=99999999", "draw=x"])
def test_options_that_cannot_be_are_refused(digits: Images, wrong: str) -> None:
    with pytest.raises(BadInput, match=f"feature-sums:{wrong.partition('=')[0]}"):
        computed(f"feature-sums:{wrong}", digits.network, digits.site("a", range(9)), 0)


def test_other_eyes_are_refused(digits: Images) -> None:
    a = parcel_of(digits.network, digits.site("a", range(40)))
    b = parcel_of(SPEC.build(generator("other")).eval(), digits.site("b", range(40, 80)))
    with pytest.raises(BadInput, match="those of b and a come from different weights"):
        FUSIONS["ridge"]().fuse(Inbox([a, b]))
    head = {name: value + 1 if name.startswith("head.") else value for name, value in a.weights.items()}
    other_head = parcel.make(weights=head, extras=a.extras, **(a.manifest.facts | {"sender": "c"}))
    with pytest.raises(BadInput, match=r"a site with the sums .* counts in a and again in c"):
        FUSIONS["ridge"]().fuse(Inbox([a, other_head]))


def forged(item: Parcel, **extras: Tensor) -> Parcel:
    named = {f"feature-sums.{name}": value for name, value in extras.items()}
    return parcel.make(weights=item.weights, extras=item.extras | named, **item.manifest.facts)


def test_sums_that_cannot_be_are_refused_and_rounding_is_not(digits: Images) -> None:
    item = parcel_of(digits.network, digits.site("a", range(100)), "feature-sums")
    extras = {name.partition(".")[2]: value for name, value in item.extras.items()}

    def refusal(**changed: Tensor) -> str:
        with pytest.raises(BadInput) as caught:
            examined(forged(item, **changed), None, "cpu", used={"feature-sums"})
        return str(caught.value)

    counts = extras["counts"].clone()
    counts[0], counts[1] = counts[0] + 1, counts[1] - 1
    assert "counts are not the parcel's own" in refusal(counts=counts)
    assert "smaller than those of their means" in refusal(moments=0.5 * extras["moments"])
    sums = Sums.unpacked(item.extras)
    shaken = sums.second.clone()
    shaken[0, 1] = shaken[1, 0] = float((shaken[0, 0] * shaken[1, 1]).sqrt()) * 1.2
    moments = dataclasses.replace(sums, second=shaken).packed(Choice(), torch.float32)["moments"]
    assert "those of no images with these means" in refusal(moments=moments)
    assert "means is F32 [10" in refusal(means=extras["means"][:, :-1])
    few = parcel_of(digits.network, digits.site("b", np.flatnonzero(digits.labels == 0)[:3]), "feature-sums")
    assert examined(few, None, "cpu", used={"feature-sums"}), "three images in many dimensions: singular, and sound"
    lying = extras["means"].roll(1, 0)
    part = digits.site("v", range(200)).train
    assert examined(item, part, "cpu", used={"feature-sums"})
    liar = forged(item, means=lying, moments=extras["moments"] + 10 * moments_of_identity(sums.width))
    with pytest.raises(BadInput, match="no more than chance"):
        examined(liar, part, "cpu", used={"feature-sums"})


def moments_of_identity(width: int) -> Tensor:
    rows, columns = torch.triu_indices(width, width)
    return (rows == columns).float()


def test_a_gate_knows_copies_by_their_sums_and_not_by_frozen_weights(digits: Images) -> None:
    a, b = (parcel_of(digits.network, digits.site(n, rows)) for n, rows in (("a", range(40)), ("b", range(40, 80))))
    copy = parcel.make(weights=a.weights, extras=a.extras, **(a.manifest.facts | {"sender": "c"}))
    gate = Gate()
    for item in (a, b, copy):
        gate.check(item)
    let_in = gate.settle(rule="ridge", needs=FUSIONS["ridge"].needs)
    assert [one.manifest.sender for one in let_in] == ["a", "b"]
    assert "every number of c is that of a" in gate.refused[0].reason
    later = Gate(standing=gate.ledger)
    with pytest.raises(BadInput, match="the model that a sent to an earlier fusion"):
        later.check(copy)


def test_singular_sums_say_what_to_do(digits: Images) -> None:
    same = digits.site("a", [0] * 6 + [1] * 6)
    inbox = Inbox([parcel_of(digits.network, same)])
    with pytest.raises(BadInput, match="do not differ from image to image"):
        solved(inbox, "lda")
    with pytest.raises(BadInput, match="do not differ from image to image"):
        solved(Inbox([parcel_of(digits.network, digits.site("a", [0] * 6))]), "ridge")


# -- trees of hubs, later and taken out again


def test_a_tree_of_hubs_gives_what_one_server_gives(digits: Images) -> None:
    leaves = list(shared(digits, 9, "by class"))
    flat = Inbox(leaves)
    hubs = [region_of(Inbox(leaves[3 * k : 3 * k + 3]), f"hub-{k}", "ridge", names=k != 1) for k in range(3)]
    assert [hub.manifest.sites for hub in hubs] == [3, 3, 3]
    assert "site_names" not in hubs[1].manifest.meta
    top = region_of(Inbox(hubs[:2]), "north", "ridge")
    assert top.manifest.sites == 6
    assert top.manifest.meta["site_names"] == ["s0", "s1", "s2"]
    for tree in ([top, hubs[2]], [*hubs[:2], *leaves[6:]], [top, *leaves[6:]]):
        inbox = Inbox(tree)
        assert inbox.counts.sum(0).tolist() == flat.counts.sum(0).tolist()
        assert all(examined(one, None, "cpu", used={"feature-sums"}) for one in inbox)
        for rule in ("ridge", "lda"):
            assert far(solved(inbox, rule), solved(flat, rule)) < 1e-10
    again = region_of(Inbox(leaves[2::-1]), "hub-0", "ridge")
    assert parcel.to_bytes(again) == parcel.to_bytes(hubs[0]), "the order of arrival changes no byte"
    for twice in ([top, leaves[0]], [top, hubs[0]], [hubs[1], leaves[4]]):
        with pytest.raises(BadInput, match=r"counts in .* and again in"):
            Contributions(Inbox(twice), "ridge")
    lying = parcel.make(
        weights=top.weights, extras=top.extras, **(top.manifest.facts | {"meta": {**top.manifest.meta, "sites": 2}})
    )
    with pytest.raises(BadInput, match="speaks for 2 sites and tells of 6"):
        Contributions(Inbox([lying]), "ridge")


def kept_of(folder: Path, items: Sequence[Parcel], network: Network, *settings: str) -> Kept:
    rule = rule_named("ridge", settings)
    assert isinstance(rule, ClosedForm)
    write_kept(folder, Inbox(items), rule)
    return read_kept(folder, network)


@pytest.mark.parametrize("keep", ["sites", "total"])
def test_what_is_added_or_taken_out_equals_the_fit_from_scratch(digits: Images, keep: str, tmp_path: Path) -> None:
    items = list(shared(digits, 5, "by class"))
    files = [tmp_path / f"{item.manifest.sender}.parcel" for item in items]
    for item, path in zip(items, files, strict=True):
        parcel.write(item, path)
    kept = kept_of(tmp_path, items[:4], digits.network, f"keep={keep}")
    assert kept.senders == (["s0", "s1", "s2", "s3"] if keep == "sites" else ["total"])
    for rule in ("ridge", "lda"):
        more = Inbox([*kept.items, items[4]])
        assert far(solved(more, rule), solved(Inbox(items), rule)) < 1e-10
        less = Inbox(kept.without(str(files[1])).items)
        assert far(solved(less, rule), solved(Inbox([items[0], *items[2:4]]), rule)) < 1e-10
    if keep == "sites":
        assert kept.without("s1").senders == ["s0", "s2", "s3"]
    else:
        with pytest.raises(BadInput, match=r"s1 is in the sum total, .* --remove s1.parcel"):
            kept.without("s1")
        once = kept.without(str(files[1]))
        assert once.items[0].manifest.sites == 3
        assert examined(once.items[0], None, "cpu", used={"feature-sums"})
        with pytest.raises(BadInput, match="s1 is not in this model"):
            once.without(str(files[1]))
    with pytest.raises(BadInput, match="s4 is not in this model"):
        kept.without(str(files[4]))


def test_kept_sums_that_were_damaged_are_not_used(digits: Images, tmp_path: Path) -> None:
    items = list(shared(digits, 2, "drawn"))
    kept_of(tmp_path, items, digits.network)
    whole = (tmp_path / "sums.safetensors").read_bytes()
    for change in (whole[:-8], whole[:-8] + b"\0" * 8, whole[:200], b""):
        (tmp_path / "sums.safetensors").write_bytes(change)
        with pytest.raises(BadInput, match=r"sums.safetensors is damaged .*; fuse the parcels again"):
            read_kept(tmp_path, digits.network)
    (tmp_path / "sums.safetensors").unlink()
    with pytest.raises(BadInput, match="keeps no sums"):
        read_kept(tmp_path, digits.network)


def test_the_pieces_fit_other_heads(digits: Images) -> None:
    """A prototype head's network gives sums as well; what is fused of them has a linear head."""
    spec = small_spec(head="prototype", logit_scale=True)
    network = spec.build(generator("eyes")).eval()
    images = torch.randint(0, 256, (30, 8, 8, 1), generator=generator("images"), dtype=torch.uint8)
    part = Part(images, torch.arange(30) % 3)
    none = Part(images[:0], part.labels[:0])
    model: Predictor = FUSIONS["ridge"]().fuse(Inbox([parcel_of(network, Site("a", part, none, none, NAMES))]))
    assert model.specs[0].head == "linear"
    assert model(images).shape == (30, 3)


@pytest.mark.parametrize("counts", ["noisy", "binary"])
def test_sums_tell_exact_counts_so_a_site_that_blurs_them_cannot_send_them(counts: Counts) -> None:
    check_counts(["feature-sums:least=1"], "exact")
    check_counts(["class-means", "kfac:samples=9"], counts)
    with pytest.raises(BadInput, match=f"feature-sums tells exact class counts, and counts = {counts} was asked for"):
        check_counts(["class-means", "feature-sums:least=1"], counts)
