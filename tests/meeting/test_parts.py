"""FOL piece by piece, with numbers a person can check: meetings, shared layers, selection, ensemble, distillation,
theorems."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from factories import quick, random_parcel, small_spec, striped_site
from flyby.data.views import PLAIN, ViewSettings
from flyby.errors import BadInput
from flyby.meeting import Candidate, OrientSettings, Schedule, make_schedule
from flyby.meeting.bounds import smoothness, theorem_1, theorem_2
from flyby.meeting.collect import newcomers, record_round, retain, stayers
from flyby.meeting.distill import TINY, UNKNOWN, Distilled, blended, epoch_steps, pool_views, study_material
from flyby.meeting.ensemble import ask, combine, fit_weights
from flyby.meeting.layers import cosine, layers_of, match, shared_layers
from flyby.meeting.pipeline import paired_gain
from flyby.meeting.select import top_k
from flyby.meeting.stack import Stack
from flyby.meeting.tuning import epoch_order, tune
from flyby.objectives.kd import softened_kl
from flyby.parcels.ledger import Ledger, SecondCrossing
from flyby.runs.config import make_config
from flyby.settings import build

# Meetings


def test_seventy_nodes_meet_everybody_exactly_once() -> None:
    nodes = [f"site-{i}" for i in range(70)]
    schedule = make_schedule(nodes, rounds=3, buffer=29, top=10, seed=0)
    for node in nodes:
        met = [schedule.senders(node, e) for e in (1, 2, 3)]
        assert [len(m) for m in met] == [29, 20, 20]
        assert set().union(*met) == set(nodes) - {node}


@given(st.integers(2, 24), st.integers(1, 4), st.integers(1, 12), st.integers(1, 12), st.integers(0, 5))
def test_no_ordered_pair_twice_and_no_buffer_over_its_size(
    count: int, rounds: int, buffer: int, top: int, seed: int
) -> None:
    nodes = [f"n{i}" for i in range(count)]
    schedule = make_schedule(nodes, rounds, buffer, top, seed)
    pairs = [(s, r) for e in range(1, rounds + 1) for r in nodes for s in schedule.senders(r, e)]
    assert len(pairs) == len(set(pairs))
    assert all((b, a) in set(pairs) for a, b in pairs), "who meets also gives"
    for node in nodes:
        held = 0
        for e in range(1, rounds + 1):
            held += len(schedule.senders(node, e))
            assert held <= buffer
            held = min(held, stayers(buffer, top))
    if count % 2 == 0 and count - 1 >= buffer + (rounds - 1) * newcomers(buffer, top):
        assert all(len(schedule.senders(n, 1)) == buffer for n in nodes)


def test_a_schedule_is_seeded_and_can_be_replayed(tmp_path: Path) -> None:
    nodes = [f"n{i}" for i in range(9)]
    made = make_schedule(nodes, 2, 4, 2, 7)
    assert made == make_schedule(nodes, 2, 4, 2, 7)
    assert made != make_schedule(nodes, 2, 4, 2, 8)
    made.save(tmp_path / "s.json")
    assert Schedule.load(tmp_path / "s.json") == made
    raw = json.loads((tmp_path / "s.json").read_text())
    raw["rounds"][0]["n0"] = ["n1"]
    (tmp_path / "s.json").write_text(json.dumps(raw))
    with pytest.raises(BadInput, match=r"changed|twice"):
        Schedule.load(tmp_path / "s.json")
    (tmp_path / "s.json").write_text('{"nodes": 3}')
    with pytest.raises(BadInput, match="not a meeting schedule"):
        Schedule.load(tmp_path / "s.json")


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ([{"a": ("b",)}, {"a": ("b",)}], "b sends to a twice"),
        ([{"a": ("a",)}], "meet itself"),
        ([{"a": ("z",)}], "'z', which is not one of its nodes"),
    ],
)
def test_an_impossible_schedule_is_refused(rounds: list[dict[str, tuple[str, ...]]], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Schedule(("a", "b"), tuple(rounds))


def test_crossings_carry_their_round_and_happen_once() -> None:
    schedule = Schedule(("a", "b", "c"), ({"a": ("b",), "b": ("a",)}, {"a": ("c",), "c": ("a",)}))
    ledger = Ledger()
    for e in (1, 2):
        record_round(ledger, schedule, e, {n: (10, f"digest-{n}") for n in "abc"})
    assert [(c.sender, c.receiver, c.round) for c in ledger.crossings] == [
        ("b", "a", 1),
        ("a", "b", 1),
        ("c", "a", 2),
        ("a", "c", 2),
    ]
    assert ledger.total_bytes == 40
    with pytest.raises(SecondCrossing):
        record_round(ledger, schedule, 1, dict.fromkeys("abc", (10, "d")))


def test_the_best_of_the_chosen_stay_and_leave_a_place_for_the_node_itself() -> None:
    chosen = [Candidate(f"n{i}", small_spec(), {}) for i in (1, 3, 0)]
    assert [c.sender for c in retain(chosen, 4, 3)] == ["n1", "n3"]
    assert retain(chosen, 4, 1) == []
    assert len(retain(chosen, 2, 9)) == 2


# Shared layers


def test_the_worked_example_of_appendix_b1() -> None:
    """Eq. 25, and eq. 26 without BN(32)_j, which the neighbour does not have."""
    own = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 64, 3), nn.Linear(256, 10))
    other = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.Linear(256, 10))
    pairs = match(layers_of(own), layers_of(other))
    assert pairs == [("0", "0"), ("2", "1"), ("3", "3")]
    assert set(layers_of(other)) - {b for _, b in pairs} == {"2"}


def test_matching_is_one_to_one_first_come_first_served() -> None:
    own = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    other = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4))
    assert match(layers_of(own), layers_of(other)) == [("0", "1"), ("1", "2")]


def test_cosine_over_shared_layers_and_minus_one_without_any() -> None:
    spec = small_spec("mlp", width=0.1)
    state = random_parcel("a", spec).weights
    assert cosine(spec, state, spec, state) == pytest.approx(1)
    assert cosine(spec, state, spec, {n: -t for n, t in state.items()}) == pytest.approx(-1)
    other = small_spec("cnn-small", width=0.2)
    assert shared_layers(spec, other) == ()
    assert cosine(spec, state, other, random_parcel("b", other).weights) == -1


# Selection


def test_top_k_breaks_ties_only_at_the_cutoff() -> None:
    scores = [0.8, 0.9, 0.8, 0.7, 0.8, 0.9]
    asked: list[int] = []

    def closeness(place: int) -> float:
        asked.append(place)
        return {0: 0.1, 2: 0.5, 4: 0.3}[place]

    assert top_k(scores, 4, closeness) == [1, 5, 2, 4]
    assert sorted(asked) == [0, 2, 4]
    asked.clear()
    assert top_k(scores, 5, closeness) == [1, 5, 0, 2, 4], "all the tied fit: nothing is asked"
    assert asked == []
    assert top_k(scores, 99, closeness) == [1, 5, 0, 2, 4, 3]
    assert top_k([0.5, 0.5], 1, lambda place: 1.0) == [0]
    assert top_k([], 3, closeness) == []


# Ensemble


@pytest.mark.parametrize(("form", "truth"), [("simplex", (0.6, 0.3, 0.1)), ("unconstrained", (1.2, -0.5, 0.4))])
def test_ensemble_weights_recover_a_known_mixture(form: str, truth: tuple[float, ...]) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(3, 8_000, 4, generator=rng)
    chances = combine(logits, torch.tensor(truth)).softmax(1)
    labels = torch.multinomial(chances, 1, generator=rng).flatten()
    found = fit_weights(logits, labels, form)  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx(truth, abs=0.05)
    if form == "simplex":
        assert float(found.sum()) == pytest.approx(1)
        assert bool((found >= 0).all())


# Distillation


def test_softened_kl_by_hand() -> None:
    teacher, student = torch.tensor([[0.0, 2 * math.log(3)]]), torch.tensor([[5.0, 5.0]])
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)  # T = 2: softmax(0, log 3) = (1/4, 3/4)
    assert float(softened_kl(student, teacher, 2.0)) == pytest.approx(expected)


def test_distillation_without_an_anchor_reaches_the_teacher_and_with_a_huge_one_stays() -> None:
    site, spec = striped_site("a"), small_spec("mlp", width=0.1)
    start, teacher = random_parcel("a", spec, 1), random_parcel("b", spec, 2)
    with torch.no_grad():
        logits = {part: 3 * teacher.network()(spec.prepare(getattr(site, part).images)) for part in ("train", "val")}
    distances = {}
    for anchor in (0.0, 0.01, 1e6):
        settings = quick(anchor=anchor, lr=0.5, distill_epochs=40, patience=40, temperature=1.0)
        stack = Stack.of(spec, [start.weights], "cpu")
        problem = Distilled(stack, logits["train"], settings, logits["val"])
        rows = torch.arange(len(site.train))
        before = float(problem.data_term(stack.logits(spec.prepare(site.train.images)).detach(), rows, rows))
        tuned = tune(stack, problem, site, settings, 40, (0, "distill"))
        after = float(problem.data_term(tuned.stack.logits(spec.prepare(site.train.images)).detach(), rows, rows))
        moved = sum(
            float((tuned.stack.parameters[n].detach()[0] - start.weights[n]).square().sum())
            for n in tuned.stack.parameters
        )
        distances[anchor] = moved
        if anchor == 0:
            assert problem.penalty(stack.parameters) is None
            assert after < 0.1 * before
        if anchor == 1e6:
            assert moved < 1e-6
    assert distances[0.0] > distances[0.01] > distances[1e6]


def test_the_anchor_is_the_sum_of_squares_times_lambda() -> None:
    spec = small_spec("mlp", width=0.1)
    stack = Stack.of(spec, [random_parcel("a", spec).weights], "cpu")
    problem = Distilled(stack, torch.zeros(4, 3), quick(anchor=0.01))
    moved = {n: t.detach() + 2 for n, t in stack.parameters.items()}
    penalty = problem.penalty(moved)
    assert penalty is not None
    assert float(penalty) == pytest.approx(0.01 * 4 * spec.parameter_count(), rel=1e-4)


# Theorems


@given(st.integers(2, 6), st.floats(0.5, 8), st.integers(0, 50))
def test_our_form_of_theorem_1_holds(classes: int, temperature: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    student, teacher = 3 * torch.randn(20, classes, generator=rng), 3 * torch.randn(20, classes, generator=rng)
    labels = torch.randint(classes, (20,), generator=rng)
    said = theorem_1(student, teacher, labels, temperature)
    assert said["logit_gap"] <= said["logit_bound"] * (1 + 1e-9)
    assert said["risk_gap"] <= said["ours"] * (1 + 1e-9)


def test_theorem_1_as_printed_by_hand() -> None:
    student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, math.log(3)]])
    said = theorem_1(student, teacher, torch.tensor([1]), 1.0)
    kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert said["kd_loss"] == pytest.approx(kl)
    assert said["least_probability"] == pytest.approx(0.25)
    assert said["printed"] == pytest.approx(math.sqrt(2) * 2 * 1 / (0.25 * 0.75) * (kl / 2 + 1 / 8))
    assert said["ours"] == pytest.approx(math.sqrt(2) * 4 * math.hypot(0.25, 0.25))
    assert said["risk_gap"] == pytest.approx(math.log(1.5))


def test_theorem_2_contracts_only_under_its_rate() -> None:
    said = theorem_2(0.1, 1.0, 2.0)
    assert said["factor"] == pytest.approx(1 - 0.2 + 0.08)
    assert said["largest_rate"] == pytest.approx(0.25)
    assert not said["says_nothing"]
    assert theorem_2(0.25, 1.0, 2.0)["says_nothing"]
    assert theorem_2(0.1, 0.0, 2.0)["says_nothing"]


def test_smoothness_finds_the_anchors_curvature_where_nothing_else_bends() -> None:
    """A teacher equal to the student and a huge anchor: the Hessian is 2 lambda times the identity, but for the small
    Fisher part."""
    spec, site = small_spec("mlp", width=0.1), striped_site("a")
    stack = Stack.of(spec, [random_parcel("a", spec).weights], "cpu")
    with torch.no_grad():
        teacher = stack.logits(spec.prepare(site.train.images))[0]
    problem = Distilled(stack, teacher, quick(anchor=1000.0))
    assert smoothness(stack, problem, site.train.images, rounds=4) == pytest.approx(2000, rel=0.01)


# fol-plus


def test_weights_with_a_prior_are_those_of_a_grid() -> None:
    """Three members, five images: the least of mean cross-entropy + s KL(uniform || w) / N over a fine grid of the
    simplex."""
    rng = torch.Generator().manual_seed(3)
    logits, labels = 2 * torch.randn(3, 5, 4, generator=rng, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    steps = 200
    grid = [(i / steps, j / steps, (steps - i - j) / steps) for i in range(1, steps) for j in range(1, steps - i)]
    points = torch.tensor(grid, dtype=torch.float64)
    answers = torch.einsum("pk,knc->pnc", points, logits)
    fit = nn.functional.cross_entropy(answers.transpose(1, 2), labels.expand(len(points), -1), reduction="none").mean(1)
    for prior in (0.5, 4.0):
        best = points[(fit + prior / 5 * (-points.log().mean(1) - math.log(3))).argmin()]
        torch.testing.assert_close(fit_weights(logits, labels, prior=prior), best, rtol=0, atol=1 / steps)


def test_a_prior_goes_from_the_fit_to_uniform() -> None:
    """One image that the first of two members gets right: without a prior all the weight is its, with a huge one half.
    In between by hand: logits (+a, -a), d/dw of log(1 + exp(-2a(2w - 1))) - s/2 (log w + log(1 - w)) is 0 at w."""
    logits = torch.tensor([[[1.0, -1.0]], [[-1.0, 1.0]]])
    label = torch.tensor([0])
    assert float(fit_weights(logits, label)[0]) > 0.99
    assert float(fit_weights(logits, label, prior=1e6)[0]) == pytest.approx(0.5, abs=1e-3)
    w = float(fit_weights(logits, label, prior=1.0)[0])
    assert 4 / (1 + math.exp(2 * (2 * w - 1))) == pytest.approx((1 / w - 1 / (1 - w)) / -2, rel=1e-3)


def test_the_gradient_with_t_squared_is_that_of_warm_probabilities() -> None:
    """T^2 KL(softmax(z/T) || softmax(f/T)) has the gradient T (q - p) in f; without the factor it is (q - p) / T."""
    spec = small_spec("mlp", width=0.1)
    stack = Stack.of(spec, [random_parcel("a", spec).weights], "cpu")
    teacher, student = torch.tensor([[0.0, 0.0, 8.0]]), torch.tensor([[[4.0, 0.0, 0.0]]], requires_grad=True)
    difference = (student.detach()[0] / 4).softmax(1) - (teacher / 4).softmax(1)
    for squared, factor in ((True, 4.0), (False, 1 / 4)):
        problem = Distilled(stack, teacher, quick(temperature_squared=squared))
        loss = problem.data_term(student, torch.tensor([2]), torch.tensor([0])).sum()
        torch.testing.assert_close(torch.autograd.grad(loss, student)[0][0], factor * difference)


def test_labels_count_where_there_are_any() -> None:
    spec = small_spec("mlp", width=0.1)
    problem = Distilled(
        Stack.of(spec, [random_parcel("a", spec).weights], "cpu"), torch.zeros(3, 3), quick(label_loss=0.3)
    )
    logits = torch.zeros(1, 3, 3)
    logits[0, 1, 0] = math.log(2)
    kl = float(softened_kl(logits[0], torch.zeros(3, 3), 4.0).mean())
    rows = torch.arange(3)
    told = problem.data_term(logits, torch.tensor([UNKNOWN, 0, 2]), rows)
    assert float(told) == pytest.approx(kl + 0.3 * (math.log(2) + math.log(3)) / 2)
    assert float(problem.data_term(logits, torch.full((3,), UNKNOWN), rows)) == pytest.approx(kl)


def test_a_pool_holds_views_of_every_image_and_of_those_without_a_label() -> None:
    site, spec = striped_site("a", count=12, size=24), small_spec(size=24)
    more = striped_site("b", count=5, size=24).train.images
    plain = study_material(site, spec, quick(), None, (0,))
    assert torch.equal(plain.images, site.train.images)
    pool = study_material(site, spec, quick(pool=3), more, (0,))
    count = len(site.train) + len(more)
    assert len(pool) == 4 * count, "the images themselves, and three views of each"
    assert torch.equal(pool.images[: len(site.train)], site.train.images)
    assert pool.images.dtype == torch.uint8
    assert torch.equal(pool.labels[:count], torch.cat([site.train.labels, torch.full((len(more),), UNKNOWN)]))
    assert not torch.equal(pool.images[:count], pool.images[count : 2 * count])
    still = study_material(site, spec, quick(pool=2, views=PLAIN), None, (0,))
    assert torch.equal(still.images, site.train.images.repeat(3, 1, 1, 1)), (
        "no view, no change: bytes come back as bytes"
    )


def test_views_of_the_pool_are_closer_than_those_of_training_and_a_user_may_choose_others() -> None:
    site, tiny = striped_site("a", count=6, size=24), striped_site("a", count=6, size=12)
    assert pool_views(site, quick()) == ViewSettings(crop="resized", scale=(0.5, 1.0), flip=0.5)
    assert pool_views(tiny, quick()) == TINY
    assert pool_views(site, quick(views=PLAIN)) == PLAIN, "what a user says of the views holds for the pool"
    turned = ViewSettings(turns=True, views=2)
    assert pool_views(site, quick(views=PLAIN, pool_views=turned)) == turned.model_copy(update={"views": 1})


def test_a_blend_lies_between_two_images_and_has_no_label() -> None:
    site, spec = striped_site("a", count=12, size=24), small_spec(size=24)
    dark, bright = torch.full((1, 2, 2, 1), 10, dtype=torch.uint8), torch.full((1, 2, 2, 1), 250, dtype=torch.uint8)
    seen = {int(blended(torch.cat([dark, bright]), (k,))[0, 0, 0, 0]) for k in range(40)}
    assert min(seen) >= 10
    assert max(seen) <= 250
    assert len(seen) > 10, "shares of its own, not one half"
    count = len(site.train)
    pool = study_material(site, spec, quick(pool=2, mix=True), None, (0,))
    assert torch.equal(pool.labels[:count], site.train.labels)
    assert bool((pool.labels[count:] == UNKNOWN).all())
    assert pool.images.dtype == torch.uint8


def test_settings_inside_settings_are_named_with_dots() -> None:
    asked = ["orient.pool_views.turns=true", "orient.pool_views.crop=pad", "orient.pool=2"]
    assert make_config("fol-plus", assignments=asked).orient == {
        "pool_views": {"turns": True, "crop": "pad"},
        "pool": 2,
    }
    with pytest.raises(BadInput, match=r"unknown orient setting 'pool_views\.turn'"):
        make_config("fol-plus", assignments=["orient.pool_views.turn=true"])
    with pytest.raises(BadInput, match=r"train\.lr = {'x': 3} will not do"):
        make_config("fol-plus", assignments=["train.lr.x=3"])


def test_energy_is_time() -> None:
    assert quick(joules=600, watts=10).time == 60
    assert quick(joules=600, watts=10, seconds=20).time == 20
    assert quick().time is None
    with pytest.raises(BadInput, match="joules need watts"):
        build(OrientSettings, {"joules": 3}, "orient")


def test_an_epoch_of_distillation_has_enough_steps() -> None:
    settings = quick(batch=32, distill_epochs=20, distill_steps=1800)
    assert epoch_steps(70, settings) == 90, "three steps a pass would be 60 in all"
    assert epoch_steps(6400, settings) == 200
    assert epoch_steps(70, quick(batch=32, distill_epochs=20)) == 3
    order = epoch_order(70, 32, (0, "order", 1), 7, torch.device("cpu"))
    assert [len(rows) for rows in order] == [32] * 7
    a_pass = epoch_order(70, 32, (0, "order", 1), None, torch.device("cpu"))
    assert len(a_pass) == 3
    assert all(torch.equal(a, b) for a, b in zip(a_pass, order, strict=False)), "the first pass is the usual one"
    assert not torch.equal(order[0], order[3])
    assert set(torch.cat(order[3:6]).tolist()) == set(range(70))


def test_asking_the_teacher_is_asking_its_members() -> None:
    site, specs = striped_site("a"), [small_spec(), small_spec("mlp", width=0.1), small_spec()]
    members = [Candidate.of(random_parcel(f"n{i}", spec, i), "cpu") for i, spec in enumerate(specs)]
    weights = (0.5, 0.3, 0.2)
    with torch.no_grad():
        expected = sum(w * c.network()(c.spec.prepare(site.val.images)) for w, c in zip(weights, members, strict=True))
    said = ask(dict(zip(members, weights, strict=True)), site.val.images, quick())
    torch.testing.assert_close(said, expected, rtol=1e-4, atol=1e-5)


def test_a_paired_gain_by_hand() -> None:
    """Log-losses log 2, log 2, log 4 before and 0, log 2, log 2 after: gains log 2, 0, log 2."""
    sure = 1e9
    old = torch.tensor([[0.0, 0.0, -sure, -sure], [0.0, 0.0, -sure, -sure], [0.0, 0.0, 0.0, 0.0]])
    new = torch.tensor([[sure, 0.0, 0.0, 0.0], [0.0, 0.0, -sure, -sure], [0.0, 0.0, -sure, -sure]])
    gain, error = paired_gain(old, new, torch.zeros(3, dtype=torch.long))
    assert gain == pytest.approx(2 / 3 * math.log(2))
    assert error == pytest.approx(math.log(2) / 3)
    assert paired_gain(old[:1], new[:1], torch.zeros(1, dtype=torch.long))[1] == math.inf
