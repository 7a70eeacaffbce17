"""Tuned backbones: what is trained and travels, that all of them start as the frozen one, and what low rank means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flyby
from factories import make_images
from flyby.data.site import Part, Site
from flyby.errors import BadInput
from flyby.fusion.predictor import Single, export_program
from flyby.fusion.weights.average import AverageSettings, FedAvg
from flyby.meeting.pipeline import orient
from flyby.meeting.settings import OrientSettings
from flyby.models import ModelSpec, Network, backbones, lite
from flyby.models import tune as tuning
from flyby.models.backbones import Frozen, Named, Tune, known, network_of
from flyby.models.cost import Limits, cost_of
from flyby.models.features import features_of, looked_at, pooled_of
from flyby.models.given import given
from flyby.models.tune import Adapted, Below, Tuned, cut, dense, shell_of
from flyby.parcels import parcel
from flyby.parcels.inbox import Inbox
from flyby.parcels.parcel import Parcel
from flyby.runs.backbones import own, tuned
from flyby.runs.config import make_config, plan
from flyby.runs.methods import METHODS
from flyby.runs.pipeline import Options, run
from flyby.statistics.kfac import input_rows, matrix_layers, second_moments
from flyby.training.loop import train_site
from flyby.training.privacy import per_sample_gradients

TUNES: tuple[Tune, ...] = ("last", "all", "lora")


def plain(name: str = "cnn-small", side: int = 8, **words: Any) -> ModelSpec:
    return ModelSpec(name=name, classes=10, channels=1, size=(side, side), **{"width": 0.25, **words})


def drawn(spec: ModelSpec, seed: int = 0) -> Named:
    network = spec.build(torch.Generator().manual_seed(seed))
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):  # not as untrained ones are
            module.running_mean.uniform_(-0.1, 0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    return own(spec, network.state_dict())


def standing(named: Named, tune: Tune, rank: int | None = None, **words: Any) -> ModelSpec:
    backbone = tuned(named.backbone, tune, rank)
    fields = {"classes": 10, "channels": backbone.channels, "size": backbone.size} | words
    return ModelSpec(name=named.name, backbone=backbone, **fields)


def built(spec: ModelSpec) -> Network:
    return spec.build(torch.Generator().manual_seed(5)).eval()


def here(count: int = 48, seed: int = 0) -> Site:
    images = torch.from_numpy(make_images(count, channels=1, seed=seed))
    part = Part(images, torch.arange(count) % 10)
    return Site(f"site-{seed}", part, Part(images[:16], part.labels[:16]), part, tuple("0123456789"))


def trained(spec: ModelSpec, method: str = "fedavg", seed: int = 0, *assignments: str, epochs: int = 2) -> Parcel:
    words = ["model.name=mlp", "views.crop=none", "views.flip=0", *assignments]
    config = make_config(method, epochs=epochs, assignments=words)
    recipe = plan(config, config.data.load()).recipe
    spec = spec.replace(head=recipe.spec.head, logit_scale=recipe.spec.logit_scale)
    clip = recipe.train.model_copy(update={"clip": None if recipe.train.dp_epsilon else 1.0})
    return train_site(here(seed=seed), recipe.model_copy(update={"spec": spec, "train": clip}), method=method).parcel


@pytest.fixture(scope="module")
def small() -> Named:
    return drawn(plain())


# -- the start


@pytest.mark.parametrize("name", ["mlp", "cnn-fol", "resnet18", "mobilenetv2"])
def test_all_start_as_the_frozen_one(name: str) -> None:
    named = drawn(plain(name, 18, width=0.1))
    frozen, x = built(standing(named, "head")), torch.randn(4, 1, 18, 18)
    for tune in TUNES:
        network = built(standing(named, tune))
        assert torch.equal(network.head.weight, frozen.head.weight)  # type: ignore[arg-type]
        if tune == "lora":
            assert torch.equal(network(x), frozen(x))
        else:  # the same numbers, in another order in memory
            assert torch.allclose(network(x), frozen(x), atol=1e-5)
            shared = network_of(named, "cpu")
            source = shared if tune == "all" else cut(shared, named.name)[1]
            tail = network.backbone.tail.state_dict()  # type: ignore[union-attr]
            assert tail.keys() == source.state_dict().keys()
            assert all(torch.equal(t, source.state_dict()[key]) for key, t in tail.items())


def test_what_is_cut_is_the_last_stage_and_a_projector_after_it() -> None:
    heads = {"mlp": "fc2", "cnn-small": "conv3", "resnet18": "layer4", "mobilenetv2": "last"}
    for name, first in heads.items():
        spec = standing(drawn(plain(name, 8, width=0.1, projector=(6, 5))), "last")
        parts = {key.split(".")[2] for key in spec.shapes() if key.startswith("backbone.")}
        assert first in parts, name
        assert "projector" in parts
        assert not parts & {"conv1", "layer3", "fc1", "first"}


def test_only_what_is_tuned_travels_and_older_specs_are_as_ever(small: Named) -> None:
    sizes = {tune: standing(small, tune).parameter_count() for tune in ("head", *TUNES)}
    whole = plain().parameter_count()
    # conv3 with its BatchNorm; everything; four columns for each of 8, 16 and 32 outputs.
    assert sizes == {"head": 330, "last": 330 + 9 * 16 * 32 + 64, "all": whole, "lora": 330 + 4 * (8 + 16 + 32)}
    said = standing(small, "lora", 3).model_dump(mode="json")
    assert (said["backbone"]["tune"], said["backbone"]["rank"]) == ("lora", 3)
    assert ModelSpec.from_dict(said) == standing(small, "lora", 3)
    assert {"tune", "rank"}.isdisjoint(standing(small, "head").model_dump(mode="json")["backbone"])


# -- low rank


def moved(network: Network, named: Named) -> Network:
    """The frozen network on a backbone whose weights W are W + U D, put together here."""
    spec = plain()
    state = {name: t.clone() for name, t in network_of(named, "cpu").state_dict().items()}
    _, places = shell_of(Named(named.name, network.spec.backbone), torch.device("cpu"))  # type: ignore[arg-type]
    for name, place in places.items():
        up = network.state_dict()[f"backbone.tail.up.{name}.weight"].flatten(1)
        state[f"{name.replace('-', '.')}.weight"] += (up @ place.down.flatten(1)).view(place.layer.weight.shape)  # type: ignore[arg-type]
    head = {name: t for name, t in network.state_dict().items() if name.startswith("head.")}
    other = built(spec)
    other.load_state_dict({**state, **head})
    return other


def shaken(spec: ModelSpec, seed: int) -> Network:
    network, rng = built(spec), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=rng))
    return network


def test_lora_is_a_product_of_low_rank_beside_the_weights(small: Named) -> None:
    network, x = shaken(standing(small, "lora", 3), 1), torch.randn(6, 1, 8, 8)
    assert torch.allclose(network(x), moved(network, small)(x), atol=1e-4)
    assert not torch.allclose(network(x), built(standing(small, "head"))(x), atol=1e-2)


def test_the_mean_of_lora_is_the_mean_of_what_it_does_to_the_weights(small: Named) -> None:
    spec = standing(small, "lora", 2)
    networks = [shaken(spec, seed) for seed in (1, 2)]
    parcels = [
        parcel.make(
            sender=f"s{k}",
            method="fedavg",
            spec=spec,
            class_names=list("0123456789"),
            samples=10 * (k + 1),
            counts=None,
            weights=network.state_dict(),
        )
        for k, network in enumerate(networks)
    ]
    fused = FedAvg(AverageSettings()).fuse(Inbox(parcels))
    assert isinstance(fused, Single)
    full = [moved(network, small).state_dict() for network in networks]
    wanted = moved(networks[0], small)
    wanted.load_state_dict(
        {k: full[0][k] / 3 + full[1][k] * 2 / 3 for k in full[0] if full[0][k].is_floating_point()}, strict=False
    )
    x = torch.randn(5, 1, 8, 8)
    assert torch.allclose(fused.networks[0](x), wanted(x), atol=1e-4)


def test_the_fixed_factor_is_drawn_from_the_hash_alone_with_rows_of_length_1(small: Named) -> None:
    spec = standing(small, "lora", 4).backbone
    assert spec is not None
    first = {name: place.down for name, place in shell_of(Named(small.name, spec), torch.device("cpu"))[1].items()}
    tuning._SHELLS.__dict__.clear()  # from nothing
    again = shell_of(Named(small.name, spec), torch.device("cpu"))[1]
    assert all(torch.equal(again[name].down, down) for name, down in first.items())
    assert not torch.equal(*(down.flatten()[:32] for down in list(first.values())[:2]))
    lengths = first["backbone-conv3"].flatten(1).norm(dim=1)
    assert lengths.sub(1).abs().max() < 0.25
    other = shell_of(Named(small.name, tuned(drawn(plain(), 3).backbone, "lora", 4)), torch.device("cpu"))[1]
    assert not torch.equal(other["backbone-conv3"].down, first["backbone-conv3"])


def test_a_layer_narrower_than_the_rank_has_its_own_width(small: Named) -> None:
    shapes = standing(small, "lora", 16).shapes()
    assert shapes["backbone.tail.up.backbone-conv1.weight"][0] == (8, 8, 1, 1)  # of 9 inputs and 8 outputs
    assert shapes["backbone.tail.up.backbone-conv2.weight"][0] == (16, 16, 1, 1)
    with pytest.raises(BadInput, match=r"model.rank = 33 will not do for lora on flyby:cnn-small: give 1 to 32"):
        standing(small, "lora", 33).skeleton()


# -- training


@pytest.mark.parametrize("tune", TUNES)
def test_training_moves_what_is_tuned_and_nothing_else(tune: Tune, small: Named) -> None:
    spec = standing(small, tune)
    before = {name: t.clone() for name, t in network_of(small, "cpu").state_dict().items()}
    start, done = built(spec).state_dict(), trained(spec)
    after = network_of(small, "cpu").state_dict()
    assert all(torch.equal(t, after[name]) for name, t in before.items())
    assert done.weights.keys() == start.keys()
    for name, tensor in done.weights.items():
        still = "running" in name or "num_batches" in name  # BatchNorm goes by the backbone's statistics
        if name.startswith("backbone."):
            assert torch.equal(tensor, start[name]) == still, name


@pytest.mark.parametrize("name", ["cnn-small", "mlp"])
def test_training_over_what_comes_before_the_last_stage_is_training_through_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = drawn(plain(name), 4)
    spec, seen = standing(named, "last"), []
    look = Frozen._seen

    def counted(self: Frozen, x: Tensor) -> Tensor:
        seen.append(0 if x.is_meta else len(x))
        return look(self, x)

    monkeypatch.setattr(Frozen, "_seen", counted)
    trained(spec, epochs=1)
    first = sum(seen)
    quick = trained(spec, epochs=3)
    assert first - (sum(seen) - first) == 48  # every image once; the rest is what is measured after a training
    monkeypatch.setattr("flyby.training.loop.looked_at", lambda model, parts, label: (model, parts))
    slow = trained(spec, epochs=3)
    assert sum(seen) > 2 * first + 2 * 48
    for key, tensor in quick.weights.items():
        assert torch.allclose(tensor, slow.weights[key], atol=1e-4), key


def test_gradients_are_those_of_the_whole_network(small: Named) -> None:
    whole, x, labels = built(plain()), torch.randn(7, 1, 8, 8), torch.arange(7)
    whole.load_state_dict(
        {**network_of(small, "cpu").state_dict(), **built(standing(small, "all")).head.state_dict(prefix="head.")}
    )
    nn.functional.cross_entropy(whole(x), labels).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    for tune, inside in (("all", "backbone.tail."), ("last", "backbone.tail.")):
        network = built(standing(small, tune)).train()  # type: ignore[arg-type]
        nn.functional.cross_entropy(network(x), labels).backward()
        for name, p in network.named_parameters():
            key = name.replace(inside, "" if tune == "all" else "backbone.")
            assert torch.allclose(p.grad, wanted[key], atol=1e-5), name  # type: ignore[arg-type]


def test_features_are_the_same_by_way_of_the_cache(small: Named) -> None:
    images = here().train.images
    for tune in ("head", *TUNES):
        network = shaken(standing(small, tune, projector=(5,)), 3)
        kept = pooled_of(network, images)
        assert (kept is None) == (tune in ("all", "lora"))
        with torch.no_grad():
            assert torch.allclose(features_of(network, images), network.features(network.prepare(images)), atol=1e-5)
    assert kept is None


def test_what_would_take_too_much_is_looked_at_every_time(small: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    network, site = built(standing(small, "last")), here()
    learner, parts = looked_at(network, (site.train, site.val), "s")
    assert learner is not network
    assert parts[0].images.shape == (48, 4, 4, 16)
    monkeypatch.setattr("flyby.models.features.MOST", 1000)
    assert looked_at(network, (site.train, site.val), "s") == (network, (site.train, site.val))


@pytest.mark.parametrize("method", ["fafi", "aurora", "fedlpa", "maecho", "ot", "fedproto", "median"])
def test_every_kind_of_method_takes_them(method: str, small: Named) -> None:
    for tune in ("last", "lora"):
        made = [trained(standing(small, tune), method, seed, epochs=1) for seed in (0, 1)]  # type: ignore[arg-type]
        assert len(flyby.fuse(made, METHODS[method].fusion).predict(here().train.images[:4])) == 4


def test_a_run_with_lora_learns_more_than_its_head(tmp_path: Path) -> None:
    start = make_config(
        "fedavg", epochs=1, split={"clients": 1, "alpha": 100.0}, assignments=["model.width=0.25", "locals=false"]
    )
    run(start, tmp_path / "taught", Options(engine="inline", quiet=True))
    said = {}
    for tune in ("head", "lora"):
        words = [f'model.backbone="{tmp_path / "taught"}"', f"model.tune={tune}", "locals=false", "views.crop=none"]
        words += ["views.flip=0", "views.jitter_p=0", "train.lr=0.5"]
        config = make_config("fafi", epochs=3, split={"clients": 2, "alpha": 100.0}, assignments=words)
        said[tune] = run(config, tmp_path / tune, Options(engine="inline", quiet=True))
    assert said["lora"].accuracy > said["head"].accuracy + 0.05
    assert said["lora"].bytes_up < 2 * 15_000


def test_private_training_takes_lora_and_says_what_it_cannot_take(small: Named) -> None:
    pytest.importorskip("opacus")
    words = ("train.dp_epsilon=8", "counts=noisy", "objective.calibrate=false")
    done = trained(standing(small, "lora"), "fedavg", 0, *words, epochs=1)
    assert done.manifest.provenance["privacy"]["epsilon"] <= 8
    moved = [t for name, t in done.weights.items() if ".up." in name]
    assert all(bool(t.abs().max() > 0) for t in moved)
    network, x = shaken(standing(small, "lora"), 1).train(), torch.randn(3, 1, 8, 8)
    with per_sample_gradients(network) as parameters:
        network(x).square().sum(1).mean().backward()
        each = [p.grad_sample.clone() for p in parameters]  # type: ignore[attr-defined]
    for i in range(3):
        network.zero_grad()
        network(x[i : i + 1]).square().sum().backward()
        assert all(torch.allclose(g[i], p.grad, atol=1e-3) for g, p in zip(each, parameters, strict=True))
    config = make_config("fedavg", epochs=1, assignments=words)
    recipe = plan(
        config.model_copy(update={"model": config.model.model_copy(update={"name": "mlp"})}), config.data.load()
    ).recipe
    with pytest.raises(BadInput, match="--tune head or lora"):
        type(recipe)(
            **recipe.model_dump() | {"spec": standing(small, "last"), "objective_settings": recipe.objective_settings}
        )


# -- costs


def test_what_is_tuned_is_counted(small: Named) -> None:
    costs = {tune: cost_of(standing(small, tune)) for tune in ("head", *TUNES)}
    whole = cost_of(plain())
    for tune in ("head", "last", "all"):
        assert costs[tune].parameters == whole.parameters
        assert costs[tune].multiply_adds == whole.multiply_adds
    beside = sum(4 * (len(m.weight) + m.weight[0].numel()) for m in dense(network_of(small, "meta")).values())
    assert costs["lora"].parameters == whole.parameters + beside
    assert costs["lora"].multiply_adds > whole.multiply_adds
    assert costs["lora"].activations > whole.activations


@pytest.mark.parametrize("tune", TUNES)
def test_a_strangers_network_is_counted_before_anything_is_made(
    tune: Tune, small: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: Any) -> Any:
        raise AssertionError("weights were read")

    monkeypatch.setattr(backbones, "_HELD", {})
    monkeypatch.setattr(backbones, "_found", opened)
    cost_of.cache_clear()
    rank = 32 if tune == "lora" else None
    with pytest.raises(BadInput, match="bytes per image, more than"):
        Limits(max_memory=6_000).check(standing(small, tune, rank))
    with pytest.raises(BadInput, match="parameters, more than"):
        Limits(max_parameters=5_000).check(standing(small, tune, rank))


# -- neighbours


@pytest.mark.parametrize(
    ("variant", "tune"), [("fol-plus", "head"), ("fol-plus", "lora"), ("fol", "lora"), ("fol", "last")]
)
def test_fol_on_a_backbone_tunes_what_travels_and_prunes_nothing(variant: str, tune: Tune, small: Named) -> None:
    spec = standing(small, tune)
    own_parcel, *received = [trained(spec, "fedavg", seed, epochs=1) for seed in (0, 1, 2)]
    words = {"epochs": 2, "batch": 16, "screen": False, "distill_steps": 2, "lr": 0.01, "watch": "labels"}
    words |= {"members": "all", "threshold": 0.01 if variant == "fol" else None, "label_loss": 1.0}
    made = orient(own_parcel, received, here(), OrientSettings(**words), variant=variant)
    assert made.own.manifest.spec == spec
    assert any(not torch.equal(t, own_parcel.weights[name]) for name, t in made.own.weights.items())
    said = [line for line in made.log if "is not pruned" in line]
    assert len(said) == (2 if variant == "fol" else 0)
    assert all(row["parameters_after"] == row["parameters_before"] for row in made.rows if row["sender"] != "self")


# -- modules in Python


def eyes(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 4, 1))
    return nn.Sequential(inner, nn.AdaptiveAvgPool2d(2), nn.Flatten())


def test_any_module_in_python_is_a_backbone_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    module, site = eyes(), flyby.load("digits").split(clients=3, alpha=0.5)[0]
    named = flyby.backbone(module, "toy", size=8, mean=[0.5], std=[0.25])
    assert (named.name, named.backbone.dim, named.backbone.channels) == ("own:toy", 16, 1)
    words = {"backbone": named, "epochs": 1, "settings": {"views.crop": "none"}}
    made = {tune: flyby.train(site, "fedavg", tune=tune, **words) for tune in ("head", *TUNES)}
    assert set(made["head"].weights) == {"head.weight", "head.bias"}
    assert {name for name in made["last"].weights if "tail" in name} == {
        "backbone.tail.0-2.weight",
        "backbone.tail.0-2.bias",
    }
    assert len(made["all"].weights) == 6
    with torch.no_grad():
        x = made["head"].manifest.spec.prepare(site.train.images)
        assert torch.allclose(made["head"].network().backbone(x), module(x), atol=1e-6)
        next(module.parameters()).add_(1)  # what was given is a copy
        assert not torch.allclose(made["head"].network().backbone(x), module(x), atol=1e-3)
    assert flyby.backbone(module, "toy", size=8, mean=[0.5], std=[0.25]).backbone.sha256 != named.backbone.sha256
    with pytest.raises(BadInput, match="own:toy is another module by now"):
        flyby.train(site, "fedavg", backbone=named)
    monkeypatch.setattr(backbones, "_LENT", {})
    monkeypatch.setattr(backbones, "_HELD", {})
    with pytest.raises(BadInput, match=r"needs the backbone own:toy .* flyby.backbone\(module"):
        flyby.fuse([made["lora"]]).predict(site.train.images[:2])
    with pytest.raises(BadInput, match="this process was not given it"):
        known("own:toy")


def test_modules_of_equal_numbers_are_told_apart_by_what_they_are() -> None:
    hashes = {
        given(module, "flat", 8, mean=[0.5], std=[0.25]).backbone.sha256
        for module in (nn.Flatten(), nn.Sequential(nn.Flatten(), nn.ReLU()))
    }
    assert len(hashes) == 2


def test_bad_input_is_one_sentence(small: Named) -> None:
    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)

    alone = given(Alone(), "alone", 8, mean=[0.5], std=[0.25])
    cases = {
        "model.tune belongs to a backbone; name one with --backbone": lambda: planned("model.tune=lora"),
        "model.rank belongs to a backbone": lambda: planned("model.rank=2"),
        "model.rank belongs to --tune lora": lambda: tuned(small.backbone, "last", 3),
        "model.tune = 'none' will not do": lambda: planned("model.tune=none"),
        "own:alone has no linear layer and no convolution": lambda: standing(alone, "lora").skeleton(),
        "own:alone cannot be cut before its last stage": lambda: standing(alone, "last").skeleton(),
        "a rank exactly where it is tuned by lora": lambda: ModelSpec.from_dict(
            standing(small, "head").model_dump(mode="json")
            | {"backbone": small.backbone.model_dump(mode="json") | {"tune": "lora"}}
        ),
        "cannot take images of [3, 8, 8]": lambda: given(eyes(), "toy", 8),
        "gives [2, 4, 3, 3] for 2 images": lambda: given(eyes()[0], "toy", 8, mean=[0.5], std=[0.25]),  # type: ignore[index]
        "gives 16 features and not 5": lambda: given(eyes(), "toy", 8, 5, mean=[0.5], std=[0.25]),
        "cannot be called 'a b'": lambda: given(eyes(), "a b", 8),
    }
    for said, ask in cases.items():
        with pytest.raises(BadInput) as caught:
            ask()
        assert said in str(caught.value)


def planned(*assignments: str) -> Any:
    config = make_config("fedavg", assignments=assignments)
    return plan(config, config.data.load())


def test_a_method_that_trains_nothing_tunes_nothing(small: Named) -> None:
    flyby.backbone(eyes(), "still", size=8, mean=[0.5], std=[0.25])
    for method, tune in (("ridge", "head"), ("fedavg", "lora")):
        config = make_config(method, assignments=["model.backbone=own:still", "model.tune=lora"])
        recipe = plan(config, config.data.load()).recipe
        assert recipe.spec.backbone is not None
        assert recipe.spec.backbone.tune == tune
        assert recipe.train.clip == (1.0 if tune == "lora" else None)


def test_a_program_for_plain_torch_holds_lora(small: Named, tmp_path: Path) -> None:
    network = shaken(standing(small, "lora"), 2)
    model = Single([network.spec], tuple("0123456789"), [network]).eval()
    export_program(model, tmp_path / "model.pt2")
    images = here().train.images[:3]
    with torch.no_grad():
        assert torch.allclose(torch.export.load(tmp_path / "model.pt2").module()(images), model(images), atol=1e-5)


def test_k_fac_meets_every_tuned_layer(small: Named) -> None:
    for tune in TUNES:
        network = shaken(standing(small, tune), 1)
        found, gradients = second_moments(network, here().train.images[:20], here().train.labels[:20])
        assert found.keys() == gradients.keys() == matrix_layers(network).keys()


def test_k_fac_pads_as_efficientnet_lite_does() -> None:
    x = torch.randn(2, 4, 6, 6)
    for conv in (lite.Same(4, 4, 3, 2, groups=4), lite.Same(4, 5, 5)):
        rows = input_rows(conv, x)  # [groups, images * positions, inputs]
        said = rows @ conv.weight.reshape(conv.groups, -1, rows.shape[2]).mT
        assert torch.allclose(said.sum((1, 2)), conv(x).unflatten(1, (conv.groups, -1)).sum((0, 2, 3, 4)), atol=1e-4)


# -- EfficientNet-Lite


@pytest.mark.skipif(lite.lite_file("efficientnet-lite0") is None, reason="the extra backbones is not installed")
def test_efficientnet_lite_is_tuned() -> None:
    named = known("efficientnet-lite0", 32)
    x = torch.randn(3, 3, 32, 32)
    frozen = built(standing(named, "head"))
    with torch.no_grad():
        for tune in TUNES:
            network = built(standing(named, tune))
            assert isinstance(network.backbone, Tuned)
            assert isinstance(network.backbone.frozen, Below)
            assert isinstance(network.backbone.tail, Adapted) == (tune == "lora")
            assert torch.allclose(network(x), frozen(x), atol=1e-3), tune
            assert tune != "lora" or torch.equal(network(x), frozen(x))
    spec = standing(named, "last")
    assert set(spec.shapes()) >= {"backbone.tail.last.0.expand_conv.weight", "backbone.tail.last.1.conv.bias"}
    assert not any("running" in name for name in spec.shapes())  # worked into the convolutions
    sizes = {tune: standing(named, tune).parameter_count() for tune in TUNES}
    assert sizes["lora"] < 64_000 < sizes["last"] < sizes["all"] / 3
    network = built(spec).train()
    nn.functional.cross_entropy(network(x), torch.arange(3)).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in network.parameters())
