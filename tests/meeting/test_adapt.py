"""Adapting neighbours: eq. 5 by hand, gates, physical removal in every architecture, several models at once against one
by one."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from factories import STRIPES, quick, random_parcel, small_spec, striped_site
from flyby.errors import BadInput
from flyby.meeting import Candidate
from flyby.meeting.adapt import Desk, accuracy_by_size, finetune, posttune, prune, shrink
from flyby.meeting.measure import flops, latency_ms
from flyby.meeting.prune import (
    Gated,
    Masked,
    channel_groups,
    folded,
    gated_layers,
    keep_masks,
    masks_to_size,
    narrowed,
    removed,
    scaled,
    share_in_time,
)
from flyby.meeting.settings import Backend
from flyby.meeting.stack import Stack
from flyby.meeting.tuning import Budget, Problem, Stepper, tune
from flyby.models import ModelSpec, Network
from flyby.parcels import parcel
from flyby.rng import generator
from flyby.training.steps import batches

ARCHITECTURES = [
    ("mlp", 8),
    ("cnn-small", 8),
    ("lenet", 16),
    ("cnn-fol", 18),
    ("vgg-wildfire", 16),
    ("resnet18", 8),
    ("mobilenetv2", 8),
]


# Eq. 5


def hand_sized() -> tuple[Gated, Stack]:
    """Neighbour: fc1 with two filters (3,4) and (0,1), fc2 with one, (.6,.8); own fc1: (1,0) and (0,2). Only fc1 is
    shared."""
    spec = ModelSpec(name="mlp", classes=2, channels=1, size=(1, 2), widths={"fc1": 2, "fc2": 1})
    own = spec.replace(widths={"fc1": 2, "fc2": 2})
    weights = random_parcel("b", spec, counts=(1, 1), names=("x", "y")).weights
    weights["backbone.fc1.weight"] = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    weights["backbone.fc2.weight"] = torch.tensor([[0.6, 0.8]])
    mine = random_parcel("a", own, counts=(1, 1), names=("x", "y")).weights
    mine["backbone.fc1.weight"] = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    problem = Gated(spec, 1, own, mine, quick(reduction="sum"), torch.device("cpu"))
    with torch.no_grad():
        problem.extra["backbone.fc1"].copy_(torch.tensor([[0.5, 1.0]]))
    return problem, Stack.of(spec, [weights], "cpu")


def gradients(problem: Gated, stack: Stack) -> list[list[float]]:
    penalty = problem.penalty(stack.parameters)
    assert penalty is not None
    wanted = [problem.extra["backbone.fc1"], problem.extra["backbone.fc2"], stack.parameters["backbone.fc1.weight"]]
    return [g.flatten().tolist() for g in torch.autograd.grad(penalty.sum(), wanted)]


def test_the_value_and_gradient_of_eq_5_by_hand() -> None:
    problem, stack = hand_sized()
    penalty = problem.penalty(stack.parameters)
    assert penalty is not None
    # alignment: |.5(3,4)-(1,0)|^2 + |(0,1)-(0,2)|^2 = 4.25 + 1; lassos: .5*5 + 1 shared, 1 unshared
    assert penalty.tolist() == pytest.approx([0.1 * 5.25 + 0.05 * 3.5 + 0.02 * 1])
    gates_1, gates_2, weights = gradients(problem, stack)
    assert gates_1 == pytest.approx([0.1 * 2 * (3 * 0.5 + 4 * 2) + 0.05 * 5, 0.1 * 2 * (1 * -1) + 0.05 * 1])
    assert gates_2 == pytest.approx([0.02])
    assert weights == pytest.approx([0.1 * 0.5 + 0.05 * 0.5 * 0.6, 0.1 * 2 + 0.05 * 0.5 * 0.8, 0, -0.1 * 2 + 0.05])


def test_the_other_forms_of_eq_5() -> None:
    problem, stack = hand_sized()
    literal = gradients(problem, stack)
    problem.settings = problem.settings.model_copy(update={"reduction": "mean"})
    mean = gradients(problem, stack)
    assert mean[0] == pytest.approx([g / 2 for g in literal[0]]), "two shared filters"
    assert mean[1] == pytest.approx(literal[1]), "one unshared filter"
    problem.settings = problem.settings.model_copy(update={"reduction": "sum", "squared": False})
    assert gradients(problem, stack)[0][1] == pytest.approx(0.1 * -1 + 0.05 * 1), (
        "the norm of (0,-1) grows at rate -1 in its gate"
    )


def test_gates_are_projected_and_may_be_learned_alone() -> None:
    problem, _ = hand_sized()
    with torch.no_grad():
        problem.extra["backbone.fc1"].copy_(torch.tensor([[-0.3, 1.7]]))
        problem.project()
    assert problem.extra["backbone.fc1"].tolist() == [[0.0, 1.0]]
    site = striped_site("a")
    spec = small_spec()
    own, other = random_parcel("a", spec, 1), random_parcel("b", spec, 2)
    for joint in (True, False):
        settings = quick(joint=joint, lr=0.1, gamma_shared=5.0, lambda_p=0.0, weight_decay=0.0)
        gated = Gated(spec, 1, spec, own.weights, settings, torch.device("cpu"))
        tuned = tune(Stack.of(spec, [other.weights], "cpu"), gated, site, settings, 3, (0,))
        same = torch.equal(tuned.stack.parameters["backbone.conv1.weight"][0], other.weights["backbone.conv1.weight"])
        assert same is not joint
        assert all(bool(((g >= 0) & (g <= 1)).all()) for g in tuned.extra.values())
        assert any(bool((g < 1).any()) for g in tuned.extra.values())


def test_a_gate_multiplies_the_response_of_its_filter() -> None:
    """Through BatchNorm too: with all gates of the last convolution at 1/2, the features are halved."""
    spec = small_spec()
    stack = Stack.of(spec, [random_parcel("a", spec).weights], "cpu")
    factors = {name: torch.ones(1, len(stack.parameters[f"{name}.weight"][0])) for name in gated_layers(spec)}
    factors["backbone.conv3"] *= 0.5
    images = spec.prepare(striped_site("a").train.images)
    plain, halved = (training_network(stack, f) for f in (None, factors))
    with torch.no_grad():
        torch.testing.assert_close(halved.features(images), plain.features(images) * 0.5, rtol=1e-3, atol=1e-5)


def training_network(stack: Stack, factors: dict[str, Tensor] | None) -> Network:
    whole = stack if factors is None else folded(stack, factors)
    network = stack.spec.build()
    network.load_state_dict(whole.states()[0])
    return network.train()  # batch statistics: a mere scaling of the filter would not be seen


# Removal


def busy(spec: ModelSpec, seed: int = 0) -> Network:
    """A network whose BatchNorms are not at their start values."""
    network = spec.build(torch.Generator().manual_seed(seed)).eval()
    rng = torch.Generator().manual_seed(seed + 1)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low in (
                (module.running_mean, -1),
                (module.running_var, 0.5),
                (module.weight, 0.5),
                (module.bias, -1),
            ):
                assert tensor is not None
                nn.init.uniform_(tensor, low, 1.5, generator=rng)
    return network


def random_masks(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = spec.shapes()
    masks = {}
    for group in channel_groups(spec):
        stays = torch.rand(shapes[f"{group[0]}.weight"][0][0], generator=rng) < 0.6
        stays[0] = True
        masks |= dict.fromkeys(group, stays.float())
    return masks


@pytest.mark.parametrize(("name", "size"), ARCHITECTURES)
def test_removing_silent_filters_keeps_the_outputs_and_gives_a_valid_spec(name: str, size: int) -> None:
    spec = small_spec(name, size, width=0.12)
    masks = random_masks(spec)
    assert set(masks) == set(gated_layers(spec)), "every layer but the last has channels that can go"
    network = busy(spec)
    network.load_state_dict(
        folded(Stack.of(spec, [network.state_dict()], "cpu"), {n: m[None] for n, m in masks.items()}).states()[0]
    )
    smaller = removed(network, masks)
    x = torch.randn(4, 1, size, size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(smaller(x), network(x), rtol=1e-4, atol=1e-4)
    assert smaller.spec.parameter_count() < spec.parameter_count()
    assert flops(smaller.spec) < flops(spec)
    for layer, mask in masks.items():
        assert smaller.get_submodule(layer).weight.shape[0] == int(mask.sum())  # type: ignore[union-attr, index]
    made = parcel.make(
        sender="a", method="fol", spec=smaller.spec, class_names=STRIPES, weights=smaller.state_dict(), samples=1
    )
    again = parcel.from_bytes(parcel.to_bytes(made)).network()
    with torch.no_grad():
        assert torch.equal(again(x), smaller(x)), "a pruned network is a spec and some weights like any other"


def test_a_projector_can_be_pruned_and_other_heads_cannot() -> None:
    spec = small_spec(projector=(12, 6))
    smaller = removed(busy(spec), random_masks(spec))
    assert smaller.spec.projector != (12, 6)
    with pytest.raises(BadInput, match="prototype head cannot be pruned"):
        gated_layers(small_spec(head="prototype"))


def test_what_goes_is_weak_everywhere_and_never_a_whole_layer() -> None:
    spec = small_spec("resnet18", width=0.1)
    network = busy(spec)
    with torch.no_grad():
        network.get_submodule("backbone.layer1.0.conv1").weight[1] = 1e-6  # type: ignore[index, operator]
        network.get_submodule("backbone.layer1.0.conv2").weight[2] = 0.0  # type: ignore[index, operator]
        network.get_submodule("backbone.layer2.1.conv1").weight[:] = 0.0  # type: ignore[index, operator]
    masks = keep_masks(Stack.of(spec, [network.state_dict()], "cpu"), 0.01)
    assert masks["backbone.layer1.0.conv1"][0].tolist() == [1, 0, 1, 1, 1, 1]
    assert bool(masks["backbone.layer1.0.conv2"].all()), "the stem and the other block still use that channel"
    assert int(masks["backbone.layer2.1.conv1"].sum()) == 1, "the last filter of a layer stays"
    assert "head" not in masks
    coupled = next(g for g in channel_groups(spec) if "backbone.conv1" in g)
    assert set(coupled) == {"backbone.conv1", "backbone.layer1.0.conv2", "backbone.layer1.1.conv2"}


@pytest.mark.parametrize(("name", "size"), ARCHITECTURES)
def test_pruning_to_a_size_reaches_it_and_takes_no_more_than_needed(name: str, size: int) -> None:
    spec, share = small_spec(name, size, width=0.25), 0.3
    states = [busy(spec, seed).state_dict() for seed in (0, 5)]
    masks = masks_to_size(Stack.of(spec, states, "cpu"), share)
    assert set(masks) == set(gated_layers(spec))
    for m, state in enumerate(states):
        network = spec.build()
        network.load_state_dict(state)
        smaller = removed(network.eval(), {n: mask[m] for n, mask in masks.items()})
        count = sum(p.numel() for p in smaller.parameters())
        assert count == smaller.spec.parameter_count() <= share * spec.parameter_count()
        assert count > share * spec.parameter_count() * 0.8, "no more than needed"
        assert all(int(mask[m].sum()) >= 1 for mask in masks.values())
    whole = masks_to_size(Stack.of(spec, states, "cpu"), 1.0)
    assert all(bool(mask.all()) for mask in whole.values())


def test_the_weakest_channels_go_first_whatever_their_layer() -> None:
    spec = ModelSpec(name="mlp", classes=2, channels=1, size=(1, 2), widths={"fc1": 2, "fc2": 2})
    weights = random_parcel("b", spec, counts=(1, 1), names=("x", "y")).weights
    weights["backbone.fc1.weight"] = torch.tensor([[30.0, 40.0], [0.0, 20.0]])  # 50 and 20: .57 of the layer's mean
    weights["backbone.fc2.weight"] = torch.tensor([[0.3, 0.0], [0.0, 0.1]])  # .3 and .1: .5 of it
    stack = Stack.of(spec, [weights], "cpu")
    whole = spec.parameter_count()
    assert whole == (2 * 2 + 2) + (2 * 2 + 2) + (2 * 2 + 2)
    one = masks_to_size(stack, 17 / whole)
    assert one["backbone.fc1"].tolist() == [[1, 1]]
    assert one["backbone.fc2"].tolist() == [[1, 0]], "without it 6 + 3 + 4 = 13"
    two = masks_to_size(stack, 12 / whole)
    assert two["backbone.fc1"].tolist() == [[1, 0]], "3 + 2 + 4 = 9"
    assert narrowed(spec, {n: m[0] for n, m in two.items()}).parameter_count() == 9
    assert masks_to_size(stack, 1 / whole)["backbone.fc2"].tolist() == [[1, 0]], "the strongest of a layer stays"


def test_milliseconds_become_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that takes a thousandth of a millisecond for a parameter and an image."""
    spec, site = small_spec(), striped_site("a", count=8)
    monkeypatch.setattr(
        "flyby.meeting.prune.latency_ms", lambda network, x: network.spec.parameter_count() * len(x) / 1000
    )
    stack = Stack.of(spec, [random_parcel("a", spec).weights], "cpu")
    most = spec.parameter_count() / 1000
    assert share_in_time(stack, most, site) == 1.0
    share = share_in_time(stack, most / 2, site)
    assert 0.45 <= share <= 0.55
    assert share_in_time(stack, most / 1e6, site) < 0.05


