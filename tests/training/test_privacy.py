"""DP-SGD: clipping and noise by hand and beside opacus' own optimiser, the budget by opacus' accountant, and everything
that is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from factories import call, done, make_stripes, one_line, result_of, train_site
from flyby.data.dataset import DataBundle
from flyby.data.site import Part, Site, part_of
from flyby.data.views import PLAIN, SALT, ViewSettings
from flyby.errors import BadInput
from flyby.models import ModelSpec
from flyby.objectives import OBJECTIVES, Aurora, BalancedEtf
from flyby.objectives.base import Batch, ObjectiveSettings, Terms
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.parcels.parcel import Manifest, to_bytes
from flyby.rng import generator
from flyby.statistics.masked_sums import ROUND
from flyby.statistics.temperature import NAME as TEMPERATURE
from flyby.training.loop import Row, Trained
from flyby.training.privacy import Budget, PrivateTraining, check_privacy, clipped_sum, draws, per_sample_gradients
from flyby.training.settings import TrainSettings

SPEC = ModelSpec(name="mlp", classes=3, channels=1, size=(4, 4), widths={"fc1": 6, "fc2": 5})
PRIVATE = TrainSettings(epochs=3, dp_epsilon=4.0, batch=8, lr=0.1)


def small_site(count: int = 24, seed: int = 0) -> Site:
    rng = torch.Generator().manual_seed(seed)
    part = Part(torch.randint(0, 256, (count, 4, 4, 1), generator=rng, dtype=torch.uint8), torch.arange(count) % 3)
    return Site("a", part, Part(part.images[:0], part.labels[:0]), part, ("x", "y", "z"))


def supervised() -> Supervised:
    return Supervised(SupervisedSettings(calibrate=False))


def trained(settings: TrainSettings = PRIVATE, **options: Any) -> Trained:
    return train_site(small_site(), SPEC, supervised(), settings, PLAIN, 0, counts="noisy", **options)


# Clipping and noise


def test_clipping_by_hand() -> None:
    """y = w x from w = 0 under (y - t)^2 / 2: the gradients are -t x, (-3, -4) of length 5 and (0.3, 0.4) of length
    0.5."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    x, t = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.tensor([1.0, -1.0])
    with per_sample_gradients(model) as (weight,):
        ((model(x)[:, 0] - t).square() / 2).mean().backward()
        assert weight.grad_sample[:, 0].tolist() == [[-3.0, -4.0], pytest.approx([0.3, 0.4])]  # type: ignore[attr-defined]
        (total,) = clipped_sum([weight.grad_sample], 1.0)  # type: ignore[attr-defined]
    assert total[0].tolist() == pytest.approx([-0.6 + 0.3, -0.8 + 0.4])
    assert not hasattr(model.weight, "grad_sample")
    assert not model._forward_hooks
    assert not model._backward_hooks


