"""The rules that work on weights: FedLPA's factors and solve, MA-Echo's projectors and steps, OT fusion's matching, and
all three on digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factories import done, result_of, train_site
from flyby.data.dataset import DataBundle, Dataset
from flyby.data.site import Part, Site, part_of
from flyby.data.views import PLAIN
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, Inbox
from flyby.fusion.base import Server
from flyby.fusion.weights import layers
from flyby.fusion.weights.average import AverageSettings, FedAvg
from flyby.fusion.weights.fedlpa import FedLpa, FedLpaSettings, solve
from flyby.fusion.weights.maecho import MaEcho, MaEchoSettings, echo
from flyby.fusion.weights.ot import Axis, OtFusion, OtSettings, match_activations, match_weights, neuron_axes, permute
from flyby.models import ARCHITECTURES, ModelSpec, Network
from flyby.objectives import OBJECTIVES
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel
from flyby.rng import generator
from flyby.runs.methods import check_pair
from flyby.statistics.kfac import (
    divide,
    input_rows,
    join,
    kfac,
    matrix_layers,
    matrix_shape,
    output_rows,
    pack,
    second_moments,
    unpack,
)
from flyby.statistics.null_space import compress, expand, null_space, projector, recurse
from flyby.training.settings import TrainSettings

NAMES = ("ant", "bee", "cat")
MLP = ModelSpec(name="mlp", classes=3, channels=1, size=(4, 4), widths={"fc1": 6, "fc2": 5})
CNN = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8), widths={"conv1": 4, "conv2": 5, "conv3": 6})
EVERY = {name: ModelSpec(name=name, classes=3, channels=2, size=(18, 18), width=0.15) for name in ARCHITECTURES}
SPECS = EVERY | {
    "prototype": CNN.replace(head="prototype"),
    "projector": CNN.replace(projector=(7, 9)),
    "imagenet": EVERY["resnet18"].replace(stem="imagenet", size=(32, 32)),
}


def lively(spec: ModelSpec, seed: int = 0) -> Network:
    """A network with BatchNorms as training leaves them: no two channels alike."""
    network = spec.build(generator(seed, "weights")).eval()
    for i, (name, value) in enumerate(network.state_dict().items()):
        if value.is_floating_point() and (".bn" in name or "running" in name or value.ndim == 1):
            value.copy_(torch.empty_like(value).uniform_(0.5, 1.5, generator=generator(seed, i)))
    return network


def images(spec: ModelSpec, count: int, seed: int = 0) -> Tensor:
    return torch.randint(
        0, 256, (count, *spec.size, spec.channels), generator=generator(seed, "images"), dtype=torch.uint8
    )


def site_of(spec: ModelSpec, count: int, seed: int = 0, name: str = "site-0") -> Site:
    labels = torch.arange(count) % spec.classes
    none = Part(images(spec, 0), labels[:0])
    return Site(name, Part(images(spec, count, seed), labels), none, none, NAMES)


def made(sender: str, network: Network, extras: dict[str, Tensor] | None = None, samples: int = 30) -> Parcel:
    return parcel.make(
        sender=sender,
        method="supervised",
        spec=network.spec,
        class_names=NAMES,
        weights=network.state_dict(),
        samples=samples,
        extras=extras,
    )


def sent(statistic: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{statistic}.{key}": value for key, value in tensors.items()}


def spd(n: int, seed: int, groups: int = 1) -> Tensor:
    root = torch.randn(groups, n, n + 2, dtype=torch.float64, generator=generator(seed, "spd", n))
    return root @ root.mT / n


# -- layers as matrices


@pytest.mark.parametrize("name", sorted(SPECS))
def test_every_layer_is_its_matrix_times_its_input_rows(name: str) -> None:
    """[W | b] times the rows is the layer's output, for strides, paddings, groups and biases: the layout of both
    factors in one identity."""
    network = lively(SPECS[name]).double()
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for key, layer in matrix_layers(network).items():
        layer.register_forward_hook(lambda _, given, out, key=key: seen.update({key: (given[0].clone(), out.clone())}))  # type: ignore[misc]
    with torch.no_grad():
        network(network.spec.prepare(images(network.spec, 2)).double())
    state = network.state_dict()
    assert len(seen) == len(matrix_layers(network)) > 2
    for key, (inner, out) in seen.items():
        layer = network.get_submodule(key)
        matrix = join(state, key, layer)  # type: ignore[arg-type]
        assert matrix.shape == matrix_shape(layer)  # type: ignore[arg-type]
        assert torch.allclose(input_rows(layer, inner) @ matrix.mT, output_rows(layer, out)), key  # type: ignore[arg-type]
        for entry, value in divide(matrix, key, layer).items():  # type: ignore[arg-type]
            assert torch.equal(value, state[entry])


@given(n=st.integers(1, 12), groups=st.integers(1, 3), seed=st.integers(0, 99))
def test_packed_matrices_come_back(n: int, groups: int, seed: int) -> None:
    matrix = spd(n, seed, groups) * 10.0 ** torch.linspace(-9, 6, groups, dtype=torch.float64)[:, None, None]
    exact, rounded = pack(matrix, half=False), pack(matrix)
    assert torch.equal(unpack(exact, n, torch.float32), matrix.float())
    assert rounded["triangle"].dtype == torch.float16
    assert rounded["triangle"].shape == (groups, n * (n + 1) // 2)
    worst = (unpack(rounded, n) - matrix).abs().amax((1, 2)) / matrix.abs().amax((1, 2))
    assert float(worst.max()) < 2**-11, "relative to each matrix's largest entry, however large or small that is"


# -- K-FAC


def test_factors_of_a_perceptron_against_per_sample_gradients() -> None:
    network = lively(MLP).double()
    x, labels = images(MLP, 7), torch.arange(7) % 3
    a, b = second_moments(network, x, labels)
    layers_ = matrix_layers(network)
    assert list(a) == list(b) == list(layers_) == ["backbone.fc1", "backbone.fc2", "head"]
    own: dict[str, list[Tensor]] = {name: [] for name in layers_}
    for i in range(7):
        loss = F.cross_entropy(network(MLP.prepare(x[i : i + 1]).double()), labels[i : i + 1])
        gradients = dict(
            zip(dict(network.named_parameters()), torch.autograd.grad(loss, list(network.parameters())), strict=True)
        )
        for name, layer in layers_.items():
            own[name].append(join(gradients, name, layer)[0])
    hidden = MLP.prepare(x).double().flatten(1)
    for name in layers_:
        ones = torch.cat((hidden, torch.ones(7, 1, dtype=torch.float64)), dim=1)
        assert torch.allclose(a[name][0], ones.T @ ones / 7)
        g = torch.stack([gradient[:, -1] for gradient in own[name]])  # the bias' gradient is g itself
        assert torch.allclose(b[name][0], g.T @ g / 7)
        hidden = F.relu(hidden @ network.state_dict()[f"{name}.weight"].T + network.state_dict()[f"{name}.bias"])
    one, two = second_moments(network, x[:1], labels[:1])
    for name in layers_:  # for one image B (x) A is the Fisher matrix itself: the outer product of its gradient
        flat = own[name][0].flatten()
        assert torch.allclose(torch.kron(two[name][0], one[name][0]), torch.outer(flat, flat), atol=1e-14)
    assert all(p.grad is None for p in network.parameters())
    assert not any(m._forward_hooks for m in network.modules())


def test_factors_of_a_convolution_by_slicing() -> None:
    spec = ModelSpec(name="cnn-fol", classes=3, channels=2, size=(18, 18), widths={"conv1": 3, "conv2": 4, "conv3": 2})
    network = lively(spec).double()
    x, labels = images(spec, 3), torch.tensor([0, 2, 1])
    a, b = second_moments(network, x, labels)
    prepared = spec.prepare(x).double()
    patches = [
        torch.cat((prepared[n, :, i : i + 3, j : j + 3].flatten(), torch.ones(1)))
        for n in range(3)
        for i in range(16)
        for j in range(16)
    ]
    rows = torch.stack(patches).double()
    assert torch.allclose(a["backbone.conv1"][0], rows.T @ rows / (3 * 256)), "averaged over images and positions"
    w = {name: value.double() for name, value in network.state_dict().items()}
    first = F.conv2d(prepared, w["backbone.conv1.weight"], w["backbone.conv1.bias"]).requires_grad_()
    y = F.max_pool2d(F.relu(first), 2)
    y = F.max_pool2d(F.relu(F.conv2d(y, w["backbone.conv2.weight"], w["backbone.conv2.bias"])), 2)
    y = F.relu(F.conv2d(y, w["backbone.conv3.weight"], w["backbone.conv3.bias"])).flatten(1)
    loss = F.cross_entropy(y @ w["head.weight"].T + w["head.bias"], labels, reduction="sum")
    (g,) = torch.autograd.grad(loss, first)
    expected = sum(torch.outer(g[n, :, i, j], g[n, :, i, j]) for n in range(3) for i in range(16) for j in range(16))
    assert torch.allclose(b["backbone.conv1"][0], torch.as_tensor(expected) / 3), (
        "summed over positions, averaged over images"
    )


def test_depthwise_convolutions_have_factors_of_their_own_for_every_channel() -> None:
    network = lively(EVERY["mobilenetv2"])
    sent_ = kfac(network, site_of(network.spec, 4), 0)
    name = "backbone.features.3.conv.1.0"
    groups, outputs, inputs = matrix_shape(matrix_layers(network)[name])
    assert (outputs, inputs) == (1, 9)
    assert groups > 1
    assert sent_[f"{name}.A.triangle"].shape == (groups, 45)
    assert sent_[f"{name}.B.triangle"].shape == (groups, 1)


def test_the_cap_on_samples_draws_from_the_seed() -> None:
    network, site = lively(MLP), site_of(MLP, 40)
    whole, some, again, other = (
        kfac(network, site, seed, samples=n) for seed, n in ((0, 40), (0, 10), (0, 10), (1, 10))
    )
    key = "head.A.triangle"
    assert torch.equal(some[key], again[key])
    assert not torch.equal(some[key], whole[key])
    assert not torch.equal(some[key], other[key])


# -- FedLPA


@given(sites=st.integers(1, 4), outputs=st.integers(1, 4), inputs=st.integers(1, 5), seed=st.integers(0, 999))
def test_the_solve_against_a_dense_kronecker_solve(sites: int, outputs: int, inputs: int, seed: int) -> None:
    a = [spd(inputs, seed + k, 2) + 0.03 * torch.eye(inputs) for k in range(sites)]
    b = [spd(outputs, seed + 50 + k, 2) + 0.03 * torch.eye(outputs) for k in range(sites)]
    m = [torch.randn(2, outputs, inputs, dtype=torch.float64, generator=generator(seed, k)) for k in range(sites)]
    q = [(k + 1) / sum(range(sites + 1)) for k in range(sites)]
    found = solve(q, a, b, m, torch.zeros_like(m[0]), tolerance=1e-12)
    assert found.residual < 1e-11
    for group in range(2):
        # vec by rows: B M A is (B (x) A^T) vec M, and A is symmetric
        system = sum(q[k] * torch.kron(b[k][group], a[k][group]) for k in range(sites))
        right = sum(q[k] * (b[k][group] @ m[k][group] @ a[k][group]).flatten() for k in range(sites))
        dense = torch.linalg.solve(torch.as_tensor(system), torch.as_tensor(right)).view(outputs, inputs)
        assert torch.allclose(found.matrix[group], dense, atol=1e-7)


def test_the_solve_reports_what_it_did_not_reach_and_survives_an_indefinite_operator() -> None:
    a, b = [spd(6, k) for k in range(3)], [spd(5, 9 + k) for k in range(3)]
    m = [torch.randn(1, 5, 6, dtype=torch.float64, generator=generator(k)) for k in range(3)]
    none = solve([1 / 3] * 3, a, b, m, torch.zeros_like(m[0]), iterations=0)
    few = solve([1 / 3] * 3, a, b, m, torch.zeros_like(m[0]), iterations=3)
    assert (none.residual, none.steps, few.steps) == (1.0, 0, 3)
    assert 1e-6 < few.residual < 1
    same = solve([1 / 3] * 3, a, [b[0]] * 3, m, torch.zeros_like(m[0]))
    assert same.steps <= 2, "the preconditioner is the answer where all B agree"
    wrong = solve([0.5, 0.5], [-a[0], -a[1]], b[:2], m[:2], torch.zeros_like(m[0]))
    assert bool(wrong.matrix.isfinite().all())


def test_fedlpa_of_linear_models_is_the_pooled_least_squares() -> None:
    """Theory: for the quadratic loss |M a - y|^2 / 2 the Hessian is I (x) A_k, with A_k = E_k[a a^T] and the same B = I
    at every site, and a site's optimum has M_k A_k = E_k[y a^T]. So sum_k q_k M A_k = sum_k q_k E_k[y a^T], the normal
    equations of all the data together: the posteriors' mode is the pooled optimum, exactly, however the data are
    divided. Here the linear model is the head of networks that share their features, through whole parcels."""
    network = lively(MLP)
    pooled_aa, pooled_ya, parcels = torch.zeros(6, 6, dtype=torch.float64), torch.zeros(3, 6, dtype=torch.float64), []
    for k, n in enumerate((30, 12, 50)):
        x = images(MLP, n, seed=k)
        with torch.no_grad():
            f = network.features(MLP.prepare(x)).double()
        f = F.pad(f * (k + 1), (0, 1), value=1.0)  # sites that see quite different inputs
        y = torch.randn(n, 3, dtype=torch.float64, generator=generator(k, "y"))
        aa, ya = f.T @ f / n + 1e-3 * torch.eye(6), y.T @ f / n  # a ridge, as part of each site's own loss
        own = ya @ torch.linalg.inv(aa)
        pooled_aa, pooled_ya = pooled_aa + n / 92 * aa, pooled_ya + n / 92 * ya
        extras = kfac(network, site_of(MLP, 5), 0, half=False)
        extras |= {f"head.A.{key}": value for key, value in pack(aa[None], half=False).items()}
        extras |= {f"head.B.{key}": value for key, value in pack(torch.eye(3)[None], half=False).items()}
        network.load_state_dict(network.state_dict() | divide(own[None].float(), "head", network.head))  # type: ignore[arg-type]
        parcels.append(made(f"site-{k}", network, sent("kfac", extras), samples=n))
    fusion = FedLpa(FedLpaSettings(damping=1e-12, tolerance=1e-12))
    fused = fusion.fuse(Inbox(parcels)).networks[0].state_dict()
    best = pooled_ya @ torch.linalg.inv(pooled_aa)
    average = sum(p.manifest.samples / 92 * join(p.weights, "head", network.head)[0] for p in parcels)  # type: ignore[arg-type]
    found = join(fused, "head", network.head)[0].double()  # type: ignore[arg-type]
    assert float((torch.as_tensor(average) - best).norm() / best.norm()) > 0.1, "the plain average is something else"
    assert float((found - best).norm() / best.norm()) < 1e-3
    for name in ("backbone.fc1.weight", "backbone.fc2.bias"):
        assert torch.allclose(fused[name], parcels[0].weights[name], atol=1e-6), "what all sites agree on stays"


def three(spec: ModelSpec, statistic: Any, name: str) -> list[Parcel]:
    found = []
    for k in range(3):
        network = lively(spec, seed=k)
        found.append(
            made(f"site-{k}", network, sent(name, statistic(network, site_of(spec, 12, k), 0)), samples=10 * (k + 1))
        )
    return found


def test_fedlpa_with_one_precision_for_all_is_fedavg() -> None:
    parcels = three(CNN, kfac, "kfac")
    same = [made(p.manifest.sender, p.network(), parcels[0].extras, p.manifest.samples) for p in parcels]
    server = Server()
    for name, value in FedLpa().fuse(Inbox(same), server).networks[0].state_dict().items():
        assert torch.allclose(value, FedAvg().fuse(Inbox(same)).networks[0].state_dict()[name], atol=1e-5), name
    table = server.report[0]["table"]
    assert [row[0] for row in table["rows"]] == list(matrix_layers(CNN.skeleton()))
    # conv2 has 36 inputs and 5 outputs: (36*37/2 + 5*6/2) halves and two scales
    assert table["rows"][1][1:3] == ["1 x 5 x 36", 2 * (666 + 15) + 8]
    own = FedLpa().fuse(Inbox(parcels)).networks[0].state_dict()
    plain = FedAvg().fuse(Inbox(parcels)).networks[0].state_dict()
    assert float((own["backbone.conv2.weight"] - plain["backbone.conv2.weight"]).abs().max()) > 1e-2
    assert torch.allclose(own["backbone.bn2.running_var"], plain["backbone.bn2.running_var"]), (
        "everything else is averaged"
    )
    only = FedLpa().fuse(Inbox(parcels[:1])).networks[0].state_dict()
    assert all(torch.allclose(value, parcels[0].weights[name], atol=1e-6) for name, value in only.items())


def test_half_precision_changes_nothing_that_matters() -> None:
    """Float16 factors against float32 ones: the fused weights agree to a thousandth, far under what one step of
    training moves."""
    parcels = three(CNN, kfac, "kfac")
    exact = [
        made(
            p.manifest.sender,
            p.network(),
            sent("kfac", kfac(p.network(), site_of(CNN, 12, k), 0, half=False)),
            p.manifest.samples,
        )
        for k, p in enumerate(parcels)
    ]
    halves, floats = (sum(t.nbytes for t in box[0].extras.values()) for box in (parcels, exact))
    assert halves < 0.52 * floats
    one, two = (FedLpa().fuse(Inbox(box)).networks[0] for box in (parcels, exact))
    for name, value in one.state_dict().items():
        if value.is_floating_point():
            assert float((value - two.state_dict()[name]).norm() / two.state_dict()[name].norm()) < 2e-3, name


@pytest.mark.parametrize(("rule", "statistic"), [("fedlpa", "kfac"), ("maecho", "null-space")])
def test_statistics_that_lack_or_do_not_fit_are_refused(
    rule: str, statistic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = {"kfac": kfac, "null-space": null_space}[statistic]
    parcels = three(CNN, compute, statistic)
    with pytest.raises(BadInput, match=rf"z sent no {statistic}; train it with --set objective.send=\[{statistic}\]"):
        FUSIONS[rule]().fuse(Inbox([*parcels, made("z", lively(CNN))]))
    wrong = {key: value[:, :-1] if value.ndim > 1 else value for key, value in parcels[0].extras.items()}
    with pytest.raises(BadInput, match=rf"that z sent cannot be used: {statistic}\.backbone\.conv1.* must be"):
        FUSIONS[rule]().fuse(Inbox([*parcels, made("z", lively(CNN), wrong)]))
    with pytest.raises(BadInput, match=f"needs {statistic}"):
        check_pair(OBJECTIVES["supervised"], FUSIONS[rule])
    check_pair(OBJECTIVES["supervised"], FUSIONS[rule], SupervisedSettings(send=(statistic,)))
    whole = FUSIONS[rule]().fuse(Inbox(parcels)).networks[0].state_dict()
    monkeypatch.setattr(layers, "PORTION", 1)  # a layer a pass: the memory of one layer's statistics, the same numbers
    parts = FUSIONS[rule]().fuse(Inbox(parcels[::-1])).networks[0].state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in parts.items())


# -- MA-Echo


def test_the_recursion_is_the_closed_form() -> None:
    r = torch.randn(40, 5, dtype=torch.float64, generator=generator(0)) * torch.tensor([1.0, 2.0, 0.1, 0.0, 3.0])
    recursive = torch.eye(5, dtype=torch.float64)
    for row in r:
        recursive = recurse(recursive, row, 1.0, 0.05 * 40)
    closed = projector(r.T @ r / 40, 0.05)
    assert torch.allclose(recursive, closed, atol=1e-12)
    assert closed[3].tolist() == pytest.approx([0, 0, 0, 1, 0]), "a direction no input uses stays free"
    assert float(closed[4, 4]) < 0.02, "and one they use does not"
    # by hand: P = 1, r = 2, a = 4, s = .5: 1 - .5 * 4 / (4 + 4)
    assert recurse(torch.ones(1, 1), torch.tensor([2.0]), 0.5, 4.0).item() == 0.75


def test_projectors_are_stored_at_low_rank_where_that_is_smaller() -> None:
    root = torch.randn(2, 20, 3, generator=generator(1))
    low, full = root @ root.mT, spd(20, 0, 2)
    stored = compress(low, 0.1, None, 0.01, half=False)
    assert stored["basis"].shape == (2, 20, 3)
    assert torch.allclose(expand(stored, 20), projector(low.double(), 0.1), atol=0.01)
    assert torch.allclose(
        expand(compress(low, 0.1, None, 0.01, half=True), 20), projector(low.double(), 0.1), atol=0.01
    )
    stored = compress(full, 0.1, None, 0.01, half=False)
    assert stored["triangle"].shape == (2, 210)
    assert torch.allclose(expand(stored, 20), projector(full, 0.1), atol=1e-6)
    capped = expand(compress(full, 0.1, 4, 0.01, half=False), 20)
    values = torch.linalg.eigvalsh(capped)
    assert bool((values[:, 4:] - 1).abs().max() < 1e-6), "all but four directions count as free"
    assert torch.allclose(values[:, :4], torch.linalg.eigvalsh(projector(full, 0.1))[:, :4], atol=1e-6), (
        "those used most are kept"
    )


def test_the_steps_by_hand() -> None:
    """Two clients, one weight: client 0 does not use it (P = 1) and has 0, client 1 uses it (P = 0) and has 1."""
    w, p = [torch.zeros(1, 1, 1), torch.ones(1, 1, 1)], [torch.ones(1, 1, 1), torch.zeros(1, 1, 1)]
    # W = .5; W <- .5 + .5 * mean(0, (-.5)(-1)) = .625; client 0 <- .5 * .625 = .3125; client 1 stays: the mean is
    # .65625
    answer, change = echo(w, p, [0.5, 0.5], 0.5, 1)
    assert answer.item() == 0.65625
    assert change == pytest.approx(0.15625 / 0.65625)
    assert echo(w, p, [0.5, 0.5], 0.5, 100)[0].item() == pytest.approx(1.0), "who uses a weight decides it"


@pytest.mark.parametrize("free", [0.0, 1.0])
@pytest.mark.parametrize("iterations", [0, 1, 50])
def test_maecho_is_the_average_where_projections_vanish_and_where_all_is_free(free: float, iterations: int) -> None:
    """P = 0: no client can move, so the answer stays the mean of the W_k. P = I: all move to W, which stays at their
    mean."""
    parcels = three(CNN, null_space, "null-space")
    extras = {}
    for name, layer in matrix_layers(CNN.skeleton()).items():
        groups, _, n = matrix_shape(layer)
        extras |= {
            f"null-space.{name}.{key}": v
            for key, v in pack(free * torch.eye(n).expand(groups, n, n), half=False).items()
        }
    parcels = [made(p.manifest.sender, p.network(), extras, p.manifest.samples) for p in parcels]
    for weights in ("uniform", "size"):
        found = (
            MaEcho(MaEchoSettings(weights=weights, iterations=iterations)).fuse(Inbox(parcels)).networks[0].state_dict()
        )  # type: ignore[arg-type]
        plain = FedAvg(AverageSettings(weights=weights)).fuse(Inbox(parcels)).networks[0].state_dict()  # type: ignore[arg-type]
        assert all(torch.allclose(value, plain[name], atol=1e-5) for name, value in found.items())
    w = [torch.randn(1, 2, 3, generator=generator(k)) for k in range(2)]
    apart = [free * torch.eye(3)[None]] * 2
    assert torch.allclose(echo(w, apart, [0.5, 0.5], 0.5, iterations)[0], (w[0] + w[1]) / 2, atol=1e-6)


def test_with_true_projectors_every_client_keeps_its_answers() -> None:
    """Where P_k are projections the fixed point solves sum_k W (I - P_k) = sum_k W_k (I - P_k); inputs of different
    clients that lie in different directions are then answered as each client answers its own, which no average does."""
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=generator(3)))[0]
    used = [basis[:, :2] @ basis[:, :2].T, basis[:, 2:5] @ basis[:, 2:5].T]
    w = [torch.randn(1, 3, 6, dtype=torch.float64, generator=generator(k)) for k in range(2)]
    p = [(torch.eye(6, dtype=torch.float64) - u)[None] for u in used]
    answer, change = echo(w, p, [0.5, 0.5], 0.5, 200)
    assert change < 1e-12
    for k in range(2):
        assert torch.allclose(answer @ used[k], w[k] @ used[k], atol=1e-9)
        assert not torch.allclose((w[0] + w[1]) / 2 @ used[k], w[k] @ used[k], atol=1e-2)


@given(seed=st.integers(0, 999), eta=st.floats(0.05, 1.0), clients=st.integers(1, 5))
def test_the_steps_stay_bounded_and_settle(seed: int, eta: float, clients: int) -> None:
    w = [torch.randn(1, 3, 6, dtype=torch.float64, generator=generator(seed, k)) for k in range(clients)]
    p = [projector(spd(6, seed + k) * 10.0 ** ((seed + k) % 5 - 2), 0.1) for k in range(clients)]
    shares = [1 / clients] * clients
    changes = [echo(w, p, shares, eta, n) for n in (1, 30, 300)]
    assert all(float(answer.norm()) <= 4 * max(float(m.norm()) for m in w) for answer, _ in changes)
    assert changes[2][1] <= changes[1][1] + 1e-9
    assert changes[2][1] < 0.01


@pytest.mark.parametrize("name", ["mobilenetv2", "resnet18", "vgg-wildfire", "prototype", "projector"])
@pytest.mark.parametrize(("rule", "statistic"), [("fedlpa", kfac), ("maecho", null_space)])
def test_sites_that_agree_are_left_as_they_are_whatever_they_saw(name: str, rule: str, statistic: Any) -> None:
    spec = SPECS[name]
    network = lively(spec)
    key = {"fedlpa": "kfac", "maecho": "null-space"}[rule]
    parcels = [
        made(f"site-{k}", network, sent(key, statistic(network, site_of(spec, 5, seed=k), 0)), samples=5 + k)
        for k in range(2)
    ]
    for entry, value in FUSIONS[rule]().fuse(Inbox(parcels)).networks[0].state_dict().items():
        assert torch.allclose(value, network.state_dict()[entry], atol=1e-5), entry


# -- OT fusion


def test_which_dimensions_a_group_of_neurons_lies_along() -> None:
    assert neuron_axes(MLP) == {
        "fc1": (Axis("backbone.fc1.weight", 0, 1), Axis("backbone.fc1.bias", 0, 1), Axis("backbone.fc2.weight", 1, 1)),
        "fc2": (Axis("backbone.fc2.weight", 0, 1), Axis("backbone.fc2.bias", 0, 1), Axis("head.weight", 1, 1)),
    }
    flat = neuron_axes(EVERY["cnn-fol"].replace(size=(22, 22)))["conv3"]
    assert flat[-1] == Axis("head.weight", 1, 4), "22 -> 20 -> 10 -> 8 -> 4 -> 2: a channel is 2 x 2 features"
    stem = {
        (axis.tensor.removeprefix("backbone."), axis.dim)
        for axis in neuron_axes(EVERY["resnet18"])["stem"]
        if "bn" not in axis.tensor
    }
    assert stem == {
        ("conv1.weight", 0),
        ("layer1.0.conv1.weight", 1),
        ("layer1.0.conv2.weight", 0),
        ("layer1.1.conv1.weight", 1),
        ("layer1.1.conv2.weight", 0),
        ("layer2.0.conv1.weight", 1),
        ("layer2.0.downsample.0.weight", 1),
    }
    order = list(neuron_axes(EVERY["resnet18"]))
    assert order.index("layer2.0.conv1") < order.index("layer2"), "a stage is matched after a layer that feeds it"
    assert "conv3" not in neuron_axes(CNN.replace(head="etf")), "fixed anchors fix the order of the features"
    assert list(neuron_axes(CNN.replace(projector=(7, 9)))) == ["conv1", "conv2", "conv3", "projector.0", "projector.1"]


def shuffled(network: Network, seed: int) -> Network:
    axes = neuron_axes(network.spec)
    state = network.state_dict()
    widths = {key: state[places[0].tensor].shape[places[0].dim] // places[0].block for key, places in axes.items()}
    orders = {key: torch.randperm(width, generator=generator(seed, key)) for key, width in widths.items()}
    other = network.spec.build()
    other.load_state_dict(permute(network.spec, state, orders))
    return other.eval()


@pytest.mark.parametrize("name", sorted(SPECS))
def test_a_shuffled_network_is_the_same_function_and_is_found_again(name: str) -> None:
    spec = SPECS[name]
    network = lively(spec)
    other = shuffled(network, 1)
    x = spec.prepare(images(spec, 4))
    state, mixed = network.state_dict(), other.state_dict()
    with torch.no_grad():
        assert torch.allclose(network(x), other(x), rtol=1e-3, atol=1e-4), "the same function"
    assert sum(not torch.equal(value, mixed[key]) for key, value in state.items()) > 4, "in another order"
    for orders in (match_weights(spec, state, mixed), match_activations(network, other, images(spec, 24, seed=2))):
        assert all(torch.equal(value, state[key]) for key, value in permute(spec, mixed, orders).items())
    server, box = Server(), Inbox([made("a", network, samples=30), made("b", other, samples=10)])
    fused = OtFusion().fuse(box, server).networks[0]
    for key, value in fused.state_dict().items():
        assert torch.allclose(value, state[key], atol=1e-5), key
    ((site, neurons, moved, before, after),) = server.report[0]["table"]["rows"]
    assert (site, after) == ("b", 0.0)
    assert before > 0.1
    assert neurons >= moved > neurons / 2


def test_the_largest_site_is_the_reference_and_integers_are_kept() -> None:
    network = lively(CNN)
    small, large = made("a", network, samples=10), made("b", shuffled(network, 3), samples=11)
    fused = OtFusion().fuse(Inbox([small, large])).networks[0].state_dict()
    assert all(torch.allclose(value, large.weights[name], atol=1e-6) for name, value in fused.items())
    assert fused["backbone.bn1.num_batches_tracked"].dtype == torch.int64
    untouched = parcel.to_bytes(small)
    OtFusion(OtSettings(weights="uniform")).fuse(Inbox([small, large]))
    assert parcel.to_bytes(small) == untouched


def test_matching_by_activations_needs_images() -> None:
    network = lively(CNN)
    box = Inbox([made("a", network), made("b", shuffled(network, 3))])
    rule = OtFusion(OtSettings(cost="activations", probe=20))
    with pytest.raises(BadInput, match="needs unlabelled images"):
        rule.fuse(box)
    proxy = Dataset(images(CNN, 30).numpy(), np.zeros(30, dtype=np.int64), NAMES, "proxy")
    found = rule.fuse(box, Server(proxy)).networks[0].state_dict()
    assert all(torch.allclose(value, network.state_dict()[name], atol=1e-6) for name, value in found.items())


def test_sites_that_began_differently_need_matching(digits: DataBundle) -> None:
    """Two sites of the same data, each from a start of its own: a plain average is little better than chance, a matched
    one is not."""
    spec = ModelSpec(name="mlp", classes=10, channels=1, size=(8, 8), widths={"fc1": 64, "fc2": 32})
    none = part_of(digits.train, [])
    parcels = []
    for k in range(2):
        site = Site(
            f"site-{k}", part_of(digits.train, range(600 * k, 600 * k + 600)), none, none, digits.train.class_names
        )
        parcels.append(
            train_site(site, spec, Supervised(SupervisedSettings()), TrainSettings(epochs=10), PLAIN, seed=k).parcel
        )
    assert digits.test is not None
    test = part_of(digits.test)
    plain, matched = (
        float((rule().fuse(Inbox(parcels))(test.images).argmax(1) == test.labels).float().mean())
        for rule in (FedAvg, OtFusion)
    )
    assert matched > plain + 0.1, (plain, matched)
    assert matched > 0.6


# -- whole


def test_all_three_on_digits_beat_the_sites_alone(tmp_path: Path) -> None:
    methods = ("local", "fedavg", "fedlpa", "maecho", "ot")
    done(
        "run",
        "--method",
        ",".join(methods),
        "--data",
        "digits",
        "--clients",
        5,
        "--alpha",
        0.5,
        "--epochs",
        8,
        "--seed",
        1,
        "--model",
        "mlp",
        "--set",
        "objective.send=[kfac,null-space]",
        "--out",
        tmp_path / "run",
        "-q",
    )
    results = {name: result_of(tmp_path / "run" / name) for name in methods}
    accuracy = {name: result["accuracy"] for name, result in results.items()}
    assert min(accuracy["fedlpa"], accuracy["maecho"], accuracy["ot"]) > accuracy["local"] + 0.03, accuracy
    assert min(accuracy["fedlpa"], accuracy["maecho"]) > accuracy["fedavg"] + 0.03, accuracy
    for name, title in (("fedlpa", "FedLPA"), ("maecho", "MA-Echo"), ("ot", "OT fusion")):
        (section,) = json.loads((tmp_path / "run" / name / "extra.json").read_text())
        assert section["title"].startswith(title)
        if name == "fedlpa":
            assert all(float(row[4]) <= 1e-6 for row in section["table"]["rows"]), "every layer is solved"
            factors = sum(row[2] for row in section["table"]["rows"])
            assert results[name]["bytes_up"] > 5 * factors > 100_000, "the factors are in the byte count"