def test_accuracy_against_size() -> None:
    spec, site = small_spec(), striped_site("a")
    group, own = neighbours(spec, 2), Candidate.of(random_parcel("a", spec, 9), "cpu")
    before = [dict(c.state) for c in group]
    rows = accuracy_by_size(group, own, Desk(site, quick(epochs=1), (0,)), (1.0, 0.3))
    assert [row["share"] for row in rows] == [1.0, 0.3]
    assert rows[0]["parameters"] == spec.parameter_count()
    assert 0 < rows[1]["parameters"] <= 0.3 * spec.parameter_count()
    assert rows[1]["flops"] < rows[0]["flops"]
    assert all(0 <= row["accuracy"] <= 1 and row["log_loss"] > 0 for row in rows)
    for candidate, state in zip(group, before, strict=True):
        assert candidate.spec == spec
        assert candidate.stays is None
        assert all(torch.equal(t, state[n]) for n, t in candidate.state.items()), "copies were pruned, not these"


def test_depthwise_filters_go_with_what_they_read() -> None:
    groups = channel_groups(small_spec("mobilenetv2", width=0.12))
    assert ("backbone.features.2.conv.1.0", "backbone.features.2.conv.0.0") in [
        tuple(sorted(g, reverse=True)) for g in groups
    ]