def test_gradients_of_convolutions_are_each_image_s_own_with_channels_last() -> None:
    """As the training loop has images in memory."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3, padding=1), nn.Flatten())
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(4, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    with per_sample_gradients(model) as parameters:
        model(x).square().sum(1).mean().backward()
        each = [p.grad_sample.clone() for p in parameters]  # type: ignore[attr-defined]
    assert not any(module._forward_pre_hooks for module in model.modules())
    for i in range(4):
        model.zero_grad()
        model(x[i : i + 1]).square().sum().backward()
        assert all(torch.allclose(g[i], p.grad, atol=1e-3) for g, p in zip(each, parameters, strict=True))


def test_the_norm_is_taken_over_all_parameters_together() -> None:
    first, second = torch.tensor([[3.0, 0.0]]), torch.tensor([[[4.0]]])
    clipped = clipped_sum([first, second], 2.5)
    assert clipped[0].tolist() == [1.5, 0.0]
    assert clipped[1].tolist() == [[2.0]]
    assert clipped_sum([torch.zeros(2, 3)], 1.0)[0].tolist() == [0.0, 0.0, 0.0]


@given(st.integers(1, 6), st.floats(0.01, 10), st.integers(0, 2**31))
def test_no_image_moves_the_sum_by_more_than_the_clip(count: int, clip: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    scale = torch.exp(4 * torch.randn(count, 1, generator=rng)).double()
    gradients = [
        scale * torch.randn(count, 3, generator=rng).double(),
        scale * torch.randn(count, 2, generator=rng).double(),
    ]
    whole = torch.cat(clipped_sum(gradients, clip))
    for i in range(count):
        rest = torch.cat(clipped_sum([torch.cat([g[:i], g[i + 1 :]]) for g in gradients], clip))
        assert float((whole - rest).norm()) <= clip * (1 + 1e-9)


def one_step(private: PrivateTraining, site: Site, lr: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = SPEC.build(generator("start")).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    private.epoch(model, supervised(), torch.optim.SGD(model.parameters(), lr=lr), site.train, 1, torch.ones(()))
    return before, {name: p.detach() for name, p in model.named_parameters()}


def everybody(settings: TrainSettings, site: Site, sigma: float) -> PrivateTraining:
    """One step on all images (q = 1) with a noise of our choice."""
    private = PrivateTraining(settings, PLAIN, 1, len(site.train), len(site.train), site.id, 0, 1.0)
    assert private.steps == 1
    private.budget = Budget(sigma, 1.0, 1, 1e-5)
    return private


def test_a_step_without_noise_is_that_of_a_loop_over_images_and_that_of_opacus() -> None:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    site, settings, lr = small_site(5), TrainSettings(dp_epsilon=1.0, dp_clip=0.3), 0.5
    before, after = one_step(everybody(settings, site, 0.0), site, lr)
    model, objective = SPEC.build(generator("start")).train(), supervised()
    sums = [torch.zeros_like(p) for p in model.parameters()]
    norms = []
    for i in range(5):
        model.zero_grad()
        images = SPEC.prepare(site.train.images[i : i + 1])
        objective.loss(model, Batch(images, site.train.labels[i : i + 1], 1), torch.ones(())).total.backward()
        gradients = [p.grad for p in model.parameters()]
        norm = float(torch.cat([g.flatten() for g in gradients if g is not None]).norm())
        norms.append(norm)
        for total, gradient in zip(sums, gradients, strict=True):
            assert gradient is not None
            total += gradient * min(1.0, 0.3 / norm)
    assert min(norms) > 0.3  # so the clip did something
    for name, total in zip(before, sums, strict=True):
        torch.testing.assert_close(after[name], before[name] - lr * total / 5, rtol=1e-5, atol=1e-7)

    theirs = GradSampleModule(SPEC.build(generator("start")).train())
    optimizer = DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=lr), noise_multiplier=0.0, max_grad_norm=0.3, expected_batch_size=5
    )
    objective.loss(
        theirs, Batch(SPEC.prepare(site.train.images), site.train.labels, 1), torch.ones(())
    ).total.backward()
    optimizer.step()
    for ours, p in zip(after.values(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, p.detach(), rtol=1e-4, atol=1e-6)  # opacus adds 1e-6 to the norm


def test_the_noise_has_the_promised_size() -> None:
    """With C = 1e-6 the images move the sum by 5e-6 at most, so that what is left is N(0, (sigma C)^2) / n."""
    site, spec = small_site(5), SPEC.replace(widths={"fc1": 200, "fc2": 100})
    model = spec.build(generator("start")).train()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    private = everybody(TrainSettings(dp_epsilon=1.0, dp_clip=1e-6), site, 1e6)
    private.epoch(model, supervised(), torch.optim.SGD(model.parameters(), lr=1.0), site.train, 1, torch.ones(()))
    moved = (nn.utils.parameters_to_vector(model.parameters()).detach() - before) * 5
    assert len(moved) > 20_000
    assert float(moved.mean()) == pytest.approx(0, abs=4 / len(moved) ** 0.5)
    assert float(moved.std()) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("seeded", [True, False])
def test_uniform_numbers_are_uniform(seeded: bool) -> None:
    draw = draws(generator("test") if seeded else None)
    numbers = draw(200_000)
    assert 0 < float(numbers.min()) < 1e-3
    assert 1 - 1e-3 < float(numbers.max()) < 1
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.004)
    assert torch.histc(numbers, 10, 0, 1).tolist() == pytest.approx([20_000] * 10, rel=0.05)
    assert not torch.equal(draw(10), draw(10))
    normal = torch.special.ndtri(numbers)
    assert bool(normal.isfinite().all())
    assert float(normal.std()) == pytest.approx(1, rel=0.01)


class Counting(Supervised):
    """Cross-entropy that notes how many images each batch had."""

    def __init__(self) -> None:
        super().__init__(SupervisedSettings(calibrate=False))
        self.sizes: list[int] = []

    def loss(self, model: Any, batch: Batch, progress: Tensor) -> Terms:
        self.sizes.append(len(batch.labels))
        return super().loss(model, batch, progress)


def test_batches_are_poisson_samples_and_an_empty_one_is_a_step_of_noise() -> None:
    site, counting = small_site(4), Counting()
    private = PrivateTraining(TrainSettings(dp_epsilon=8.0), PLAIN, 100, 4, 1, "a", 0, 1.0)
    assert (private.steps, private.budget.rate, private.budget.steps) == (4, 0.25, 400)
    model = SPEC.build(generator("start")).train()
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=1e-3), 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    optimizer.register_step_post_hook(count)
    for epoch in range(100):
        private.epoch(model, counting, optimizer, site.train, epoch, torch.ones(()))
    assert steps == 400
    filled = len(counting.sizes)
    assert filled == pytest.approx(400 * (1 - 0.75**4), rel=0.1)  # the others were empty
    assert sum(counting.sizes) == pytest.approx(400, rel=0.15)  # 400 steps of 4 images at 1/4
    assert max(counting.sizes) > 1


# The budget


def test_epsilon_is_that_of_opacus_accountant_stepped_one_by_one() -> None:
    from opacus.accountants import RDPAccountant

    budget = Budget.plan(3.0, 1e-5, 0.05, 200)
    accountant = RDPAccountant()
    for _ in range(200):
        accountant.step(noise_multiplier=budget.sigma, sample_rate=0.05)
    assert budget.epsilon() == pytest.approx(accountant.get_epsilon(delta=1e-5), rel=1e-9)
    assert 3.0 * 0.98 < budget.epsilon() <= 3.0


def test_more_noise_or_fewer_steps_cost_less() -> None:
    costs = [Budget(sigma, 0.05, 200, 1e-5).epsilon() for sigma in (0.7, 1.0, 2.0, 8.0)]
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) == 4
    budget = Budget(1.0, 0.05, 200, 1e-5)
    assert budget.epsilon(50) < budget.epsilon(100) < budget.epsilon()
    assert Budget.plan(1.0, 1e-5, 0.05, 200).sigma > Budget.plan(8.0, 1e-5, 0.05, 200).sigma
    with pytest.raises(BadInput, match="no amount of noise"):
        Budget.plan(1e-7, 1e-9, 1.0, 100_000)


def test_the_parcel_says_what_was_spent() -> None:
    made = trained(epsilon=0.5).parcel.manifest
    facts: Any = made.provenance["privacy"]
    assert (facts["steps"], facts["rate"], facts["delta"], facts["clip"]) == (9, 8 / 24, pytest.approx(0.1 / 24), 1.0)
    assert facts["epsilon"] == Budget(facts["noise"], 8 / 24, 9, 0.1 / 24).epsilon() <= 4.0
    assert facts["total_epsilon"] == facts["epsilon"] + 0.5
    assert facts["randomness"] == "seeded: a simulation, not private"
    assert made.counts_kind == "noisy"
    assert made.extras == ()
    assert set(made.meta) == {"epochs", "best_epoch"}
    assert made.provenance["train"]["dp_epsilon"] == 4.0  # type: ignore[index, call-overload]


def test_other_parcels_do_not_know_of_privacy() -> None:
    assert not any(key.startswith("dp_") for key in TrainSettings(epochs=2).model_dump(mode="json"))
    assert TrainSettings(dp_epsilon=2).model_dump()["dp_clip"] == 1.0
    assert "privacy" not in trained(TrainSettings(epochs=1)).parcel.manifest.provenance


# Randomness and resume


def test_a_simulation_repeats_and_a_real_site_does_not() -> None:
    assert to_bytes(trained().parcel) == to_bytes(trained().parcel)
    real, again = trained(simulated=False).parcel, trained(simulated=False).parcel
    assert real.manifest.provenance["privacy"]["randomness"] == "operating system"  # type: ignore[index, call-overload]
    assert any(not torch.equal(real.weights[name], again.weights[name]) for name in real.weights)


@pytest.mark.parametrize("simulated", [True, False])
def test_a_resumed_site_goes_on_with_its_budget(tmp_path: Path, simulated: bool) -> None:
    def stop(row: Row) -> None:
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(folder=tmp_path, on_epoch=stop, simulated=simulated)
    resumed, whole = trained(folder=tmp_path, simulated=simulated), trained(simulated=simulated)
    assert [row["epoch"] for row in resumed.rows] == [1, 2, 3]
    facts = [item.parcel.manifest.provenance["privacy"] for item in (resumed, whole)]
    assert facts[0] == facts[1]
    assert (to_bytes(resumed.parcel) == to_bytes(whole.parcel)) is simulated


# What is refused


def refusal(**changes: Any) -> str:
    given: dict[str, Any] = {
        "spec": SPEC,
        "objective": Supervised,
        "chosen": ObjectiveSettings(calibrate=False),
        "views": PLAIN,
        "counts": "noisy",
        "train": TrainSettings(dp_epsilon=1.0),
    }
    with pytest.raises(BadInput) as caught:
        check_privacy(**(given | changes))
    return str(caught.value)


def test_what_would_escape_the_accounting_is_refused() -> None:
    check_privacy(SPEC, Aurora, ObjectiveSettings(), TrainSettings(), SALT, "exact")  # privacy is off
    check_privacy(
        SPEC,
        Supervised,
        ObjectiveSettings(calibrate=False),
        TrainSettings(dp_epsilon=1.0),
        ViewSettings(flip=0.5),
        "noisy",
    )
    assert "mixes the images" in refusal(objective=Aurora, views=SALT)
    assert "exact counts" in refusal(objective=BalancedEtf)
    assert "exact class counts" in refusal(counts="exact")
    assert "binary class counts" in refusal(counts="binary")
    assert "objective.calibrate=false" in refusal(chosen=ObjectiveSettings())
    assert "class-means" in refusal(chosen=ObjectiveSettings(calibrate=False, send=("class-means",)))
    assert "several views" in refusal(views=ViewSettings(views=2))
    for name, value in (("patience", 3), ("clip", 1.0), ("compile", "full")):
        assert f"train.{name} left out" in refusal(train=TrainSettings(dp_epsilon=1.0, **{name: value}))


def test_networks_with_batch_norm_are_refused_and_others_that_fit_are_named() -> None:
    assert "--model mlp (cnn-small has BatchNorm" in refusal(
        spec=ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8))
    )
    assert "--model mlp or lenet or cnn-fol (resnet18 has" in refusal(
        spec=ModelSpec(name="resnet18", classes=3, size=(32, 32))
    )


def test_no_network_that_is_allowed_lets_one_image_change_anothers_answer() -> None:
    for name in ("mlp", "lenet", "cnn-fol"):
        spec = ModelSpec(name=name, classes=3, channels=1, size=(18, 18))
        check_privacy(
            spec, Supervised, ObjectiveSettings(calibrate=False), TrainSettings(dp_epsilon=1.0), PLAIN, "noisy"
        )
        model = spec.build(generator("start")).train()
        images = torch.randn(3, 1, 18, 18, generator=generator("images"))
        torch.testing.assert_close(model(images)[0], model(images[:1])[0])


def test_every_refusal_is_one_line_before_anything_is_written(tmp_path: Path) -> None:
    data, out = make_stripes(tmp_path / "d.npz", 60, 30), tmp_path / "run"
    line = one_line(
        call("run", "--method", "fedavg", "--data", data, "--out", out, "-q", "--set", "train.dp_epsilon=8")
    )
    assert all(word in line for word in ("--model mlp", "counts=noisy", "calibrate=false"))
    assert not out.exists()
    assert "plain cross-entropy" in one_line(
        call("run", "--method", "aurora", "--data", data, "--out", out, "-q", "--set", "train.dp_epsilon=8")
    )
    assert not out.exists()


def test_without_opacus_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(BadInput, match=r"flyby\[privacy\]"):
        trained()


# End to end


def test_digits_are_learnt_at_epsilon_8(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done(
        "run",
        "--method",
        "ensemble",
        "--data",
        "digits",
        "--clients",
        2,
        "--alpha",
        100,
        "--epochs",
        10,
        "--model",
        "mlp",
        "--out",
        out,
        "-q",
        "--engine",
        "inline",
        "--set",
        "train.dp_epsilon=8",
        "--set",
        "counts=noisy",
        "--set",
        "objective.calibrate=false",
    )
    assert result_of(out)["accuracy"] > 0.8  # chance is 0.1
    answer = done("inspect", out / "parcels" / "site-0.parcel")
    assert "privacy" in answer.out
    assert done("inspect", out / "parcels" / "site-0.parcel", "--json").json["provenance"]["privacy"]["epsilon"] <= 8


def test_a_real_site_trains_privately(tmp_path: Path, digits: DataBundle) -> None:
    part = part_of(digits.train, range(400))
    site = Site("a", part, part_of(digits.train, []), part, digits.train.class_names)
    spec = ModelSpec(name="mlp", classes=10, channels=1, size=(8, 8))
    made = train_site(
        site,
        spec,
        supervised(),
        TrainSettings(epochs=6, dp_epsilon=20.0, lr=0.1),
        PLAIN,
        0,
        counts="noisy",
        simulated=False,
    )
    test = part_of(digits.train, range(400, 800))
    right = made.parcel.network()(spec.prepare(test.images)).argmax(1) == test.labels
    assert float(right.float().mean()) > 0.5


# What a parcel tells


def documented() -> set[str]:
    """The fields that docs/privacy.md has a line for."""
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    table = page.split("## What is in a parcel")[1].split("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_field_of_a_parcel_is_in_the_table_and_the_other_way_round() -> None:
    sent = {*Manifest.model_fields} - {"meta", "provenance"}
    for name, kind in OBJECTIVES.items():
        variants = [{}] if name != "aurora" else [{}, {"weighting": "learnable"}]
        for words in variants:
            objective = kind(kind.settings_type(**words))
            spec = kind.adapt_spec(SPEC, objective.settings)
            short = TrainSettings(epochs=int(kind.trains))
            made = train_site(small_site(), spec, objective, short, SALT, 0).parcel.manifest
            sent |= {f"meta.{key}" for key in made.meta} | {f"provenance.{key}" for key in made.provenance}
    sent |= {f"provenance.{key}" for key in trained().parcel.manifest.provenance}
    sent |= {f"meta.{key}" for key in ROUND}  # of masked parcels
    sent |= {f"meta.{TEMPERATURE}"}  # of real sites
    assert documented() == sent | {"meta.version", "provenance.oriented from", "provenance.round"}  # of orient


def test_nothing_but_weights_and_noisy_counts_depends_on_the_images() -> None:
    """With 199 images known and ten candidates for the last, no field names the right one."""
    sites = [small_site(seed=seed) for seed in range(10)]
    texts = set()
    for one in sites:
        made = train_site(one, SPEC, supervised(), PRIVATE, PLAIN, 0, counts="noisy").parcel.manifest
        told = json.loads(made.to_bytes())
        for tensor in told["tensors"].values():
            tensor.pop("sha256")  # of the weights, which the budget covers
        texts.add(json.dumps(told, sort_keys=True))
    assert len(texts) == 1
