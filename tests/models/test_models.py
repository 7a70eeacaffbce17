"""Models: published parameter counts, shapes, exact randomness, and specs that survive JSON."""

from __future__ import annotations

import copy
import difflib
import json
import math
import os
import pickle
import subprocess
import sys
import time
from typing import Any

import pydantic
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from factories import WAIT
from flyby import rng
from flyby.errors import BadInput
from flyby.models import ARCHITECTURES, HEADS, ModelSpec, Network
from flyby.models.resnet import Shortcut

NAMES = sorted(ARCHITECTURES)
PLAIN_HEADS = sorted(name for name in HEADS if not HEADS[name].shift)  # of any size and channels
BRANCHING = ["mobilenetv2", "resnet18", "resnet34"]


def a_spec(name: str = "cnn-small", **changes: Any) -> ModelSpec:
    return ModelSpec(**{"name": name, "classes": 10, "size": (32, 32), **changes})


def images_for(spec: ModelSpec, count: int = 2, seed: int = 0) -> torch.Tensor:
    shape = (count, *spec.size, spec.channels)
    return torch.randint(0, 256, shape, generator=rng.generator(seed), dtype=torch.uint8)


def same_bytes(a: Network, b: Network) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# --- counts
# -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "classes", "stem", "size", "count"),
    [
        ("resnet18", 1000, "imagenet", 224, 11_689_512),
        ("resnet34", 1000, "imagenet", 224, 21_797_672),
        ("mobilenetv2", 1000, "imagenet", 224, 3_504_872),
        ("resnet18", 10, "cifar", 32, 11_173_962),
        ("mobilenetv2", 1000, "cifar", 32, 3_504_872),
        ("vgg-wildfire", 2, "cifar", 224, 1_553_922),
        ("cnn-fol", 10, "cifar", 32, 3_584 + 147_584 + 147_584 + 20_490),
        ("lenet", 10, "cifar", 32, 456 + 2416 + 48_120 + 10_164 + 850),
        ("mlp", 10, "cifar", 32, (3072 + 1) * 256 + (256 + 1) * 128 + (128 + 1) * 10),
        ("cnn-small", 10, "cifar", 32, 9 * (3 * 32 + 32 * 64 + 64 * 128) + 2 * (32 + 64 + 128) + 1290),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, classes: int, stem: str, size: int, count: int) -> None:
    spec = ModelSpec(name=name, classes=classes, size=(size, size), stem=stem)  # type: ignore[arg-type]
    assert spec.parameter_count() == count
    assert sum(p.numel() for p in spec.build().parameters()) == count


def test_table_9_layer_by_layer() -> None:
    skeleton = ModelSpec(name="vgg-wildfire", classes=2, size=(224, 224)).skeleton()
    counts = [
        sum(p.numel() for p in m.parameters())
        for m in skeleton.modules()
        if isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.Linear)
    ]
    assert counts == [1792, 128, 73_856, 256, 295_168, 512, 1_180_160, 1024, 1026]
    pooled = [m for m in skeleton.modules() if isinstance(m, nn.MaxPool2d)]
    assert len(pooled) == 4


def test_cnn_fol_ends_in_2048_features_at_32x32() -> None:
    assert a_spec("cnn-fol").shapes()["head.weight"][0] == (10, 2048)
    assert a_spec("cnn-fol", size=(18, 22)).skeleton().feature_dim == 128 * 1 * 2


def test_strides_of_the_stems() -> None:
    def map_side(name: str, stem: str, side: int, module: str) -> int:
        network = a_spec(name, stem=stem, size=(side, side), width=0.1).build().eval()
        seen: list[int] = []
        network.get_submodule(module).register_forward_hook(lambda _, __, out: seen.append(out.shape[-1]))
        network(network.spec.prepare(images_for(network.spec)))
        return seen[0]

    assert map_side("resnet18", "cifar", 32, "backbone.layer1") == 32
    assert map_side("resnet18", "cifar", 32, "backbone.layer4") == 4
    assert map_side("resnet18", "imagenet", 64, "backbone.layer1") == 16
    assert map_side("resnet18", "imagenet", 64, "backbone.layer4") == 2
    assert map_side("mobilenetv2", "cifar", 32, "backbone.features") == 4
    assert map_side("mobilenetv2", "imagenet", 64, "backbone.features") == 2