@pytest.mark.parametrize(("name", "size"), [("cnn-small", 8), ("cnn-fol", 18), ("resnet18", 8), ("mobilenetv2", 8)])
def test_training_behind_masks_is_training_the_smaller_network(name: str, size: int) -> None:
    spec, site = small_spec(name, size, width=0.1), striped_site("a", count=32, size=size)
    masks = random_masks(spec, 3)
    stack = folded(Stack.of(spec, [random_parcel("a", spec).weights], "cpu"), {n: m[None] for n, m in masks.items()})
    settings = quick(lr=0.01)
    network = spec.build()
    network.load_state_dict(stack.states()[0])
    smaller = removed(network, masks)
    behind = tune(stack, Masked(spec, {n: m[None] for n, m in masks.items()}), site, settings, 2, (0,))
    alone = tune(Stack.of(smaller.spec, [smaller.state_dict()], "cpu"), Problem(), site, settings, 2, (0,))
    network.load_state_dict(folded(behind.stack, {n: m[None] for n, m in masks.items()}).states()[0])
    smaller.load_state_dict(alone.stack.states()[0])
    x = spec.prepare(site.val.images)
    with torch.no_grad():
        torch.testing.assert_close(removed(network.eval(), masks)(x), smaller.eval()(x), rtol=2e-3, atol=2e-4)
    assert behind.val_losses == pytest.approx(alone.val_losses, rel=1e-3)


