"""Who teaches and what is shown: every teacher against the predictor it stands for, views and blends by hand, one
network made of many, and students that are the same twice."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from factories import call, done, one_line
from flyby.data.dataset import Dataset
from flyby.data.site import Part
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, Inbox
from flyby.fusion.alignment import aligned
from flyby.fusion.base import Server
from flyby.fusion.distilled.compact import Compact, CompactSettings, inherit, sharpness
from flyby.fusion.distilled.dense import DenseSettings
from flyby.fusion.distilled.distill import rate_factor
from flyby.fusion.distilled.fedcvae import FedCvaeSettings
from flyby.fusion.distilled.synthesis import Synthesis, as_unit
from flyby.fusion.distilled.teachers import Probabilities, Teachers, mix, teacher_of, teaching_of
from flyby.fusion.distilled.views import blend, crop_and_flip, site_views
from flyby.fusion.evaluation import milliseconds
from flyby.fusion.weights.average import likeliest
from flyby.models import ModelSpec
from flyby.models.generator import Generator as Maker
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel
from flyby.rng import generator
from flyby.runs.methods import check_pair
from flyby.runs.server import Order, compact_rule

CNN = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8), widths={"conv1": 4, "conv2": 5, "conv3": 6})
NAMES = ("ant", "bee", "cat")
TINY: dict[str, Any] = {"epochs": 3, "images": 12, "steps": 2, "batch": 8, "latent": 5, "generator_width": 3}
MOVED = {"crop": "pad", "flip": 0.5}
RULES = (
    "ensemble",
    "ensemble:mean=logits;weights=size",
    "experts",
    "experts-softmax",
    "experts-gate",
    "experts-calibrated",
    "iffi",
    "ensemble-median",
    "fedproto",
)


def made(k: int, spec: ModelSpec = CNN, views: object = None) -> Parcel:
    weights = {name: t.clone() for name, t in spec.build(generator(k, "weights")).state_dict().items()}
    weights["head.weight" if spec.head == "linear" else "head.prototypes"] *= 5  # sure of something
    extras = {
        "calibration": torch.tensor([[0.8, 0.7, 0.9], [0.1, 0.2, 0.0], [0.2, 0.1, 0.3]]),
        "class-means.means": torch.rand((3, 6), generator=generator(k, "means")),
        "class-means.classes": torch.arange(3),
    }
    return parcel.make(
        sender=f"site-{k}",
        method="x",
        spec=spec,
        class_names=NAMES,
        weights=weights,
        samples=30 + 10 * k,
        counts=[10, 10 + 10 * k, 10],
        extras=extras,
        provenance={} if views is None else {"views": views},
    )


def inbox(count: int = 3, **settings: Any) -> Inbox:
    return Inbox([made(k, **settings) for k in range(count)])


def pictures(count: int = 12) -> Tensor:
    return torch.randint(0, 256, (count, 8, 8, 1), generator=generator("pictures"), dtype=torch.uint8)


def proxy_set(count: int = 40) -> Dataset:
    return Dataset(pictures(count).numpy(), np.zeros(count, dtype=np.int64), NAMES, f"digest-{count}")


# -- who teaches


@pytest.mark.parametrize("word", ["logits", "probabilities", *RULES])
@pytest.mark.parametrize("resident", ["all", "one"])
def test_a_teacher_answers_as_the_predictor_it_stands_for(word: str, resident: Any) -> None:
    box, server, images = inbox(), Server(), pictures()
    teachers = Teachers(box, "cpu", resident, teaching=teaching_of(word, box, server))
    said = teachers.say(as_unit(images))
    for k, item in enumerate(box):
        assert torch.allclose(said[k, :, :3], item.network()(CNN.prepare(images)), atol=1e-5), "logits come first"
    predictor = teacher_of(word, box, server)
    with torch.no_grad():
        wanted = predictor.chances(predictor(images))
    found = teachers.answer(torch.full((3,), 1 / 3), said).softmax(1)
    spoken = wanted.sum(1) > 0.5  # where no expert says anything a teacher has no opinion
    assert int(spoken.sum()) > 5
    assert torch.allclose(found[spoken], wanted[spoken], atol=1e-5)
    assert torch.allclose(found[~spoken], torch.tensor(1 / 3))
    assert float(found.max()) > 0.34, "it does say something"


@pytest.mark.parametrize("rule", ["best", "fedproto"])
def test_networks_whose_features_differ_in_number_teach_together(rule: str) -> None:
    """What such rules hear of a member are its features."""
    wide = made(1, CNN.replace(widths={"conv3": 9}))
    wide.extras["class-means.means"] = torch.rand((3, 9), generator=generator("means"))
    items = [parcel.make(weights=one.weights, extras=one.extras, **one.manifest.facts) for one in (made(0), wide)]
    box, images = Inbox(items), pictures()
    predictor, teachers = FUSIONS[rule]().fuse(box), Teachers(box, "cpu", teaching=teaching_of(rule, box, Server()))
    with torch.no_grad():
        wanted = predictor.chances(predictor(images))
    found = teachers.answer(torch.full((2,), 0.5), teachers.say(as_unit(images))).softmax(1)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_the_two_means_by_hand() -> None:
    said = torch.tensor([[[0.0, math.log(9)]], [[math.log(4), math.log(4)]]])  # (.1, .9) and (.5, .5)
    weights = torch.tensor([0.75, 0.25])
    assert Probabilities().answer(weights, said).exp()[0].tolist() == pytest.approx([0.2, 0.8])
    assert Probabilities().answer(2 * weights, said).exp()[0].tolist() == pytest.approx([0.2, 0.8])
    assert mix(weights, said)[0].tolist() == pytest.approx(
        [0.25 * math.log(4), 0.75 * math.log(9) + 0.25 * math.log(4)]
    )
    # Two clients that are right, one that never saw the class: a mean of logits lets it veto, one of chances does not.
    veto = torch.tensor([[[3.0, 0.0]], [[3.0, 0.0]], [[-20.0, 0.0]]])
    third = torch.full((3,), 1 / 3)
    assert (int(mix(third, veto).argmax()), int(Probabilities().answer(third, veto).argmax())) == (1, 0)


def test_what_nobody_believes_still_has_a_gradient() -> None:
    said = torch.tensor([[[-200.0, 0.0]], [[-150.0, 0.0]]], requires_grad=True)
    weights = torch.tensor([1.0, 0.0], requires_grad=True)
    told = Probabilities().answer(weights, said)
    assert told.isfinite().all()
    towards, moved = torch.autograd.grad(F.cross_entropy(told, torch.tensor([0])), (said, weights))
    assert float(towards[:, 0, 0].sum()) == pytest.approx(-1.0, abs=1e-4)
    assert moved.isfinite().all()
    assert float(moved[1]) < 0, "a client that was switched off can come back"


@pytest.mark.parametrize("word", ["probabilities", "experts-calibrated", "iffi", "fedproto"])
def test_teachers_of_every_kind_pull_alike_all_at_once_and_one_at_a_time(word: str) -> None:
    box = inbox()
    teaching = teaching_of(word, box, Server())
    weights, y = torch.tensor([0.5, 0.2, 0.3]), torch.tensor([0, 1, 2, 0])
    x = torch.rand((4, 1, 8, 8), generator=generator(0))
    both = [
        Teachers(box, "cpu", how, teaching=teaching).pull(  # type: ignore[arg-type]
            x, lambda _, said: F.cross_entropy(teaching.answer(weights, said), y), 0.1
        )
        for how in ("all", "one")
    ]
    for a, b in zip(*both, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert float(both[0][2].abs().max()) > 1e-4
    # The gradient itself, by differences along it.
    direction, step = both[0][2] / both[0][2].norm(), 1e-2
    loss = [
        float(
            Teachers(box, "cpu", "all", teaching=teaching).pull(
                x + s * direction, lambda _, said: F.cross_entropy(teaching.answer(weights, said), y), 0.1
            )[0]
        )
        for s in (step, -step)
    ]
    assert (loss[0] - loss[1]) / (2 * step) == pytest.approx(float(both[0][2].norm()), rel=0.1)


def test_who_cannot_teach_is_refused() -> None:
    for word, said in (
        ("logit", "unknown teacher 'logit'; did you mean 'logits'"),
        ("dense", "dense is itself distilled"),
        ("ensemble:mean=medians", r"teacher.mean = 'medians' will not do"),
    ):
        with pytest.raises(BadInput, match=said):
            DenseSettings(teacher=word)
        with pytest.raises(BadInput, match=said):
            FedCvaeSettings(teacher=word)
    with pytest.raises(BadInput, match="fedavg makes one network of all"):
        FUSIONS["dense"](DenseSettings(**TINY | {"teacher": "fedavg"})).fuse(inbox())


def test_a_rule_that_teaches_brings_its_needs() -> None:
    assert "calibration" not in FUSIONS["dense"]().needs
    assert "calibration" in FUSIONS["dense"](DenseSettings(teacher="experts-calibrated")).needs
    assert "calibration" in FUSIONS["fedcvae"](FedCvaeSettings(teacher="experts-calibrated")).needs
    assert "decoder" in FUSIONS["fedcvae"](FedCvaeSettings(teacher="experts-calibrated")).needs
    assert "calibration" in Compact().needs
    assert Compact(CompactSettings(teacher="ensemble")).needs == {"weights"}
    with pytest.raises(BadInput, match="fusion 'dense' needs calibration"):
        check_pair(
            Supervised,
            FUSIONS["dense"](DenseSettings(teacher="experts-calibrated")),
            SupervisedSettings(calibrate=False),
        )


@pytest.mark.parametrize(
    ("rule", "teacher"),
    [("dense", "probabilities"), ("coboosting", "iffi"), ("intactofl", "experts-calibrated"), ("compact", "ensemble")],
)
def test_rules_learn_from_other_teachers_and_the_same_twice(rule: str, teacher: str) -> None:
    kind, box = FUSIONS[rule], inbox(views=MOVED)
    threads = torch.get_num_threads()
    students = []
    for count in (1, 2):
        torch.set_num_threads(count)
        students.append(kind(kind.settings_type(**TINY | {"teacher": teacher})).fuse(box, Server(seed=3)))
        assert torch.get_num_threads() == count
    torch.set_num_threads(threads)
    other = kind(kind.settings_type(**TINY | {"teacher": teacher})).fuse(box, Server(seed=4))
    states = [s.state_dict() for s in (*students, other)]
    assert all(torch.equal(t, states[1][name]) for name, t in states[0].items()), "whatever the number of threads"
    assert any(not torch.equal(t, states[2][name]) for name, t in states[0].items()), "by the server's seed"


def test_the_teacher_that_is_judged_has_the_weights_it_ended_with() -> None:
    kind, server, box = FUSIONS["coboosting"], Server(), inbox()
    rule = kind(kind.settings_type(**TINY | {"weight_step": 0.05}))
    rule.fuse(box, server)
    teacher = rule.teacher(box, server)
    assert teacher is not None
    learned = teacher.state_dict()["weights"].tolist()
    assert sum(learned) == pytest.approx(1.0)
    assert max(learned) - min(learned) > 0.05
    assert server.report[-1]["weights"] == pytest.approx(learned)
    assert "The teacher is logits;" in server.report[-1]["text"]
    assert FUSIONS["fedavg"]().teacher(box, server) is None


# -- what is shown


def test_a_view_is_one_of_all_shifts_and_mirror_images() -> None:
    x = torch.rand((200, 2, 5, 4), generator=generator(1)) + 0.1
    seen = crop_and_flip(x, 1, True, generator(2))
    border = F.pad(x, (1, 1, 1, 1))
    kinds = []
    for i in range(len(x)):
        found = [
            (top, left, flip)
            for top, left, flip in itertools.product(range(3), range(3), (False, True))
            if torch.equal(
                seen[i],
                (p.flip(2) if flip else p) if (p := border[i, :, top : top + 5, left : left + 4]) is not None else p,
            )
        ]
        assert len(found) == 1, "exactly one of the eighteen"
        kinds += found
    assert len(set(kinds)) == 18
    assert torch.equal(crop_and_flip(x, 0, False, generator(0)), x)
    assert {k[2] for k in kinds} == {True, False}


def test_the_gradient_of_a_view_goes_where_its_pixels_came_from() -> None:
    x = torch.rand((6, 1, 4, 4), generator=generator(1), dtype=torch.float64, requires_grad=True)
    seen = crop_and_flip(x, 2, True, generator(5))
    (gradient,) = torch.autograd.grad(seen.sum(), x)
    assert set(gradient.flatten().tolist()) == {0.0, 1.0}
    assert gradient.flatten(1).sum(1).tolist() == (seen > 0).flatten(1).sum(1).tolist()


@pytest.mark.parametrize(
    ("views", "wanted"),
    [
        (None, (0, False)),
        ({"crop": "pad", "flip": 0.5}, (1, True)),
        ({"crop": "resized", "flip": 0.0}, (1, False)),
        ({"crop": "none", "flip": 0.5}, (0, True)),
        ("nonsense", (0, False)),
        ({"crop": "pad", "flip": "often"}, (1, False)),
    ],
)
def test_a_server_moves_images_as_the_sites_did(views: object, wanted: tuple[int, bool]) -> None:
    assert site_views(inbox(views=views)) == wanted
    mixed = Inbox([made(0, views=MOVED), made(1, views={"crop": "none", "flip": 0.0})])
    assert site_views(mixed) == (0, False), "as all of them did"


def test_where_images_move_the_teacher_is_asked_about_what_the_student_sees() -> None:
    box = inbox(views=MOVED)
    for rule in ("dense", "coboosting", "intactofl", "feddf", "compact"):
        kind = FUSIONS[rule]
        fusion = kind(kind.settings_type(augment=True, teacher="logits"))
        teachers = Teachers(box, "cpu")
        x, said = fusion.inputs(pictures(), torch.zeros(3, 12, 3), torch.full((3,), 1 / 3), teachers, generator(1))  # type: ignore[attr-defined]
        assert torch.equal(said, teachers.say(x)), rule
        assert not torch.equal(x, as_unit(pictures())), rule
    kept = torch.randn((3, 12, 3), generator=generator(0))
    still = FUSIONS["dense"](DenseSettings(augment=False))
    x, said = still.inputs(pictures(), kept, torch.full((3,), 1 / 3), Teachers(box, "cpu"), generator(1))  # type: ignore[attr-defined]
    assert torch.equal(x, as_unit(pictures()))
    assert said is kept
    unmoved = FUSIONS["dense"]()
    assert unmoved.inputs(pictures(), kept, torch.ones(3), Teachers(inbox(), "cpu"), generator(1))[1] is kept  # type: ignore[attr-defined]


def test_synthesis_keeps_images_and_shows_views_of_them() -> None:
    teachers, shown = Teachers(inbox(views=MOVED), "cpu"), []

    def objective(x: Tensor, said: Tensor, y: Tensor) -> Tensor:
        shown.append(x.detach().clone())
        return F.cross_entropy(said.mean(0), y)

    settings = DenseSettings(**TINY | {"steps": 1, "bn": 0.0})
    plain = Synthesis(teachers, 3, objective, settings).make("key")[0]
    moved = Synthesis(teachers, 3, objective, settings, augment=True).make("key")[0]
    assert torch.equal(plain, moved), "what the generator made, not what was shown of it"
    assert torch.equal((shown[0] * 255).round().to(torch.uint8).permute(0, 2, 3, 1), plain)
    assert not torch.equal(shown[0], shown[1])
    assert bool((shown[1] == 0).any()), "a black border"


def test_the_generators_gradient_is_clipped() -> None:
    teachers = Teachers(inbox(), "cpu")

    def norm(clip: float | None) -> float:
        settings = DenseSettings(**TINY | {"steps": 1, "generator_clip": clip})
        work = Synthesis(teachers, 3, lambda x, said, y: 1e4 * F.cross_entropy(said.mean(0), y), settings)
        work.make("key")
        parts = [p.grad for p in (*work.maker.parameters(), work.z) if p.grad is not None]
        return float(torch.cat([g.flatten() for g in parts]).norm())

    assert norm(None) > 100
    assert norm(10.0) == pytest.approx(10.0, rel=1e-4)


def test_a_large_generator_works_in_halves_beside_small_teachers(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[Teachers, Synthesis]:
        teachers, settings = (
            Teachers(inbox(), "cpu"),
            DenseSettings(**TINY | {"steps": 1, "bn": 0.0, "generator_width": 16}),
        )
        return teachers, Synthesis(teachers, 3, lambda x, said, y: F.cross_entropy(said.mean(0), y), settings)

    full = made()[1]
    assert full.precision == "fp32", "8x8 pixels: little to gain"
    monkeypatch.setattr("flyby.training.steps.WORTH_HALVING", full.maker.multiply_adds())
    monkeypatch.setattr("flyby.training.steps.halves_well", lambda: True)
    teachers, half = made()
    assert teachers.precision == "fp32"
    assert half.precision == "bf16"
    one, other = (work.make("key")[0].int() for work in (full, half))
    assert 0 < int((one - other).abs().max()) <= 8, "of 255"


@pytest.mark.parametrize(("size", "channels"), [((8, 8), 1), ((30, 17), 3)])
def test_what_a_generator_costs_is_what_is_counted(size: tuple[int, int], channels: int) -> None:
    maker = Maker.build(size, channels, 5, 4, generator(0))
    with FlopCounterMode(display=False) as counter:
        maker(torch.zeros(2, 5))
    assert counter.get_total_flops() == 2 * 2 * maker.multiply_adds()


def test_blends_by_hand() -> None:
    x = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    mixed = blend(x, 0.5, generator(0))
    part = torch.rand((2, 1, 1, 1), generator=generator(0)).flatten().tolist()
    wanted = [part[0] * 0 + (1 - part[0]) * 3, part[1] * 1 + (1 - part[1]) * 2, 2, 3]
    assert mixed[:, 0, 1, 1].tolist() == pytest.approx(wanted)
    assert blend(x, 0.0, generator(0)) is x


def test_one_cycle_rises_then_falls() -> None:
    rates = [rate_factor("one-cycle", epoch, 20) for epoch in range(20)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0 < rates[-1] < 0.02
    assert [rate_factor("cosine", e, 2) for e in (0, 1)] == pytest.approx([1.0, 0.5])
    assert rate_factor("constant", 9, 10) == 1.0
    assert rate_factor("one-cycle", 0, 1) > 0


# -- one network of many


def test_a_teacher_is_sharpened_until_it_is_sure_enough() -> None:
    told = torch.tensor([[0.6, 0.4], [0.4, 0.6]]).log()
    factor = sharpness(told, 0.9)
    assert 1 / (1 + (0.4 / 0.6) ** factor) == pytest.approx(0.9, abs=1e-4)
    assert sharpness(torch.tensor([[0.99, 0.01]]).log(), 0.9) == 1.0, "one that is sure already is left alone"
    assert sharpness(torch.tensor([[0.5, 0.5]]).log(), 0.9) == 64.0, "one that knows nothing cannot be made to"


def test_the_student_starts_at_the_largest_clients_backbone() -> None:
    prototypes = CNN.replace(head="prototype")
    box = Inbox([made(0), made(1, prototypes), made(2, CNN.replace(widths={"conv1": 3, "conv2": 5, "conv3": 6}))])
    network = CNN.build(generator("student"))
    head = network.head.weight.clone()
    inherit(network, box)
    theirs = box.read(1).weights
    assert all(torch.equal(t, theirs[name]) for name, t in network.state_dict().items() if not name.startswith("head."))
    assert torch.equal(network.head.weight, head), "sender 2 is larger, of another architecture; heads are not taken"
    made_one = Compact(CompactSettings(**TINY)).fuse(Inbox([made(0, prototypes), made(1, prototypes)]))
    assert made_one.specs[0] == CNN, "with a linear head"
    one, other = made(0), made(3)
    other = parcel.make(weights=other.weights, **{**other.manifest.facts, "class_names": ("bee", "cat", "dog")})  # type: ignore[typeddict-item]
    whole = aligned(Inbox([one, other]), ["weights"], whole=True)
    network = whole.manifests[0].spec.replace(partial=False).build(generator("student"))
    inherit(network, whole)
    theirs = whole.read(1).weights
    assert all(torch.equal(t, theirs[name]) for name, t in network.state_dict().items() if name.startswith("backbone."))


@pytest.mark.parametrize("source", ["auto", "both", "synthetic"])
def test_compact_goes_on_where_it_was_interrupted(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fusion() -> Compact:
        return Compact(CompactSettings(**TINY | {"epochs": 4, "source": source}))

    box, proxy = inbox(views=MOVED), proxy_set()
    whole = Server(proxy, 5)
    wanted = fusion().fuse(box, whole).state_dict()
    assert ("Synthetic images" in {s["title"] for s in whole.report}) == (source in ("both", "synthetic"))
    learn = Compact._learn

    def interrupted(self: Compact, *args: Any) -> float:
        if args[-1] == 2:
            raise KeyboardInterrupt
        return learn(self, *args)

    monkeypatch.setattr(Compact, "_learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fusion().fuse(box, Server(proxy, 5, work=tmp_path))
    monkeypatch.setattr(Compact, "_learn", learn)
    found = fusion().fuse(box, Server(proxy, 5, work=tmp_path)).state_dict()
    assert all(torch.equal(t, found[name]) for name, t in wanted.items())


def test_compact_learns_its_teacher_on_unlabelled_images() -> None:
    box, images = inbox(), pictures(32)
    rule = Compact(CompactSettings(epochs=60, batch=16, lr=0.1, blends=0.0, teacher="ensemble", start="fresh"))
    server = Server(proxy_set(32))
    student, teacher = rule.fuse(box, server), rule.teacher(box, server)
    assert len(student.specs) == 1
    with torch.no_grad():
        alike = (student(images).argmax(1) == teacher(images).argmax(1)).double().mean()
    assert float(alike) > 0.9


def test_compact_says_what_it_lacks() -> None:
    for source in ("proxy", "both"):
        with pytest.raises(BadInput, match=f"fusion.source={source} needs unlabelled images"):
            Compact(CompactSettings(**TINY | {"source": source})).fuse(inbox())


def test_the_command_makes_one_network_and_compares(tmp_path: Path) -> None:
    for k in range(2):
        parcel.write(made(k), tmp_path / f"{k}.parcel")
    np.savez(tmp_path / "proxy.npz", images=pictures(40).numpy(), labels=np.arange(40) % 3)
    words = ["fuse", tmp_path / "0.parcel", tmp_path / "1.parcel", "--compact", "--fusion", "ensemble", "--no-export"]
    small = [text for key, value in TINY.items() for text in ("--set", f"{key}={value}")]
    found = done(
        *words, *small, "--set", "mean=logits", "--proxy", tmp_path / "proxy.npz", "--out", tmp_path / "one", "--json"
    )
    facts = found.json
    assert (facts["kind"], facts["fusion"]) == ("single", "compact")
    assert (facts["compact"]["teacher"]["networks"], facts["compact"]["student"]["networks"]) == (2, 1)
    assert facts["compact"]["teacher"]["bytes"] == 2 * facts["compact"]["student"]["bytes"]
    assert facts["compact"]["student"]["ms_per_image"] > 0
    card = (tmp_path / "one" / "README.md").read_text()
    assert "- teacher: ensemble:mean=logits" in card
    assert "single of one network" in card
    assert "does not go with" in one_line(call(*words[:4], "--add", tmp_path / "0.parcel", "--out", tmp_path / "two"))


def test_settings_of_compact_and_of_its_teacher_are_told_apart() -> None:
    rule = compact_rule("experts", ["fusion.power=0.5", "epochs=7"], {"sharpness": 8.0})
    assert rule.settings.model_dump()["teacher"] == "experts:sharpness=8.0;power=0.5"
    assert rule.settings.model_dump()["epochs"] == 7
    assert compact_rule("ensemble", ["teacher=iffi"], {}).settings.model_dump()["teacher"] == "iffi"
    with pytest.raises(BadInput, match="unknown compact setting 'epoch'; did you mean 'epochs'"):
        compact_rule("ensemble", ["epoch=7"], {})
    with pytest.raises(BadInput, match="itself distilled"):
        Order(Path("nowhere"), "dense", compact=True).check()


def test_milliseconds_are_of_one_image() -> None:
    few, many = (milliseconds(teacher_of("ensemble", inbox(count), Server())) for count in (1, 8))
    assert 0 < few < many


# -- the ensemble's learned weights


def test_learned_weights_are_the_likeliest() -> None:
    box = inbox()
    images, networks = pictures(60), [item.network() for item in box]
    with torch.no_grad():
        answers = [network(CNN.prepare(images)).argmax(1) for network in networks]
    labels = torch.cat((answers[0][:35], answers[2][35:50], torch.arange(10) % 3))
    found = torch.tensor(likeliest(networks, Part(images, labels)), dtype=torch.float64)
    assert float(found.sum()) == pytest.approx(1.0)
    with torch.no_grad():
        right = torch.stack([n(CNN.prepare(images)).double().softmax(1)[torch.arange(60), labels] for n in networks])

    def likely(weights: Tensor) -> float:
        return float((weights @ right).log().mean())

    grid = [torch.tensor([a, b, 40 - a - b]) / 40.0 for a in range(41) for b in range(41 - a)]
    assert likely(found) >= max(likely(w.double()) for w in grid) - 1e-7, "better than all of 861 others"
    kind = FUSIONS["ensemble"]
    learned = kind(kind.settings_type(weights="learned"))
    proxy = Dataset(images.numpy(), labels.numpy(), NAMES, "digest")
    assert learned.fuse(box, Server(proxy)).state_dict()["weights"].tolist() == pytest.approx(found.tolist())
    with pytest.raises(BadInput, match="needs images with labels"):
        learned.fuse(box)
    with pytest.raises(BadInput, match=r"leave out fusion\.mean=logits"):
        kind(kind.settings_type(weights="learned", mean="logits")).fuse(box, Server(proxy))
