"""Data-free distillation: every formula by hand or by an independent computation, exact resume, and rules that really
learn on digits."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from factories import train_site
from flyby.data.dataset import DataBundle, Dataset
from flyby.data.site import part_of, site_of
from flyby.data.splits import SplitSettings, make_split
from flyby.data.views import PLAIN
from flyby.errors import BadInput, Diverged
from flyby.fusion import FUSIONS, Inbox, load_predictor, save_predictor
from flyby.fusion.base import Server
from flyby.fusion.distilled.batchnorm import Moments, distance, norms, relative, with_distance
from flyby.fusion.distilled.coboosting import CoBoosting, CoBoostingSettings, hard_cross_entropy, signed_step
from flyby.fusion.distilled.dense import DenseSettings, masked_disagreement
from flyby.fusion.distilled.distill import Distillation, about_images, push
from flyby.fusion.distilled.feddf import FedDF, FedDFSettings
from flyby.fusion.distilled.intactofl import GatedPredictor, IntactOFL, IntactOFLSettings, gate_weights
from flyby.fusion.distilled.synthesis import Pool, Synthesis, as_pictures, as_unit
from flyby.fusion.distilled.teachers import Probabilities, Teachers, memory_of, mix, normalise
from flyby.fusion.predictor import Predictor, Single
from flyby.models import ModelSpec
from flyby.models.generator import Generator
from flyby.objectives import OBJECTIVES
from flyby.objectives.kd import softened_kl
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel
from flyby.report.sections import pictures
from flyby.rng import generator
from flyby.runs.methods import METHODS, check_pair
from flyby.training.settings import TrainSettings
from flyby.training.steps import batches

CNN = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8), widths={"conv1": 4, "conv2": 5, "conv3": 6})
MLP = ModelSpec(name="mlp", classes=3, channels=1, size=(8, 8), widths={"fc1": 6, "fc2": 4})
NAMES = ("ant", "bee", "cat")
TINY: dict[str, Any] = {"epochs": 3, "images": 12, "steps": 2, "batch": 8, "latent": 5, "generator_width": 3}
DATA_FREE = ("dense", "coboosting", "intactofl")


def made(k: int, spec: ModelSpec = CNN) -> Parcel:
    weights = dict(spec.build(generator(k, "weights")).state_dict())
    for i, (name, value) in enumerate(weights.items()):
        if "running" in name:  # near what the layers see, so that no ReLU is dead and every gradient counts
            low, high = (-0.3, 0.3) if name.endswith("mean") else (0.05, 0.3)
            weights[name] = torch.empty_like(value).uniform_(low, high, generator=generator(k, i))
    return parcel.make(
        sender=f"site-{k}", method="x", spec=spec, class_names=NAMES, weights=weights, samples=30, counts=[10, 10, 10]
    )


def unit(count: int = 6, spec: ModelSpec = CNN, seed: int = 0) -> Tensor:
    return torch.rand((count, spec.channels, *spec.size), generator=generator(seed, "unit"))


def state_bytes(predictor: Predictor) -> bytes:
    return b"".join(t.contiguous().numpy().tobytes() for t in predictor.state_dict().values())


def small(rule: str, **changes: Any) -> Distillation:
    kind = FUSIONS[rule]
    fusion = kind(kind.settings_type(**(TINY | changes)))
    assert isinstance(fusion, Distillation)
    return fusion


# -- the generator


@pytest.mark.parametrize(
    ("size", "channels"), [((32, 32), 3), ((8, 8), 1), ((28, 28), 1), ((9, 7), 3), ((1, 1), 2), ((5, 30), 1)]
)
def test_the_generator_makes_images_of_any_size(size: tuple[int, int], channels: int) -> None:
    maker = Generator.build(size, channels, 256, 4, generator(0))
    x = maker(torch.randn(6, 256, generator=generator(1))).detach()
    assert x.shape == (6, channels, *size)
    assert 0 <= float(x.min()) < float(x.max()) <= 1
    assert torch.equal(
        x, Generator.build(size, channels, 256, 4, generator(0))(torch.randn(6, 256, generator=generator(1)))
    )


def test_the_generator_has_the_published_layers() -> None:
    shapes = {name: tuple(p.shape) for name, p in Generator((32, 32), 3).named_parameters() if p.ndim > 1}
    assert shapes == {
        "linear.weight": (128 * 64, 256),
        "conv1.weight": (128, 128, 3, 3),
        "conv2.weight": (64, 128, 3, 3),
        "conv3.weight": (3, 64, 3, 3),
    }


def test_building_a_generator_leaves_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    Generator.build((8, 8), 1, 8, 4, generator(0))
    small("intactofl").fuse(Inbox([made(0), made(1)]))
    assert torch.equal(torch.get_rng_state(), before)


# -- L_BN and the teachers


def direct_distance(weights: dict[str, Tensor], x: Tensor) -> float:
    """L_BN of one cnn-small, layer by layer, in double precision."""
    total, x = 0.0, x.double()
    for i in (1, 2, 3):
        x = F.conv2d(x, weights[f"backbone.conv{i}.weight"].double(), padding=1)
        channels = x.permute(1, 0, 2, 3).flatten(1)
        mean, var = weights[f"backbone.bn{i}.running_mean"].double(), weights[f"backbone.bn{i}.running_var"].double()
        total += math.sqrt(float(((channels.mean(1) - mean) ** 2).sum()))
        total += math.sqrt(float((((channels - channels.mean(1, keepdim=True)) ** 2).mean(1) - var).square().sum()))
        x = (x - mean.view(1, -1, 1, 1)) / (var.view(1, -1, 1, 1) + 1e-5).sqrt()
        x = (
            x * weights[f"backbone.bn{i}.weight"].view(1, -1, 1, 1) + weights[f"backbone.bn{i}.bias"].view(1, -1, 1, 1)
        ).relu()
        x = F.max_pool2d(x, 2) if i == 2 else x
    return total


@pytest.mark.parametrize("resident", ["all", "one"])
def test_the_batchnorm_loss_sums_over_all_layers_of_all_clients(resident: Any) -> None:
    other = CNN.replace(mean=(0.2,), std=(0.9,))
    parcels = [made(0), made(1), made(2, other), made(3, MLP)]
    x = unit()
    each = [direct_distance(p.weights, normalise(x, p.manifest.spec)) for p in parcels[:3]]
    assert min(each) > 0.1
    for k, p in enumerate(parcels[:3]):
        assert float(with_distance(p.network(), normalise(x, p.manifest.spec))[1].detach()) == pytest.approx(
            each[k], rel=1e-4
        )
    loss, distance, _ = Teachers(Inbox(parcels), "cpu", resident).pull(x, lambda x, logits: logits.sum() * 0, bn=0.5)
    assert float(distance) == pytest.approx(sum(each), rel=1e-4)
    assert float(loss) == pytest.approx(0.5 * sum(each), rel=1e-4)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (7, 5), (4, 8, 8, 8)])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_moments_and_their_derivative_are_those_of_var_mean(
    device: str, shape: tuple[int, ...], dtype: torch.dtype, close: float
) -> None:
    x = (torch.randn(shape, generator=generator("moments")) * 2 + 3).to(device, dtype)
    x = x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
    x[:, 1] = 4.0  # a channel that is always the same
    towards = [torch.randn(shape[1], generator=generator("towards", i)).to(device) for i in range(2)]
    mine, plain = x.clone().requires_grad_(), x.double().requires_grad_()
    var, mean = torch.var_mean(plain, [d for d in range(len(shape)) if d != 1], correction=0)
    found = Moments.apply(mine)
    for got, wanted in zip(found, (mean, var), strict=True):
        assert got.dtype == torch.float32
        assert torch.allclose(got.double(), wanted, rtol=1e-5, atol=1e-5)
    sum((a * b).sum() for a, b in zip(found, towards, strict=True)).backward()
    ((mean * towards[0]).sum() + (var * towards[1]).sum()).backward()
    assert mine.grad.dtype == dtype
    assert torch.allclose(mine.grad.double(), plain.grad, rtol=close, atol=close / 10)


def test_without_a_weight_the_batchnorm_distance_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox([made(0), made(1)])
    for resident in ("all", "one"):
        teachers = Teachers(inbox, "cpu", resident)  # type: ignore[arg-type]
        wanted = teachers.pull(unit(), lambda x, logits: logits.square().sum(), 0.0)
        with monkeypatch.context() as patch:
            patch.setattr("flyby.fusion.distilled.teachers.with_distance", None)
            loss, distance, gradient = teachers.pull(unit(), lambda x, logits: logits.square().sum())
        assert (float(loss), float(distance)) == (pytest.approx(float(wanted[0])), 0.0)
        assert torch.allclose(gradient, wanted[2], atol=1e-6)


def test_watching_leaves_no_hook_behind() -> None:
    network = made(0).network()
    with_distance(network, normalise(unit(), CNN))
    assert not any(m._forward_pre_hooks for m in network.modules())


def test_teachers_one_at_a_time_pull_as_all_at_once() -> None:
    parcels = [made(0), made(1, MLP), made(2)]
    student = CNN.build(generator(9)).eval()
    y = torch.tensor([0, 1, 2, 0, 1, 2])

    def objective(x: Tensor, logits: Tensor) -> Tensor:
        t = logits.mean(0)
        return F.cross_entropy(t, y) + masked_disagreement(student(normalise(x, CNN)), t, 1.0)

    together, apart = (Teachers(Inbox(parcels), "cpu", how) for how in ("all", "one"))  # type: ignore[arg-type]
    assert together.together
    assert not apart.together
    for a, b in zip(together.pull(unit(), objective, 0.3), apart.pull(unit(), objective, 0.3), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert torch.equal(together.say(unit()), apart.say(unit()))
    assert torch.allclose(together.say(unit())[1], parcels[1].network()(normalise(unit(), MLP)), atol=1e-6)


def test_images_in_0_to_1_are_prepared_as_bytes_are() -> None:
    images = torch.randint(0, 256, (4, 8, 8, 1), generator=generator(0), dtype=torch.uint8)
    assert torch.allclose(normalise(as_unit(images), CNN), CNN.prepare(images), atol=1e-6)


def test_the_stated_memory_is_that_of_the_layers() -> None:
    weights, activations = memory_of(MLP)
    assert weights == 4 * (64 * 6 + 6 + 6 * 4 + 4 + 4 * 3 + 3)
    assert activations == 4 * (64 + 6 + 6 + 4 + 4 + 4 + 3)  # flatten, fc1, relu, fc2, relu, the empty projector, head
    inbox = Inbox([made(k, MLP) for k in range(3)])
    assert Teachers(inbox, "cpu", "all", batch=10).peak == 3 * (weights + 10 * activations)
    assert Teachers(inbox, "cpu", "one", batch=10).peak == 3 * weights + weights + 10 * activations
    assert Teachers(inbox, "cpu", "auto", batch=10).together
    assert not Teachers(inbox, "cpu", "auto", batch=10**8).together


@pytest.mark.parametrize(
    ("form", "apart", "share"), [("sum", distance, 1.0), ("mean", distance, 0.5), ("relative", relative, 0.5)]
)
def test_synthesis_keeps_the_best_of_its_steps(form: str, apart: Any, share: float) -> None:
    teachers = Teachers(Inbox([made(0), made(1)]), "cpu")
    settings = DenseSettings(**TINY | {"steps": 6, "generator_lr": 0.05, "bn_form": form})  # type: ignore[arg-type]
    seen: list[tuple[float, Tensor]] = []

    def objective(x: Tensor, logits: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.mean(0), y) + torch.tensor([3.0, 0.0, 5.0, 1.0, 4.0, 2.0])[len(seen)] * 100
        off = share * sum(with_distance(net, normalise(x, CNN), apart)[1] for net in teachers.networks())
        seen.append((float((loss + settings.bn * off).detach()), x.detach().clone()))
        return loss

    images, labels, noted = Synthesis(teachers, 3, objective, settings).make("key")
    assert len(seen) == 6
    least, best = min(seen, key=lambda pair: pair[0])
    assert least == seen[1][0]
    assert torch.equal(images, (best * 255).round().to(torch.uint8).permute(0, 2, 3, 1))
    assert noted["synthesis_loss"] == pytest.approx(least, rel=1e-5)
    assert noted["bn_distance"] > 0
    assert (images.shape, labels.shape) == ((12, 8, 8, 1), (12,))


def test_synthesis_learns() -> None:
    teachers = Teachers(Inbox([made(0), made(1)]), "cpu")

    def reached(steps: int) -> float:
        settings = DenseSettings(**TINY | {"steps": steps, "generator_lr": 0.02})  # type: ignore[arg-type]
        return Synthesis(teachers, 3, lambda x, logits, y: F.cross_entropy(logits.mean(0), y), settings).make(0)[2][
            "synthesis_loss"
        ]

    assert reached(30) < 0.95 * reached(1), "not to nothing: no image fits statistics that were drawn at random"


# -- the losses


def test_distillation_loss_by_hand() -> None:
    s, t = torch.tensor([[0.0, 0.0], [4.0, 0.0]]), torch.tensor([[2 * math.log(3), 0.0], [4.0, 0.0]])
    # T = 2: p_t = (3/4, 1/4), p_s = (1/2, 1/2); the second sample agrees.
    by_hand = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert softened_kl(s, t, 2.0).tolist() == pytest.approx([by_hand, 0.0], abs=1e-6)
    rule = small("dense", temperature=2.0)

    class Fixed(torch.nn.Module):
        def scores(self, x: Tensor, said: Tensor) -> Tensor:
            return s

    told = mix(torch.tensor([0.5, 0.5]), torch.stack((t + 1, t - 1)))
    loss = rule.loss(Fixed(), s, torch.empty(2, 2, 0), told, torch.zeros(2))  # type: ignore[arg-type]
    assert float(loss) == pytest.approx(4 * by_hand / 2, abs=1e-6)


def test_the_adversarial_mask_on_three_samples() -> None:
    t = torch.tensor([[math.log(3), 0.0], [math.log(3), 0.0], [0.0, math.log(3)]])
    s = torch.tensor([[0.0, math.log(3)], [math.log(7), 0.0], [math.log(3), 0.0]])
    # Samples 1 and 3 differ, each with KL((3/4, 1/4) || (1/4, 3/4)) = log(3)/2; sample 2 agrees and counts 0, though
    # its KL is not.
    assert float(softened_kl(s, t, 1.0)[1]) > 0.01
    assert float(masked_disagreement(s, t, 1.0)) == pytest.approx(-2 * (math.log(3) / 2) / 3, abs=1e-6)
    assert float(small("dense").adversarial(s, t)) == pytest.approx(-math.log(3) / 3, abs=1e-6)  # type: ignore[attr-defined]
    unmasked = CoBoosting(CoBoostingSettings(adv_temperature=1.0)).adversarial(s, t)
    assert float(unmasked) == pytest.approx(-float(softened_kl(s, t, 1.0).mean()), abs=1e-6)
    assert float(CoBoosting().adversarial(3 * s, 3 * t)) == pytest.approx(9 * float(unmasked), abs=1e-5), "T^2 at T = 3"


def test_hard_samples_weigh_more() -> None:
    t = torch.tensor([[math.log(3), 0.0], [0.0, math.log(3)]], requires_grad=True)
    y = torch.tensor([0, 0])  # p_y = 3/4 and 1/4
    each = [-math.log(0.75), -math.log(0.25)]
    assert float(hard_cross_entropy(t, y, 0.0)) == pytest.approx(sum(each) / 2)
    assert float(hard_cross_entropy(t, y, 1.0)) == pytest.approx((0.25 * each[0] + 0.75 * each[1]) / 2)
    assert float(hard_cross_entropy(t, y, 2.0)) == pytest.approx((0.0625 * each[0] + 0.5625 * each[1]) / 2)
    (gradient,) = torch.autograd.grad(
        hard_cross_entropy(t, y, 1.0), t
    )  # dCE/dt_y = p_y - 1, times the weight, over two samples
    assert gradient[:, 0].tolist() == pytest.approx([0.25 * -0.25 / 2, 0.75 * -0.75 / 2])


def test_the_signed_step_of_the_ensemble_weights_by_hand() -> None:
    # Client 0 is right on both images, client 1 wrong, client 2 says nothing: up, down, and sign(0) = 0.
    logits = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    y = torch.tensor([0, 1])
    teachers = Teachers(Inbox([made(k) for k in range(3)]), "cpu")
    thirds = torch.full((3,), 1 / 3)
    assert signed_step(teachers, thirds, logits, y, 0.01).tolist() == pytest.approx([1 / 3 + 0.01, 1 / 3 - 0.01, 1 / 3])
    clipped = signed_step(teachers, torch.tensor([0.995, 0.004, 0.5]), logits, y, 0.01)
    assert clipped.tolist() == pytest.approx([1 / 1.5, 0.0, 0.5 / 1.5]), "clipped to 0..1, then divided by the sum"
    nothing = signed_step(teachers, torch.tensor([0.0, 0.004, 0.0]), -logits, y, 0.01)
    assert nothing.tolist() == pytest.approx([0.0, 1.0, 0.0]), "wrong becomes right: 1 of what is left"
    assert signed_step(teachers, torch.zeros(3), 0 * logits, y, 0.01).tolist() == pytest.approx([1 / 3] * 3)
    teachers.teaching = Probabilities()
    logits[2] = 0.2 * logits[0]  # right in .55 of a mean of .52: it gains too, and 1 + .01 is divided by
    wanted = [(1 / 3 + 0.01) / 1.01, (1 / 3 - 0.01) / 1.01, (1 / 3 + 0.01) / 1.01]
    assert signed_step(teachers, thirds, logits, y, 0.01).tolist() == pytest.approx(wanted)


def test_the_weights_take_a_step_a_minibatch_from_the_second_epoch_on() -> None:
    logits = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 0.0]]]).repeat(1, 10, 1)
    teachers = Teachers(Inbox([made(k) for k in range(3)]), "cpu")
    pool = Pool(CNN.replace(classes=2), 3, "cpu")
    pool.add(torch.zeros(10, 8, 8, 1, dtype=torch.uint8), torch.zeros(10, dtype=torch.int64), logits)
    rule = CoBoosting(CoBoostingSettings(batch=4))
    rule.reweigh(pool, teachers, 0, 0)
    assert pool.weights.tolist() == pytest.approx([1 / 3] * 3)
    rule.reweigh(pool, teachers, 0, 2)
    far = 3 * 0.01 * 0.99**2  # ten images in batches of four are three steps
    assert pool.weights.tolist() == pytest.approx([1 / 3 + far, 1 / 3 - far, 1 / 3])
    teachers.teaching.weighted = False  # a rule teaches: there is nothing to weigh
    rule.reweigh(pool, teachers, 0, 3)
    assert pool.weights.tolist() == pytest.approx([1 / 3 + far, 1 / 3 - far, 1 / 3])


@pytest.mark.parametrize("resident", ["all", "one"])
def test_inputs_move_along_the_gradient_of_a_random_mixture_of_answers(resident: Any) -> None:
    parcels = [made(0), made(1)]
    weights, u = torch.tensor([0.7, 0.1]), torch.rand((6, 3), generator=generator(3)) * 2 - 1
    moved = push(Teachers(Inbox(parcels), "cpu", resident), unit(), weights, u, 8 / 255, 4.0)
    x = unit().double().requires_grad_()
    nets = [p.network().double() for p in parcels]
    t = 0.7 * nets[0]((x - 0.5) / 0.25) + 0.1 * nets[1]((x - 0.5) / 0.25)
    (gradient,) = torch.autograd.grad((u.double() * (t / 4).softmax(1)).sum(), x)
    sure = gradient.abs() > 1e-7
    assert float(sure.double().mean()) > 0.9
    # 8/255 of the normalised image, which is the image in 0..1 divided by .25
    assert torch.allclose(((moved - unit()) * 255 / 8 / 0.25)[sure].double(), gradient.sign()[sure], atol=1e-4)


def test_batches_have_one_shape_and_leave_nothing_out() -> None:
    rows = list(batches(10, 4, generator(0)))
    assert [len(r) for r in rows] == [4, 4, 4]
    assert sorted(torch.cat(rows)[:10].tolist()) == list(range(10))
    assert [len(r) for r in batches(3, 256, generator(0))] == [3]
    assert [len(r) for r in batches(2, 1, generator(0))] == [2], "BatchNorm needs two"
    assert [len(r) for r in batches(2, 1, generator(0), least=1)] == [1, 1]


# -- IntactOFL's gate


def test_the_gate_by_hand() -> None:
    h = torch.tensor([[0.0, math.log(3), -5.0], [math.log(2), 0.0, math.log(6)]])
    assert torch.allclose(gate_weights(h, 2), torch.tensor([[0.25, 0.75, 0.0], [0.25, 0.0, 0.75]]))
    assert torch.allclose(gate_weights(h, 3), h.softmax(1))
    assert gate_weights(h, 1).tolist() == [[0, 1, 0], [0, 0, 1]]
    logits = torch.tensor([[[4.0, 0.0]], [[0.0, 8.0]], [[99.0, 99.0]]])
    assert mix(gate_weights(h[:1], 2), logits)[0].tolist() == pytest.approx([1.0, 6.0])


def test_the_gates_loss_by_hand() -> None:
    rule = IntactOFL(IntactOFLSettings(top=2, balance=0.01, kd=2.0, temperature=4.0))
    gate = rule.learner(Inbox([made(0), made(1), made(2)]), 0)
    h = torch.tensor([0.0, math.log(3), -5.0])
    gate.linear.load_state_dict({"weight": torch.zeros(3, 64), "bias": h})  # type: ignore[union-attr,operator]
    logits, y, w = (
        torch.randn((3, 5, 3), generator=generator(0)),
        torch.tensor([0, 1, 2, 0, 1]),
        torch.full((3,), 1 / 3),
    )
    scores = 0.25 * logits[0] + 0.75 * logits[1]
    p, q = (logits.mean(0) / 4).softmax(1), (scores / 4).softmax(1)
    # All 5 x 3 gate weights: five times (1/4, 3/4, 0), whose mean is 1/3.
    spread = math.sqrt(((0.25 - 1 / 3) ** 2 + (0.75 - 1 / 3) ** 2 + (1 / 3) ** 2) / 3)
    by_hand = float(F.cross_entropy(scores, y)) + 0.01 * spread + 2 * 16 * float((p * (p / q).log()).sum(1).mean())
    assert float(rule.loss(gate, unit(5), logits, mix(w, logits), y)) == pytest.approx(by_hand, abs=1e-4)
    # Gates that change from image to image count as well, where their mean over images does not show it.
    gate.linear.load_state_dict({"weight": torch.eye(3, 64) * 9, "bias": torch.zeros(3)})  # type: ignore[union-attr,operator]
    x = torch.full((3, 1, 8, 8), 0.5)
    x[torch.arange(3), 0, 0, torch.arange(3)] = 1.0
    gates = gate.weights(x)  # type: ignore[operator]
    assert float(gates.mean(0).std(correction=0)) < 1e-6
    loss = [
        float(IntactOFL(IntactOFLSettings(top=2, balance=b, kd=0)).loss(gate, x, logits[:, :3], logits[0, :3], y[:3]))
        for b in (0.0, 1.0)
    ]
    flat = gates.flatten().tolist()
    apart = math.sqrt(sum((g - sum(flat) / 9) ** 2 for g in flat) / 9)
    assert apart > 0.3
    assert loss[1] - loss[0] == pytest.approx(apart, abs=1e-5)


def test_the_published_numbers_are_the_defaults() -> None:
    """Sum over 200 epochs of (pool / batch): 20,100 steps on 51,200 images (DENSE) or 25,600 (Co-Boosting)."""
    for kind, total in ((DenseSettings(), 51_200), (CoBoostingSettings(), 25_600)):
        assert kind.epochs * kind.images == total
        assert sum(-(-e * kind.images // kind.batch) * kind.passes for e in range(1, kind.epochs + 1)) == 20_100
        assert (kind.teacher, kind.augment, kind.generator_clip) == ("logits", True, 10.0)
    boost, gate = CoBoostingSettings(), IntactOFLSettings()
    assert (boost.bn, boost.schedule, boost.clip, boost.weight_decay) == (0.0, "cosine", 10.0, 1e-4)
    assert (gate.schedule, gate.clip, gate.weight_decay, gate.temperature) == ("cosine", 10.0, 1e-4, 4.0)
    assert not FedDFSettings().augment


def test_a_gated_predictor_survives_its_folder_and_its_export(tmp_path: Path) -> None:
    parcels = [made(0), made(1, MLP), made(2)]
    assert small("intactofl").fuse(Inbox(parcels)).settings == {"top": 3}
    predictor = small("intactofl", top=2).fuse(Inbox(parcels))
    assert isinstance(predictor, GatedPredictor)
    images = torch.randint(0, 256, (5, 8, 8, 1), generator=generator(0), dtype=torch.uint8)
    wanted = predictor(images).detach()
    h = CNN.prepare(images).flatten(1) @ predictor.gate.weight.T + predictor.gate.bias
    each = torch.stack([p.network()(p.manifest.spec.prepare(images)) for p in parcels])
    assert torch.allclose(wanted, torch.einsum("nk,knc->nc", gate_weights(h, 2), each), atol=1e-5)
    save_predictor(predictor, tmp_path / "model")
    assert torch.equal(load_predictor(tmp_path / "model")(images), wanted)
    program = torch.export.load(tmp_path / "model" / "model.pt2").module()
    for count in (1, 5):
        assert torch.allclose(program(images[:count]), wanted[:count], atol=1e-5)


# -- what may be asked for


def proxy_set(count: int, size: int = 8) -> Dataset:
    images = torch.randint(0, 256, (count, size, size, 1), generator=generator(0), dtype=torch.uint8).numpy()
    return Dataset(images, np.zeros(count, dtype=np.int64), NAMES, f"digest-{count}")


def test_feddf_refuses_to_work_without_fit_images() -> None:
    inbox = Inbox([made(0), made(1)])
    for none in (None, proxy_set(0)):
        with pytest.raises(BadInput, match="name some with --proxy PATH"):
            FedDF().fuse(inbox, Server(proxy=none))
    with pytest.raises(BadInput, match="may not be used"):
        FedDF(FedDFSettings(refuse=("digest-20",))).fuse(inbox, Server(proxy=proxy_set(20)))
    with pytest.raises(BadInput, match=r"are \(9, 9\)x1 where the clients take \(8, 8\)x1"):
        FedDF().fuse(inbox, Server(proxy=proxy_set(20, 9)))


def test_feddf_starts_at_the_average_where_there_is_one() -> None:
    def fused(*parcels: Parcel, **settings: Any) -> Predictor:
        return FedDF(FedDFSettings(**{"epochs": 1, "lr": 1e-12, **settings})).fuse(
            Inbox(parcels), Server(proxy=proxy_set(20))
        )

    def weight(predictor: Predictor) -> Tensor:
        return predictor.state_dict()["networks.0.backbone.conv1.weight"]

    a, b = made(0), made(1)
    mean = (a.weights["backbone.conv1.weight"] + b.weights["backbone.conv1.weight"]) / 2
    assert torch.allclose(weight(fused(a, b)), mean, atol=1e-6)
    assert not torch.allclose(weight(fused(a, b, start="fresh")), mean, atol=1e-2)
    mixed = fused(a, made(1, MLP), student="cnn-small")
    assert mixed.state_dict()["networks.0.backbone.conv1.weight"].shape[0] == 32


def test_labels_of_the_proxy_are_never_read() -> None:
    one = proxy_set(20)
    other = Dataset(one.images, np.arange(20) % 3, NAMES, one.digest)
    rules = [FedDF(FedDFSettings(epochs=1)).fuse(Inbox([made(0), made(1)]), Server(proxy=p)) for p in (one, other)]
    assert state_bytes(rules[0]) == state_bytes(rules[1])


@pytest.mark.parametrize("rule", ["dense", "coboosting"])
def test_mixed_clients_any_student_any_size(rule: str) -> None:
    for size, channels in (((9, 7), 3), ((8, 8), 1)):
        specs = [s.replace(size=size, channels=channels) for s in (CNN, MLP, CNN.replace(head="prototype"))]
        fusion = small(rule, student="mlp", epochs=1)
        server = Server()
        predictor = fusion.fuse(Inbox([made(k, s) for k, s in enumerate(specs)]), server)
        assert predictor.specs[0].name == "mlp"
        assert predictor(torch.zeros(2, *size, channels, dtype=torch.uint8)).shape == (2, 3)
        assert "L_BN leaves them out: 1 of 3 clients have no BatchNorm" in server.report[-1]["text"]
    with pytest.raises(BadInput, match="unknown student 'mlq'; did you mean 'mlp'"):
        small(rule, student="mlq")


def test_models_without_batchnorm_skip_the_loss_and_say_so() -> None:
    fusion = small("dense")
    server = Server()
    fusion.fuse(Inbox([made(0, MLP), made(1, MLP)]), server)
    assert "L_BN is skipped: no client has BatchNorm layers." in server.report[-1]["text"]
    table = server.report[-1]["table"]
    assert {row[table["columns"].index("bn_distance")] for row in table["rows"]} == {0.0}
    fusion = small("dense")
    server = Server()
    fusion.fuse(Inbox([made(0), made(1)]), server)
    assert "L_BN" not in server.report[-1]["text"]
    assert min(row[table["columns"].index("bn_distance")] for row in server.report[-1]["table"]["rows"]) > 0


def test_the_report_says_whether_the_ensemble_recognises_its_images() -> None:
    fusion = small("dense", bn=0.0, adv=0.0, steps=60, generator_lr=0.05)
    server = Server()
    fusion.fuse(Inbox([made(0), made(1)]), server)
    table = server.report[-1]["table"]
    assert "bn_distance" not in table["columns"], "what was not found is not said"
    share = table["rows"][-1][table["columns"].index("recognised")]
    assert share >= 0.5, "sixty steps for the class alone"
    assert f"takes {share:.0%} of the last epoch's" in server.report[0]["text"]
    advice = "L_BN weighs 70 and drowns the class term; a smaller fusion.bn"
    assert advice in about_images(9, {"recognised": 0.2, "bn_distance": 700.4}, 0.1)
    for row in (
        {"recognised": 0.6, "bn_distance": 700.4},
        {"recognised": 0.2},
        {"recognised": 0.2, "bn_distance": 2.0},
    ):
        assert "fusion.bn" not in about_images(9, row, 1.0)


def test_the_relative_batchnorm_loss_is_that_of_normalised_outputs() -> None:
    """Two channels by hand; then a whole network, layer by layer. A channel's scale does not matter, where the
    published distance grows with it."""
    mean, var, running = torch.tensor([1.0, -2.0]), torch.tensor([4.0, 0.5]), torch.tensor([0.0, 1.0])
    spread = torch.tensor([4.0, 0.25])
    wanted = (
        1 / math.sqrt(4 + 1e-5) + 3 / math.sqrt(0.25 + 1e-5) + 0 + abs(math.log((0.5 + 1e-5) / (0.25 + 1e-5)))
    ) / 2
    assert float(relative(mean, var, running, spread)) == pytest.approx(wanted, rel=1e-5)
    large = relative(100 * mean, 1e4 * var, 100 * running, 1e4 * spread)
    assert float(large) == pytest.approx(wanted, rel=1e-3)
    assert float(distance(100 * mean, 1e4 * var, 100 * running, 1e4 * spread)) > 90 * float(
        distance(mean, var, running, spread)
    )
    x, network = unit(), made(0).network()
    each: list[float] = []
    hooks = [
        m.register_forward_pre_hook(
            lambda m, i: each.append(
                float(
                    relative(
                        *torch.var_mean(i[0], (0, 2, 3), correction=0)[::-1], m.running_mean, m.running_var
                    ).detach()
                )
            )
        )
        for m in norms(network)
    ]
    with_distance(network, x)
    for hook in hooks:
        hook.remove()
    assert len(each) == 3
    assert float(with_distance(network, x, relative)[1].detach()) == pytest.approx(sum(each) / 3, rel=1e-4), (
        "the mean over the layers"
    )


@pytest.mark.parametrize("rule", DATA_FREE)
def test_one_client_is_enough(rule: str) -> None:
    assert small(rule).fuse(Inbox([made(0)]))(torch.zeros(1, 8, 8, 1, dtype=torch.uint8)).isfinite().all()


@pytest.mark.parametrize("rule", DATA_FREE)
@pytest.mark.parametrize("resident", ["all", "one"])
def test_half_precision_works_and_spares_the_ensemble(rule: str, resident: str) -> None:
    predictor = small(rule, precision="bf16", resident=resident).fuse(Inbox([made(0), made(1)]))
    assert all(t.isfinite().all() and t.dtype != torch.bfloat16 for t in predictor.state_dict().values())
    weights, logits = torch.tensor([0.3, 0.7]), torch.randn((2, 4, 3), generator=generator(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = mix(weights, logits)
    assert torch.allclose(mixed, 0.3 * logits[0] + 0.7 * logits[1], atol=1e-6)


def test_a_cpu_that_halves_well_distils_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Inbox([made(0), made(1)])
    images = torch.randint(0, 256, (9, 8, 8, 1), generator=generator(0), dtype=torch.uint8)
    full, half = (small("dense", precision=how).fuse(box)(images) for how in ("fp32", "bf16"))
    assert torch.equal(small("dense").fuse(box)(images), full), "8x8 pixels: little to gain"
    monkeypatch.setattr("flyby.training.steps.WORTH_HALVING", 0)
    monkeypatch.setattr("flyby.training.steps.halves_well", lambda: True)
    assert torch.equal(small("dense").fuse(box)(images), half)
    assert not torch.equal(half, full)


def test_a_student_that_leaves_the_finite_numbers_is_reported() -> None:
    with pytest.raises(Diverged, match=r"dense diverged in server epoch 1; lower fusion\.lr"):
        small("dense", lr=1e30).fuse(Inbox([made(0), made(1)]))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_report_gets_the_images_as_data(channels: int) -> None:
    images = torch.randint(0, 256, (20, 5, 7, channels), generator=generator(0), dtype=torch.uint8)
    found = as_pictures(images, columns=4, most=9)
    assert (found["shape"], found["columns"]) == ([9, 5, 7, channels], 4)
    assert base64.b64decode(found["pixels"]) == images[:9].numpy().tobytes()
    server = Server()
    small("dense").fuse(Inbox([made(0), made(1)]), server)
    assert server.report[0]["title"] == "Synthetic images"
    assert server.report == json.loads(json.dumps(server.report)), "plain data: nothing is drawn here"
    assert pictures(server.report[0]["images"]).startswith("<svg")


def test_the_recipes_fit_together() -> None:
    for rule in (*DATA_FREE, "feddf"):
        method = METHODS[rule]
        assert (method.objective, method.fusion) == ("supervised", rule)
        check_pair(OBJECTIVES[method.objective], FUSIONS[rule])
        assert FUSIONS[rule].heterogeneous


# -- resume


@pytest.mark.parametrize("rule", [*DATA_FREE, "feddf"])
def test_interrupted_and_resumed_gives_the_same_bytes(
    tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fusion() -> Distillation:
        return FedDF(FedDFSettings(epochs=4, batch=8)) if rule == "feddf" else small(rule, epochs=4, resident="one")

    inbox = Inbox([made(0), made(1), made(2, MLP)])
    proxy = proxy_set(20)
    whole = Server(proxy, seed=5)
    wanted = state_bytes(fusion().fuse(inbox, whole))
    learn = Distillation._learn

    def interrupted(self: Distillation, *args: Any) -> float:
        if args[-1] == 2:
            raise KeyboardInterrupt
        return learn(self, *args)

    monkeypatch.setattr(Distillation, "_learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fusion().fuse(inbox, Server(proxy, seed=5, work=tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == [f"{rule}.ckpt"]
    done: list[int] = []
    monkeypatch.setattr(Distillation, "_learn", lambda self, *args: done.append(args[-1]) or learn(self, *args))
    resumed = Server(proxy, seed=5, work=tmp_path)
    assert state_bytes(fusion().fuse(inbox, resumed)) == wanted
    assert done == [2, 3]
    assert resumed.report == whole.report
    with pytest.raises(BadInput, match="other settings"):
        fusion().fuse(inbox, Server(proxy, seed=6, work=tmp_path))


def test_long_work_says_where_it_stands_and_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "flyby")
    monkeypatch.setattr("flyby.fusion.distilled.distill.SPEAK_SECONDS", -1.0)
    monkeypatch.setattr("flyby.training.checkpoint.SECONDS", -1.0)
    small("dense").fuse(Inbox([made(0), made(1)]), Server(work=tmp_path))
    lines = caplog.messages
    assert len(lines) == 2
    assert re.fullmatch(r"dense: epoch 1 of 3, loss \d+\.\d{4}, about \d+ s left", lines[0])
    assert (tmp_path / "dense.ckpt").exists()


# -- whole, on digits

DIGITS = ModelSpec(name="cnn-small", classes=10, channels=1, size=(8, 8), widths={"conv1": 8, "conv2": 12, "conv3": 16})
PROXY_IMAGES = 300


@pytest.fixture(scope="module")
def uploads(digits: DataBundle) -> tuple[Inbox, Dataset, float]:
    """Five clients at alpha .3; 300 training images that no client holds, as proxy; the clients'
    mean accuracy alone."""
    rows = np.random.RandomState(0).permutation(len(digits.train))
    held, rest = np.sort(rows[:PROXY_IMAGES]), np.sort(rows[PROXY_IMAGES:])
    data, proxy = (
        Dataset(digits.train.images[r], digits.train.labels[r], digits.train.class_names, f"{len(r)}")
        for r in (rest, held)
    )
    split = make_split(data, SplitSettings(clients=5, alpha=0.3), 0)
    bundle = DataBundle("digits", data, digits.test)
    settings = TrainSettings(epochs=15, lr=0.1, batch=32)
    quiet = SupervisedSettings(calibrate=False)
    parcels = [
        train_site(site_of(bundle, split, name), DIGITS, Supervised(quiet), settings, PLAIN, 0).parcel
        for name in split.shares
    ]
    alone = [accuracy(Single([DIGITS], digits.train.class_names, [p.network()]), digits) for p in parcels]
    return Inbox(parcels), proxy, sum(alone) / len(alone)


def accuracy(predictor: Predictor, digits: DataBundle) -> float:
    assert digits.test is not None
    test = part_of(digits.test)
    with torch.no_grad():
        return float((predictor(test.images).argmax(1) == test.labels).double().mean())


SMALL: dict[str, Any] = {
    "images": 96,
    "steps": 30,
    "batch": 96,
    "latent": 64,
    "generator_width": 16,
    "generator_lr": 0.01,
}
STUDENT: dict[str, Any] = SMALL | {"lr": 0.1}


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("dense", STUDENT | {"epochs": 6, "passes": 5}),
        ("coboosting", STUDENT | {"epochs": 8, "passes": 6, "bn": 1.0, "adv": 0.1, "teacher": "probabilities"}),
        ("intactofl", SMALL | {"epochs": 3, "passes": 3, "adv": 0.3}),
        ("feddf", {"epochs": 40, "batch": 64}),
    ],
)
def test_each_rule_beats_being_alone_and_plain_averaging(
    digits: DataBundle, uploads: tuple[Inbox, Dataset, float], rule: str, settings: dict[str, Any]
) -> None:
    inbox, proxy, alone = uploads
    kind = FUSIONS[rule]
    reached = accuracy(
        kind(kind.settings_type(**settings)).fuse(inbox, Server(proxy if rule == "feddf" else None)), digits
    )
    averaged = accuracy(FUSIONS["fedavg"]().fuse(inbox), digits)
    print(f"{rule} {reached:.3f} alone {alone:.3f} fedavg {averaged:.3f}")
    assert reached > alone + 0.03
    assert reached > averaged + 0.1
