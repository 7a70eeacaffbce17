"""Whatever travels beside the weights, no parcel leads to a traceback or to a model that is not finite: every rule
meets every extra, mutated in every way, through the entrance that the command uses and through the rule alone. And what
lies is refused, alone, while the rest goes on."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from factories import Answer, call, done, make_npz, make_stripes, one_line, small_spec, striped_site, train_site
from flyby.data.site import Part, Site, part_of
from flyby.data.sources import load
from flyby.data.views import PLAIN
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, Server
from flyby.fusion.predictor import Predictor
from flyby.fusion.weights.average import FedAvg
from flyby.models import ModelSpec
from flyby.models.decoder import Decoder, DecoderSpec, build
from flyby.objectives import OBJECTIVES
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.parcels import parcel
from flyby.parcels.gate import Gate
from flyby.parcels.inbox import Inbox
from flyby.parcels.ledger import Ledger, SecondCrossing
from flyby.parcels.parcel import Parcel
from flyby.rng import generator
from flyby.runs.server import Order, fuse_waiting, rule_named
from flyby.statistics import extras as declared
from flyby.statistics.calibration import calibrate
from flyby.statistics.catalogue import EXTRAS, STATISTICS, computed, examined
from flyby.statistics.feature_sums import noised_sums
from flyby.statistics.kfac import pack
from flyby.statistics.masked_sums import ROUND, length
from flyby.statistics.noised import Noise
from flyby.training.privacy import draws
from flyby.training.settings import TrainSettings

SPEC = ModelSpec(name="mlp", classes=3, channels=1, size=(4, 4), widths={"fc1": 3, "fc2": 2})
NAMES = ("ant", "bee", "cat")
CASES = 5000  # in all, at the least
SHARE = 3  # mutations of each tensor that a rule meets and does not read; of those that it reads it meets all
ROUND_TOLD = ("spring", "0" * 64, 30, ["site-0", "site-1", "site-2"])
QUICK = {
    "fedcvae": ("images=6", "epochs=1", "batch=6"),
    "fedcvae-kd": ("images=6", "epochs=1", "batch=6", "distil_epochs=1"),
    "fedtgp": ("epochs=2",),
    "feddf": ("epochs=1", "batch=8"),
    **dict.fromkeys(
        ("dense", "coboosting", "intactofl", "compact"),
        ("epochs=1", "images=4", "latent=2", "generator_width=1", "steps=1", "batch=4"),
    ),
}


# -- honest parcels


def site_of(k: int) -> Site:
    labels = torch.arange(12) % 3
    images = torch.randint(0, 256, (12, 4, 4, 1), generator=generator(k, "images"), dtype=torch.uint8)
    none = Part(images[:0], labels[:0])
    return Site(f"site-{k}", Part(images, labels), none, none, NAMES)


def made(k: int, kind: str) -> Parcel:
    """An upload with all that belongs to one kind of extra; where sites may choose, each chose another way."""
    eyes = 0 if kind in ("feature-sums", "masked-sums") else k  # sums are of features that one network gave
    network, site = SPEC.build(generator(eyes, "weights")).eval(), site_of(k)
    chosen = {("kfac", 1): ":half=false", ("null-space", 1): ":half=false", ("null-space", 2): ":rank=1"}
    chosen |= {("feature-sums", 1): ":dtype=float64"}
    if kind == "calibration":
        extras = calibrate(network, site, 0)
    elif kind == "decoder":
        decoder = build(Decoder, DecoderSpec.beside(SPEC, 1, 1), generator(k, "decoder"))
        extras = {f"decoder.{name}": value for name, value in decoder.state_dict().items()}
    elif kind == "masked-sums":
        words = torch.randint(-(2**63), 2**63 - 1, (length(3, 2),), generator=generator(k, "words"))
        extras = {f"{kind}.choice": torch.tensor([0, 0, 2]), f"{kind}.words": words}
        extras |= {f"{kind}.noise": torch.tensor(Noise.planned(0, 2.0, 1.0), dtype=torch.float64)} if k == 1 else {}
    elif (kind, k) == ("feature-sums", 2):
        noisy = noised_sums(network, site, {}, (8.0, 1e-5), 2.0, draws(generator(k, "noise")))
        extras = {f"{kind}.{name}": value for name, value in noisy.items()}
    else:
        extras = computed(kind + chosen.get((kind, k), ""), network, site, 0)
    return parcel.make(
        sender=site.id,
        method="x",
        spec=SPEC,
        class_names=NAMES,
        weights=network.state_dict(),
        samples=12,
        counts=None if "feature-sums.noise" in extras else (4, 4, 4),
        extras=extras,
        meta={"decoder_latent": 1, "decoder_width": 1, **dict(zip(ROUND, ROUND_TOLD, strict=True))},
    )


HONEST = {kind: [made(k, kind) for k in range(3)] for kind in EXTRAS}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> str:
    images = np.random.RandomState(0).randint(0, 256, (8, 4, 4, 1)).astype(np.uint8)
    return str(make_npz(tmp_path_factory.mktemp("proxy") / "proxy.npz", images=images, labels=np.arange(8) % 3))


# -- mutations

Extras = dict[str, Tensor]


def _with(change: Callable[[Tensor], Tensor]) -> Callable[[Extras, str], Extras]:
    return lambda extras, name: extras | {name: change(extras[name])}


def _filled(value: float) -> Callable[[Tensor], Tensor]:
    def fill(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.full_like(tensor, int(max(-9, min(9, value))) if value == value else 2**62)
        most = torch.finfo(tensor.dtype).max
        return torch.full_like(tensor, value if value != value or abs(value) == torch.inf else min(value, most))

    return fill


def _first(value: float) -> Callable[[Tensor], Tensor]:
    def put(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.flatten()[:1] = _filled(value)(tensor).flatten()[:1]
        return changed

    return put


def _noise(scale: float) -> Callable[[Tensor], Tensor]:
    def drawn(tensor: Tensor) -> Tensor:
        return (scale * torch.randn(tensor.shape, generator=generator("noise"))).to(tensor.dtype)

    return drawn


def _neighbour(extras: Extras, name: str) -> str:
    names = sorted(extras)
    return names[(names.index(name) + 1) % len(names)]


def _swapped(extras: Extras, name: str) -> Extras:
    other = _neighbour(extras, name)
    return extras | {name: extras[other], other: extras[name]}


def _moved(extras: Extras, name: str, to: str) -> Extras:
    return {key: value for key, value in extras.items() if key != name} | {to: extras[name]}


MUTATIONS: dict[str, Callable[[Extras, str], Extras]] = {
    **{
        f"as {dtype}": _with(lambda t, dtype=dtype: t.to(dtype))  # type: ignore[misc]
        for dtype in (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
            *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
        )
    },
    "scalar": _with(lambda t: t.flatten()[0].clone()),
    "empty": _with(lambda t: t[:0]),
    "no numbers": _with(lambda t: torch.zeros(0, dtype=t.dtype)),
    "one more dimension": _with(lambda t: t[None]),
    "many more dimensions": _with(lambda t: t[None, None, None]),
    "flat": _with(lambda t: t.flatten()),
    "one column": _with(lambda t: t.reshape(-1, 1)),
    "longer": _with(lambda t: torch.cat((t, t), dim=-1)),
    "deeper": _with(lambda t: torch.cat((t, t))),
    "shorter": _with(lambda t: t[..., :-1]),
    "transposed": _with(lambda t: t.mT.contiguous() if t.ndim > 1 else t[:, None]),
    "backwards": _with(lambda t: t.flip(-1)),
    "NaN": _with(_filled(float("nan"))),
    "one NaN": _with(_first(float("nan"))),
    "infinite": _with(_filled(torch.inf)),
    "one minus infinity": _with(_first(-torch.inf)),
    "huge": _with(_filled(1e38)),
    "one huge": _with(_first(1e38)),
    "large": _with(_filled(1e4)),
    "tiny": _with(_filled(1e-38)),
    "zero": _with(_filled(0.0)),
    "ones": _with(_filled(1.0)),
    "minus ones": _with(_filled(-1.0)),
    "negated": _with(lambda t: -t),
    "noise": _with(_noise(1.0)),
    "loud noise": _with(_noise(1e3)),
    "missing": lambda extras, name: {key: value for key, value in extras.items() if key != name},
    "alone": lambda extras, name: {name: extras[name]},
    "swapped": _swapped,
    "renamed": lambda extras, name: _moved(extras, name, f"{name}.x"),
    "one too many": lambda extras, name: extras | {f"{name}.more": extras[name]},
    "basis": lambda extras, name: _moved(extras, name, f"{name.rpartition('.')[0] or name}.basis"),
    "scale too": lambda extras, name: extras | {f"{name.rpartition('.')[0] or name}.scale": torch.tensor([1.0])},
    "unknown beside": lambda extras, name: extras | {"whatever.else": torch.tensor(3)},
}


class Case(NamedTuple):
    rule: str
    kind: str
    tensor: str
    mutation: str

    def mutant(self) -> tuple[Parcel, Extras]:
        able = [item for item in HONEST[self.kind] if self.tensor in item.extras]
        item = able[len(self.mutation) % len(able)]
        return item, MUTATIONS[self.mutation](dict(item.extras), self.tensor)


def reads(rule: str) -> frozenset[str]:
    return FUSIONS[rule].needs | FUSIONS[rule].wants


def cases(rule: str) -> Iterator[Case]:
    """All mutations of what a rule reads; of what it does not read a share, another one for every rule and tensor."""
    names, place = list(MUTATIONS), sorted(FUSIONS).index(rule)
    for kind in EXTRAS:
        tensors = sorted({name for item in HONEST[kind] for name in item.extras})
        for number, tensor in enumerate(tensors):
            first = 7 * place + 3 * number
            chosen = names if kind in reads(rule) else [names[(first + 5 * i) % len(names)] for i in range(SHARE)]
            yield from (Case(rule, kind, tensor, mutation) for mutation in chosen)


# -- what may come of it

PROBE = torch.randint(0, 256, (4, 4, 4, 1), generator=generator("probe"), dtype=torch.uint8)


def came_of(fuse: Callable[[], Predictor]) -> str:
    try:
        return "fused" if bool(fuse()(PROBE).isfinite().all()) else "not finite"
    except BadInput as error:
        return str(error) if "crashes" in str(error) else "refused"  # the gate takes a crash for the sender's fault
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def entrance(case: Case, proxy: str) -> str:
    """The case through the command's own entrance: refused, fused, or what must not be."""
    item, extras = case.mutant()
    try:
        mutant = parcel.make(weights=item.weights, extras=extras, **item.manifest.facts)
    except BadInput:  # what no honest sender can write a forger still can: the reader meets it
        mutant = dataclasses.replace(item, extras=extras)
    gate = Gate(receiver="server")
    gate.try_check(mutant)
    order = Order(Path("out"), case.rule, QUICK.get(case.rule, ()), min_sites=1, device="cpu")
    order = dataclasses.replace(order, proxy=proxy if case.rule == "feddf" else None)
    return came_of(lambda: fuse_waiting(gate, order).predictor)


