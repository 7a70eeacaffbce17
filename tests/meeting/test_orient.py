"""FOL as a whole at one node: variants, refusals, poison, mixed fleets, early exit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from factories import STRIPES, quick, random_parcel, small_spec, striped_site, trained
from flyby.data.site import Part, Site
from flyby.errors import BadInput
from flyby.fusion.ensembles.experts import ExpertsPredictor
from flyby.fusion.predictor import Ensemble, Single
from flyby.meeting import VARIANTS, History, OrientSettings, orient
from flyby.meeting.admit import read_inbox
from flyby.meeting.pipeline import neighbours
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel


@pytest.fixture(scope="module")
def nodes() -> dict[str, tuple[Site, Parcel]]:
    sites = [striped_site(f"n{i}", seed=i + 1, count=48) for i in range(6)]
    return {site.id: (site, trained(site, epochs=3)) for site in sites}


def parcels(nodes: dict[str, tuple[Site, Parcel]], *but: str) -> list[Parcel]:
    return [item for name, (_, item) in nodes.items() if name not in but]


def test_every_variant_answers_and_looks_at_no_test_image(nodes: dict[str, tuple[Site, Parcel]]) -> None:
    site, own = nodes["n0"]
    blind = Site(
        site.id, site.train, site.val, Part(torch.full_like(site.test.images, 7), site.test.labels), site.class_names
    )
    for variant in VARIANTS:
        made = orient(own, parcels(nodes, "n0"), site, quick(diagnostics=True), variant=variant)
        again = orient(own, parcels(nodes, "n0"), blind, quick(diagnostics=True), variant=variant)
        images = site.test.images
        with torch.no_grad():
            assert torch.equal(made.predictor(images), again.predictor(images)), (
                "same seed, same bytes, whatever the test part holds"
            )
        assert isinstance(made.predictor, Ensemble if VARIANTS[variant].teacher else Single)
        assert made.own.manifest.sender == "n0"
        if variant in ("fol", "fol-n"):
            assert made.own.manifest.meta == {"version": 1}
            assert len(made.kept) == 2
            assert sum(row["chosen"] for row in made.rows) == 3
            assert sum(made.facts["weights"].values()) == pytest.approx(1, abs=1e-4)
            assert made.facts["theorem_1"]["risk_gap"] <= made.facts["theorem_1"]["ours"]
            assert {row["sender"] for row in made.rows} == {"self", "n1", "n2", "n3", "n4", "n5"}
        assert ("finetune" in made.facts["seconds"]) is ("finetune" in VARIANTS[variant].stages)
    with pytest.raises(BadInput, match="did you mean 'fol'"):
        orient(own, [], site, quick(), variant="foll")


def test_the_student_is_of_the_own_architecture_and_the_teacher_is_the_weighted_ensemble(
    nodes: dict[str, tuple[Site, Parcel]],
) -> None:
    site, own = nodes["n0"]
    made = orient(own, parcels(nodes, "n0"), site, quick(), variant="fol-n")
    assert made.student.specs == (own.manifest.spec,)
    assert isinstance(made.teacher, Ensemble)
    x = site.val.images
    weights = list(made.facts["weights"].values())
    with torch.no_grad():
        each = [net(spec.prepare(x)) for net, spec in zip(made.teacher.networks, made.teacher.specs, strict=True)]
        torch.testing.assert_close(
            made.teacher(x), sum(w * z for w, z in zip(weights, each, strict=True)), rtol=1e-3, atol=1e-3
        )


def test_gossip_is_the_mean_of_own_and_received_of_one_architecture(nodes: dict[str, tuple[Site, Parcel]]) -> None:
    site, own = nodes["n0"]
    stranger = random_parcel("other", small_spec("mlp", width=0.1))
    made = orient(own, [nodes["n1"][1], stranger], site, quick(screen=False), variant="gossip")
    key = "backbone.conv1.weight"
    torch.testing.assert_close(made.own.weights[key], (own.weights[key] + nodes["n1"][1].weights[key]) / 2)
    assert made.log == ["left out other: averaging needs one architecture"]
    assert neighbours(made.rows, made.facts) == ["n1"]


def test_kept_peers_are_scored_again_and_not_adapted_again(nodes: dict[str, tuple[Site, Parcel]]) -> None:
    site, own = nodes["n0"]
    first = orient(own, [nodes["n1"][1], nodes["n2"][1], nodes["n3"][1]], site, quick(buffer=3))
    before = {c.sender: {n: t.clone() for n, t in c.state.items()} for c in first.kept}
    second = orient(first.own, [nodes["n4"][1], nodes["n5"][1]], site, quick(buffer=3), history=History(first.kept, 2))
    assert len(first.kept) == 2
    assert len(second.rows) == 4, "three peers at most, and self"
    assert any("buffer holds 3" in line for line in second.log)
    for candidate in first.kept:
        assert all(torch.equal(t, candidate.state[n]) for n, t in before[candidate.sender].items())
        assert candidate.score is not None
    again = orient(first.own, [nodes["n4"][1]], site, quick(buffer=3, readapt=True), history=History(first.kept, 2))
    moved = [
        c
        for c in first.kept
        if any(not torch.equal(t, c.state[n]) for n, t in before[c.sender].items() if c.state[n].shape == t.shape)
    ]
    assert moved
    assert again.own.manifest.meta == {"version": 2}


def test_the_peers_that_stay_are_the_members_of_the_ensemble(nodes: dict[str, tuple[Site, Parcel]]) -> None:
    """Scores of few images are often equal: one rule must break the ties of both."""
    site, own = nodes["n0"]
    few = Site(site.id, site.train, Part(site.val.images[:2], site.val.labels[:2]), site.test, STRIPES)
    for top in (2, 3, 4):
        made = orient(own, parcels(nodes, "n0"), few, quick(top=top), variant="fol-n")
        assert len({row["score"] for row in made.rows}) < len(made.rows), "there are ties"
        chosen = [row["sender"] for row in made.rows if row["chosen"] and row["sender"] != "self"]
        assert len(made.kept) == top - 1
        assert {c.sender for c in made.kept} <= set(chosen)
        assert len(chosen) - len(made.kept) == ("self" not in made.facts["weights"])


def plus(**changes: object) -> OrientSettings:
    return quick(**{**VARIANTS["fol-plus"].settings, **changes})


def test_fol_plus_takes_everybody_and_asks_them_on_views(nodes: dict[str, tuple[Site, Parcel]]) -> None:
    site, own = nodes["n0"]
    inbox = parcels(nodes, "n0")
    made = orient(own, inbox, site, plus(prior=10.0, distill_steps=40), variant="fol-plus")
    weights = made.facts["weights"]
    assert set(weights) == {"self", "n1", "n2", "n3", "n4", "n5"}
    assert min(weights.values()) > 0.02, "the prior leaves nobody out"
    heaviest = sorted((name for name in weights if name != "self"), key=lambda name: -weights[name])
    assert [c.sender for c in made.kept] == heaviest[:2]
    assert made.facts["distill_images"] == 5 * len(site.train)
    assert made.facts["distill_steps"] >= 40
    assert all("prune_epochs" not in row for row in made.rows)
    more = orient(
        own,
        inbox,
        site,
        plus(),
        variant="fol-plus",
        history=History(unlabelled=striped_site("x", seed=9, count=10).train.images),
    )
    assert more.facts["distill_images"] > made.facts["distill_images"]


def test_a_student_that_is_no_better_stays_out(nodes: dict[str, tuple[Site, Parcel]]) -> None:
    site, own = nodes["n0"]
    inbox = parcels(nodes, "n0")
    refused = orient(own, inbox, site, plus(accept=1e6), variant="fol-plus")
    assert refused.own is own
    assert refused.facts["accept"]["accepted"] is False
    assert "1e+06 standard errors are asked for; this node keeps its own model" in refused.log[-1]
    assert isinstance(refused.teacher, Ensemble), "fol-plus-a answers with the teacher all the same"
    assert len(refused.kept) == 2
    weak = random_parcel("n0", own.manifest.spec, 3)
    taken = orient(weak, inbox, site, plus(accept=1.0, distill_steps=300), variant="fol-plus")
    assert taken.facts["accept"]["accepted"] is True
    assert taken.own is not weak
    assert taken.facts["accept"]["gain"] > taken.facts["accept"]["error"]
    assert "accept" not in orient(own, inbox, site, plus(), variant="fol-plus").facts


def test_cheap_first(nodes: dict[str, tuple[Site, Parcel]]) -> None:
    site, own = nodes["n0"]
    strangers = [random_parcel(f"r{i}", own.manifest.spec, i) for i in range(2)]
    made = orient(own, [*strangers, *parcels(nodes, "n0", "n5")], site, quick(prescreen=4, screen=False, buffer=9))
    assert {row["sender"] for row in made.rows} == {"self", "n1", "n2", "n3", "n4"}
    assert sorted(made.log) == [f"left out r{i}: 4 others fit the validation images better" for i in range(2)]


def test_a_round_keeps_to_its_seconds_and_says_what_it_left_out(nodes: dict[str, tuple[Site, Parcel]]) -> None:
    site, own = nodes["n0"]
    made = orient(own, parcels(nodes, "n0"), site, quick(seconds=1e-6, distill_epochs=50))
    assert [row["sender"] for row in made.rows] == ["self"]
    assert sum("the round's 1e-06 s are too few to adapt it" in line for line in made.log) == 5
    assert made.facts["distill_epochs"] == 1


def test_neighbours_can_be_cut_to_a_size(nodes: dict[str, tuple[Site, Parcel]]) -> None:
    site, own = nodes["n0"]
    made = orient(
        own, parcels(nodes, "n0", "n5"), site, plus(prune_to=0.4, curve=(1.0, 0.5), epochs=1), variant="fol-plus"
    )
    for row in made.rows[:-1]:
        assert row["parameters_after"] <= 0.4 * row["parameters_before"]
    assert [line["share"] for line in made.facts["curve"]] == [1.0, 0.5]
    assert made.student.specs[0] == own.manifest.spec


def test_what_cannot_be_used_is_refused_with_a_reason_and_the_round_goes_on(
    nodes: dict[str, tuple[Site, Parcel]],
) -> None:
    site, own = nodes["n0"]
    good = nodes["n1"][1]
    not_finite = dataclasses.replace(
        nodes["n2"][1],
        weights={n: t * math.nan if t.is_floating_point() else t for n, t in nodes["n2"][1].weights.items()},
    )
    crashing = dataclasses.replace(
        nodes["n3"][1], weights={n: t for n, t in nodes["n3"][1].weights.items() if "conv2" not in n}
    )
    inbox = [
        random_parcel("other-classes", names=("a", "b", "c")),
        random_parcel("other-size", small_spec(size=12)),
        not_finite,
        crashing,
        good,
        good,
        own,
    ]
    made = orient(own, inbox, site, quick())
    assert [row["sender"] for row in made.rows] == ["n1", "self"]
    log = "\n".join(made.log)
    for reason in (
        "refused other-classes: it knows none of this node's classes, but a, b, c",
        "refused other-size: it takes 12x12x1 images",
        "refused n2: its weights are not finite",
        "refused n3: it crashes on a batch of images (RuntimeError",
        "refused n1: this node has its model already",
        "refused n0: this node has its model already",
    ):
        assert reason in log


def test_a_node_without_a_usable_neighbour_keeps_its_own_model(nodes: dict[str, tuple[Site, Parcel]]) -> None:
    site, own = nodes["n0"]
    for inbox in ([], [random_parcel("x", small_spec(size=12))]):
        made = orient(own, inbox, site, quick())
        assert made.own is own
        assert made.log[-1] == "no usable neighbour; this node keeps its own model"
        with torch.no_grad():
            torch.testing.assert_close(
                made.predictor(site.val.images), own.network()(own.manifest.spec.prepare(site.val.images))
            )


def test_a_node_must_fit_its_own_data(nodes: dict[str, tuple[Site, Parcel]]) -> None:
    site, own = nodes["n0"]
    with pytest.raises(BadInput, match="no validation images"):
        orient(
            own,
            [],
            Site(site.id, site.train, Part(site.val.images[:0], site.val.labels[:0]), site.test, STRIPES),
            quick(),
        )
    with pytest.raises(BadInput, match="other classes or other images"):
        orient(random_parcel("n0", small_spec(size=12)), [], site, quick())


def test_an_inbox_is_read_file_by_file(tmp_path: Path, nodes: dict[str, tuple[Site, Parcel]]) -> None:
    parcel.write(nodes["n1"][1], tmp_path / "b.parcel")
    (tmp_path / "a.parcel").write_bytes(parcel.to_bytes(nodes["n2"][1])[:-100])
    (tmp_path / "c.parcel").write_text("hello")
    (tmp_path / "notes.txt").write_text("not a parcel by its name")
    read, refused = read_inbox(tmp_path)
    assert [item.manifest.sender for item in read] == ["n1"]
    assert len(refused) == 2
    assert refused[0].startswith("refused a.parcel: ")
    assert "not a parcel" in refused[1]
    with pytest.raises(BadInput, match="not a folder"):
        read_inbox(tmp_path / "nowhere")


@pytest.mark.parametrize("variant", ["fol", "fol-n"])
def test_a_poisoned_third_never_enters_the_top_k(variant: str) -> None:
    """Ten neighbours of a node, three of them poisoned: random weights, and weights trained on flipped labels."""
    clean = [trained(striped_site(f"clean-{i}", seed=i + 10, count=48), epochs=3) for i in range(7)]
    flipped = [trained(striped_site(f"flipped-{i}", seed=i + 30, count=48, flip=True), epochs=4) for i in range(2)]
    poison = [*flipped, random_parcel("random", seed=5)]
    for seed in (1, 2):
        site = striped_site("me", seed=seed, count=48)
        own = trained(site, epochs=3)
        met = [poison[0], *clean[:3], *poison[1:], *clean[3:]]
        made = orient(own, met, site, quick(buffer=10, top=4), seed=seed, variant=variant)
        chosen = {row["sender"] for row in made.rows if row["chosen"]}
        assert len(chosen) == 4
        assert not chosen & {"flipped-0", "flipped-1", "random"}
        assert sum("no more than chance" in line for line in made.log) == 3


def test_architectures_may_differ_between_neighbours() -> None:
    site = striped_site("me", count=32, size=32)
    kinds = {"cnn-fol": 0.05, "resnet18": 0.05, "mobilenetv2": 0.05, "vgg-wildfire": 0.05}
    specs = {kind: small_spec(kind, 32, width=width) for kind, width in kinds.items()}
    inbox = [random_parcel(f"{kind}-{i}", spec, i) for kind, spec in specs.items() for i in range(2)]
    settings = quick(epochs=1, batch=32, buffer=8, top=6, screen=False, diagnostics=True)
    for mine in ("cnn-fol", "resnet18"):
        made = orient(random_parcel("me", specs[mine], 7), inbox, site, settings)
        assert made.log == []
        assert made.student.specs[0] == specs[mine]
        assert {row["model"] for row in made.rows} == set(kinds)
        assert len({c.spec.name for c in made.kept}) > 1
        assert all(row["score"] is not None for row in made.rows)


def test_early_exit_when_no_neighbour_beats_self() -> None:
    site = striped_site("me", count=60)
    own = trained(site, epochs=8)
    inbox = [random_parcel(f"r{i}", seed=i) for i in range(3)]
    settings = quick(early_exit=True, screen=False, epochs=1, lr=1e-4)
    made = orient(own, inbox, site, settings)
    assert made.own is own
    assert "keeps its model" in made.log[-1]
    assert "distill" not in made.facts["seconds"]
    stays = orient(own, inbox, site, settings.model_copy(update={"early_exit": False}))
    assert "distill" in stays.facts["seconds"]


def test_weights_on_validation_data_and_experts_as_teacher(nodes: dict[str, tuple[Site, Parcel]]) -> None:
    site, own = nodes["n0"]
    inbox = parcels(nodes, "n0")
    misled = Site(site.id, site.train, striped_site("n0", seed=1, count=48, flip=True).val, site.test, STRIPES)
    on_train = orient(own, inbox, misled, quick(screen=False), variant="fol-an")
    on_val = orient(own, inbox, misled, quick(screen=False, fit="val"), variant="fol-an")
    assert on_train.facts["weights"].keys() == on_val.facts["weights"].keys()
    assert on_train.facts["weights"] != on_val.facts["weights"]
    free = orient(own, inbox, site, quick(weights="unconstrained"), variant="fol-an")
    assert sum(free.facts["weights"].values()) != pytest.approx(1, abs=1e-3)
    experts = orient(own, inbox, site, quick(teacher="experts"), variant="fol-an")
    assert isinstance(experts.predictor, ExpertsPredictor)
    with torch.no_grad():
        right = (experts.predictor(site.val.images).argmax(1) == site.val.labels).float().mean()
    assert float(right) > 0.8


def test_a_prototype_head_is_tuned_but_not_pruned(nodes: dict[str, tuple[Site, Parcel]]) -> None:
    site, own = nodes["n0"]
    other = random_parcel("p", small_spec(head="prototype"))
    made = orient(own, [other], site, quick(screen=False))
    row = next(row for row in made.rows if row["sender"] == "p")
    assert "finetune_epochs" in row
    assert "prune_epochs" not in row
    assert row["parameters_after"] == row["parameters_before"]
