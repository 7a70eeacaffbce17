"""The rules for the most accurate uploads: standardised features and the one calibrated form, against plain loops; the
statistics they read; clients of one class and of a hundred, and parcels of both kinds, with a shift and without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flyby.data.dataset import Dataset
from flyby.data.site import Part, Site
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, Inbox, evaluation, load_predictor, save_predictor
from flyby.fusion.base import Server
from flyby.fusion.distilled.batchnorm import with_distance
from flyby.fusion.distilled.synthesis import as_unit
from flyby.fusion.distilled.teachers import Teachers, teaching_of
from flyby.fusion.ensembles.best import LOUDEST, Best, BestSettings, calibration_of
from flyby.fusion.ensembles.standardised import FLOOR, Standardised, StandardisedSettings, standardised
from flyby.fusion.evaluation import scores_of, sizes
from flyby.fusion.predictor import Predictor
from flyby.models import ModelSpec, Network
from flyby.models.shifts import WAYS, shifted
from flyby.objectives import OBJECTIVES
from flyby.parcels import parcel
from flyby.parcels.parcel import Manifest, Parcel
from flyby.rng import generator
from flyby.runs.methods import METHODS, check_pair
from flyby.runs.quality import tempered
from flyby.statistics.calibration import calibrate
from flyby.statistics.catalogue import computed
from flyby.statistics.foreign import foreign, leave_one_out
from flyby.statistics.moments import moments, moments_of

SPEC = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8), widths={"conv1": 4, "conv2": 5, "conv3": 6})
SITES_DEFAULTS = OBJECTIVES["bearings"].settings_type().model_dump()
HEADS = ("linear", "prototype", "etf", "turns", "patches")
COUNTS = ((40, 10, 0), (0, 30, 50), (0, 0, 20))


def site_of(k: int, counts: Sequence[int] = (4, 4, 4), size: int = 8) -> Site:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    shape = (len(labels), size, size, 1)
    images = torch.randint(0, 256, shape, generator=generator(k, "own"), dtype=torch.uint8)
    none = Part(images[:0], labels[:0])
    return Site(f"site-{k}", Part(images, labels), none, none, tuple(f"c{c}" for c in range(len(counts))))


def made(k: int, head: str, counts: Sequence[int], spec: ModelSpec = SPEC) -> Parcel:
    """An upload with all that the rules may read, measured on the site's own images."""
    spec = spec.replace(head=head, classes=len(counts))
    network, site = spec.build(generator(k, "weights")).eval(), site_of(k, [min(n, 8) for n in counts])
    extras = calibrate(network, site, 0)
    for name in ("moments", "foreign"):
        extras |= computed(name, network, site, 0)
    return parcel.make(
        sender=site.id,
        method="x",
        spec=spec,
        class_names=site.class_names,
        weights=network.state_dict(),
        samples=sum(counts),
        counts=counts,
        extras=extras,
    )


def inbox(*heads: str) -> list[Parcel]:
    return [made(k, heads[k % len(heads)], counts) for k, counts in enumerate(COUNTS)]


def asked(count: int = 4, seed: int = 5) -> Tensor:
    return torch.randint(0, 256, (count, 8, 8, 1), generator=generator(seed, "asked"), dtype=torch.uint8)


def proxy_of(count: int = 9) -> Dataset:
    return Dataset(asked(count, 8).numpy(), np.zeros(count, np.int64), ("c0", "c1", "c2"), "proxy")


