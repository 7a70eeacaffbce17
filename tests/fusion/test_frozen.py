"""Networks in their frozen form: folded layers against the layers themselves, compiled ones against written ones, and
what still needs the network as it came. Recording needs a GPU; the logic around it is tested without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flyby.fusion import FUSIONS, Inbox
from flyby.fusion.base import Server
from flyby.fusion.distilled import distill
from flyby.fusion.distilled import frozen as frozen_module
from flyby.fusion.distilled import teachers as teachers_module
from flyby.fusion.distilled.batchnorm import norms
from flyby.fusion.distilled.coboosting import CoBoosting, CoBoostingSettings, Scales, signed_step
from flyby.fusion.distilled.dense import Dense, DenseSettings
from flyby.fusion.distilled.distill import Student
from flyby.fusion.distilled.frozen import as_written, can_compile, folded, frozen, pairs
from flyby.fusion.distilled.synthesis import Pool
from flyby.fusion.distilled.teachers import Teachers, normalise
from flyby.models import ModelSpec, Network
from flyby.parcels import parcel
from flyby.rng import generator
from flyby.training.graphs import Captured

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs, and there is no GPU here")
CPU = torch.device("cpu")
NAMES = ("ant", "bee", "cat")
CNN = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8), widths={"conv1": 4, "conv2": 5, "conv3": 6})
RESNET = ModelSpec(name="resnet18", classes=3, channels=1, size=(8, 8), width=0.125)
TINY: dict[str, Any] = {"epochs": 3, "images": 12, "steps": 2, "batch": 8, "latent": 5, "generator_width": 3}


def trained(spec: ModelSpec, k: int = 0) -> Network:
    """A network whose BatchNorm layers do something in every channel."""
    network = spec.build(generator(k, "weights"))
    for i, module in enumerate(norms(network)):
        for tensor, low, high in (
            (module.running_mean, -0.3, 0.3),
            (module.running_var, 0.3, 2.0),
            (module.weight, -1.5, 1.5),
            (module.bias, -0.5, 0.5),
        ):
            assert tensor is not None
            tensor.data.uniform_(low, high, generator=generator(k, i, high))
    return network.eval()


def inbox(count: int = 3, spec: ModelSpec = CNN, **views: Any) -> Inbox:
    return Inbox(
        [
            parcel.make(
                sender=f"site-{k}",
                method="x",
                spec=spec,
                class_names=NAMES,
                weights=dict(trained(spec, k).state_dict()),
                samples=30,
                counts=[10, 10, 10],
                provenance={"views": views} if views else {},
            )
            for k in range(count)
        ]
    )


def unit(count: int = 6, spec: ModelSpec = CNN) -> Tensor:
    return torch.rand((count, spec.channels, *spec.size), generator=generator(count, "unit"))


# -- folding


@pytest.mark.parametrize("name", ["resnet18", "cnn-small", "vgg-wildfire", "mobilenetv2", "cnn-fol", "lenet", "mlp"])
def test_a_folded_network_has_no_batchnorm_and_the_same_answers_and_gradients(name: str) -> None:
    spec = ModelSpec(name=name, classes=5, size=(32, 32), width=0.25)
    network = trained(spec)
    made = folded(network)
    assert not norms(made)
    found = []
    for one in (network, made):
        x = normalise(unit(3, spec), spec).requires_grad_()
        out = one(x)
        found.append((out.detach(), torch.autograd.grad(out.square().sum(), x)[0]))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))


def test_one_folded_convolution_by_hand() -> None:
    network = trained(CNN)
    made = folded(network)
    norm, conv = norms(network)[0], network.get_submodule("backbone.conv1")
    assert norm.running_var is not None
    assert norm.running_mean is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    one = made.get_submodule("backbone.conv1")
    assert torch.allclose(one.weight, conv.weight * scale.view(-1, 1, 1, 1))
    assert torch.allclose(one.bias, norm.bias - norm.running_mean * scale)


class Shared(nn.Module):
    """A convolution that two hear: its BatchNorm layer, and the sum at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.norm.running_mean.fill_(0.7)

    def forward(self, x: Tensor) -> Tensor:
        given = self.conv(x)
        return (self.norm(given) + given).mean((2, 3))  # type: ignore[no-any-return]