@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_resnet_names_follow_torchvision(name: str) -> None:
    shapes = a_spec(name, stem="imagenet", classes=1000).shapes()
    expected = {
        "backbone.conv1.weight": (64, 3, 7, 7),
        "backbone.bn1.running_var": (64,),
        "backbone.layer1.0.conv1.weight": (64, 64, 3, 3),
        "backbone.layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "backbone.layer2.0.downsample.1.num_batches_tracked": (),
        "backbone.layer4.1.bn2.bias": (512,),
        "head.weight": (1000, 512),
    }
    assert {key: shapes[key][0] for key in expected} == expected
    assert "backbone.layer1.0.downsample.0.weight" not in shapes
    assert shapes["backbone.layer2.0.downsample.1.num_batches_tracked"][1] == torch.int64
    assert len(shapes) == {"resnet18": 122, "resnet34": 218}[name]  # the lengths of torchvision's state dicts


# --- shapes
# -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", PLAIN_HEADS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("size", "channels", "width", "stem"), [((18, 18), 1, 0.25, "cifar"), ((33, 20), 4, 0.1, "imagenet")]
)
def test_features_and_logits(
    name: str, head: str, size: tuple[int, int], channels: int, width: float, stem: str
) -> None:
    spec = a_spec(
        name,
        head=head,
        size=size,
        channels=channels,
        width=width,
        stem=stem,
        classes=7,
        logit_scale=head == "prototype",
    )
    network = spec.build()
    x = spec.prepare(images_for(spec, 3))
    assert network.features(x).shape == (3, network.feature_dim)
    network(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    network.eval()
    logits = network(x)
    assert logits.shape == (3, 7)
    assert logits.isfinite().all()
    assert torch.equal(logits, network.head(network.features(x)))
    assert {k: (tuple(v.shape), v.dtype) for k, v in network.state_dict().items()} == spec.shapes()


def test_cnn_small_takes_digits() -> None:
    for side in (4, 8, 9, 64):
        spec = a_spec(size=(side, side), channels=1)
        assert spec.build().features(spec.prepare(images_for(spec))).shape == (2, 128)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("name", NAMES)
def test_smallest_size_is_the_smallest(name: str) -> None:
    least = ARCHITECTURES[name].smallest
    spec = a_spec(name, size=(least, least), width=0.1)
    spec.build()(spec.prepare(images_for(spec)))
    if least > 1:
        for size in ((least - 1, 64), (64, least - 1)):
            with pytest.raises(BadInput, match=f"smallest that works is {least}x{least}"):
                spec.replace(size=size)
        unchecked = spec.model_copy(update={"size": (least - 1, least - 1)})
        with pytest.raises(RuntimeError):
            unchecked.skeleton()(unchecked.prepare(images_for(unchecked)).to("meta"))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["cnn-small", "vgg-wildfire", *BRANCHING])
def test_feature_maps_stay_channels_last(name: str, channels: int) -> None:
    spec = a_spec(name, channels=channels, width=0.25)
    network = spec.build()
    seen: list[bool] = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.MaxPool2d):
            module.register_forward_hook(
                lambda _, __, out: seen.append(
                    out.shape[2:] == (1, 1) or out.is_contiguous(memory_format=torch.channels_last)
                )
            )
    network(spec.prepare(images_for(spec)))
    assert len(seen) >= 7
    assert all(seen)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", NAMES)
def test_backward_hooks_on_every_weighted_layer(name: str) -> None:
    spec = a_spec(name, width=0.1)
    network = spec.build()
    layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    caught: list[nn.Module] = []
    for layer in layers:
        layer.register_full_backward_hook(lambda module, _, __: caught.append(module))
    network(spec.prepare(images_for(spec))).sum().backward()
    assert set(caught) == set(layers)


@pytest.mark.parametrize("inputs", [Shortcut.NARROW - 1, Shortcut.NARROW])
def test_a_shortcut_is_the_strided_convolution(inputs: int) -> None:
    shortcut = Shortcut(inputs, 5, 1, 2, bias=False).double()
    plain = nn.Conv2d(inputs, 5, 1, 2, bias=False).double()
    plain.load_state_dict(shortcut.state_dict())
    x = torch.randn(2, inputs, 9, 6, dtype=torch.float64, generator=rng.generator(0))
    found = []
    for layer in (shortcut, plain):
        given_x = x.clone().requires_grad_()
        out = layer(given_x)
        found.append((out, *torch.autograd.grad(out.square().sum(), (given_x, layer.weight))))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_no_other_layer_is_a_strided_1x1_convolution(name: str) -> None:
    layers = [m for m in a_spec(name).skeleton().modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)]
    assert all(m.stride == (1, 1) or isinstance(m, Shortcut) for m in layers)