def scores(predictor: Predictor, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = predictor(x)
    return found.double()


def seen(network: Network, x: Tensor) -> list[Tensor]:
    """The features of every way, computed one by one; of one way where the head knows no shift."""
    prepared = network.spec.prepare(x)
    with torch.no_grad():
        if not network.head.shift:
            return [network.features(prepared).double()]
        return [network.features(shifted(prepared, network.head.shift, way)).double() for way in range(WAYS)]


def rows_of(item: Parcel) -> list[Tensor]:
    """Class directions of every way, straight from the weights."""
    rows = next(item.weights[n] for n in ("head.prototypes", "head.anchors", "head.weight") if n in item.weights)
    return list(rows.double().split(len(item.manifest.class_names)))


def cos(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


# -- standardised


def test_one_feature_by_hand() -> None:
    found = standardised(torch.tensor([[3.0, 5.0, 2.0]]), torch.tensor([1.0, 1.0, 2.0]), torch.tensor([2.0, 4.0, 0.0]))
    assert torch.allclose(found, torch.tensor([[1.0, 1.0, 0.0]]))
    still = standardised(torch.tensor([1.0, 1.0]), torch.zeros(2), torch.tensor([2.0, 0.0]))
    assert still.tolist() == pytest.approx([0.5, 1 / FLOOR]), "a feature that never moved has the floor's spread"
    assert bool(standardised(torch.ones(2), torch.zeros(2), torch.zeros(2)).isfinite().all())


@pytest.mark.parametrize("source", ["own", "unlabelled", "batch"])
@pytest.mark.parametrize("heads", [("prototype",), ("etf",), ("linear",), ("turns",), ("turns", "prototype")])
def test_standardised_against_a_plain_loop(source: Any, heads: tuple[str, ...]) -> None:
    parcels, x, proxy = inbox(*heads), asked(), proxy_of()
    rule = Standardised(StandardisedSettings(moments=source))
    found = scores(rule.fuse(Inbox(parcels), Server(proxy=proxy if source == "unlabelled" else None)), x)
    networks = [item.network() for item in parcels]
    measured = []
    for k, (item, network) in enumerate(zip(parcels, networks, strict=True)):
        if source == "own":
            assert torch.equal(
                item.extras["moments.mean"], moments(network, site_of(k, [min(n, 8) for n in COUNTS[k]]), 0)["mean"]
            )
            measured.append((item.extras["moments.mean"].double(), item.extras["moments.std"].double()))
        else:
            every = torch.cat(seen(network, x if source == "batch" else torch.from_numpy(proxy.images)))
            measured.append((every.mean(0), every.std(0, correction=0)))
    shares = [math.sqrt(sum(counts)) for counts in COUNTS]
    ways = WAYS if "turns" in heads else 1
    for n in range(len(x)):
        for c in range(3):
            total, score = sum(counts[c] for counts in COUNTS), 0.0
            for way in range(ways):
                fused = torch.zeros(6, dtype=torch.float64)
                row = torch.zeros(6, dtype=torch.float64)
                for k, network in enumerate(networks):
                    looks, directions = seen(network, x), rows_of(parcels[k])
                    mean, std = measured[k]
                    std = torch.maximum(std, FLOOR * std.mean())
                    fused += shares[k] * (looks[min(way, len(looks) - 1)][n] - mean) / std
                    row += COUNTS[k][c] / total * directions[min(way, len(directions) - 1)][c]
                score += float(fused @ row / fused.norm()) / ways
            assert float(found[n, c]) == pytest.approx(score, abs=2e-5)


def test_with_one_anchor_for_all_the_prototypes_are_the_anchors() -> None:
    parcels = inbox("etf")
    fused = Standardised().fuse(Inbox(parcels)).state_dict()["prototypes"]
    assert torch.allclose(fused[0], parcels[0].weights["head.anchors"], atol=1e-6)
    assert torch.allclose(fused[0] @ fused[0].T, 1.5 * torch.eye(3) - 0.5, atol=1e-5)


def test_a_single_image_has_no_batch_to_take_moments_of() -> None:
    rule = Standardised(StandardisedSettings(moments="batch"))
    predictor = rule.fuse(Inbox(inbox("etf")))
    with pytest.raises(BadInput, match="one image has none; ask about many at once"):
        predictor(asked(1))
    assert scores(predictor, asked(2)).shape == (2, 3)
    assert rule.needs == {"weights", "class_counts", "prototypes"}
    assert [sizes(5, 2), sizes(5, 2, 2), sizes(1, 2, 2), sizes(4, 2, 2)] == [[2, 2, 1], [2, 3], [1], [2, 2]]


def test_a_rest_of_one_image_goes_with_the_batch_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Standardised(StandardisedSettings(moments="batch")).fuse(Inbox(inbox("etf")))
    monkeypatch.setattr(evaluation, "BATCH", 4)
    x = asked(9)
    found = scores_of(predictor, x)
    assert torch.allclose(found[4:].double(), scores(predictor, x[4:]), atol=1e-5)
    monkeypatch.setattr(evaluation, "VOICES", 1)  # members then speak of one batch at a time
    assert torch.equal(scores_of(predictor, x, name="nine"), found)


def test_moments_must_come_from_somewhere() -> None:
    with pytest.raises(BadInput, match="unlabelled needs unlabelled images; name some with --proxy"):
        Standardised(StandardisedSettings(moments="unlabelled")).fuse(Inbox(inbox("etf")))
    bare = [parcel.make(weights=item.weights, extras={}, **item.manifest.facts) for item in inbox("etf")]
    with pytest.raises(BadInput, match=r"site-0 sent no moments; train it with --set objective.send=\[moments\]"):
        Standardised().fuse(Inbox(bare))
    salt = OBJECTIVES["salt"]
    with pytest.raises(BadInput, match=r"needs moments.*ask the sites for it with --set objective.send=\[moments\]"):
        check_pair(salt, Standardised)
    check_pair(salt, Standardised, salt.settings_type(send=("moments",)))
    check_pair(salt, Standardised, rule_settings=StandardisedSettings(moments="batch"))
    assert not Standardised(StandardisedSettings(moments="unlabelled")).data_free


# -- statistics


def test_moments_are_those_of_all_ways_together() -> None:
    network, site = SPEC.replace(head="turns").build(generator(3)).eval(), site_of(1)
    found = moments(network, site, 0)
    every = torch.cat(seen(network, site.train.images))
    assert every.shape == (WAYS * 12, 6)
    assert torch.allclose(found["mean"].double(), every.mean(0), atol=1e-6)
    assert torch.allclose(found["std"].double(), every.std(0, correction=0), atol=1e-6)
    mean, std = moments_of(network, site.train.images[:1])
    assert mean.shape == std.shape == (6,)
    other = moments(network, site, 0, of="scraps")
    assert not torch.allclose(other["mean"], found["mean"])
    with pytest.raises(BadInput, match="unknown source of moments 'scrap'; did you mean 'scraps'"):
        moments(network, site, 0, of="scrap")  # type: ignore[arg-type]


def test_leave_one_class_out_by_hand() -> None:
    said = torch.tensor([[0.9, 0.1, 0.5], [0.7, 0.3, 0.5], [0.2, 0.8, 0.5]])
    mean, std = leave_one_out(said, torch.tensor([0, 0, 1]), 3)
    assert mean.tolist() == pytest.approx([0.2, 0.2, 0.0]), "0 sees the image of 1; 1 sees both of 0; 2 is not held"
    assert std.tolist() == pytest.approx([0.0, 0.1, 0.0])
    both = leave_one_out(
        torch.tensor([[0.0, 0.4, 0.0]] * 3 + [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), torch.tensor([0, 0, 0, 1, 2]), 3
    )
    assert both[0].tolist() == pytest.approx([0.0, 0.7, 0.0]), (
        "three images of one class weigh as much as one of another"
    )
    alone = leave_one_out(said, torch.tensor([1, 1, 1]), 3)
    assert [t.tolist() for t in alone] == [[0.0] * 3] * 2


def test_foreign_images_are_the_sites_own_of_other_classes() -> None:
    network, site = SPEC.build(generator(4)).eval(), site_of(2, (3, 0, 2))
    found = foreign(network, site, 0)
    looks, rows = seen(network, site.train.images)[0], network.head.weight.detach().double()  # type: ignore[operator, union-attr]
    of_first = [cos(looks[i], rows[0]) for i in (3, 4)]
    of_last = [cos(looks[i], rows[2]) for i in (0, 1, 2)]
    assert found["mean"].tolist() == pytest.approx([np.mean(of_first), 0.0, np.mean(of_last)], abs=1e-6)
    assert found["std"].tolist() == pytest.approx([np.std(of_first), 0.0, np.std(of_last)], abs=1e-5)


def test_negatives_that_were_asked_for() -> None:
    item = made(0, "prototype", (40, 10, 0))
    table, mean, std = (item.extras[n].clone() for n in ("calibration", "foreign.mean", "foreign.std"))
    assert torch.equal(calibration_of(item, "scraps"), table)
    taken = calibration_of(item, "foreign")
    assert torch.equal(taken[0], table[0])
    assert torch.equal(taken[1:, :2], torch.stack((mean, std))[:, :2])
    worst = calibration_of(item, "worst")
    for c in range(2):
        fooled = mean[c] > table[1, c]
        assert worst[1, c] == (mean[c] if fooled else table[1, c])
        assert worst[2, c] == (std[c] if fooled else table[2, c])
    alone = made(2, "prototype", (0, 0, 20))
    for negatives in ("foreign", "worst"):
        assert torch.equal(calibration_of(alone, negatives), alone.extras["calibration"]), "one class: scraps"


# -- the one rule


def voice(value: float, table: Tensor, c: int, reliable: bool) -> float:
    own, scrap, spread = (float(t) for t in table[:, c])
    if own - scrap < 1e-3:
        return 0.0
    distinct = (own - scrap) / max(spread, 1e-3)
    weight = math.sqrt(distinct / (1 + distinct)) if reliable else 1.0
    return weight * min(1.2, max(0.0, (value - scrap) / (own - scrap)))


@pytest.mark.parametrize("heads", [(head,) for head in HEADS] + [("turns", "linear")])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"negatives": "foreign", "exponent": 1.0},
        {"negatives": "worst", "reliability": False},
        {"negatives": "none", "exponent": 0.0, "power": 0.5},
        {"negatives": "none", "seen": 0.0, "crowd": 2.0, "sharpness": 4.0},
        {"seen": 0.7, "crowd": 0.0, "enough": 5.0},
        {"centre": True},
    ],
)
def test_best_against_a_plain_loop(heads: tuple[str, ...], settings: dict[str, Any]) -> None:
    parcels, x, chosen = inbox(*heads), asked(), BestSettings(**settings)
    found = scores(Best(chosen).fuse(Inbox(parcels)), x)
    expected = torch.zeros(len(x), 3, dtype=torch.float64)
    whole = sum(math.sqrt(item.manifest.samples) for item in parcels)

    def worth(k: int, c: int) -> float:
        n, fair = COUNTS[k][c], sum(counts[c] for counts in COUNTS) / len(COUNTS)
        return n / (n + (chosen.enough or 1) * fair) if chosen.power is None else n**chosen.power

    for k, item in enumerate(parcels):
        looks, rows = seen(item.network(), x), rows_of(item)
        mean, std = (item.extras[f"moments.{name}"].double() for name in ("mean", "std"))
        mean, std = (mean, std) if chosen.centre else (torch.zeros_like(mean), (mean**2 + std**2).sqrt())
        std = torch.maximum(std, FLOOR * std.mean())
        held = [c for c in range(3) if COUNTS[k][c]]
        for n in range(len(x)):
            said = {c: sum(cos(looks[r][n], rows[r][c]) for r in range(len(looks))) / len(looks) for c in range(3)}
            for c in range(3):
                stands = 0.0
                for look, row in zip(looks, rows, strict=True):
                    z = (look[n] - mean) / std
                    z = z * min(1.0, LOUDEST * math.sqrt(6) / float(z.norm()))
                    stands += float(z @ row[c] / row[c].norm()) / math.sqrt(6) / len(looks)
                if c not in held:
                    continue
                expected[n, c] += chosen.crowd * math.sqrt(item.manifest.samples) / whole * stands
                share = worth(k, c) / sum(worth(j, c) for j, counts in enumerate(COUNTS) if counts[c])
                certain = math.exp(chosen.sharpness * said[c]) / sum(math.exp(chosen.sharpness * said[j]) for j in held)
                if chosen.negatives == "none":
                    one = (1 + said[c]) / 2
                else:
                    one = voice(said[c], calibration_of(item, chosen.negatives), c, chosen.reliability)
                expected[n, c] += share * (chosen.seen * stands + one * certain**chosen.exponent + 1e-3 * said[c])
    assert torch.allclose(found, expected, atol=2e-5)