def test_flops_by_hand_and_latency() -> None:
    spec = ModelSpec(name="mlp", classes=2, channels=1, size=(1, 2), widths={"fc1": 3, "fc2": 4})
    assert flops(spec) == (2 * 2 * 3 + 3) + (2 * 3 * 4 + 4) + (2 * 4 * 2 + 2)
    conv = ModelSpec(name="cnn-small", classes=2, channels=1, size=(2, 2), widths={"conv1": 1, "conv2": 1, "conv3": 1})
    assert flops(conv) == 2 * 9 * 4 + 2 * 9 * 4 + 2 * 9 * 1 + (2 * 2 + 2)  # a pool between the second and the third
    assert latency_ms(small_spec().build(), striped_site("a").train.images) > 0


def test_pruning_without_torch_pruning_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    channel_groups.cache_clear()
    with pytest.raises(BadInput, match=r"pip install 'flyby\[prune\]'"):
        channel_groups(small_spec())


# Several at once


def neighbours(spec: ModelSpec, count: int = 3) -> list[Candidate]:
    return [Candidate.of(random_parcel(f"n{i}", spec, i), "cpu") for i in range(count)]


@pytest.mark.parametrize("backend", ["vmap", "matmul"])
@pytest.mark.parametrize(("name", "size"), ARCHITECTURES)
def test_a_stack_takes_the_steps_of_its_models(name: str, size: int, backend: Backend) -> None:
    """Eq. 5 in double precision, where rounding cannot grow into a difference: weights, gates and BatchNorm buffers of
    every model."""
    spec, own = small_spec(name, size, width=0.1), random_parcel("own", small_spec(name, size, width=0.1), 9)
    states = [
        {n: t.double() if t.is_floating_point() else t for n, t in random_parcel("n", spec, i).weights.items()}
        for i in range(3)
    ]
    x = torch.randn(8, 1, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels, settings = torch.arange(8) % 3, quick(lr=0.01, reduction="sum")

    def stepped(some: list[dict[str, Tensor]], kind: Backend) -> tuple[Stack, Gated]:
        stack = Stack.of(spec, some, "cpu", kind)
        problem = Gated(spec, len(some), spec, own.weights, settings, torch.device("cpu"))
        step = Stepper(stack, problem, settings)
        for _ in range(2):
            step(x, labels, labels)
        return stack, problem

    whole, gates = stepped(states, backend)
    for m, state in enumerate(states):
        one, gate = stepped([state], "loop")
        for key, tensor in one.tensors().items():
            torch.testing.assert_close(whole.tensors()[key][m], tensor[0], rtol=1e-5, atol=1e-6)
        for key in gate.extra:
            torch.testing.assert_close(gates.extra[key][m], gate.extra[key][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["vmap", "matmul", "loop"])
@pytest.mark.parametrize(("name", "size"), [("cnn-small", 8), ("mlp", 8), ("vgg-wildfire", 16)])
def test_together_is_one_by_one(name: str, size: int, backend: Backend) -> None:
    """Fine-tune, prune, post-tune and cut, in single precision."""
    spec, site = small_spec(name, size, width=0.12), striped_site("a", count=32, size=size)
    found = []
    for together in (True, False):
        settings = quick(together=together, backend=backend, epochs=2, lr=0.01, reduction="sum")
        group, own = neighbours(spec), Candidate.of(random_parcel("a", spec, 9), "cpu")
        finetune(group, Desk(site, settings, (0,)))
        prune(group, own, Desk(site, settings, (0,)))
        posttune(group, Desk(site, settings, (0,)))
        shrink(group, site, settings)
        found.append(group)
    for left, right in zip(*found, strict=True):
        assert left.spec == right.spec
        assert {k: v for k, v in left.facts.items() if "latency" not in k} == {
            k: v for k, v in right.facts.items() if "latency" not in k
        }
        for key, tensor in left.state.items():
            torch.testing.assert_close(tensor, right.state[key], rtol=1e-3, atol=1e-4)


def test_models_of_one_stack_stop_by_themselves_with_their_best_weights() -> None:
    """A good model that training makes worse stops at once and keeps its start; a bad one goes on."""
    spec, site = small_spec("mlp", width=0.1), striped_site("a")
    settings = quick(lr=0.05, patience=2, weight_decay=0.0)
    good = tune(
        Stack.of(spec, [random_parcel("a", spec, 1).weights], "cpu"),
        Problem(),
        site,
        quick(lr=0.05, patience=40),
        40,
        (0,),
    )
    ruined = striped_site("a", flip=True)
    noisy = type(site)("a", ruined.train, site.val, site.test, site.class_names)
    fresh = random_parcel("b", spec, 2)
    states = [good.stack.states()[0], {n: -t for n, t in fresh.weights.items()}]
    both = tune(Stack.of(spec, states, "cpu", "vmap"), Problem(), noisy, settings, 6, (1,))
    assert both.best_epochs[0] == 0
    assert both.epochs[0] == 2
    for n, t in good.stack.parameters.items():
        assert torch.equal(both.stack.parameters[n][0], t[0])
    alone = tune(Stack.of(spec, states[1:], "cpu"), Problem(), noisy, settings, 6, (1,))
    assert both.epochs[1] == alone.epochs[0]
    assert both.val_losses[1] == pytest.approx(alone.val_losses[0], rel=1e-4)


def test_a_model_that_diverges_harms_no_other() -> None:
    spec, site = small_spec("mlp", width=0.1), striped_site("a")
    states = [
        random_parcel("a", spec, 1).weights,
        {n: t * 1e18 for n, t in random_parcel("b", spec, 2).weights.items()},
    ]
    tuned = tune(Stack.of(spec, states, "cpu"), Problem(), site, quick(), 2, (0,))
    alone = tune(Stack.of(spec, states[:1], "cpu"), Problem(), site, quick(), 2, (0,))
    torch.testing.assert_close(
        tuned.stack.parameters["head.weight"][0], alone.stack.parameters["head.weight"][0], rtol=1e-4, atol=1e-5
    )


def test_a_step_is_torchs_sgd() -> None:
    spec, site = small_spec(width=0.12), striped_site("a", count=16)
    settings = quick(batch=16, lr=0.03, weight_decay=0.1, patience=9)
    tuned = tune(Stack.of(spec, [random_parcel("a", spec).weights], "cpu"), Problem(), site, settings, 0, (0,))
    assert tuned.best_epochs == [0]
    network = random_parcel("a", spec).network().train()
    groups = [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in network.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.03, momentum=0.9)
    stack = Stack.of(spec, [random_parcel("a", spec).weights], "cpu")
    step = Stepper(stack, Problem(), settings)
    for rows in [*batches(16, 16, generator(0))] * 3:
        x, y = spec.prepare(site.train.images[rows]), site.train.labels[rows]
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
        step(x, y, rows)
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(stack.states()[0][name], tensor, rtol=1e-4, atol=1e-5)


def test_pruning_makes_networks_smaller_when_it_is_asked_to() -> None:
    spec, site = small_spec(), striped_site("a")
    settings = quick(gamma_shared=3.0, lambda_p=0.0, reduction="sum", epochs=12, patience=12, lr=0.02, diagnostics=True)
    group, own = neighbours(spec, 2), Candidate.of(random_parcel("a", spec, 9), "cpu")
    finetune(group, Desk(site, settings, (0,)))
    prune(group, own, Desk(site, settings, (0,)))
    shrink(group, site, settings)
    assert any(c.facts["parameters_after"] < c.facts["parameters_before"] for c in group)
    for c in group:
        assert (
            c.facts["parameters_after"] == c.spec.parameter_count() == sum(p.numel() for p in c.network().parameters())
        )
        if c.facts["parameters_after"] < c.facts["parameters_before"]:
            assert c.facts["flops_after"] < c.facts["flops_before"]
            assert c.facts["latency_ms_after"] > 0


def test_a_cpu_that_halves_well_adapts_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, site = small_spec(), striped_site("site-0")

    def tuned(**words: object) -> Tensor:
        stack = Stack.of(spec, [one.state for one in neighbours(spec, 2)], torch.device("cpu"))
        after = tune(stack, Problem(), site, quick(**words), 2, ("test",)).stack
        return torch.cat([t.detach().flatten() for t in after.parameters.values()])

    full, half = tuned(precision="fp32"), tuned(precision="bf16")
    assert torch.equal(tuned(), full)
    monkeypatch.setattr("flyby.training.steps.WORTH_HALVING", 0)
    monkeypatch.setattr("flyby.training.steps.halves_well", lambda: True)
    assert torch.equal(tuned(), half)
    assert not torch.equal(half, full)


def test_when_the_time_is_over_no_further_epoch_and_no_further_group() -> None:
    spec, site = small_spec("mlp", width=0.1), striped_site("a")
    group = neighbours(spec, 3)
    finetune(group, Desk(site, quick(together=False), (0,), until=0.0))
    assert all("finetune_epochs" not in c.facts for c in group), "the time was over before the first"
    stack = Stack.of(spec, [group[0].state], "cpu")
    assert tune(stack, Problem(), site, quick(), Budget(3, until=0.0), (0,)).epochs == [1], "an epoch is not cut short"
    assert tune(stack, Problem(), site, quick(), Budget(3), (0,)).epochs == [3]


def test_scaled_leaves_the_head_alone() -> None:
    spec = small_spec()
    stack = Stack.of(spec, [random_parcel("a", spec).weights], "cpu")
    zeros = {n: torch.zeros(1, stack.parameters[f"{n}.weight"].shape[1]) for n in gated_layers(spec)}
    out = scaled(spec, stack.parameters, zeros)
    assert out["head.weight"] is stack.parameters["head.weight"]
    assert float(out["backbone.bn1.bias"].detach().abs().sum() + out["backbone.conv1.weight"].detach().abs().sum()) == 0