BACKWARD = """
import torch
from flyby.models import ModelSpec
torch.set_num_threads(1)
spec = ModelSpec(name="resnet18", classes=10, size=(32, 32), width=0.1)
network, x = spec.build(), spec.prepare(torch.zeros(2, 32, 32, 3, dtype=torch.uint8))
assert x.is_contiguous(memory_format=torch.channels_last)
for _ in range(30):
    network(x).sum().backward()
print("whole")
"""


def test_the_heap_is_whole_after_a_narrow_resnet_with_avx2_alone() -> None:
    """In oneDNN a strided 1x1 convolution of few channels writes past its memory; malloc's own checks see that at
    once."""
    checked = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}
    avx2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    ended = subprocess.run(
        [sys.executable, "-c", BACKWARD],
        env={**os.environ, **avx2, **checked},
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    if checked["LD_PRELOAD"] in ended.stderr:  # the loader's complaint
        pytest.skip(f"this system has no {checked['LD_PRELOAD']}, which checks the heap")
    assert (ended.returncode, ended.stdout) == (0, "whole\n"), ended.stderr


# --- randomness
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", sorted(HEADS))
@pytest.mark.parametrize("name", NAMES)
def test_same_generator_same_bytes_and_no_global_randomness(name: str, head: str) -> None:
    spec = a_spec(name, head=head, width=0.25)
    before = torch.get_rng_state()
    first, again, other = (spec.build(rng.generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert same_bytes(first, again)
    assert same_bytes(spec.build(), spec.build())
    assert not same_bytes(first, other)
    assert all(t.isfinite().all() for t in first.state_dict().values())
    assert not any(t.is_meta for t in (*first.parameters(), *first.buffers()))


def test_nothing_is_left_uninitialised() -> None:
    for name in NAMES:
        for head in HEADS:
            spec = a_spec(name, head=head, width=0.15)
            network = spec.skeleton().to_empty(device="cpu")
            with torch.no_grad():
                for tensor in (*network.parameters(), *network.buffers()):
                    tensor.fill_(-12345)
            network.initialise(rng.generator(0))
            assert not any((t == -12345).any() for t in network.state_dict().values())


def test_initial_distributions() -> None:
    plain = a_spec("cnn-fol").build(rng.generator(3)).state_dict()
    bound = 1 / math.sqrt(128 * 9)
    for key in ("backbone.conv2.weight", "backbone.conv2.bias"):
        assert 0.9 * bound < plain[key].abs().max() <= bound
    assert plain["backbone.conv2.weight"].std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)

    residual = a_spec("resnet18", head="prototype", classes=100, logit_scale=True).build(rng.generator(3))
    weights = dict(residual.named_parameters())
    assert weights["backbone.layer3.1.conv1.weight"].std().item() == pytest.approx(math.sqrt(2 / (256 * 9)), rel=0.02)
    assert weights["head.prototypes"].std().item() == pytest.approx(1, rel=0.02)
    assert weights["head.scale"].item() == 16
    state = residual.state_dict()
    assert (state["backbone.bn1.weight"] == 1).all()
    assert (state["backbone.bn1.bias"] == 0).all()
    assert (state["backbone.bn1.running_mean"] == 0).all()
    assert (state["backbone.bn1.running_var"] == 1).all()
    assert state["backbone.bn1.num_batches_tracked"] == 0


def test_a_layer_nobody_initialises_is_refused() -> None:
    network = a_spec(width=0.1).build()
    network.backbone.add_module("odd", nn.PReLU())
    with pytest.raises(NotImplementedError, match="PReLU"):
        network.initialise(rng.generator(0))


# --- heads
# ------------------------------------------------------------------------------------------------------------------


def test_prototype_logits_by_hand() -> None:
    features = torch.tensor([[3.0, 4.0], [0.0, -2.0]])  # normalised: (.6, .8) and (0, -1)
    spec = a_spec("mlp", widths={"fc2": 2}, head="prototype", classes=3)
    head = spec.build().head
    with torch.no_grad():
        head.prototypes.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-5.0, 5.0]]))  # type: ignore[operator,union-attr]
    expected = torch.tensor([[0.6, 1.6, 1.0], [0.0, -2.0, -5.0]])
    torch.testing.assert_close(head(features), expected)

    scaled = spec.replace(logit_scale=True).build().head
    scaled.load_state_dict({"prototypes": head.prototypes, "scale": torch.tensor(0.5)})
    torch.testing.assert_close(scaled(features), expected / 2)