def test_nobody_outshouts_all_others_and_what_nobody_holds_comes_last() -> None:
    """One client says that its features spread a million times less than they do."""
    honest = [made(k, "prototype", counts) for k, counts in enumerate(((9, 4, 0), (5, 8, 0)))]
    tiny = {name: value * 1e-6 for name, value in honest[0].extras.items() if name.startswith("moments")}
    liar = parcel.make(weights=honest[0].weights, extras=honest[0].extras | tiny, **honest[0].manifest.facts)
    rule, x = Best(BestSettings(crowd=4.0)), asked(20)
    found = scores(rule.fuse(Inbox([liar, honest[1]])), x)
    assert float(found[:, :2].abs().max()) <= LOUDEST * (1 + 4) + 2
    assert bool((found[:, 2:] < found[:, :2]).all())


def test_without_calibration_and_softmax_it_orders_as_experts_do() -> None:
    parcels, x = inbox("prototype"), asked(20)
    plain = scores(FUSIONS["experts"]().fuse(Inbox(parcels)), x)
    found = scores(Best(BestSettings(negatives="none", exponent=0, seen=0, crowd=0, power=1)).fuse(Inbox(parcels)), x)
    assert torch.allclose(found, (1 + plain) / 2 + 1e-3 * plain, atol=1e-6)


