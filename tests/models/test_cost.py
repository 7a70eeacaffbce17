"""What a network costs, told from its spec, against the network itself, counted layer by layer while it really runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from factories import small_spec, striped_site
from flyby.errors import BadInput
from flyby.fusion.ensembles.experts import f1_scores
from flyby.fusion.evaluation import scores_of
from flyby.fusion.predictor import Single
from flyby.fusion.weights.average import likeliest
from flyby.models import ARCHITECTURES, ModelSpec, Network, cost
from flyby.models.cost import Limits, at_once, cost_of
from flyby.models.mobilenet import InvertedResidual
from flyby.rng import generator
from flyby.statistics.calibration import calibrate
from flyby.statistics.class_means import class_means


def a_spec(name: str, **changes: Any) -> ModelSpec:
    return ModelSpec(**{"name": name, "classes": 10, "size": (32, 32), **changes})


def counted(spec: ModelSpec) -> tuple[int, int, int, int]:
    """(numbers of the state, bytes that layers gave out, largest input and output of one layer, multiply-adds), from
    hooks on the layers of a real network that answers one real image."""
    network = spec.build().eval()
    given, largest, products = 0, 0, 0

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal given, largest, products
        x = inputs[0]
        if out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():  # not in place, not a view
            given += out.nbytes + (8 * out.numel() if isinstance(layer, nn.MaxPool2d) else 0)
            largest = max(largest, x.nbytes + out.nbytes)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            products += out.numel() * layer.weight[0].numel()

    for layer in network.modules():
        if not list(layer.children()) or (isinstance(layer, InvertedResidual) and layer.residual):
            layer.register_forward_hook(hook)  # type: ignore[arg-type]
    image = spec.prepare(torch.zeros((1, *spec.size, spec.channels), dtype=torch.uint8))
    with torch.no_grad():
        network(image)
    return sum(t.numel() for t in network.state_dict().values()), given + image.nbytes, largest, products


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_the_cost_is_what_the_network_takes(name: str, stem: str) -> None:
    for changes in ({}, {"size": (48, 33), "channels": 2, "width": 0.3, "projector": (24, 7)}):
        spec = a_spec(name, stem=stem, **changes)
        found, (parameters, given, largest, products) = cost_of(spec), counted(spec)
        assert (found.parameters, found.activations, found.multiply_adds) == (parameters, given, products)
        assert largest <= found.live <= given
        assert found.pixels == spec.channels * spec.size[0] * spec.size[1]


def test_published_numbers_and_one_by_hand() -> None:
    work = {"resnet18": 1.814e9, "resnet34": 3.664e9, "mobilenetv2": 0.3008e9}  # multiply-adds at 224 pixels
    for name, published in work.items():
        found = cost_of(a_spec(name, classes=1000, size=(224, 224), stem="imagenet"))
        assert found.multiply_adds == pytest.approx(published, rel=2e-3)
    # While the second batch norm works: the image, and 64 channels before and after it.
    assert cost_of(a_spec("cnn-small")).live == 4 * (3 + 2 * 64) * 32 * 32
    # The image stands there twice, once with its channels last.
    assert cost_of(a_spec("mlp")).activations == 4 * (2 * 3072 + 2 * 256 + 2 * 128 + 10)
    # A prototype head adds features of length one, logits, and logits times the scale.
    plain, scaled = cost_of(a_spec("mlp")), cost_of(a_spec("mlp", head="prototype", logit_scale=True))
    assert scaled.activations - plain.activations == 4 * (128 + 10)
    assert cost_of(a_spec("mlp", head="etf")).parameters == plain.parameters - 10 + 1  # anchors count, like weights


def test_absurd_specs_are_told_without_memory_and_at_once() -> None:
    worst = a_spec("resnet34", classes=100_000, size=(4096, 4096), channels=64, width=64.0, projector=(65536,) * 4)
    found = cost_of(worst)  # 434 GB of weights, 8.6 TB of activations
    assert found.parameters > 10**11
    assert found.activations > 8 * 10**12


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"size": (1025, 8)}, "max-side"),
        ({"classes": 10_001}, "max-classes"),
        ({"projector": (65536, 65536)}, "max-parameters"),
        ({"channels": 64, "size": (1024, 1024), "projector": (65536, 4000)}, "max-parameters"),
    ],
)
def test_the_spec_s_own_numbers_are_enough_for_the_worst(
    changes: dict[str, Any], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = a_spec("cnn-small", **changes)
    monkeypatch.setattr(ModelSpec, "skeleton", lambda _: pytest.fail("a network was drawn up"))
    cost_of.cache_clear()
    with pytest.raises(BadInput, match=f"a.parcel: its network takes .* allowed; raise --{flag} if you trust"):
        Limits().check(spec, "a.parcel")


def test_limits_leave_room_for_honest_networks_and_can_be_moved() -> None:
    for name in ARCHITECTURES:
        for stem in ("cifar", "imagenet"):
            Limits().check(a_spec(name, size=(224, 224), stem=stem))
    Limits().check(a_spec("resnet18", size=(512, 512)))
    exact = cost_of(a_spec("cnn-small"))
    limits = Limits(max_parameters=exact.parameters, max_memory=exact.live, max_side=32, max_classes=10)
    assert limits.check(a_spec("cnn-small")) == exact
    for name in ("max_parameters", "max_memory", "max_side", "max_classes"):
        less = limits.model_copy(update={name: getattr(limits, name) - 1})
        with pytest.raises(BadInput, match=name.replace("_", "-")):
            less.check(a_spec("cnn-small"))


def test_batches_fit_into_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert at_once(a_spec("resnet34"), 512) == 512  # nothing changes for small images
    big = a_spec("resnet18", size=(224, 224))
    assert at_once(big, 512) == cost.ROOM // cost_of(big).live == 11
    spec = a_spec("cnn-small", width=0.1)
    predictor = Single([spec], [f"c{i}" for i in range(10)], [spec.build()])
    images = torch.randint(0, 256, (9, 32, 32, 3), generator=generator("cost"), dtype=torch.uint8)
    whole = scores_of(predictor, images)
    monkeypatch.setattr(cost, "ROOM", 2 * cost_of(spec).live)
    assert at_once(spec, 512) == 2
    torch.testing.assert_close(scores_of(predictor, images), whole)
    monkeypatch.setattr(cost, "ROOM", 1)
    assert at_once(spec, 512) == 1


def test_what_is_measured_on_many_images_takes_them_as_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the site and at the server, where a network that was trained with batches of 32 has hundreds to look at."""
    spec = small_spec()
    network, site, lengths, honest = spec.build(), striped_site("site-0"), list[int](), Network.features
    part = site.train

    def measured() -> list[Tensor]:
        scraps, means = calibrate(network, site, 0)["calibration"], class_means(network, site, 0)["means"]
        return [scraps, means, f1_scores(network, part.images, part.labels), torch.tensor(likeliest([network], part))]

    def seen(self: Network, x: Tensor) -> Tensor:
        lengths.append(len(x))
        return honest(self, x)

    whole = measured()
    monkeypatch.setattr(Network, "features", seen)
    monkeypatch.setattr(cost, "ROOM", 7 * cost_of(spec).live)
    for found, wanted in zip(measured(), whole, strict=True):
        torch.testing.assert_close(found, wanted)
    assert max(lengths) == 7


def test_an_architecture_that_does_the_unheard_of_is_asked_for_its_shapes_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_last(last: nn.Module) -> ModelSpec:
        kind = ARCHITECTURES["mlp"]

        def build(shape: Any, widths: Any) -> tuple[nn.Module, int]:
            layers, dim = kind.build(shape, widths)
            return nn.Sequential(layers, last), dim

        monkeypatch.setitem(ARCHITECTURES.built_in, "odd", type(kind)(build, kind.widths))
        cost_of.cache_clear()
        return a_spec("odd")

    assert cost_of(with_last(nn.GELU())).activations == cost_of(a_spec("mlp")).activations + 4 * 128  # torch's own rule

    class Peeks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    spec = with_last(Peeks())
    with pytest.raises(BadInput, match="what odd costs cannot be told from its spec"):
        Limits().check(spec)
    assert at_once(spec, 7) == 7