def test_linear_head_is_a_linear_layer() -> None:
    network = a_spec("mlp").build()
    assert isinstance(network.head, nn.Linear)
    f = torch.ones(1, 128)
    torch.testing.assert_close(network.head(f), network.head.weight.sum(1)[None] + network.head.bias)


# --- widths
# -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_width_can_be_overridden_alone(name: str) -> None:
    base = a_spec(name, width=0.1, size=(18, 18))
    widths = base.layer_widths()
    for key, value in widths.items():
        spec = base.replace(widths={key: value + 3})
        assert spec.layer_widths() == {**widths, key: value + 3}
        assert spec.parameter_count() > base.parameter_count()
    odd = base.replace(widths={key: 2 + i % 5 for i, key in enumerate(widths)})
    assert odd.layer_widths() == odd.widths
    logits = odd.build()(odd.prepare(images_for(odd)))
    assert logits.shape == (2, 10)


def test_widths_by_hand() -> None:
    assert a_spec().layer_widths() == {"conv1": 32, "conv2": 64, "conv3": 128}
    assert a_spec(width=0.01).layer_widths() == {"conv1": 1, "conv2": 1, "conv3": 1}
    pruned = a_spec(width=0.5, widths={"conv2": 5})
    assert pruned.layer_widths() == {"conv1": 16, "conv2": 5, "conv3": 64}
    assert pruned.shapes()["backbone.conv3.weight"][0] == (64, 5, 3, 3)

    shapes = a_spec("resnet18", widths={"layer2": 7, "layer1.1.conv1": 3, "layer4": 9}).shapes()
    assert shapes["backbone.layer1.1.conv1.weight"][0] == (3, 64, 3, 3)
    assert shapes["backbone.layer1.1.conv2.weight"][0] == (64, 3, 3, 3)
    assert shapes["backbone.layer2.0.downsample.0.weight"][0] == (7, 64, 1, 1)
    assert shapes["backbone.layer2.1.conv2.weight"][0] == (7, 128, 3, 3)
    assert shapes["backbone.layer3.0.conv1.weight"][0] == (256, 7, 3, 3)
    assert shapes["head.weight"][0] == (10, 9)

    mobile = a_spec("mobilenetv2", widths={"stage3": 11, "features.5.conv.0": 13})
    shapes = mobile.shapes()
    assert shapes["backbone.features.4.conv.2.weight"][0] == (11, 144, 1, 1)
    assert shapes["backbone.features.5.conv.0.0.weight"][0] == (13, 11, 1, 1)
    assert shapes["backbone.features.5.conv.1.0.weight"][0] == (13, 1, 3, 3)
    assert shapes["backbone.features.5.conv.2.weight"][0] == (11, 13, 1, 1)


def test_equal_widths_of_two_stages_add_no_shortcut() -> None:
    """A pruned network computes what its spec's places say, whatever the numbers happen to be."""
    spec = a_spec("mobilenetv2", widths={"stage4": 96, "stage1": 24})
    blocks = [m for m in spec.skeleton().modules() if hasattr(m, "residual")]
    assert sum(b.residual for b in blocks) == 10
    assert "backbone.layer2.0.downsample.0.weight" in a_spec("resnet18", widths={"layer2": 64}).shapes()


# --- specs
# ------------------------------------------------------------------------------------------------------------------


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    name = draw(st.sampled_from(NAMES))
    architecture = ARCHITECTURES[name]
    channels = draw(st.integers(1, 64))
    unit = st.floats(-10, 10)
    positive = st.floats(min_value=1e-6, max_value=10)
    head = draw(st.sampled_from(PLAIN_HEADS))
    side = st.integers(architecture.smallest, 4096)
    return ModelSpec(
        name=name,
        classes=draw(st.integers(2, 100_000)),
        channels=channels,
        size=(draw(side), draw(side)),
        head=head,
        width=draw(st.floats(min_value=1e-9, max_value=51.2)),
        stem=draw(st.sampled_from(["cifar", "imagenet"])),
        widths=draw(st.dictionaries(st.sampled_from(sorted(architecture.widths)), st.integers(1, 65_536), max_size=4)),
        logit_scale=HEADS[head].takes_scale and draw(st.booleans()),
        mean=tuple(draw(st.one_of(st.just([]), st.lists(unit, min_size=channels, max_size=channels)))),
        std=tuple(draw(st.one_of(st.just([]), st.lists(positive, min_size=channels, max_size=channels)))),
    )