def test_it_asks_for_no_more_than_it_reads() -> None:
    assert Best().needs == {"weights", "class_counts", "prototypes", "calibration"} == Best.needs
    assert "foreign" in Best(BestSettings(negatives="worst")).needs
    assert "calibration" not in Best(BestSettings(negatives="none")).needs


def test_where_one_sent_no_moments_nobody_is_heard_by_the_size_of_features(caplog: pytest.LogCaptureFixture) -> None:
    full, x = inbox("turns", "prototype"), asked(20)
    extras = {name: value for name, value in full[1].extras.items() if not name.startswith("moments")}
    bare = parcel.make(weights=full[1].weights, extras=extras, **full[1].manifest.facts)
    with caplog.at_level("INFO", logger="flyby"):
        found = scores(Best().fuse(Inbox([full[0], bare, full[2]])), x)
    assert "site-1 sent no moments, so that no client is heard by the size of its features" in caplog.text
    assert torch.equal(found, scores(Best(BestSettings(seen=0, crowd=0)).fuse(Inbox(full)), x))
    assert not torch.allclose(found, scores(Best().fuse(Inbox(full)), x), atol=1e-2)


def test_moments_are_read_where_sites_have_other_lists_of_classes(caplog: pytest.LogCaptureFixture) -> None:
    parcels = []
    for k, names in enumerate((("a", "b", "c"), ("b", "d", "c"))):
        item = made(k, "prototype", (9, 4, 6))
        facts = item.manifest.facts | {"class_names": names}
        parcels.append(parcel.make(weights=item.weights, extras=item.extras, **facts))
    with caplog.at_level("INFO", logger="flyby"):
        predictor = Best().fuse(Inbox(parcels))
    assert "no moments" not in caplog.text
    assert torch.equal(predictor.state_dict()["mean_1"], parcels[1].extras["moments.mean"])
    assert scores(predictor, asked()).shape == (4, 4)