class Twice(Shared):
    """One convolution in two places, with a layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.conv(x)) - 2 * self.other(self.conv(-x))).mean((2, 3))  # type: ignore[no-any-return]


@pytest.mark.parametrize("backbone", [Shared, Twice])
def test_what_cannot_be_folded_stays_as_it_is(backbone: Callable[[], nn.Module]) -> None:
    network = CNN.replace(widths={"conv3": 4}).build(generator(0))
    network.backbone = backbone()
    network.eval()
    x = normalise(unit(), CNN)
    assert len(pairs(network, x)[0]) == (backbone is Shared)
    made = folded(network)
    assert len(norms(made)) == len(norms(network))
    assert torch.equal(made.features(x), network.features(x))


def test_the_network_that_is_frozen_is_left_alone() -> None:
    network = trained(CNN)
    before = {name: t.clone() for name, t in network.state_dict().items()}
    made = frozen(network, CPU, half=True)
    assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (*network.modules(), *made.modules()))
    assert {m.weight.dtype for m in made.modules() if isinstance(m, nn.Conv2d)} == {torch.bfloat16}
    assert made.head.weight.dtype == torch.float32, "rules read the rows of heads"
    assert not any(p.requires_grad for p in made.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near, wanted = (one(normalise(unit(), CNN)).detach().float() for one in (made, network))
    assert torch.allclose(near, wanted, atol=0.03 * float(wanted.abs().max()))


def answering(box: Inbox, **words: Any) -> Teachers:
    """Teachers as a GPU has them, here."""
    made = Teachers(box, "cpu", **words)
    made._frozen = [frozen(network, CPU, half=False) for network in made.networks()]
    return made


def test_frozen_teachers_say_and_pull_as_the_others_and_l_bn_sees_its_layers() -> None:
    box = inbox()
    plain, quick = Teachers(box, "cpu"), answering(box)
    assert next(plain.answering()) is next(plain.networks()), "on a CPU there is one form only"
    assert torch.allclose(plain.say(unit()), quick.say(unit()), atol=1e-5)
    for bn in (None, 0.3):
        pulls = [t.pull(unit(), lambda x, said: said.square().sum(), bn) for t in (plain, quick)]
        for a, b in zip(*pulls, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        assert (float(pulls[1][1]) > 0.1) == (bn is not None)


# -- compiling


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Everything is worth compiling, by a back end that needs no compiler; what was compiled."""
    done: list[nn.Module] = []
    real = nn.Module.compile

    def quick(self: nn.Module, **words: Any) -> None:
        done.append(self)
        real(self, backend="eager", **words)

    monkeypatch.setattr(nn.Module, "compile", quick)
    monkeypatch.setattr(frozen_module, "can_compile", lambda device: True)
    for module in (teachers_module, distill):
        monkeypatch.setattr(module, "fully_compiled", lambda settings, *_: settings.compile == "full")
    torch.compiler.reset()
    return done


def frames() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def test_only_batches_of_the_loop_are_compiled(compiling: list[nn.Module]) -> None:
    box = inbox(spec=RESNET)
    plain, quick = answering(box), answering(box, compile="full")
    quick.quicken(1, {6})
    assert len(compiling) == 3
    before = frames()
    assert torch.allclose(quick.say(unit()), plain.say(unit()), atol=1e-5)
    assert frames() == before + 1, "three networks of one spec share what was compiled"
    assert torch.allclose(quick.say(unit(5)), plain.say(unit(5)), atol=1e-5)
    assert frames() == before + 1, "five images are not worth it"
    for bn in (None, 0.3):
        pulls = [t.pull(unit(), lambda x, said: said.square().sum(), bn) for t in (plain, quick)]
        for a, b in zip(*pulls, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert frames() == before + 2, "one more for gradients; L_BN asks the layers as they are written"


def test_a_student_is_compiled_where_it_trains_and_nowhere_else(compiling: list[nn.Module]) -> None:
    student, same = (Student(trained(RESNET)) for _ in range(2))
    student.quicken("full", 1, 6)
    before = frames()
    student.eval(), same.eval()
    said = torch.empty(1, 6, 3)
    assert torch.equal(student.scores(unit(), said), same.scores(unit(), said))
    student.train(), same.train()
    assert torch.equal(student.scores(unit(4), said), same.scores(unit(4), said))
    assert frames() == before
    for one in (student, same):
        one.scores(unit(), said).square().sum().backward()
    assert frames() == before + 1
    for a, b in zip(student.parameters(), same.parameters(), strict=True):
        assert a.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-5 * float(b.grad.abs().max()))
    assert student.answer() is not student.network
    assert student.answer().backbone._compiled_call_impl is None
    assert same.answer() is same.network
    assert list(student.state_dict()) == list(same.state_dict()), "a checkpoint does not tell"