@settings(max_examples=60, deadline=None)
@given(specs())
def test_specs_survive_json(spec: ModelSpec) -> None:
    plain = spec.model_dump(mode="json")
    for back in (
        ModelSpec.model_validate_json(spec.model_dump_json()),
        ModelSpec.model_validate_json(json.dumps(plain)),
        ModelSpec.from_dict(plain),
        pickle.loads(pickle.dumps(spec)),
        copy.deepcopy(spec),
        spec.replace(),
    ):
        assert back == spec
        assert hash(back) == hash(spec)
        assert back.model_dump_json() == spec.model_dump_json()
    assert set(spec.layer_widths()) == set(ARCHITECTURES[spec.name].widths)
    assert all(1 <= w <= 65_536 for w in spec.layer_widths().values())


def test_a_spec_inside_another_model_survives_json_and_keeps_its_errors() -> None:
    class Manifest(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(strict=True)
        spec: ModelSpec

    manifest = Manifest(spec=a_spec(mean=(0.1, 0.2, 0.3)))
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest
    with pytest.raises(BadInput, match="classes is 0"):
        Manifest.model_validate_json(manifest.model_dump_json().replace('"classes":10', '"classes":0'))


def test_specs_are_values() -> None:
    a, b = a_spec(widths={"conv1": 3, "conv2": 4}), a_spec(widths={"conv2": 4, "conv1": 3})
    assert a == b
    assert len({a, b, a_spec()}) == 2
    with pytest.raises(Exception, match="frozen"):
        a.classes = 3  # type: ignore[misc]
    a.shapes().clear()
    assert len(a.shapes()) == 20  # five entries for each of three batch norms, three convolutions, weight and bias
    assert a_spec().widths is not a_spec().widths


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "resnet19"}, "unknown model 'resnet19'; did you mean 'resnet18'"),
        ({"head": "prototypes"}, "unknown head 'prototypes'; did you mean 'prototype'"),
        ({"widths": {"conv9": 3}}, "unknown width of cnn-small 'conv9'; did you mean 'conv"),
        ({"stems": "cifar"}, "unknown model spec key 'stems'; did you mean 'stem'"),
        ({"classes": 0}, "classes is 0"),
        ({"classes": True}, "classes is True"),
        ({"classes": "10"}, "classes is '10'"),
        ({"channels": 65}, "channels is 65"),
        ({"size": (0, 8)}, "size.0 is 0"),
        ({"size": {8, 9}}, "size is {8, 9}"),
        ({"size": (8, 8, 8)}, "size is (8, 8, 8)"),
        ({"size": (8.0, 8)}, "size.0 is 8.0"),
        ({"mean": "0.5"}, "mean is '0.5'"),
        ({"size": (8, 4097)}, "size.1 is 4097"),
        ({"width": 0.0}, "width is 0.0"),
        ({"width": math.nan}, "width is nan"),
        ({"width": 65.0}, "width is 65.0"),
        ({"widths": {"conv1": 0}}, "widths.conv1 is 0"),
        ({"widths": {"a\nb" + "c" * 99: 0}}, "widths.a\\nbc"),
        ({"stem": "vgg"}, "stem is 'vgg'"),
        ({"mean": (0.5,)}, "mean has 1 numbers for 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, "std.1 is 0.0"),
        ({"std": (1e-60, 0.5, 0.5)}, "std.0 is 1e-60"),
        ({"mean": (0.5, 0.5, 1e300)}, "mean.2 is 1e+300"),
        ({"logit_scale": True}, "no meaning for the linear head"),
        ({"name": "mobilenetv2", "width": 64.0}, "makes 'last' of mobilenetv2 81920 wide"),
    ],
)
def test_bad_specs_say_what_is_wrong_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        a_spec(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


HUGE = "x" * (15 << 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": HUGE}, "name is 'xxxxxxxxxxxx...xxxxxxxxxxxxx': String should have at most 64 characters"),
        ({"head": HUGE}, "head is 'xxxxxxxxxxxx...xxxxxxxxxxxxx': String should have at most 64 characters"),
        ({"widths": {HUGE: 3}}, "String should have at most 64 characters"),
        ({HUGE: 3}, f"unknown model spec key '{'x' * 64}'; known: "),
    ],
    ids=["name", "head", "widths", "key"],
)
def test_a_name_of_megabytes_is_refused_quickly_and_in_a_short_sentence(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda word, *_, **__: compared.append(len(word)) or [])  # type: ignore[func-returns-value]
    with pytest.raises(BadInput) as caught:
        a_spec(**changes)
    assert max(compared, default=0) <= 64, "to look for the nearest kin of megabytes takes seconds"
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def test_from_dict_refuses_what_is_not_a_spec() -> None:
    with pytest.raises(BadInput, match="the model spec's content is"):
        ModelSpec.from_dict(["mlp"])  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="has no 'classes'"):
        ModelSpec.from_dict({"name": "mlp", "size": [8, 8]})
    with pytest.raises(BadInput, match=r"size is \{8\}"):
        ModelSpec.from_dict({"name": "mlp", "size": {8}, "classes": 2})
    with pytest.raises(BadInput, match=r"has no 'size\.1'"):
        ModelSpec.from_dict({"name": "mlp", "size": [8], "classes": 2})