@pytest.mark.parametrize("rule", ["best", "standardised", "experts"])
def test_clients_of_one_class_and_of_a_hundred(rule: str) -> None:
    many = SPEC.replace(widths={"conv1": 4, "conv2": 5, "conv3": 100})
    alone = [0] * 100
    alone[7] = 6
    half = [2] * 50 + [0] * 50
    parcels = [made(k, "prototype", counts, many) for k, counts in enumerate((alone, half, [1] * 100))]
    parcels.append(made(3, "turns", alone, many))
    found = scores(FUSIONS[rule]().fuse(Inbox(parcels)), asked(6))
    assert found.shape == (6, 100)
    assert bool(found.isfinite().all())
    two = [made(k, "linear", counts) for k, counts in enumerate(((9, 0), (0, 5)))]
    assert scores(FUSIONS[rule]().fuse(Inbox(two)), asked(3)).shape == (3, 2)


@pytest.mark.parametrize("settings", [{}, {"negatives": "none", "seen": 0}])
def test_a_client_of_one_class_is_not_sure_of_everything(settings: dict[str, Any]) -> None:
    """Its softmax is 1 whatever it sees, so that only what it says is left."""
    predictor = Best(BestSettings(**settings)).fuse(Inbox([made(0, "prototype", (0, 0, 20))]))
    said = scores(predictor, asked(30))
    assert bool((said[:, :2] < said[:, 2:]).all()), "nobody speaks for the other classes"
    assert float(said[:, 2].std()) > 0