@pytest.mark.parametrize("rule", ["dense"])
def test_a_compiled_fusion_is_the_fusion(compiling: list[nn.Module], rule: str) -> None:
    kind, box = FUSIONS[rule], inbox(spec=RESNET, crop="pad", flip=0.5)
    words = TINY | {"teacher": "probabilities"}
    wanted, found = (
        kind(kind.settings_type(**words, compile=how)).fuse(box, Server(seed=3)).state_dict() for how in ("off", "full")
    )
    assert len(compiling) == 1, "the student; on a CPU teachers stay as they are"
    for name, tensor in wanted.items():
        assert torch.allclose(tensor.float(), found[name].float(), rtol=1e-3, atol=1e-3), name


def test_a_machine_that_cannot_compile_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", broken)
    can_compile.cache_clear()
    assert not frozen_module.compiled(trained(CNN))
    assert not frozen_module.compiled(trained(CNN))
    assert caplog.messages == ["networks are not compiled: no compiler"]
    can_compile.cache_clear()
    with as_written(False):
        pass


def test_the_images_that_are_shown_are_counted() -> None:
    assert Dense().shown(0) == 20_100 * 256
    assert CoBoosting().shown(0) == 20_100 * 128
    feddf = FUSIONS["feddf"]()
    assert feddf.shown(5_000) == 50 * 5_000  # type: ignore[attr-defined]
    assert Dense(DenseSettings(passes=2, epochs=3, images=10)).shown(0) == 2 * (10 + 20 + 30)


# -- the ensemble's weights


def test_scales_take_the_signed_steps_where_the_weights_lie() -> None:
    teachers, box = Teachers(inbox(), "cpu"), Pool(CNN, 3, "cpu")
    said, labels = torch.randn((12, 3, 3), generator=generator(1)), torch.arange(12) % 3
    scales, place = Scales(teachers, box.weights), box.weights.data_ptr()
    wanted = box.weights.clone()
    for size in (0.01, 0.02):
        scales.size.fill_(size)
        scales.move(said, labels)
        wanted = signed_step(teachers, wanted, said.transpose(0, 1), labels, size)
    assert torch.equal(box.weights, wanted)
    assert box.weights.data_ptr() == place
    assert not torch.equal(wanted, torch.full((3,), 1 / 3))
    rule = CoBoosting(CoBoostingSettings(**TINY))
    rule.fuse(inbox())
    assert rule.scales is None


# -- on a GPU


def test_nothing_is_recorded_where_it_cannot_be() -> None:
    assert Teachers(inbox(), "cpu").recorder() is None


@gpu
@pytest.mark.parametrize("how", ["graph", "full"])
@pytest.mark.parametrize("rule", ["dense", "coboosting", "intactofl", "compact"])
def test_every_step_is_recorded(rule: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Captured] = []
    real = Captured.__init__

    def noted(self: Captured, *words: Any) -> None:
        real(self, *words)
        made.append(self)

    monkeypatch.setattr(Captured, "__init__", noted)
    spec = ModelSpec(name="resnet18", classes=3, size=(16, 16), width=0.25)
    kind = FUSIONS[rule]
    words = {**TINY, "epochs": 6, "steps": 6, "batch": 12, "teacher": "probabilities", "compile": how}
    kind(kind.settings_type(**words)).fuse(inbox(spec=spec, crop="pad", flip=0.5), Server(device="cuda"))
    assert made
    assert [one.refused for one in made] == [""] * len(made)
    assert all(one.graph is not None for one in made)


@gpu
def test_frozen_teachers_of_a_gpu_answer_as_the_networks_do() -> None:
    spec = ModelSpec(name="resnet18", classes=3, size=(16, 16), width=0.25)
    box = inbox(spec=spec)
    wanted = Teachers(box, "cpu").say(unit(8, spec))
    found = Teachers(box, "cuda", precision="bf16").say(unit(8, spec).cuda()).cpu()
    assert F.mse_loss(found, wanted).sqrt() < 0.03 * wanted.std()
