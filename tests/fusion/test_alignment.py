"""Sites that hold different classes: every rule over the union of their names, against hand-computed numbers, against
the same parcels in one order, and against sites that knew the whole list beforehand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flyby
from flyby.data.arrays import bundle_from
from flyby.data.classes import places
from flyby.data.dataset import Dataset
from flyby.data.site import Site, whole_site
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, load_predictor, save_predictor
from flyby.fusion.alignment import Aligned, aligned, holdings, onto, remarks, rows_of, table
from flyby.fusion.base import Server
from flyby.fusion.closed.kept import region_of, taken_out
from flyby.fusion.distilled.teachers import teacher_of
from flyby.fusion.robust import middle, middle_of_those
from flyby.meeting.admit import for_classes
from flyby.models import ModelSpec
from flyby.models.heads import HEADS, NEVER
from flyby.models.shifts import WAYS
from flyby.parcels import parcel
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import Parcel
from flyby.rng import generator
from flyby.statistics.catalogue import EXTRAS
from flyby.statistics.extras import sent
from flyby.statistics.kfac import reordered, unpack

ALL = ("ant", "bee", "cat", "dog")
SPEC = ModelSpec(name="mlp", classes=2, channels=1, size=(8, 8), widths={"fc1": 6, "fc2": 4})
SENT = ("kfac", "null-space", "class-means", "moments", "foreign", "feature-sums")
CLOSED = ("ridge", "lda", "nb", "fishermix")


def site(name: str, own: Sequence[str], seed: int = 0, each: int = 12) -> Site:
    """Noise with a bright band whose height says the class."""
    rng, images, labels = np.random.default_rng(seed), [], []
    for label, one in enumerate(own):
        pixels = rng.integers(0, 60, (each + label, 8, 8, 1))
        pixels[:, 2 * ALL.index(one) : 2 * ALL.index(one) + 2] += 180
        images.append(pixels.astype(np.uint8))
        labels += [label] * (each + label)
    data = bundle_from(np.concatenate(images), np.array(labels), class_names=own, holdout=0.0)
    return dataclasses.replace(whole_site(data, name), real=False)


SITES = {"a": ("cat", "dog", "ant"), "b": ("dog", "bee")}
TEST = Dataset(*(t.numpy() for t in (lambda s: (s.images, s.labels))(site("t", ALL, 9).train)), ALL, "t")


def trained(
    method: str, lists: dict[str, Sequence[str]], classes: Sequence[str] | None = None, **more: Any
) -> list[Parcel]:
    words: dict[str, Any] = {"model": "mlp", "epochs": 2, **more}
    found = [site(name, own, seed) for seed, (name, own) in enumerate(lists.items())]
    return [flyby.train(one, method, classes=classes, device="cpu", **words) for one in found]


@pytest.fixture(scope="module")
def uploads() -> dict[str, list[Parcel]]:
    """Parcels of sites that all hold all classes, for every rule."""
    whole = {"a": ALL, "b": ALL}
    plain = trained("fedavg", whole, settings={"objective.send": list(SENT)})
    return {"plain": plain, "sums": trained("ridge", whole), "cvae": trained("fedcvae", whole, epochs=1)}


def settings_of(rule: str) -> dict[str, Any]:
    known, few = FUSIONS[rule].settings_type.model_fields, {"epochs": 1, "images": 8, "distil_epochs": 1, "batch": 8}
    few |= {"steps": 1} if "steps" in known else {}
    return {name: value for name, value in few.items() if name in known}


def fused(rule: str, parcels: Sequence[Parcel], **settings: Any) -> Any:
    kind = FUSIONS[rule]
    made = kind(kind.settings_type(**{**settings_of(rule), **settings}))
    return made.fuse(Inbox(parcels), Server(TEST if not made.data_free else None, 0, "cpu"))


def kind_of(rule: str) -> str:
    return "sums" if rule in CLOSED else "cvae" if "cvae" in rule else "plain"


def permuted(item: Parcel, order: list[int]) -> Parcel:
    """The same upload as a site would send it that numbers its classes otherwise, each tensor moved by hand."""
    m, weights, extras, rank = item.manifest, dict(item.weights), dict(item.extras), [order.index(c) for c in range(4)]
    for name in ("head.weight", "head.bias"):
        weights[name] = weights[name][order]
    for name in list(extras):
        if name == "calibration":
            extras[name] = extras[name][:, order]
        elif name.startswith("foreign."):
            extras[name] = extras[name][order]
        elif name == "class-means.means":
            extras[name] = extras[name][[extras["class-means.classes"].tolist().index(c) for c in order]]
        elif name in ("feature-sums.counts", "feature-sums.means"):
            extras[name] = extras[name][order]  # all classes are held
        elif name == "decoder.hidden.weight":
            latent = extras[name].shape[1] - 4
            extras[name] = extras[name][:, [*range(latent), *(latent + c for c in order)]]
        elif name == "kfac.head.B.triangle":
            rows, columns = torch.triu_indices(4, 4).tolist()
            at = {(i, j): k for k, (i, j) in enumerate(zip(rows, columns, strict=True))}
            old = [at[min(order[i], order[j]), max(order[i], order[j])] for i, j in zip(rows, columns, strict=True)]
            extras[name] = extras[name][:, old]
    assert rank
    assert m.counts is not None
    facts = {**m.facts, "class_names": [ALL[c] for c in order], "counts": [m.counts[c] for c in order]}
    return parcel.make(weights=weights, extras=extras, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", sorted(FUSIONS))
def test_another_order_of_the_same_classes_changes_no_answer(rule: str, uploads: dict[str, list[Parcel]]) -> None:
    first, second = uploads[kind_of(rule)]
    images = torch.from_numpy(TEST.images[::5])
    one = fused(rule, [first, second])
    other = fused(rule, [permuted(first, [2, 0, 3, 1]), permuted(second, [3, 1, 0, 2])])
    assert other.class_names == one.class_names == ALL
    assert torch.equal(other(images), one(images))


@pytest.mark.parametrize("rule", CLOSED)
def test_closed_forms_over_the_union_are_those_of_sites_that_knew_the_list(rule: str) -> None:
    apart = fused(rule, trained("ridge", SITES))
    listed = fused(rule, trained("ridge", SITES, ALL))
    assert apart.class_names == listed.class_names == ALL
    for name, value in listed.state_dict().items():
        assert float((apart.state_dict()[name].double() - value.double()).abs().max()) < 1e-10, name
    assert flyby.api.Model(apart, device="cpu").evaluate(TEST).accuracy > 0.9


def test_sums_can_be_added_and_taken_out_over_other_classes() -> None:
    a, b = trained("ridge", SITES)
    both = region_of(Inbox([a, b]), "north", "ridge")
    assert both.manifest.class_names == ALL
    assert both.manifest.counts == (14, 13, 12, 25)
    left = taken_out(both, b)
    assert left.manifest.counts == (14, 0, 12, 13)
    again, alone = (sent(onto(one, ALL, ["feature-sums"]), EXTRAS["feature-sums"]) for one in (left, a))
    assert torch.allclose(again["feature-sums.means"], alone["feature-sums.means"].double(), atol=1e-6)


# -- heads, by hand


def made(
    sender: str,
    names: Sequence[str],
    samples: int,
    rows: Sequence[Sequence[float]],
    bias: Sequence[float] = (),
    **how: Any,
) -> Parcel:
    """A network whose features are all zero but for what its bias says, with these rows in its head."""
    spec = SPEC.replace(classes=len(names), **how)
    weights = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.shapes().items()}
    name = "head.weight" if spec.head == "linear" else "head.prototypes"
    weights[name] = torch.tensor(rows, dtype=torch.float32)
    if bias:
        weights["head.bias"] = torch.tensor(bias)
    counts = [samples] + [0] * (len(names) - 1)
    facts = {"method": "fedavg", "class_names": names, "samples": samples, "counts": counts}
    return parcel.make(sender=sender, spec=spec, weights=weights, **facts)


def row(value: float) -> list[float]:
    return [value] * 4


A = made("a", ("cat", "dog"), 30, [row(1), row(2)], [0.1, 0.2])
B = made("b", ("fox", "dog"), 10, [row(5), row(6)], [0.5, 0.6])
IMAGES = torch.zeros(3, 8, 8, 1, dtype=torch.uint8)


def test_a_row_is_the_mean_of_those_who_know_its_class() -> None:
    network = fused("fedavg", [A, B]).networks[0]
    assert network.head.weight[:, 0].tolist() == pytest.approx([1.0, 0.75 * 2 + 0.25 * 6, 5.0])
    assert network.head.bias.tolist() == pytest.approx([0.1, 0.75 * 0.2 + 0.25 * 0.6, 0.5])
    even = fused("fedavg", [A, B], weights="uniform").networks[0]
    assert even.head.weight[:, 0].tolist() == pytest.approx([1.0, 4.0, 5.0])
    assert fused("median", [A, B]).networks[0].head.weight[:, 0].tolist() == pytest.approx([1.0, 4.0, 5.0])
    liar = made("c", ("cat", "dog"), 10, [row(900), row(2)], [0.1, 0.2])
    honest = made("d", ("cat", "dog"), 10, [row(2), row(2)], [0.1, 0.2])
    assert fused("median", [A, B, liar, honest]).networks[0].head.weight[0, 0] == 2.0


def test_an_ensemble_hears_of_a_class_only_those_who_know_it() -> None:
    """Features are zero, so logits are the biases: cat .1, dog .2 and fox .5, dog .6."""
    mine, other = (torch.tensor(logits).softmax(0).tolist() for logits in ([0.1, 0.2], [0.5, 0.6]))
    said = fused("ensemble", [A, B])(IMAGES)[0].exp()
    assert said.tolist() == pytest.approx([mine[0] / 2, (mine[1] + other[1]) / 2, other[0] / 2])
    assert fused("ensemble", [A, B], mean="logits")(IMAGES)[0].tolist() == pytest.approx([0.1, 0.4, 0.5])
    assert fused("ensemble-median", [A, B])(IMAGES)[0].exp().tolist() == pytest.approx(
        [mine[0], (mine[1] + other[1]) / 2, other[0]]
    )


@pytest.mark.parametrize("rule", ["ensemble", "ensemble-median", "intactofl", "experts"])
def test_a_model_of_partial_networks_survives_its_folder(rule: str, tmp_path: Any) -> None:
    model = fused(rule, [A, B], **({"mean": "logits"} if rule.startswith("ensemble") else {}))
    assert [spec.partial for spec in model.specs] == [True, True]
    before = model(IMAGES)
    save_predictor(model, tmp_path / "model", export=rule == "ensemble")
    assert torch.equal(load_predictor(tmp_path / "model")(IMAGES), before)
    if rule == "ensemble":
        program = torch.export.load(tmp_path / "model" / "model.pt2").module()
        assert torch.allclose(program(IMAGES), before, atol=1e-6)


def test_prototypes_and_shifted_prototypes_are_fused_over_those_who_know_the_class() -> None:
    one = made("a", ("cat", "dog"), 30, [row(1), row(2)], head="prototype")
    two = made("b", ("dog", "fox"), 10, [row(6), row(5)], head="prototype")
    assert fused("iffi", [one, two]).prototypes[:, 0].tolist() == [1.0, 4.0, 5.0]
    turning = made("c", ("fox", "dog"), 5, [row(10 * way + c) for way in range(WAYS) for c in range(2)], head="turns")
    inbox = aligned(Inbox([one, turning]), ["weights"], shares=[0.5, 0.5])
    rows = rows_of(inbox.read(1))["head.prototypes"][:, :, 0]
    assert rows.tolist() == [[1, 1, 0], [1, 11, 10], [1, 21, 20], [1, 31, 30]]  # cat as the other site has it
    assert rows_of(inbox.read(0))["head.prototypes"][0, :, 0].tolist() == [1, 2, 0]


def test_a_rule_inside_another_has_the_parcels_as_it_wants_them() -> None:
    """A rule that distils keeps networks whole; one that it starts from, or learns from, may fill missing rows."""
    items = [A, B, made("c", ("cat", "fox"), 10, [row(3), row(7)], [0.1, 0.2])]
    whole = aligned(Inbox(items), ["weights", "class_counts"], whole=True)
    for rule in ("fedavg", "iffi", "ensemble"):
        inside, alone = FUSIONS[rule]().fuse(whole).state_dict(), FUSIONS[rule]().fuse(Inbox(items)).state_dict()
        assert inside.keys() == alone.keys(), rule
        assert all(torch.equal(inside[name], value) for name, value in alone.items()), rule
    student = fused("feddf", items).networks[0]
    assert not student.spec.partial, "who lacks a class took it away from the average"
    assert torch.allclose(student.head.bias, fused("fedavg", items).networks[0].head.bias, atol=0.02)
    taught = teacher_of("probabilities", Inbox(items), Server())
    assert torch.equal(taught(IMAGES), FUSIONS["ensemble"]().fuse(Inbox(items))(IMAGES))


def test_the_middle_of_those_who_know_a_class() -> None:
    said, held = torch.rand(5, 3, 2, generator=generator(0, "said")), torch.ones(5, 2, dtype=torch.bool)
    held[1:3, 1] = False
    for trim in (0.0, 0.2, 0.34, 0.5):
        found = middle_of_those(said, trim, held)
        assert torch.allclose(found[:, 0], middle(said[:, :, 0], trim))
        assert torch.allclose(found[:, 1], middle(said[[0, 3, 4], :, 1], trim))


def test_a_network_kept_whole_says_never_and_its_counts_are_zero() -> None:
    inbox = aligned(Inbox([A, B]), ["weights"], whole=True)
    assert isinstance(inbox, Aligned)
    assert inbox.held.tolist() == [[True, True, False], [False, True, True]]
    assert inbox.counts.tolist() == [[30, 0, 0], [0, 0, 10]]
    logits = inbox.read(1).network()(torch.zeros(1, 1, 8, 8))[0]
    assert logits.tolist() == pytest.approx([NEVER, 0.6, 0.5])
    assert aligned(inbox, ["weights"], whole=True) is inbox
    assert aligned(Inbox([A]), whole=True).manifests[0] is A.manifest


def test_experts_speak_for_the_classes_they_name() -> None:
    votes = fused("experts", [A, B]).votes
    assert votes.tolist() == [[1, 0, 0], [0, 0, 1]]


# -- what travels beside weights


def test_every_extra_says_where_its_classes_are(uploads: dict[str, list[Parcel]]) -> None:
    """Whatever grows by one more class must be put into another order by the declaration of its kind."""
    seen = set()
    for item in (uploads["plain"][0], uploads["cvae"][0]):
        more = dataclasses.replace(
            item, manifest=item.manifest.model_copy(update={"spec": item.manifest.spec.replace(classes=5)})
        )
        for kind in EXTRAS.values():
            own = {n: t for n, t in item.extras.items() if n == kind.name or n.startswith(f"{kind.name}.")}
            if not own:
                continue
            seen.add(kind.name)
            small, large = (kind.entries(one.manifest, own) for one in (item, more))
            moved = kind.onto(item.manifest, own, [3, 2, -1, 1, 0])
            for name, entry in small.items():
                wanted = large[name].shape if name in large and entry.shape != large[name].shape else entry.shape
                assert tuple(moved[name].shape) == wanted, f"{name} has classes and no axis"
    assert seen == set(EXTRAS) - {"masked-sums"}


def test_statistics_of_unknown_classes_are_zero(uploads: dict[str, list[Parcel]]) -> None:
    item = uploads["plain"][0]
    names = ("dog", "emu", "ant", "bee", "cat")
    moved = onto(item, names, [*SENT, "calibration"])
    source = [3, -1, 0, 1, 2]
    assert moved.manifest.counts == tuple(0 if c < 0 else (item.manifest.counts or ())[c] for c in source)
    for place, c in enumerate(source):
        wanted = torch.zeros(3) if c < 0 else item.extras["calibration"][:, c]
        assert torch.equal(moved.extras["calibration"][:, place], wanted)
    assert moved.extras["class-means.classes"].tolist() == [0, 2, 3, 4]
    assert torch.equal(moved.extras["class-means.means"], item.extras["class-means.means"][[3, 0, 1, 2]])
    assert torch.equal(moved.extras["feature-sums.means"], item.extras["feature-sums.means"][[3, 0, 1, 2]])
    for kind in (*SENT, "calibration"):
        sent(moved, EXTRAS[kind])  # what the declaration says holds


def test_triangles_are_put_into_another_order_as_matrices_are() -> None:
    packed = torch.arange(1.0, 7.0)[None]  # [[1 2 3], [2 4 5], [3 5 6]]
    found = unpack({"triangle": reordered(packed, 3, [2, -1, 0])}, 3, torch.float32)[0]
    assert found.tolist() == [[6, 0, 3], [0, 0, 0], [3, 0, 1]]


@pytest.mark.parametrize("head", sorted(HEADS))
def test_every_head_says_which_rows_are_classes(head: str) -> None:
    spec = SPEC.replace(channels=3)
    small, large = (spec.replace(classes=n, head=head).shapes() for n in (3, 4))
    grown = {name for name, (shape, _) in small.items() if shape != large[name][0]}
    assert grown == {f"head.{name}" for name in HEADS[head].rows}
    network = spec.replace(classes=3, head=head, partial=True).build(generator(0, "x")).eval()
    network.head.absent[1] = True
    assert network(torch.rand(2, 3, 8, 8))[:, 1].tolist() == [NEVER, NEVER]


# -- what cannot be done is said


def test_what_cannot_be_put_together_names_the_list() -> None:
    etf = trained("fedetf", {"a": ("ant", "bee"), "b": ("bee", "cat", "dog")}, epochs=1)
    with pytest.raises(BadInput, match=r"the anchor of bee at b is not that at a.*--classes LIST"):
        fused("fedavg", etf)
    assert fused("ensemble", etf).class_names == ALL
    one = made("c", ("owl",), 5, [row(1)], [0.0])
    with pytest.raises(BadInput, match=r"c knows one class only.*--classes LIST"):
        fused("ensemble", [A, one])
    assert fused("experts", [A, one]).class_names == ("cat", "dog", "owl")
    with pytest.raises(BadInput, match="nothing to tell apart"):
        fused("experts", [made("d", ("owl",), 5, [row(1)], [0.0]), one])
    with pytest.raises(BadInput, match=r"needs networks for the same classes.*--classes LIST"):
        Inbox([A, made("c", ("cat", "dog", "fox"), 5, [row(1)] * 3, [0.0] * 3)]).same_spec("fedavg")
    with pytest.raises(BadInput, match=r"masks cancel only in one order.*--classes LIST"):
        EXTRAS["masked-sums"].onto(A.manifest, {}, [0])


def test_who_holds_what_is_a_table() -> None:
    held = holdings([A.manifest, B.manifest])
    assert held == {"cat": {"a": 30}, "dog": {"a": 0, "b": 0}, "fox": {"b": 10}}
    assert table(held) == ["  class   a   b", "  cat    30   -", "  dog     0   0", "  fox     -  10"]
    many = {"cat": {f"site-{i}": 2 for i in range(12)}, "dog": {"site-3": None}}
    assert table(many)[1:] == ["  cat        24           12", "  dog         ?            1"]
    alike = made("c", ("Cat", "dog"), 5, [row(1), row(2)], [0.0, 0.0])
    assert remarks([A.manifest, B.manifest]) == []
    assert "Cat and cat look like the same class" in remarks([A.manifest, alike.manifest])[0]


# -- one class, and nodes that meet


def test_a_site_of_one_class_trains_where_that_makes_sense() -> None:
    only = {"a": ("ant", "bee"), "b": ("dog",)}
    for rule in ("ridge", "lda"):
        assert (
            flyby.api.Model(fused(rule, trained("ridge", only)), device="cpu")
            .evaluate(TEST, skip_unknown=True)
            .per_class["dog"]
            == 1.0
        )
    with pytest.raises(BadInput, match=r"b has one class, dog.*--classes LIST"):
        trained("fedavg", only)
    assert trained("fedavg", only, ALL)[1].manifest.counts == (0, 0, 0, 12)
    turned = trained("bearings", only, settings={"objective.test": False})
    assert [p.manifest.spec.classes for p in turned] == [2, 1]
    assert fused("experts-calibrated", turned).class_names == ("ant", "bee", "dog")
    with pytest.raises(BadInput, match="nothing to learn"):
        trained("bearings", {"b": ("dog",)}, settings={"objective.shift": "none"})


def test_a_neighbour_is_read_over_the_nodes_classes() -> None:
    found = for_classes(B, ("dog", "cat", "fox"))
    assert found.weights["head.weight"][:, 0].tolist() == [6, 0, 5]
    assert not found.manifest.spec.partial  # what it does not know it can still learn
    assert for_classes(B, ("dog",)).manifest.counts == (0,)
    with pytest.raises(BadInput, match="knows none of this node's classes, but fox, dog"):
        for_classes(B, ("owl", "emu"))


def test_places_of_head_rows_follow_names(uploads: dict[str, list[Parcel]]) -> None:
    item = uploads["plain"][0]
    back = onto(onto(item, tuple(reversed(ALL))), ALL)
    assert torch.equal(back.weights["head.weight"], item.weights["head.weight"])
    assert places(["b", "x"], ["a", "b"]) == [1, -1]
    assert isinstance(back.weights["head.bias"], Tensor)