@pytest.mark.parametrize("rule", ["fedavg", "ensemble", "iffi"])
def test_other_rules_look_at_images_as_they_are(rule: str) -> None:
    """Of a head that knows turns they take the rows for unturned images, and so they can mix it with one that knows
    none."""
    mixed = inbox("turns", "prototype")
    plain = []
    for item in mixed:
        rows = item.weights["head.prototypes"][:3]
        facts = item.manifest.facts | {"spec": item.manifest.spec.replace(head="prototype")}
        plain.append(parcel.make(weights=item.weights | {"head.prototypes": rows}, **facts))
    found, expected = (scores(FUSIONS[rule]().fuse(Inbox(items)), asked()) for items in (mixed, plain))
    assert torch.allclose(found, expected, atol=1e-6)


# -- what is kept


@pytest.mark.parametrize(
    "rule",
    [
        Best(),
        Best(BestSettings(negatives="none", seen=0, crowd=0)),
        Standardised(StandardisedSettings(moments="batch")),
    ],
)
def test_models_come_back_as_they_were_with_and_without_flyby(rule: Any, tmp_path: Path) -> None:
    predictor, x = rule.fuse(Inbox(inbox("turns", "prototype"))), asked(6)
    expected = scores(predictor, x)
    save_predictor(predictor, tmp_path / "model")
    assert torch.equal(scores(load_predictor(tmp_path / "model"), x), expected)
    program = torch.export.load(tmp_path / "model" / "model.pt2").module()
    assert torch.allclose(scores(program, x), expected, atol=1e-5)  # type: ignore[arg-type]
    assert torch.allclose(scores_of(predictor, x).double(), expected, atol=1e-5), "features of all ways are shared"


def test_what_an_answer_costs_is_in_the_report() -> None:
    server = Server()
    FUSIONS["experts"]().fuse(Inbox(inbox("turns", "prototype")), server)
    (section,) = server.report
    assert [row[:3] for row in section["table"]["rows"]] == [
        ["site-0", "turns", 4],
        ["site-1", "none", 1],
        ["site-2", "turns", 4],
    ]
    assert section["text"].startswith("An answer takes 9 passes through 3 networks")
    quiet = Server()
    FUSIONS["experts"]().fuse(Inbox(inbox("prototype")), quiet)
    assert quiet.report == []