# --- prepare
# ----------------------------------------------------------------------------------------------------------------


def test_prepare_by_hand() -> None:
    pixels = torch.tensor([[[[0, 51], [255, 102]]]], dtype=torch.uint8)  # one picture, 1x2, two channels
    spec = a_spec("mlp", size=(1, 2), channels=2)
    expected = torch.tensor([[[[-2.0, 2.0]], [[-1.2, -0.4]]]])  # (0, 1, .2, .4) - .5, times 4
    torch.testing.assert_close(spec.prepare(pixels), expected)
    mean, std = spec.statistics()
    assert (mean.tolist(), std.tolist()) == ([0.5, 0.5], [0.25, 0.25])
    own = spec.replace(mean=(0.0, 0.2), std=(0.5, 0.1))
    torch.testing.assert_close(own.statistics("cpu")[1], torch.tensor([0.5, 0.1]))
    torch.testing.assert_close(own.prepare(pixels), torch.tensor([[[[0.0, 2.0]], [[0.0, 2.0]]]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_prepare_is_channels_last_float32_whatever_the_strides(channels: int) -> None:
    spec = a_spec(size=(6, 5), channels=channels)
    images = images_for(spec, 4)
    x = spec.prepare(images)
    assert x.shape == (4, channels, 6, 5)
    assert x.dtype == torch.float32
    assert x.stride() == (30 * channels, 1, 5 * channels, channels)
    strided = images.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    assert torch.equal(spec.prepare(strided), x)
    assert spec.prepare(strided).stride() == x.stride()
    assert spec.prepare(images[:0]).shape == (0, channels, 6, 5)


def test_prepare_refuses_other_images() -> None:
    spec = a_spec(size=(8, 8), channels=1)
    with pytest.raises(BadInput, match="28x28 with 1 channels where the model cnn-small takes 8x8 with 1"):
        spec.prepare(torch.zeros(2, 28, 28, 1, dtype=torch.uint8))
    with pytest.raises(BadInput, match="uint8"):
        spec.prepare(torch.zeros(2, 8, 8, 1))
    with pytest.raises(BadInput, match="uint8"):
        spec.prepare(torch.zeros(8, 8, 1, dtype=torch.uint8))


def test_constants_made_in_inference_mode_serve_training_too() -> None:
    spec = a_spec(size=(8, 8), mean=(0.11, 0.12, 0.13))
    with torch.inference_mode():
        spec.prepare(images_for(spec))
    spec.build()(spec.prepare(images_for(spec))).sum().backward()


# --- speed
# ------------------------------------------------------------------------------------------------------------------


def test_a_skeleton_is_quick_and_weightless() -> None:
    spec = a_spec("resnet18")
    skeleton = spec.skeleton()
    assert all(t.is_meta for t in skeleton.state_dict().values())
    best = min(_seconds(spec.skeleton) for _ in range(5))
    assert best < min(_seconds(spec.build) for _ in range(3)) / 2, "no weight is made"


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