def alone(case: Case, proxy: str) -> str:
    """Beside an honest site and without a gate, as a program that calls the rule: what a rule reads it checks."""
    item, extras = case.mutant()
    other = next(one for one in HONEST[case.kind] if one is not item)
    inbox = Inbox([other, dataclasses.replace(item, extras=extras)])
    rule = rule_named(case.rule, QUICK.get(case.rule, ()))
    return came_of(lambda: rule.fuse(inbox, Server(load(proxy).train if case.rule == "feddf" else None)))


def outcomes(rule: str, proxy: str) -> tuple[Counter[str], dict[tuple[str, Case], str]]:
    found, wrong = Counter[str](), {}
    for case in cases(rule):
        for way in (entrance, alone) if case.kind in reads(rule) else (entrance,):
            answer = way(case, proxy)
            found[answer if answer in ("refused", "fused") else "wrong"] += 1
            if answer not in ("refused", "fused"):
                wrong[way.__name__, case] = answer
    return found, wrong


def count() -> int:
    return sum(1 + (case.kind in reads(rule)) for rule in FUSIONS for case in cases(rule))


def test_there_are_enough_cases() -> None:
    assert count() >= CASES
    met = {(case.rule, case.kind) for rule in FUSIONS for case in cases(rule)}
    assert met == {(rule, kind) for rule in FUSIONS for kind in EXTRAS}