def test_the_best_pair_is_one_place() -> None:
    method = METHODS["best"]
    objective = OBJECTIVES[method.objective]
    check_pair(objective, FUSIONS["best"], objective.settings_type(**method.objective_settings))
    assert (method.fusion, method.fusion_settings) == ("best", {}), "the rule is the same for every upload"
    chosen = {name: value for name, value in method.objective_settings.items() if SITES_DEFAULTS[name] != value}
    assert chosen == {"preset": "fast", "send": ["moments"]}, "nothing else tells its uploads from those of bearings"


# -- how sure


def test_chances_of_best_are_a_softmax_of_its_scores_as_sure_as_sites_measured() -> None:
    rule, other = FUSIONS["best"](), FUSIONS["experts-calibrated"]()
    sent = Inbox(inbox("prototype"))
    predictor = rule.fuse(sent)
    said = scores(predictor, asked())
    assert torch.allclose(predictor.chances(said), (6 * said).softmax(1), atol=1e-6)
    without = FUSIONS["best"](BestSettings(seen=0.0, crowd=0.0)).fuse(sent)
    assert without.temperature == other.fuse(sent).temperature == 0.1
    told = [replace(one, manifest=_told(one, "best")) for one in inbox("prototype")]
    manifests = [one.manifest for one in told]
    measured = tempered(rule.fuse(Inbox(told)), manifests, rule)
    assert (measured.temperature, measured.measured) == (2.0, True)
    assert torch.allclose(measured.chances(said), (said / 2).softmax(1), atol=1e-6)
    assert torch.equal(measured.chances(said).argmax(1), said.argmax(1))
    assert not tempered(other.fuse(Inbox(told)), manifests, other).measured, "it was measured by another rule"


def _told(item: Parcel, method: str) -> Manifest:
    return item.manifest.model_copy(update={"method": method, "meta": {**item.manifest.meta, "temperature": 2.0}})


# -- such uploads as teachers


@pytest.mark.parametrize("heads", [("turns",), ("turns", "prototype"), ("patches",)])
@pytest.mark.parametrize("rule", ["best", "experts", "experts-calibrated", "standardised", "iffi"])
@pytest.mark.parametrize("resident", ["all", "one"])
def test_a_teacher_looks_in_all_the_ways_in_which_its_rule_does(
    rule: str, heads: tuple[str, ...], resident: Any
) -> None:
    box, images = Inbox(inbox(*heads)), asked(12)
    predictor, teaching = FUSIONS[rule]().fuse(box), teaching_of(rule, box, Server())
    teachers = Teachers(box, "cpu", resident, teaching=teaching)
    with torch.no_grad():
        wanted = predictor.chances(predictor(images))
    said = teachers.say(as_unit(images))
    assert torch.allclose(teachers.answer(torch.full((3,), 1 / 3), said).softmax(1), wanted, atol=1e-5)
    plain = torch.stack([item.network()(item.network().prepare(images)) for item in box])
    assert torch.allclose(said[..., :3], plain, atol=1e-5), "logits are of images as they are"
    assert [teaching.ways(item.manifest.spec) for item in box] == [
        WAYS if predictor.shows and heads[k % len(heads)] != "prototype" else 1 for k in range(3)
    ]


def test_what_batchnorm_finds_odd_is_a_mean_over_the_ways() -> None:
    (item, *_) = parcels = inbox("turns")
    network, teaching = item.network().eval(), teaching_of("best", Inbox(parcels), Server())
    x = torch.rand((5, 1, 8, 8), generator=generator("odd"))
    with torch.no_grad():
        each = [with_distance(network, shifted(x, "turns", way))[1] for way in range(WAYS)]
        _, off = with_distance(network, x, say=partial(teaching.say, 0))
    assert float(off) == pytest.approx(float(sum(each)) / WAYS, rel=1e-5)
    assert float(each[0]) != pytest.approx(float(each[1]), rel=1e-5)
