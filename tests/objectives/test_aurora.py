"""AURORA's and FAFI's clients: anchors, SupCon, SALT, every way to choose lambda, FedETF; each formula worked out a
second way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factories import train_site
from flyby.data.dataset import DataBundle
from flyby.data.site import Part, Site, part_of
from flyby.data.views import PLAIN, SALT, ViewSettings
from flyby.errors import BadInput, Diverged
from flyby.fusion import FUSIONS, Inbox
from flyby.fusion.ensembles.iffi import Iffi
from flyby.models import ModelSpec, Network
from flyby.models.anchors import simplex_etf
from flyby.objectives import OBJECTIVES
from flyby.objectives.anchored import AnchorSettings
from flyby.objectives.aurora import Aurora, AuroraSettings, first_log_sigma
from flyby.objectives.base import Batch, Objective
from flyby.objectives.etf import BalancedEtf
from flyby.objectives.salt import Salt, SaltSettings, supcon
from flyby.objectives.weighting import WEIGHTINGS, Learnable, TwoScalars, Uncertainty, Weighting, WeightingSettings
from flyby.parcels import parcel
from flyby.rng import generator
from flyby.runs.config import make_config, plan
from flyby.training.checkpoint import load_checkpoint
from flyby.training.loop import Trained
from flyby.training.optim import make_optimizer
from flyby.training.settings import TrainSettings
from flyby.training.steps import Step, one_epoch

ALL = ("none", "fixed", "linear", "cosine", "learnable", "gradnorm", "kendall", "decoupled", "meta-anneal", "aurora")
MLP = ModelSpec(name="mlp", classes=10, channels=1, size=(8, 8), widths={"fc1": 24, "fc2": 16})
CNN = ModelSpec(name="cnn-small", classes=10, channels=1, size=(8, 8), widths={"conv1": 6, "conv2": 8, "conv3": 12})
VIEWS = SALT.model_copy(update={"flip": 0.0})


def make_site(
    digits: DataBundle, samples: int = 120, keep: Sequence[int] = tuple(range(10)), name: str = "site-0"
) -> Site:
    rows = np.flatnonzero(np.isin(digits.train.labels, keep))[:samples]
    return Site(
        name,
        part_of(digits.train, rows),
        part_of(digits.train, rows[:0]),
        part_of(digits.train, rows[:0]),
        digits.train.class_names,
    )


def random_site(classes: int, held: Sequence[int], samples: int, name: str = "site-0") -> Site:
    rng = generator("random site", classes, samples)
    labels = torch.tensor([held[i % len(held)] for i in range(samples)])
    part = Part(torch.randint(0, 256, (samples, 8, 8, 1), generator=rng, dtype=torch.uint8), labels)
    return Site(
        name,
        part,
        Part(part.images[:0], labels[:0]),
        Part(part.images[:0], labels[:0]),
        tuple(f"c{i}" for i in range(classes)),
    )


def aurora(**settings: Any) -> Aurora:
    return Aurora(AuroraSettings(**settings))


def trained(
    site: Site,
    objective: Objective,
    spec: ModelSpec = MLP,
    views: ViewSettings = VIEWS,
    seed: int = 0,
    folder: Path | None = None,
    on_epoch: Callable[[Any], None] | None = None,
    **settings: Any,
) -> Trained:
    choice = TrainSettings(**{"epochs": 3, **objective.defaults(objective.settings), **settings})
    return train_site(
        site,
        objective.adapt_spec(spec, objective.settings),
        objective,
        choice,
        views,
        seed,
        folder=folder,
        on_epoch=on_epoch,
    )


def learner(kind: str = "aurora", **settings: Any) -> Weighting:
    return WEIGHTINGS[kind](WeightingSettings(weighting=kind, **settings), 0.0)


def prototypes_of(model: nn.Module) -> nn.Parameter:
    return model.get_parameter("head.prototypes")


def number(value: float) -> Tensor:
    return torch.tensor(value)


# -- anchors


@pytest.mark.parametrize(("classes", "dim"), [(2, 2), (10, 9), (10, 512), (100, 99), (100, 512), (2, 1), (3, 3)])
def test_the_gram_matrix_of_the_anchors_is_the_simplex(classes: int, dim: int) -> None:
    anchors = simplex_etf(classes, dim, seed=0)
    assert anchors.shape == (classes, dim)
    assert anchors.dtype == torch.float32
    gram = anchors.double() @ anchors.double().T
    for i in range(classes):
        for j in range(classes) if classes <= 10 else (i, (i + 1) % classes, (7 * i + 3) % classes):
            assert abs(float(gram[i, j]) - (1.0 if i == j else -1 / (classes - 1))) < 1e-5
    wanted = (
        classes
        / (classes - 1)
        * (torch.eye(classes, dtype=torch.float64) - torch.ones(classes, classes, dtype=torch.float64) / classes)
    )
    assert float((gram - wanted).abs().max()) < 1e-5


@pytest.mark.parametrize(("classes", "dim"), [(3, 2), (10, 9), (10, 64)])
def test_one_seed_gives_one_set_of_anchors(classes: int, dim: int) -> None:
    one, two, other = (simplex_etf(classes, dim, seed) for seed in (5, 5, 6))
    assert one.numpy().tobytes() == two.numpy().tobytes()
    assert float((one - other).abs().max()) > 0.01


def test_too_few_dimensions_name_the_projector(digits: DataBundle) -> None:
    with pytest.raises(
        BadInput, match=r"100 classes needs .* at least 99 dimensions, this network has 98.*model\.projector"
    ):
        simplex_etf(100, 98, 0)
    site = random_site(100, range(100), 200)
    for objective in (aurora(), BalancedEtf(AnchorSettings())):
        with pytest.raises(BadInput, match=r"model\.projector"):
            trained(site, objective, MLP.replace(classes=100))


@pytest.mark.parametrize("objective", [aurora(), BalancedEtf(AnchorSettings())], ids=["aurora", "fedetf"])
def test_a_projector_makes_room_for_more_classes_than_dimensions(objective: Objective) -> None:
    site = random_site(100, range(100), 200)
    spec = MLP.replace(classes=100, projector=(32, 99))  # 16 features -> 99
    made = trained(site, objective, spec, epochs=2).parcel
    assert made.manifest.spec.projector == (32, 99)
    network = made.network()
    assert [tuple(layer.weight.shape) for layer in network.projector if isinstance(layer, nn.Linear)] == [
        (32, 16),
        (99, 32),
    ]
    start = objective.adapt_spec(spec, objective.settings).build(generator(0, "shared", "init"))
    assert not torch.equal(start.projector[0].weight, network.projector[0].weight), "the projector is trained"
    for rule in ("experts-calibrated", "iffi"):
        with torch.no_grad():
            scores = FUSIONS[rule]().fuse(Inbox([made]))(site.train.images[:3])
        assert scores.shape == (3, 100)
        assert bool(scores.isfinite().all())


# -- SupCon


def supcon_by_loops(points: list[list[float]], labels: Sequence[int], tau: float) -> float:
    """The definition, one anchor and one positive at a time, in float64."""
    total = 0.0
    for i, own in enumerate(points):
        similar = [sum(a * b for a, b in zip(own, other, strict=True)) / tau for other in points]
        normaliser = math.log(sum(math.exp(s) for a, s in enumerate(similar) if a != i))
        positives = [a for a, label in enumerate(labels) if label == labels[i] and a != i]
        if positives:
            total += sum(normaliser - similar[a] for a in positives) / len(positives)
    return total / len(points)


def test_supcon_on_four_points_by_hand() -> None:
    # Four unit vectors in the plane: a = (1, 0), b = (.6, .8), c = (0, 1), d = (-1, 0).
    # Inner products: ab .6, ac 0, ad -1, bc .8, bd -.6, cd 0; tau = .5 doubles them.
    points = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    row_a = math.log(math.exp(1.2) + math.exp(0.0) + math.exp(-2.0))
    row_b = math.log(math.exp(1.2) + math.exp(1.6) + math.exp(-1.2))
    row_c = math.log(math.exp(0.0) + math.exp(1.6) + math.exp(0.0))
    row_d = math.log(math.exp(-2.0) + math.exp(-1.2) + math.exp(0.0))
    cases = {
        (0, 0, 1, 1): ((row_a - 1.2) + (row_b - 1.2) + (row_c - 0.0) + (row_d - 0.0)) / 4,
        (0, 0, 0, 1): (
            ((row_a - (1.2 + 0.0) / 2) + (row_b - (1.2 + 1.6) / 2) + (row_c - (0.0 + 1.6) / 2)) / 4
        ),  # d has no positive: 0
        (0, 0, 1, 2): ((row_a - 1.2) + (row_b - 1.2)) / 4,
        (0, 1, 2, 3): 0.0,
    }
    for labels, by_hand in cases.items():
        assert supcon_by_loops(points.tolist(), labels, 0.5) == pytest.approx(by_hand, abs=1e-7)
        assert float(supcon(points, torch.tensor(labels), 0.5, 4)) == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize(
    ("n", "dim", "classes", "tau"), [(12, 3, 2, 0.07), (20, 16, 10, 0.07), (9, 4, 3, 1.0), (6, 5, 6, 0.2)]
)
def test_supcon_and_its_gradient_against_a_double_loop(n: int, dim: int, classes: int, tau: float) -> None:
    rng = generator("supcon", n, dim)
    raw = torch.randn(n, dim, generator=rng, dtype=torch.float64)
    labels = torch.randint(0, classes, (n,), generator=rng)
    mine, plain = raw.float().requires_grad_(), raw.clone().requires_grad_()
    found = supcon(F.normalize(mine, dim=1), labels, tau, classes)

    unit = plain / plain.norm(dim=1, keepdim=True)
    terms = []
    for i in range(n):
        others = [a for a in range(n) if a != i]
        positives = [a for a in others if labels[a] == labels[i]]
        if positives:
            normaliser = torch.stack([unit[i] @ unit[a] / tau for a in others]).exp().sum().log()
            terms.append(torch.stack([normaliser - unit[i] @ unit[a] / tau for a in positives]).mean())
    expected = torch.stack(terms).sum() / n
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert found.item() == pytest.approx(supcon_by_loops(unit.tolist(), labels.tolist(), tau), rel=1e-5)
    found.backward()
    expected.backward()
    assert mine.grad is not None
    assert plain.grad is not None
    assert torch.allclose(mine.grad.double(), plain.grad, atol=1e-5 * float(plain.grad.abs().max()) + 1e-7)


def test_anchors_without_a_positive_give_no_gradient_and_no_nan() -> None:
    for points in (torch.eye(4), torch.eye(4)[:1]):
        features = points.clone().requires_grad_()
        loss = supcon(features, torch.arange(len(points)), 0.07, 4)
        loss.backward()
        assert loss.item() == 0.0
        assert features.grad is not None
        assert torch.equal(features.grad, torch.zeros_like(points))


# -- SALT


def salt_batch(n: int = 10, classes: int = 10) -> Batch:
    rng = generator("salt batch", n)
    labels = torch.randint(0, classes, (n,), generator=rng)
    return Batch(torch.randn(2 * n, 1, 8, 8, generator=rng), labels.repeat(2), 2)


def cross_entropy_by_loops(logits: np.ndarray, labels: Sequence[int]) -> float:
    return float(
        np.mean([math.log(sum(math.exp(v - row[y]) for v in row)) for row, y in zip(logits, labels, strict=True)])
    )


def salt_by_hand(
    model: Network, batch: Batch, tau: float = 0.07, proto_tau: float = 1.0, scale: float = 1.0
) -> dict[str, float]:
    with torch.no_grad():
        features = model.features(batch.images).double().numpy()
    features = features / np.linalg.norm(features, axis=1, keepdims=True)
    prototypes = prototypes_of(model).detach().double().numpy()
    labels = batch.labels.tolist()
    return {
        "cls": cross_entropy_by_loops(scale * features @ prototypes.T, labels),
        "con": supcon_by_loops(features.tolist(), labels, tau),
        "proto_self": cross_entropy_by_loops(prototypes @ prototypes.T, range(len(prototypes))),
        "proto_feat": cross_entropy_by_loops(scale * features @ prototypes.T / proto_tau, labels),
    }


@pytest.mark.parametrize(
    ("settings", "hand"),
    [
        ({}, {}),
        ({"tau": 0.5}, {"tau": 0.5}),
        ({"proto_tau": 0.25}, {"proto_tau": 0.25}),
        ({"cls": 2.0, "con": 0.0, "proto_self": 0.5, "proto_feat": 3.0}, {}),
        ({"cls": 0.0, "con": 4.0, "proto_self": 0.0, "proto_feat": 0.0, "proto_tau": 2.0}, {"proto_tau": 2.0}),
    ],
)
def test_salts_four_terms_and_their_weights(settings: dict[str, float], hand: dict[str, float]) -> None:
    model = MLP.replace(head="prototype").build(generator(3))
    batch = salt_batch()
    terms = Salt(SaltSettings(**settings)).loss(model, batch, number(0.5))
    by_hand = salt_by_hand(model, batch, **hand)
    for name, value in by_hand.items():
        assert terms.parts[name].item() == pytest.approx(value, rel=1e-5), name
    weights = {name: settings.get(name, 1.0) for name in by_hand}
    assert terms.total.item() == pytest.approx(sum(weights[name] * by_hand[name] for name in by_hand), rel=1e-5)
    logits = model(batch.images)
    assert terms.parts["train_accuracy"].item() == pytest.approx(
        float((logits.argmax(1) == batch.labels).double().mean())
    )


def test_the_first_and_last_term_are_equal_as_released_and_free_of_each_other_otherwise() -> None:
    model, batch = MLP.replace(head="prototype").build(generator(3)), salt_batch()
    released = Salt(SaltSettings()).loss(model, batch, number(0.5)).parts
    assert released["cls"].item() == released["proto_feat"].item()
    warmer = Salt(SaltSettings(proto_tau=0.5)).loss(model, batch, number(0.5)).parts
    assert warmer["cls"].item() == released["cls"].item() != float(warmer["proto_feat"])
    scaled = MLP.replace(head="prototype", logit_scale=True).build(generator(3))
    parts = Salt(SaltSettings(proto_tau=2.0)).loss(scaled, batch, number(0.5)).parts
    by_hand = salt_by_hand(scaled, batch, proto_tau=2.0, scale=16.0)
    assert parts["cls"].item() == pytest.approx(by_hand["cls"], rel=1e-5)
    assert parts["proto_feat"].item() == pytest.approx(by_hand["proto_feat"], rel=1e-5)


def test_salts_gradient_is_that_of_a_plain_sum() -> None:
    model, batch = MLP.replace(head="prototype").build(generator(4)), salt_batch()
    parameters = list(model.parameters())
    found = torch.autograd.grad(Salt(SaltSettings(proto_self=0.5)).loss(model, batch, number(0.5)).total, parameters)

    unit = F.normalize(model.features(batch.images), dim=1)
    prototypes = prototypes_of(model)
    alike = (batch.labels[:, None] == batch.labels[None]) & ~torch.eye(20, dtype=torch.bool)
    logs = (unit @ unit.T / 0.07).masked_fill(torch.eye(20, dtype=torch.bool), -1e9).log_softmax(1)
    contrast = -((logs * alike).sum(1) / alike.sum(1)).mean()  # two views: everybody has a positive
    plain = 2 * F.cross_entropy(unit @ prototypes.T, batch.labels) + contrast
    plain = plain + 0.5 * F.cross_entropy(prototypes @ prototypes.T, torch.arange(10))
    for one, two in zip(found, torch.autograd.grad(plain, parameters), strict=True):
        assert torch.allclose(one, two, atol=1e-5)


def test_presets() -> None:
    paper, as_run = (Salt.defaults(SaltSettings(preset=preset)) for preset in ("paper", "as-run"))
    shared = {"lr": 0.05, "momentum": 0.9, "clip": 1.0, "optimizer": "sgd"}
    assert paper == {**shared, "weight_decay": 5e-4, "schedule": "cosine"}
    assert as_run == {**shared, "weight_decay": 0.0, "schedule": "constant"}
    assert Salt.batch == 512
    found = {preset: aurora(preset=preset).settings for preset in ("paper", "as-run")}
    assert (found["paper"].anneal_on, found["paper"].sigma_init) == ("log", "zero")
    assert (found["as-run"].anneal_on, found["as-run"].sigma_init) == ("data", "entropy")
    assert aurora(preset="as-run", anneal_on="log").settings.anneal_on == "log"


# -- one AURORA step, by hand


class Toy(nn.Module):
    """Features are the pixels themselves, so that the prototypes are all there is to learn."""

    def __init__(self, prototypes: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self.head = nn.Module()
        self.head.prototypes = nn.Parameter(torch.tensor(prototypes))
        self.head.register_parameter("scale", None)

    def features(self, images: Tensor) -> Tensor:
        return images.flatten(1)


def toy_site(labels: Sequence[int], classes: int = 2) -> Site:
    part = Part(torch.zeros(len(labels), 1, 1, 2, dtype=torch.uint8), torch.tensor(labels))
    return Site("toy", part, part, part, tuple(f"c{i}" for i in range(classes)))


def softmax(rows: np.ndarray) -> np.ndarray:
    powers = np.exp(rows - rows.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


START = [[0.9, -0.4], [0.3, 0.7]]
SAMPLES = [[2.0, 1.0], [-1.0, 0.5], [0.5, 3.0]]


@pytest.mark.parametrize(
    ("first", "labels", "extra"),
    [
        ((0.0, 0.0), (0, 1, 1), {}),  # the beginning of a training
        (
            (math.log(60.0), 0.0),
            (0, 1, 1),
            {},
        ),  # lambda = 60: the hinge is on, and the sigma gradient over 1 is clipped
        ((math.log(50.5), 0.0), (0, 1, 1), {"sigma_clip": 10.0}),  # the hinge is on, nothing is clipped
        ((0.4, -0.7), (1, 1, 1), {"align_reduction": "sum"}),  # one class of two
        ((0.4, -0.7), (0, 1, 1), {"anneal_on": "data", "gamma": 0.0}),
        ((math.log(60.0), 0.0), (0, 1, 1), {"lambda_cap": 55.0}),
    ],
)
def test_two_steps_of_aurora_by_hand(
    first: tuple[float, float], labels: tuple[int, ...], extra: dict[str, Any]
) -> None:
    progress, lr = 0.3, 0.05
    objective, model = aurora(**extra), Toy(START)
    objective.prepare(model, toy_site(labels), 0)
    objective.weighting.scalars.copy_(torch.tensor(first))
    settings = TrainSettings(epochs=1, lr=lr, momentum=0.9, weight_decay=0.0, clip=1.0)
    optimizer = make_optimizer(model, objective, settings)
    views = (torch.tensor([0.1, -0.2]), torch.tensor([-0.3, 0.4]))
    part = Part(torch.tensor(SAMPLES), torch.tensor(labels))

    def two_views(x: Tensor) -> Tensor:
        return torch.cat([x + shift for shift in views])[:, :, None, None]

    step = Step(model, objective, optimizer, part, two_views, settings, 2)

    # The same by formulas, in float64.
    features = np.concatenate([np.array(SAMPLES) + shift.double().numpy() for shift in views])
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    twice = list(labels) * 2
    anchors = simplex_etf(2, 2, 0).double().numpy()
    held = np.array([[float(c in labels)] for c in (0, 1)])
    prototypes, velocity = np.array(START), np.zeros((2, 2))
    ell, drift = np.array(first), np.zeros(2)
    s = max(1e-3, 0.5 * (1 + math.cos(math.pi * progress)))
    share = 1 / held.sum() / (2 if extra.get("align_reduction") != "sum" else 1)
    on_log, on_data = (1.0, s) if extra.get("anneal_on") == "data" else (s, 1.0)
    gamma, clip = extra.get("gamma", 1e-3), extra.get("sigma_clip", 1.0)
    for _ in range(2):
        one_epoch(step, iter([torch.arange(3)]), progress)
        found = step.means()

        certain = softmax(unit @ prototypes.T)
        wrong = certain - np.eye(2)[twice]
        own = softmax(prototypes @ prototypes.T) - np.eye(2)
        cls = cross_entropy_by_loops(unit @ prototypes.T, twice)
        con = supcon_by_loops(unit.tolist(), twice, 0.07)
        proto_self = cross_entropy_by_loops(prototypes @ prototypes.T, (0, 1))
        local = 2 * cls + con + proto_self
        align = share * float((held * (prototypes - anchors) ** 2).sum())
        free = math.exp(ell[0] - ell[1])
        strength = min(free, extra.get("lambda_cap", math.inf))
        assert found["loss_local"] == pytest.approx(local, rel=1e-5)
        assert found["loss_align"] == pytest.approx(align, rel=1e-5)
        assert found["lambda"] == pytest.approx(strength, rel=1e-5)
        assert found["lambda_align"] == pytest.approx(strength * align, rel=1e-5)
        assert found["loss"] == pytest.approx(local + strength * align, rel=1e-5)

        # dCE/dP_c = mean_i (softmax_ic - [y_i = c]) f_i, twice; dCE(PP^T)/dP = (G + G^T) P / C; dL_align/dP_c = 2 (p_c
        # - a_c) / (d |C_k|)
        gradient = (
            2 * wrong.T @ unit / 6
            + (own + own.T) @ prototypes / 2
            + strength * share * 2 * held * (prototypes - anchors)
        )
        gradient = gradient * min(1.0, 1.0 / float(np.linalg.norm(gradient)))
        velocity = 0.9 * velocity + gradient
        prototypes = prototypes - lr * velocity
        assert np.allclose(prototypes_of(model).detach().numpy(), prototypes, atol=1e-5)

        hinge = 2 * gamma * max(0.0, free - 50.0) * free
        pull = np.array(
            [
                -local / (2 * math.exp(ell[0])) + 0.5 + hinge,
                -on_data * align / (2 * math.exp(ell[1])) + 0.5 * on_log - hinge,
            ]
        )
        pull = pull * min(1.0, clip / float(np.linalg.norm(pull)))
        drift = 0.9 * drift + pull
        ell = ell - 0.005 * drift
        state = objective.epoch_state(model)
        assert [float(state["l_local"]), float(state["l_align"])] == pytest.approx(ell.tolist(), abs=1e-6)
        assert objective.weighting.velocity.tolist() == pytest.approx(drift.tolist(), abs=1e-5)
        assert float(state["proto_norm"]) == pytest.approx(np.linalg.norm(prototypes, axis=1).mean(), rel=1e-5)


# -- who may reach whom


def leaves(value: Tensor) -> set[int]:
    """The ids of all tensors that autograd would send a gradient to."""
    found, waiting, seen = set(), [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [after for after, _ in node.next_functions]
    return found


@pytest.mark.parametrize("kind", ALL)
def test_the_networks_loss_reaches_the_network_alone(digits: DataBundle, kind: str) -> None:
    objective = aurora(weighting=kind)
    model = MLP.replace(head="prototype").build(generator(1))
    objective.prepare(model, make_site(digits), 0)
    terms = objective.loss(model, salt_batch(), number(0.4))
    reached, network = leaves(terms.total), {id(p) for p in model.parameters()}
    assert reached == network
    assert not list(objective.parameters())
    assert not any(b.requires_grad for b in objective.buffers())


def test_no_gradient_of_l_sigma_reaches_theta_and_none_of_l_w_reaches_sigma(digits: DataBundle) -> None:
    objective = aurora(lambda_max=0.5)  # the hinge is on
    model = MLP.replace(head="prototype").build(generator(1))
    objective.prepare(model, make_site(digits), 0)
    batch, p = salt_batch(), number(0.4)
    theta = list(model.parameters())

    # The literal two losses, with sigmas that could take a gradient.
    sigma = torch.zeros(2, requires_grad=True)
    local, _ = objective.local_terms(model, batch)
    align = objective.align_loss(prototypes_of(model), batch.labels)
    strength = torch.exp(sigma[0] - sigma[1])
    s = 0.5 * (1 + math.cos(math.pi * 0.4))
    l_w = local + strength.detach() * align
    l_sigma = (
        local.detach() / (2 * sigma[0].exp()) + align.detach() / (2 * sigma[1].exp()) + sigma[0] / 2 + s * sigma[1] / 2
    )
    l_sigma = l_sigma + 1e-3 * F.relu(strength - 0.5) ** 2
    assert all(g is None for g in torch.autograd.grad(l_sigma, theta, allow_unused=True, retain_graph=True))
    assert torch.autograd.grad(l_w, [sigma], allow_unused=True, retain_graph=True) == (None,)
    for_theta = torch.autograd.grad(l_w, theta)
    (for_sigma,) = torch.autograd.grad(l_sigma, [sigma])

    terms = objective.loss(model, batch, p)
    terms.total.backward()
    for parameter, expected in zip(theta, for_theta, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, expected, atol=1e-6)
    before = [parameter.grad.clone() for parameter in theta if parameter.grad is not None]
    weights = [parameter.detach().clone() for parameter in theta]
    objective.after_step(model, terms, p)
    assert all(torch.equal(a, b.grad) for a, b in zip(before, theta, strict=True) if b.grad is not None)
    assert all(torch.equal(a, b) for a, b in zip(weights, theta, strict=True))
    clipped = for_sigma / max(1.0, float(for_sigma.norm()))
    assert objective.weighting.scalars.tolist() == pytest.approx((-0.005 * clipped).tolist(), abs=1e-7)


@pytest.mark.parametrize("anneal_on", ["log", "data"])
@pytest.mark.parametrize("kind", ["aurora", "meta-anneal", "decoupled"])
def test_the_sigma_gradient_in_closed_form_is_autograds(kind: str, anneal_on: str) -> None:
    rng = np.random.RandomState(0)
    hinged = 0
    for _ in range(40):
        local, align, p = rng.uniform(0.1, 12), rng.exponential(0.5), rng.uniform(0, 1)
        ell = torch.tensor(rng.uniform(-3, 3, 2), requires_grad=True)
        s = max(1e-3, 0.5 * (1 + math.cos(math.pi * p))) if kind != "decoupled" else 1.0
        strength = torch.exp(ell[0] - ell[1])
        loss = local / (2 * ell[0].exp()) + ell[0] / 2
        if anneal_on == "log":
            loss = loss + align / (2 * ell[1].exp()) + s * ell[1] / 2
        else:
            loss = loss + s * align / (2 * ell[1].exp()) + ell[1] / 2
        if kind == "aurora":
            loss = loss + 0.02 * F.relu(strength - 5.0) ** 2
            hinged += float(strength) > 5.0
        (expected,) = torch.autograd.grad(loss, [ell])

        mine = learner(kind, anneal_on=anneal_on, lambda_max=5.0, gamma=0.02).double()
        assert isinstance(mine, TwoScalars)
        mine.scalars.copy_(ell.detach())
        numbers = [torch.tensor(v, dtype=torch.float64) for v in (local, align, p)]
        found = mine.gradient(*numbers)
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
        mine.update(*numbers)
        clipped = expected / max(1.0, float(expected.norm()))
        assert torch.allclose(mine.scalars, ell.detach() - 0.005 * clipped, rtol=1e-9, atol=1e-12)
        assert torch.allclose(mine.velocity, clipped, rtol=1e-9, atol=1e-12)
    assert hinged == 0 or 5 < hinged < 35, "both sides of the hinge were seen"


# -- Proposition 1 and the explosion


def simulate(
    kind: str, steps: int, local: float, align: Callable[[float], float], p: float | None = None, **settings: Any
) -> list[float]:
    """lambda at each of ``steps`` updates with given losses; progress runs from 0 to 1 unless it is held at ``p``."""
    mine = learner(kind, **settings)
    trajectory = []
    for t in range(steps):
        progress = number((t + 1) / steps if p is None else p)
        trajectory.append(float(mine.weigh(number(0.0), number(0.0), progress, torch.zeros(1))[1]))
        mine.update(number(local), number(align(t / steps)), progress)
    return trajectory


@pytest.mark.parametrize(
    ("kind", "p", "sigma_lr"),
    [
        ("aurora", 0.0, 0.005),
        ("aurora", 0.5, 0.005),
        ("aurora", 0.8, 0.02),
        ("aurora", 0.94, 0.2),
        ("decoupled", 0.9, 0.005),
    ],
)
@pytest.mark.parametrize(("local", "align"), [(6.0, 0.9), (1.5, 0.05)])
def test_proposition_1(kind: str, p: float, sigma_lr: float, local: float, align: float) -> None:
    mine = learner(kind, sigma_lr=sigma_lr)
    assert isinstance(mine, Uncertainty)
    s = (1 + math.cos(math.pi * p)) / 2 if kind == "aurora" else 1.0
    for _ in range(1500):
        mine.update(number(local), number(align), number(p))
    sigma_local, sigma_align = mine.scalars.exp().tolist()
    assert sigma_local == pytest.approx(local, rel=0.01)
    assert sigma_align == pytest.approx(align / s, rel=0.01)
    assert float(mine.strength(number(p))) == pytest.approx(s * local / align, rel=0.01)


def test_without_stability_lambda_explodes_and_with_it_it_stays_near_its_bound() -> None:
    def vanishing(t: float) -> float:
        return math.exp(-20 * t)

    free = simulate("meta-anneal", 1200, 2.0, vanishing)
    bound = simulate("aurora", 1200, 2.0, vanishing)
    assert max(free) > 1e4
    assert 50 < max(bound) <= 55
    assert bound[-1] == pytest.approx(50, abs=0.5)
    assert [a for a in free if a < 50] == [b for a, b in zip(free, bound, strict=True) if a < 50], (
        "below the bound the two are one"
    )


def test_the_bound_is_soft() -> None:
    """With L_align = 0 from the first step, the worst there is, momentum carries lambda to 56.04 and back under 55
    within six steps."""
    worst = simulate("aurora", 5000, 2.0, lambda t: 0.0)
    assert max(worst) == pytest.approx(56.04, abs=0.05)
    assert 1 <= sum(value > 55 for value in worst) <= 6
    assert worst[-1] == pytest.approx(50, abs=0.1)


@pytest.mark.parametrize("kind", ["meta-anneal", "aurora", "decoupled", "linear", "cosine", "fixed", "gradnorm"])
def test_lambda_cap_is_hard(kind: str) -> None:
    if kind == "gradnorm":
        prototypes = torch.ones(2, 2, requires_grad=True)
        mine = learner(kind, lambda_cap=2.0)
        total, strength = mine.weigh(100 * prototypes.sum(), prototypes.sum(), number(0.5), prototypes)
        assert float(strength) == 2.0
        assert float(total) == 408.0
        return
    settings = {"lambda_cap": 9.0}
    capped, free = simulate(kind, 600, 2.0, lambda t: 0.0, **settings), simulate(kind, 600, 2.0, lambda t: 0.0)
    assert max(free) >= 10
    assert capped == [min(value, 9.0) for value in free], (
        "the cap changes what the network sees, not what the sigmas learn"
    )


def test_annealing_the_data_term_makes_lambda_rise_and_the_log_term_fall() -> None:
    rising = simulate("meta-anneal", 3000, 4.0, lambda t: 0.4, anneal_on="data", sigma_lr=0.02)
    falling = simulate("meta-anneal", 3000, 4.0, lambda t: 0.4, anneal_on="log", sigma_lr=0.02)
    steady = simulate("decoupled", 3000, 4.0, lambda t: 0.4, anneal_on="data", sigma_lr=0.02)
    for p in (0.5, 0.7):
        at = int(3000 * p)
        s = (1 + math.cos(math.pi * p)) / 2
        assert rising[at] == pytest.approx(10 / s, rel=0.1)
        assert falling[at] == pytest.approx(10 * s, rel=0.1)
        assert steady[at] == pytest.approx(10, rel=0.01)
    assert all(a < b for a, b in zip(rising[600:2500:100], rising[700:2600:100], strict=True))
    assert rising[-1] > 100 * falling[-1]


# -- the rivals


@pytest.mark.parametrize("kind", ALL)
def test_every_weighting_trains_and_lambda_goes_as_defined(digits: DataBundle, kind: str) -> None:
    result = trained(make_site(digits), aurora(weighting=kind), MLP, epochs=4, batch=40)
    rows = result.rows
    assert all(math.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    assert rows[-1]["loss_local"] < rows[0]["loss_local"]
    found = [row["lambda"] for row in rows]
    schedules = {
        "none": [0.0] * 4,
        "fixed": [10.0] * 4,
        "linear": [13.5, 9.0, 4.5, 0.0],
        "cosine": [18 * max(1e-3, (1 + math.cos(math.pi * e / 4)) / 2) for e in (1, 2, 3, 4)],
    }
    if kind in schedules:
        assert found == pytest.approx(schedules[kind], abs=1e-5)
    else:
        assert all(value > 0 for value in found)
        assert found != sorted(set(found))[:1] * 4, "it learns"
    for row in rows:
        if (
            kind == "kendall"
        ):  # total = (L_local / sigma_local^2 + L_align / sigma_align^2 + l_local + l_align) / 2, not the weighted sum
            assert abs(row["loss"] - row["loss_local"] - row["lambda_align"]) > 0.5
        else:
            assert row["loss"] == pytest.approx(row["loss_local"] + row["lambda_align"], rel=1e-5)
    if kind != "none":
        assert "lambda_align" in rows[0]
        assert (rows[-1]["lambda_align"] > 0) == (kind != "linear")


def test_none_is_fafi_and_the_anchor_pulls_only_where_lambda_says(digits: DataBundle) -> None:
    site = make_site(digits)
    fafi = trained(site, Salt(SaltSettings())).parcel.weights
    watched = trained(site, aurora(weighting="none")).parcel.weights
    assert all(torch.equal(watched[name], value) for name, value in fafi.items())
    rows = {kind: trained(site, aurora(weighting=kind)).rows for kind in ("none", "fixed")}
    assert rows["fixed"][-1]["loss_align"] < rows["none"][-1]["loss_align"]


def test_kendall_is_coupled_and_learns_by_its_own_settings(digits: DataBundle) -> None:
    objective = aurora(weighting="kendall", sigma_lr=0.02, sigma_clip=0.5, sigma_momentum=0.3)
    model = MLP.replace(head="prototype").build(generator(2))
    objective.prepare(model, make_site(digits), 0)
    scalars = objective.weighting.scalars
    scalars.copy_(torch.tensor([0.8, -0.3]))
    batch = salt_batch()
    terms = objective.loss(model, batch, number(0.5))
    local, align = terms.parts["loss_local"].item(), float(terms.parts["loss_align"])
    total = local / (2 * math.exp(0.8)) + align / (2 * math.exp(-0.3)) + 0.4 - 0.15
    assert terms.total.item() == pytest.approx(total, rel=1e-5)
    assert terms.parts["lambda"].item() == pytest.approx(math.exp(1.1), rel=1e-5)
    (coupled,) = torch.autograd.grad(terms.total, [prototypes_of(model)], retain_graph=True)
    (free,) = torch.autograd.grad(terms.parts["loss_local"], [prototypes_of(model)], retain_graph=True)
    pulled = (prototypes_of(model) - objective.anchors) * 2 / 160
    assert torch.allclose(coupled, free / (2 * math.exp(0.8)) + pulled / (2 * math.exp(-0.3)), atol=1e-6), (
        "1/sigma^2 scales the network's gradient"
    )

    pull = np.array([0.5 - local / (2 * math.exp(0.8)), 0.5 - align / (2 * math.exp(-0.3))])
    sigmas = torch.tensor([0.8, -0.3], dtype=torch.float64, requires_grad=True)
    ((local * (-sigmas[0]).exp() + align * (-sigmas[1]).exp() + sigmas.sum()) / 2).backward()
    assert sigmas.grad is not None
    assert sigmas.grad.tolist() == pytest.approx(pull.tolist()), "the gradient of what the network minimises"
    pull *= 0.5 / max(0.5, float(np.linalg.norm(pull)))
    objective.after_step(model, terms, number(0.5))
    assert scalars.tolist() == pytest.approx([0.8 - 0.02 * pull[0], -0.3 - 0.02 * pull[1]], abs=1e-5), (
        "clipped to sigma_clip"
    )
    assert objective.weighting.velocity.tolist() == pytest.approx(pull.tolist(), abs=1e-5)
    objective.weighting.update(number(0.0), number(0.0), number(0.5))  # both gradients are 1/2 then, of norm .71
    second = 0.3 * pull + 0.5 / math.sqrt(2)
    wanted = [0.8 - 0.02 * (pull + second)[0], -0.3 - 0.02 * (pull + second)[1]]
    assert scalars.tolist() == pytest.approx(wanted, abs=1e-5), "with sigma_momentum"


def test_kendalls_lambda_can_be_capped() -> None:
    mine = learner("kendall", lambda_cap=2.0)
    mine.scalars.copy_(torch.tensor([1.5, 0.0]))
    total, strength = mine.weigh(number(3.0), number(4.0), number(0.5), torch.zeros(1))
    assert float(strength) == 2.0 < math.exp(1.5)
    assert float(total) == pytest.approx((math.exp(-1.5) * (3 + 2 * 4) + 1.5) / 2)


@pytest.mark.parametrize(("local", "align"), [(4.0, 1.0), (2.0, 5.0), (9.0, 0.6)])
def test_the_learnable_schedule_rests_where_the_losses_balance(local: float, align: float) -> None:
    mine = learner("learnable", sigma_lr=0.3)
    assert isinstance(mine, Learnable)
    assert float(mine.strength(number(0.3))) == pytest.approx(1.0)
    for _ in range(1500):
        mine.update(number(local), number(align), number(0.5))
    assert float(mine.scalars[1]) == pytest.approx(0.0, abs=1e-5), "cos(pi / 2) = 0: b is not asked"
    assert float(mine.strength(number(0.5))) == pytest.approx(local / align, rel=0.01)


def test_the_learnable_gradient_is_autograds() -> None:
    rng = np.random.RandomState(1)
    for _ in range(20):
        local, align, p = rng.uniform(0.1, 9), rng.uniform(0.01, 3), rng.uniform(0, 1)
        ab = torch.tensor(rng.uniform(-2, 2, 2), requires_grad=True)
        strength = F.softplus(ab[0] + ab[1] * math.cos(math.pi * p))
        (expected,) = torch.autograd.grad(strength * align / local - strength.log(), [ab])
        mine = learner("learnable").double()
        assert isinstance(mine, Learnable)
        mine.scalars.copy_(ab.detach())
        found = mine.gradient(*(torch.tensor(v, dtype=torch.float64) for v in (local, align, p)))
        assert torch.allclose(found, expected, rtol=1e-9)
        assert float(mine.strength(torch.tensor(p, dtype=torch.float64))) == pytest.approx(float(strength), rel=1e-9)


def test_gradnorm_follows_the_ratio_of_the_gradients(digits: DataBundle) -> None:
    objective = aurora(weighting="gradnorm")
    model = MLP.replace(head="prototype").build(generator(2))
    objective.prepare(model, make_site(digits), 0)
    batch, ratio = salt_batch(), 1.0
    for shift in (0.0, 0.5):
        with torch.no_grad():
            prototypes_of(model).add_(shift)
        local, _ = objective.local_terms(model, batch)
        (pull,) = torch.autograd.grad(local, [prototypes_of(model)])
        push = (prototypes_of(model).detach() - objective.anchors) * 2 / (10 * 16)
        ratio = 0.9 * ratio + 0.1 * float(pull.norm() / push.norm())
        terms = objective.loss(model, batch, number(0.5))
        assert terms.parts["lambda"].item() == pytest.approx(ratio, rel=1e-5)
        assert terms.total.item() == pytest.approx(local.item() + ratio * terms.parts["loss_align"].item(), rel=1e-5)
    terms.total.backward()
    assert model.backbone.fc1.weight.grad is not None, "the graph is still whole"


# -- options


def test_entropy_start_by_hand(digits: DataBundle) -> None:
    entropy = AuroraSettings(sigma_init="entropy")
    # 3/4 and 1/4: H = .75 log2(4/3) + .25 log2 4 = .811278 bits
    cases = {(3, 1): 0.1 + 0.811278 * 14.9, (5, 5): 15.0, (9, 0): 0.1, (2, 2, 0, 0): 0.1 + 0.5 * 14.9, (7,) * 10: 15.0}
    for counts, expected in cases.items():
        start = first_log_sigma(entropy, torch.tensor(counts, dtype=torch.float64))
        assert math.exp(start) == pytest.approx(expected, rel=1e-5)
        assert first_log_sigma(AuroraSettings(), torch.tensor(counts, dtype=torch.float64)) == 0.0
    site = make_site(digits, 60, keep=(0, 1))
    share = np.array(site.counts)[:2] / 60
    expected = 0.1 + float(-(share * np.log2(share)).sum()) / math.log2(10) * 14.9
    for kind in ("aurora", "kendall", "learnable"):
        objective = aurora(weighting=kind, sigma_init="entropy")
        model = MLP.replace(head="prototype").build()
        objective.prepare(model, site, 0)
        assert float(objective.loss(model, salt_batch(), number(0.1)).parts["lambda"]) == pytest.approx(
            expected, rel=1e-4
        ), kind


def test_prototypes_may_start_at_the_anchors_with_a_logit_scale(digits: DataBundle) -> None:
    site = make_site(digits, 60)
    objective = aurora(proto_init="etf")
    spec = objective.adapt_spec(MLP, objective.settings)
    assert spec.logit_scale
    starts = []
    for name, seed in (("site-0", 0), ("site-1", 1)):
        model = spec.build(generator(seed))
        objective = aurora(proto_init="etf")
        objective.prepare(model, make_site(digits, 60, name=name), seed)
        starts.append(prototypes_of(model).detach().clone())
        assert float((starts[-1] - simplex_etf(10, 16, 0)).abs().max()) < 0.06
        assert float(objective.align_loss(starts[-1], site.train.labels)) == pytest.approx(1e-4, rel=0.5)
    assert torch.equal(*starts), "one start for all sites"
    result = trained(site, aurora(proto_init="etf"))
    assert float(result.parcel.weights["head.scale"]) != 16.0
    plain = aurora().adapt_spec(MLP.replace(head="prototype", logit_scale=True), aurora().settings)
    assert not plain.logit_scale
    assert float(aurora_start(digits).norm(dim=1).mean()) == pytest.approx(4.0, abs=0.5), "N(0, 1) in 16 dimensions"


def aurora_start(digits: DataBundle) -> Tensor:
    model = MLP.replace(head="prototype").build(generator(0, "shared", "init"))
    aurora().prepare(model, make_site(digits, 60), 0)
    return prototypes_of(model).detach().clone()


def test_freeze_missing_keeps_the_rows_of_missing_classes(digits: DataBundle) -> None:
    site, start = make_site(digits, 60, keep=(2, 5, 7)), aurora_start(digits)
    frozen, free = (trained(site, aurora(freeze_missing=f)).parcel.weights["head.prototypes"] for f in (True, False))
    for c in range(10):
        assert torch.equal(frozen[c], start[c]) == (c not in (2, 5, 7))
        assert not torch.equal(free[c], start[c]), "softmax and proto-self do reach missing classes"


def test_the_alignment_loss_by_hand(digits: DataBundle) -> None:
    prototypes = torch.randn(10, 16, generator=generator("p"))
    labels = torch.tensor([4, 4, 7, 4])
    squares = (prototypes.double() - simplex_etf(10, 16, 9).double()).square().sum(1)
    found = {}
    for reduction in ("mean", "sum"):
        for classes in ("site", "batch"):
            objective = aurora(align_reduction=reduction, align_classes=classes, anchor_seed=9)
            objective.prepare(MLP.replace(head="prototype").build(), make_site(digits, 60, keep=(1, 4, 7)), 0)
            found[reduction, classes] = float(objective.align_loss(prototypes, labels))
    site, batch = float(squares[[1, 4, 7]].mean()), float(squares[[4, 7]].mean())
    assert found["sum", "site"] == pytest.approx(site, rel=1e-5)
    assert found["sum", "batch"] == pytest.approx(batch, rel=1e-5)
    assert found["mean", "site"] * 16 == pytest.approx(found["sum", "site"], rel=1e-5)
    assert found["mean", "batch"] * 16 == pytest.approx(found["sum", "batch"], rel=1e-5)


def test_other_anchors_for_another_anchor_seed(digits: DataBundle) -> None:
    site = make_site(digits, 60)
    one, two = (trained(site, aurora(anchor_seed=seed), epochs=1).parcel for seed in (0, 1))
    assert not torch.equal(one.weights["head.prototypes"], two.weights["head.prototypes"])
    assert [p.manifest.meta["anchor_seed"] for p in (one, two)] == [0, 1]
    assert {"l_local", "l_align"} <= one.manifest.meta.keys()


# -- training: odd sites, rows, resume, divergence


@pytest.mark.parametrize(
    ("classes", "held", "samples"),
    [
        (10, [3], 20),
        (10, list(range(10)), 3),
        (2, [0, 1], 30),
        (2, [1], 1),
        (100, list(range(100)), 150),
        (100, [5, 6], 5),
    ],
)
@pytest.mark.parametrize("kind", ["aurora", "kendall", "gradnorm"])
def test_odd_sites_train(classes: int, held: list[int], samples: int, kind: str) -> None:
    site = random_site(classes, held, samples)
    spec = CNN.replace(classes=classes, projector=(104,) if classes == 100 else ())
    result = trained(site, aurora(weighting=kind, align_classes="batch"), spec, epochs=2)
    assert all(bool(t.isfinite().all()) for t in result.parcel.weights.values())
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["lambda"]) for row in result.rows)
    assert result.parcel.manifest.samples == samples
    assert sum(result.parcel.manifest.counts or ()) == samples
    assert result.parcel.extras["calibration"].shape == (3, classes)


def test_a_row_of_metrics_says_it_all(digits: DataBundle) -> None:
    rows = trained(make_site(digits), aurora(), CNN, epochs=2, batch=40).rows
    parts = {"cls", "con", "proto_self", "proto_feat", "proto_norm", "train_accuracy", "loss"}
    wanted = {"site", "epoch", "lambda", "lambda_align", "loss_local", "loss_align", "l_local", "l_align"} | parts
    for row in rows:
        assert wanted <= row.keys()
        assert row["loss_local"] == pytest.approx(
            row["cls"] + row["con"] + row["proto_self"] + row["proto_feat"], rel=1e-5
        )
    assert [(row["site"], row["epoch"]) for row in rows] == [("site-0", 1), ("site-0", 2)]
    last = trained(make_site(digits), aurora(), CNN, epochs=2, batch=40).parcel
    assert rows[-1]["proto_norm"] == pytest.approx(float(last.weights["head.prototypes"].norm(dim=1).mean()), rel=1e-5)
    assert rows[-1]["l_local"] == last.manifest.meta["l_local"]


def stop_after(epochs: int) -> Callable[[Any], None]:
    def on_epoch(row: Any) -> None:
        if row["epoch"] == epochs:
            raise KeyboardInterrupt

    return on_epoch


@pytest.mark.parametrize(
    "settings",
    [
        {"weighting": "aurora"},
        {"weighting": "aurora", "preset": "as-run", "freeze_missing": True, "proto_init": "etf"},
        {"weighting": "kendall"},
        {"weighting": "learnable"},
        {"weighting": "gradnorm"},
        {"weighting": "meta-anneal"},
    ],
)
def test_resume_is_byte_identical(digits: DataBundle, tmp_path: Path, settings: dict[str, Any]) -> None:
    site = make_site(digits, 80, keep=(0, 1, 2, 3, 4))
    straight = trained(site, aurora(**settings), CNN, epochs=4)
    with pytest.raises(KeyboardInterrupt):
        trained(site, aurora(**settings), CNN, epochs=4, folder=tmp_path, on_epoch=stop_after(2))
    seen: list[int] = []
    resumed = trained(
        site, aurora(**settings), CNN, epochs=4, folder=tmp_path, on_epoch=lambda row: seen.append(row["epoch"])
    )
    assert seen == [3, 4]
    assert parcel.to_bytes(resumed.parcel) == parcel.to_bytes(straight.parcel)
    drop = "samples_per_second"
    assert [{**row, drop: 0} for row in resumed.rows] == [{**row, drop: 0} for row in straight.rows]


@pytest.mark.parametrize(
    ("kind", "named"), [("meta-anneal", "lambda"), ("aurora", "lambda"), ("learnable", "lambda_a")]
)
def test_a_lambda_that_leaves_the_finite_numbers_stops_the_run(
    digits: DataBundle, tmp_path: Path, kind: str, named: str
) -> None:
    # One step an epoch, and sigmas that leap: finite after the first epoch, out of bounds in the second.
    site = make_site(digits, 40)
    objective = aurora(
        weighting=kind, sigma_lr=3e38 if kind == "learnable" else 300.0, sigma_clip=1e3 if kind == "learnable" else 1.0
    )
    with pytest.raises(Diverged, match=rf"site-0 diverged in epoch \d: .*\b{named}\b") as caught:
        trained(site, objective, folder=tmp_path, epochs=6, batch=40)
    assert caught.value.exit_code == 3
    tensors, state = load_checkpoint(tmp_path / "site-0.ckpt")
    assert state["epoch"] == (2 if kind == "learnable" else 1)
    assert all(bool(t.isfinite().all()) for t in tensors.values())
    assert f"after epoch {state['epoch']} is kept" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "most"),
    [("aurora", 4), ("meta-anneal", 4), ("learnable", 4), ("kendall", 4), ("gradnorm", 1), ("none", 0), ("linear", 0)],
)
def test_the_extra_state_is_two_scalars_and_their_velocities(digits: DataBundle, kind: str, most: int) -> None:
    objective = aurora(weighting=kind)
    objective.prepare(MLP.replace(head="prototype").build(), make_site(digits, 40), 0)
    assert sum(t.numel() for t in objective.state_dict().values()) == most
    assert not list(objective.parameters())


# -- FedETF


def test_fedetfs_balanced_softmax_by_hand() -> None:
    site = random_site(4, [0, 0, 0, 1, 3], 20)  # 12, 4, 0 and 4 images
    objective = BalancedEtf(AnchorSettings(anchor_seed=3))
    spec = objective.adapt_spec(MLP.replace(classes=4), objective.settings)
    model = spec.build(generator(5))
    objective.prepare(model, site, 0)
    assert site.counts == [12, 4, 0, 4]
    anchors = simplex_etf(4, 16, 3).double().numpy()
    assert np.allclose(model.head.anchors.numpy(), anchors)
    batch = Batch(torch.randn(6, 1, 8, 8, generator=generator("b")), torch.tensor([0, 1, 3, 0, 0, 1]), 1)
    with torch.no_grad():
        features = model.features(batch.images).double().numpy()
    logits = 16 * features / np.linalg.norm(features, axis=1, keepdims=True) @ anchors.T
    assert np.allclose(model(batch.images).detach().numpy(), logits, atol=1e-4)
    present = [0, 1, 3]  # class 2 has log 0 = -inf: it is not there at all
    balanced = logits[:, present] + np.log([12, 4, 4])
    by_hand = cross_entropy_by_loops(balanced, [present.index(y) for y in batch.labels.tolist()])
    terms = objective.loss(model, batch, number(0.5))
    assert terms.total.item() == pytest.approx(by_hand, rel=1e-5)

    # The gradient of the scale: mean_i sum_c (softmax_ic - [y_i = c]) cos_ic over the classes that are there; none
    # through class 2.
    terms.total.backward()
    wrong = softmax(balanced) - np.eye(3)[[present.index(y) for y in batch.labels.tolist()]]
    assert float(model.head.scale.grad) == pytest.approx(float((wrong * logits[:, present] / 16).sum() / 6), rel=1e-4)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_fedetf_learns_everything_but_its_anchors(digits: DataBundle) -> None:
    result = trained(
        make_site(digits, 300), BalancedEtf(AnchorSettings(anchor_seed=2)), CNN, views=PLAIN, epochs=8, lr=0.1
    )
    weights = result.parcel.weights
    assert weights["head.anchors"].numpy().tobytes() == simplex_etf(10, 12, 2).numpy().tobytes()
    assert float(weights["head.scale"]) != 16.0
    assert result.parcel.manifest.meta["anchor_seed"] == 2
    assert result.rows[-1]["train_accuracy"] > 0.6
    lopsided = trained(make_site(digits, 60, keep=(1, 8)), BalancedEtf(AnchorSettings()), CNN, views=PLAIN)
    assert all(bool(t.isfinite().all()) for t in lopsided.parcel.weights.values())


# -- recipes


@pytest.mark.parametrize(
    ("method", "objective", "wanted"),
    [
        ("fafi", "salt", {}),
        ("fafi-anneal", "aurora", {"weighting": "linear", "lambda_start": 18.0}),
        (
            "aurora",
            "aurora",
            {
                "weighting": "aurora",
                "lambda_max": 50.0,
                "gamma": 1e-3,
                "sigma_lr": 0.005,
                "sigma_momentum": 0.9,
                "sigma_clip": 1.0,
                "align_reduction": "mean",
                "align_classes": "site",
                "proto_init": "normal",
            },
        ),
        ("aurora-no-stability", "aurora", {"weighting": "meta-anneal"}),
        ("aurora-no-decouple", "aurora", {"weighting": "kendall"}),
        ("fedetf", "etf", {}),
    ],
)
def test_the_recipes(digits: DataBundle, method: str, objective: str, wanted: dict[str, Any]) -> None:
    done = plan(make_config(method), digits)
    assert done.recipe.objective == objective
    settings = done.recipe.objective_settings.model_dump()
    assert {name: settings[name] for name in wanted} == wanted
    assert done.recipe.spec.head == ("etf" if objective == "etf" else "prototype")
    rebuilt = OBJECTIVES[objective](OBJECTIVES[objective].settings_type(**settings))
    if objective == "etf":
        assert done.fusion is not None
        assert done.fusion.name == "fedavg"
    else:
        assert rebuilt.settings.cls == rebuilt.settings.con == 1.0
        train = done.recipe.train
        assert (train.lr, train.momentum, train.clip, train.weight_decay, train.schedule) == (
            0.05,
            0.9,
            1.0,
            5e-4,
            "cosine",
        )
        assert done.recipe.views.views == 2
    assert plan(make_config(method, assignments=["train.lr=0.2"]), digits).recipe.train.lr == 0.2


@pytest.mark.parametrize(
    ("method", "prototypes"), [("fafi", "uniform"), ("aurora", "counts"), ("aurora-no-decouple", "counts")]
)
def test_iffi_counts_for_aurora_and_not_for_fafi(digits: DataBundle, method: str, prototypes: str) -> None:
    fusion = plan(make_config(method, fusion="iffi"), digits).fusion
    assert isinstance(fusion, Iffi)
    assert (fusion.settings.weights, fusion.settings.prototypes) == ("size", prototypes)
    chosen = plan(
        make_config(method, fusion="iffi", assignments=["fusion.prototypes=uniform", "fusion.weights=noise"]), digits
    ).fusion
    assert isinstance(chosen, Iffi)
    assert (chosen.settings.weights, chosen.settings.prototypes) == ("noise", "uniform")


@pytest.mark.parametrize(
    "rule", ["fedavg", "ensemble", "iffi", "experts", "experts-softmax", "experts-gate", "experts-calibrated"]
)
def test_auroras_clients_go_with_every_server_rule(digits: DataBundle, rule: str) -> None:
    done = plan(make_config("aurora", fusion=rule, assignments=["weighting=gradnorm", "preset=as-run"]), digits)
    assert done.fusion is not None
    assert done.fusion.name == rule
    assert done.recipe.objective_settings.model_dump()["weighting"] == "gradnorm"
    assert (done.recipe.train.schedule, done.recipe.train.weight_decay) == ("constant", 0.0)


def test_unknown_weightings_and_settings_are_refused(digits: DataBundle) -> None:
    with pytest.raises(BadInput, match="weighting"):
        plan(make_config("aurora", assignments=["weighting=cosin"]), digits)
    with pytest.raises(BadInput, match="sigma_lr"):
        plan(make_config("aurora", assignments=["sigma_lr=0"]), digits)
    assert set(ALL) == set(WEIGHTINGS)