@pytest.mark.parametrize("rule", FUSIONS)
def test_no_mutated_extra_leads_to_a_traceback_or_to_a_model_that_is_not_finite(rule: str, proxy: str) -> None:
    found, wrong = outcomes(rule, proxy)
    assert not wrong
    assert found["refused"] > 0
    assert found["fused"] > 0, "what is not refused is used"


READERS = [rule for rule in FUSIONS if FUSIONS[rule].needs & set(EXTRAS)]


@pytest.mark.parametrize("rule", READERS)
def test_without_the_declarations_the_same_cases_do_lead_there(
    rule: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fuzz above can fail: of one mutation in five, through the rule alone, some are tracebacks."""
    monkeypatch.setattr(declared, "_misfit", lambda entries, tensors: "")
    for kind in EXTRAS.values():
        monkeypatch.setattr(type(kind), "agree", lambda self, manifest, given: "")
    read = [case for case in cases(rule) if case.kind in FUSIONS[rule].needs][::5]
    assert sum(alone(case, proxy) not in ("refused", "fused") for case in read) > 0


# -- what is declared


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_all_that_an_objective_can_send_is_declared_and_sound(objective: str) -> None:
    kind = OBJECTIVES[objective]
    asked = kind.settings_type(send=tuple(STATISTICS))
    made = kind(asked)
    network, site = kind.adapt_spec(SPEC, asked).build(generator("any")).eval(), site_of(0)
    made.prepare(network, site, 0)
    tensors, facts = made.extras(network, site, 0)
    assert kind.provided(asked) & set(EXTRAS) == {name.partition(".")[0] for name in tensors}, "no extra is undeclared"
    item = parcel.make(
        sender="a",
        method=objective,
        spec=network.spec,
        class_names=NAMES,
        weights=network.state_dict(),
        samples=12,
        counts=(4, 4, 4),
        extras=tensors,
        meta=facts,
    )
    sizes = examined(item, None, "cpu", used=set(EXTRAS))
    assert all(0 <= size < 100 for size in sizes.values())
    assert {"class-means.means", "kfac.backbone.fc1.A"} < sizes.keys()


def changed(item: Parcel, sender: str = "", **extras: Tensor) -> Parcel:
    facts = item.manifest.facts | ({"sender": sender} if sender else {})
    renamed = {name.replace("__", "-").replace("_", "."): value for name, value in extras.items()}
    return parcel.make(weights=item.weights, extras=item.extras | renamed, **facts)


def packed(matrix: Tensor) -> Tensor:
    return pack(matrix[None], half=False)["triangle"]


def refusal(item: Parcel, used: str) -> str:
    with pytest.raises(BadInput) as caught:
        examined(item, None, "cpu", used={used})
    return str(caught.value)


def test_matrices_that_cannot_be_are_refused_and_rounding_is_not() -> None:
    whole = made(1, "kfac")
    indefinite = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    assert "kfac.backbone.fc2.B is not positive" in refusal(
        changed(whole, kfac_backbone_fc2_B_triangle=packed(indefinite)), "kfac"
    )
    twice = changed(whole, kfac_head_A_triangle=2 * whole.extras["kfac.head.A.triangle"])
    assert "kfac.head.A does not end with the 1 of the bias" in refusal(twice, "kfac")
    assert examined(twice, None, "cpu", used={"class-means"}), "algebra is for what will be used"
    space = made(1, "null-space")
    name = "null-space.backbone.fc2.triangle"
    for factor in (-1.0, 1.5, 40.0):
        bad = changed(space, null__space_backbone_fc2_triangle=factor * packed(torch.eye(4)))
        assert "no projector" in refusal(bad, "null-space"), factor
    assert space.extras[name].shape == (1, 10)
    for free in (0.0, 0.5, 1.0, 1.0 + 2**-10):
        good = changed(space, null__space_backbone_fc2_triangle=free * packed(torch.eye(4)))
        assert examined(good, None, "cpu", used={"null-space"}) == {}
    wide = 3 * torch.ones_like(made(2, "null-space").extras["null-space.head.basis"])
    assert "outside" in refusal(changed(made(2, "null-space"), null__space_head_basis=wide), "null-space")
    full = torch.full_like(wide, 0.9)  # each number may be, their length may not
    assert "no projector" in refusal(changed(made(2, "null-space"), null__space_head_basis=full), "null-space")


def test_a_decoder_that_paints_nothing_finite_is_refused() -> None:
    item = made(0, "decoder")
    loud = {name: 9e3 * torch.ones_like(value) for name, value in item.extras.items()}
    assert "its pictures are not finite or beyond 10000" in refusal(
        parcel.make(weights=item.weights, extras=loud, **item.manifest.facts), "decoder"
    )
    assert examined(item, None, "cpu", used={"decoder"}).keys() == item.extras.keys()


def test_tables_that_cannot_be_are_refused() -> None:
    item = made(0, "calibration")
    table = item.extras["calibration"].clone()
    table[2, 1] = -0.1
    assert "a spread is negative" in refusal(changed(item, calibration=table), "calibration")
    table[2, 1] = 1.5
    assert "outside -1.001 .. 1.001" in refusal(changed(item, calibration=table), "calibration")
    means = made(0, "class-means")
    assert "does not rise" in refusal(changed(means, class__means_classes=torch.tensor([0, 2, 1])), "class-means")
    lacking = parcel.make(weights=means.weights, extras={}, **means.manifest.facts)
    assert examined(lacking, None, "cpu", used={"class-means"}) == {}, "what lacks is the gate's business"
    odd = parcel.make(weights=means.weights, extras={"whatever.else": torch.tensor(3)}, **means.manifest.facts)
    assert examined(odd, None, "cpu", used=set(EXTRAS)) == {}, "of unknown kinds nothing is read"


# -- what lies, on a small federation that learned something


@pytest.fixture(scope="module")
def sites() -> list[Parcel]:
    settings = TrainSettings(epochs=6, lr=0.05, batch=32, schedule="constant")
    objective = SupervisedSettings(send=("class-means", "kfac", "null-space"))
    return [
        train_site(
            striped_site(f"n{k}", seed=k + 1, count=48), small_spec(), Supervised(objective), settings, PLAIN, 0
        ).parcel
        for k in range(5)
    ]


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stripes(tmp_path_factory.mktemp("data") / "stripes.npz", count=60, test=12)


def saved(items: Sequence[Parcel], folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{item.manifest.sender}.parcel" for item in items]
    for item, path in zip(items, paths, strict=True):
        parcel.write(item, path)
    return paths


def lies(item: Parcel) -> dict[str, tuple[str, Parcel, str]]:
    """What could be said in an honest network's company: (rule, parcel, stage at which it must be refused)."""
    means, scale = item.extras["class-means.means"], item.extras["kfac.head.A.scale"]
    basis = {name: value for name, value in item.extras.items() if name.startswith("null-space.head.")}
    key, value = next(iter(basis.items()))
    evil = parcel.make(
        weights=item.weights, extras=item.extras | {key: torch.full_like(value, -1.0)}, **item.manifest.facts
    )
    return {
        "false class means": ("fedproto", changed(item, class__means_means=means.roll(1, 0)), "extras"),
        "long class means": ("fedproto", changed(item, class__means_means=30 * means), "extras"),
        "evil projector": ("maecho", evil, "extras"),
        "scalar scale": ("fedlpa", changed(item, kfac_head_A_scale=scale[0]), "extras"),
    }


@pytest.mark.parametrize("lie", ["false class means", "long class means", "evil projector", "scalar scale"])
def test_a_lie_beside_an_honest_network_is_refused_and_the_rest_goes_on(
    lie: str, sites: list[Parcel], validation: Path, tmp_path: Path
) -> None:
    rule, liar, stage = lies(sites[4])[lie]
    paths = saved([*sites[:2], liar], tmp_path / "in")
    words = ("fuse", *paths, "--fusion", rule, "--validation", validation, "--no-export", "--json")
    assert f"the {liar_kind(rule)} that n4 sent cannot be used" in one_line(call(*words, "--out", tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    answer = done(*words, "--min-sites", 2, "--out", tmp_path / "two").json
    assert [(one["sender"], one["stage"]) for one in answer["refused"]] == [("n4", stage)]
    assert answer["sites"] == 2
    assert answer["validation"]["accuracy"] > 0.9


def liar_kind(rule: str) -> str:
    (kind,) = FUSIONS[rule].needs & set(EXTRAS)
    return kind


def test_class_means_far_longer_than_those_of_others_are_refused_without_images(sites: list[Parcel]) -> None:
    gate = Gate()
    for item in [*sites[:4], lies(sites[4])["long class means"][1]]:
        gate.check(item)
    beside = partial(examined, used={"class-means"})
    assert [one.manifest.sender for one in gate.settle(beside=beside)] == ["n0", "n1", "n2", "n3"]
    assert [(one.sender, one.stage) for one in gate.refused] == [("n4", "norm")]
    assert "class-means.means" in gate.refused[0].reason


def test_honest_extras_of_every_kind_pass_with_and_without_images(sites: list[Parcel], validation: Path) -> None:
    for part in (None, part_of(load(str(validation)).train)):
        gate = Gate()
        for item in sites:
            gate.check(item)
        assert len(gate.settle(part, beside=partial(examined, used=set(EXTRAS)))) == 5
        assert gate.refused == []


# -- judged after fusing


class Spoilt(FedAvg):
    """The average, with its first class put out; or with its classes turned by one."""

    turned = False

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        made = super().combine(parcels, server)
        head: Any = made.networks[0].head
        with torch.no_grad():
            if self.turned:
                head.weight.copy_(head.weight.roll(1, 0))
            else:
                head.bias[0] = -1e3
        return made


class Turned(Spoilt):
    turned = True


def test_a_fused_model_is_judged_too(
    sites: list[Parcel], validation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FUSIONS.built_in, "spoilt", Spoilt)
    monkeypatch.setitem(FUSIONS.built_in, "turned", Turned)
    paths = saved(sites[:3], tmp_path / "in")

    def fuse(rule: str, *more: object) -> Answer:
        return call("fuse", *paths, "--fusion", rule, "--no-export", "--json", "--out", tmp_path / rule, *more)

    judged = ("--validation", validation)
    good = fuse("fedavg", *judged).json["validation"]
    assert (good["images"], good["better_than_chance"]) == (60, True)
    assert good["best_site"] in ("n0", "n1", "n2")
    assert fuse("ensemble").json["validation"] is None
    worse = fuse("spoilt", *judged)
    assert worse.code == 0
    said = worse.json["validation"]
    assert said["worse_than_best_site"]
    assert 0.5 < said["accuracy"] < said["best_site_accuracy"]
    assert "note: WARNING: the fused model has " in worse.err
    assert "no better than chance on the validation images" in one_line(fuse("turned", *judged))
    assert not (tmp_path / "turned").exists()
    kept = fuse("turned", *judged, "--keep-bad")
    assert not kept.json["validation"]["better_than_chance"]
    assert "note: WARNING: the fused model is no better than chance" in kept.err


# -- the ledger remembers models, not only names


def test_a_copy_under_a_new_name_is_a_second_crossing_in_a_later_round(sites: list[Parcel], tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.json"
    words = ("--fusion", "fedavg", "--no-export", "--json", "--ledger", ledger)
    done("fuse", *saved(sites[:2], tmp_path / "in"), "--out", tmp_path / "one", *words)
    copy = changed(sites[0], "thief", junk=torch.ones(1))
    later = saved([sites[2], copy], tmp_path / "later")
    assert "it is the model that n0 sent" in one_line(call("fuse", *later, "--out", tmp_path / "two", *words))
    old = json.loads(ledger.read_text())
    assert [set(row) for row in old["crossings"]] == [{"sender", "receiver", "bytes", "digest", "round", "weights"}] * 2
    for row in old["crossings"]:
        del row["weights"]
    ledger.write_text(json.dumps(old))
    assert done("fuse", *later, "--out", tmp_path / "two", *words).json["sites"] == 2, "an older ledger still loads"
    assert Ledger.load(ledger).origin(sites[0].manifest.weights_digest, "server") == "thief"


def test_a_ledger_takes_each_model_once_per_receiver() -> None:
    ledger = Ledger()
    ledger.record("a", "server", 1, "x", weights="w")
    ledger.record("a", "other", 1, "x", weights="w")
    with pytest.raises(SecondCrossing, match="the model of b is the one that a already sent to server"):
        ledger.record("b", "server", 1, "y", weights="w")
    ledger.record("b", "server", 1, "y")
    ledger.record("c", "server", 1, "y")
    assert [c.sender for c in ledger.crossings] == ["a", "a", "b", "c"]
