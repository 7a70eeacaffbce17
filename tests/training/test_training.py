"""The one training loop: hand numbers, the same bytes again, exact resume, and a second way of computing the same
weights."""

from __future__ import annotations

import hashlib
import math
import platform
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from factories import small_spec, striped_site, train_site
from flyby.data.dataset import DataBundle
from flyby.data.site import Part, Site, part_of
from flyby.data.views import PLAIN, STANDARD, ViewSettings
from flyby.errors import BadInput, Diverged
from flyby.machine import as_a_site, halves_well
from flyby.models import ModelSpec, Network
from flyby.models.cost import cost_of
from flyby.objectives.base import Batch, Terms
from flyby.objectives.supervised import Supervised, SupervisedSettings
from flyby.parcels import parcel
from flyby.rng import generator
from flyby.runs.backbones import own
from flyby.training.checkpoint import load_checkpoint, optimizer_tensors, restore_optimizer, save_checkpoint
from flyby.training.loop import Trained
from flyby.training.optim import make_optimizer, set_learning_rate
from flyby.training.settings import Precision, TrainSettings, batch_size
from flyby.training.steps import WORTH_HALVING, batches, precision_of

CPU = torch.device("cpu")
CNN = ModelSpec(name="cnn-small", classes=10, channels=1, size=(8, 8), widths={"conv1": 8, "conv2": 12, "conv3": 16})
MLP = ModelSpec(name="mlp", classes=10, channels=1, size=(8, 8), widths={"fc1": 32, "fc2": 16})


def make_site(
    digits: DataBundle, train: int = 200, val: int = 0, name: str = "site-0", only: int | None = None
) -> Site:
    rows = np.arange(len(digits.train)) if only is None else np.flatnonzero(digits.train.labels == only)
    mine, held, none = (part_of(digits.train, rows[a:b]) for a, b in ((0, train), (train, train + val), (0, 0)))
    return Site(name, mine, held, none, digits.train.class_names)


def supervised() -> Supervised:
    return Supervised(SupervisedSettings())


def trained(
    site: Site,
    spec: ModelSpec = CNN,
    seed: int = 0,
    objective: Supervised | None = None,
    views: ViewSettings = PLAIN,
    folder: Path | None = None,
    on_epoch: Callable[[Any], None] | None = None,
    **settings: Any,
) -> Trained:
    choice = TrainSettings(**{"epochs": 2, "lr": 0.1, **settings})
    return train_site(site, spec, objective or supervised(), choice, views, seed, folder=folder, on_epoch=on_epoch)


def fingerprint(result: Trained) -> str:
    return hashlib.sha256(parcel.to_bytes(result.parcel)).hexdigest()


def same_weights(left: Trained, right: Trained) -> bool:
    """Whatever their manifests say of how they were trained."""
    a, b = left.parcel.weights, right.parcel.weights
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "samples_per_second"} for row in rows]


# -- batches, by hand


@given(samples=st.integers(1, 200), batch=st.integers(1, 250), seed=st.integers(0, 99))
def test_an_epoch_covers_every_sample_in_batches_of_one_size(samples: int, batch: int, seed: int) -> None:
    found = [rows.tolist() for rows in batches(samples, batch, generator(seed), CPU)]
    size = max(2, min(batch, samples))
    assert len(found) == math.ceil(samples / size)
    assert {len(rows) for rows in found} == {size}
    flat = [i for rows in found for i in rows]
    assert sorted(flat[:samples]) == list(range(samples)), "each sample once before any comes twice"
    extra = flat[samples:]
    assert extra == [flat[i % samples] for i in range(len(extra))], "the last batch is filled from the beginning"
    assert found == [rows.tolist() for rows in batches(samples, batch, generator(seed), CPU)]


def test_one_sample_makes_a_batch_of_two() -> None:
    assert [rows.tolist() for rows in batches(1, 64, generator(0), CPU)] == [[0, 0]]


@pytest.mark.parametrize(
    ("asked", "preferred", "samples", "expected"),
    [
        (None, 64, 256, 64),
        (None, 64, 255, 32),
        (None, 64, 127, 16),
        (None, 64, 1, 16),
        (None, 128, 10_000, 128),
        (None, 8, 3, 8),
        (100, 64, 5, 100),
        (1, 64, 5000, 1),
    ],
)
def test_batch_size(asked: int | None, preferred: int, samples: int, expected: int) -> None:
    assert batch_size(TrainSettings(batch=asked), preferred, samples) == expected


# -- schedules and weight decay, by hand


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"schedule": "constant"}, [0.8, 0.8, 0.8, 0.8]),
        # .4 (1 + cos(pi e / 4)): cos = 1, .70711, 0, -.70711
        ({"schedule": "cosine"}, [0.8, 0.68284, 0.4, 0.11716]),
        ({"schedule": "step", "milestones": (0.5, 0.75), "gamma": 0.1}, [0.8, 0.8, 0.08, 0.008]),
        ({"schedule": "step", "milestones": (0.25,), "gamma": 0.5}, [0.8, 0.4, 0.4, 0.4]),
    ],
)
def test_schedules(settings: dict[str, Any], rates: list[float]) -> None:
    choice = TrainSettings(epochs=4, lr=0.8, **settings)
    optimizer = make_optimizer(nn.Linear(2, 2), supervised(), choice)
    for epoch, rate in enumerate(rates):
        assert set_learning_rate(optimizer, choice, epoch) == pytest.approx(rate, abs=1e-5)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [rate] * len(optimizer.param_groups), abs=1e-5
        )


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_weight_decay_spares_biases_and_batch_norms(kind: Any) -> None:
    model = CNN.build()
    optimizer = make_optimizer(model, supervised(), TrainSettings(optimizer=kind, weight_decay=0.25))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        **{f"backbone.conv{i}.weight": 0.25 for i in (1, 2, 3)},
        **{f"backbone.bn{i}.{part}": 0.0 for i in (1, 2, 3) for part in ("weight", "bias")},
        "head.weight": 0.25,
        "head.bias": 0.0,
    }


def test_an_objectives_own_parameters_are_trained_without_decay() -> None:
    objective = supervised()
    objective.scale = nn.Parameter(torch.ones(3, 3))
    optimizer = make_optimizer(nn.Linear(2, 2), objective, TrainSettings(weight_decay=0.5))
    (mine,) = (g for g in optimizer.param_groups if any(p is objective.scale for p in g["params"]))
    assert mine["weight_decay"] == 0.0


# -- it learns, and the same way each time


@pytest.mark.parametrize("spec", [CNN, MLP])
def test_it_learns_the_digits(digits: DataBundle, spec: ModelSpec) -> None:
    result = trained(make_site(digits, 600), spec, epochs=6)
    assert result.rows[-1]["train_accuracy"] > 0.85
    assert [row["epoch"] for row in result.rows] == [1, 2, 3, 4, 5, 6]
    network, part = result.parcel.network(), part_of(digits.test) if digits.test else None
    assert part is not None
    with torch.no_grad():
        right = (network(spec.prepare(part.images)).argmax(1) == part.labels).float().mean()
    assert right > 0.8


@pytest.mark.parametrize("views", [PLAIN, ViewSettings(crop="pad", pad=1, flip=0.5, jitter=(0.2, 0.2, 0, 0), views=2)])
def test_the_same_seed_gives_the_same_bytes(digits: DataBundle, views: ViewSettings) -> None:
    site = make_site(digits)
    one, two, other = (trained(site, views=views, seed=seed) for seed in (0, 0, 1))
    assert fingerprint(one) == fingerprint(two)
    assert not same_weights(one, other)
    assert timeless(one.rows) == timeless(two.rows)
    assert not same_weights(one, trained(make_site(digits, name="site-1"), views=views))


def test_training_neither_reads_nor_moves_the_global_randomness(digits: DataBundle) -> None:
    torch.manual_seed(1)
    one = trained(make_site(digits, 50), views=STANDARD)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert fingerprint(trained(make_site(digits, 50), views=STANDARD)) == fingerprint(one)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


class Watching(Supervised):
    """Keeps what a test wants to see: the weights at the start, and the gradient norm of every step."""

    def __init__(self) -> None:
        super().__init__(SupervisedSettings())
        self.start: dict[str, Tensor] = {}
        self.norms: list[float] = []
        self.classes: set[int] = set()

    def prepare(self, model: Network, site: Site, seed: int) -> None:
        self.model = [model]  # in a list: not a submodule
        self.start = {name: t.clone() for name, t in model.state_dict().items()}

    def loss(self, model: Network, batch: Batch, progress: Tensor) -> Terms:
        self.classes |= set(batch.labels.tolist())
        return super().loss(model, batch, progress)

    def after_step(self, *_: Any) -> None:
        grads = [p.grad for p in self.model[0].parameters() if p.grad is not None]
        self.norms.append(float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))))


def test_all_sites_start_from_one_point(digits: DataBundle) -> None:
    starts = []
    for name, seed, samples in (("site-0", 0, 40), ("site-7", 0, 90), ("site-0", 1, 40)):
        watching = Watching()
        trained(make_site(digits, samples, name=name), seed=seed, objective=watching, epochs=1)
        starts.append(watching.start)
    same = [all(torch.equal(starts[0][name], start[name]) for name in start) for start in starts]
    assert same == [True, True, False]


def test_clipping_bounds_the_gradient(digits: DataBundle) -> None:
    free, bound = Watching(), Watching()
    trained(make_site(digits, 64), objective=free, epochs=3)
    trained(make_site(digits, 64), objective=bound, epochs=3, clip=0.05)
    assert max(free.norms) > 0.1
    assert max(bound.norms) <= 0.05 + 1e-6
    assert len(bound.norms) == 3 * 4


# -- a second way


def test_a_plain_pytorch_loop_gives_the_same_weights(digits: DataBundle) -> None:
    site = make_site(digits, 150)
    result = trained(site, epochs=4, lr=0.1, batch=32, weight_decay=1e-2, seed=3)

    net = CNN.build(generator(3, "shared", "init"))
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim == 1]
    velocity = {p: torch.zeros_like(p) for p in net.parameters()}
    images = (site.train.images.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
    for epoch in range(4):
        rate = 0.1 * 0.5 * (1 + math.cos(math.pi * epoch / 4))
        for rows in batches(150, 32, generator(3, "site-0", "order", epoch + 1), CPU):
            loss = F.cross_entropy(net(images[rows]), site.train.labels[rows])
            grads = dict(zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True))
            with torch.no_grad():
                for p in (*matrices, *vectors):
                    velocity[p] = 0.9 * velocity[p] + grads[p] + (1e-2 * p if p.ndim > 1 else 0)
                    p.sub_(rate * velocity[p])

    for name, value in net.state_dict().items():
        assert torch.allclose(result.parcel.weights[name].float(), value.float(), atol=1e-5), name


# -- interrupted and resumed


def stop_after(epochs: int) -> Callable[[Any], None]:
    def on_epoch(row: Any) -> None:
        if row["epoch"] == epochs:
            raise KeyboardInterrupt

    return on_epoch


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.0},
        {"optimizer": "adam", "lr": 0.01},
        {"optimizer": "adamw", "lr": 0.01},
        {"optimizer": "sgd", "patience": 50},
    ],
)
def test_a_resumed_run_is_the_run_that_was_never_interrupted(
    digits: DataBundle, tmp_path: Path, settings: dict[str, Any]
) -> None:
    site = make_site(digits, 100, val=50 if "patience" in settings else 0)
    views = ViewSettings(crop="pad", pad=1)
    straight = trained(site, views=views, epochs=6, **settings)
    with pytest.raises(KeyboardInterrupt):
        trained(site, views=views, epochs=6, folder=tmp_path, on_epoch=stop_after(3), **settings)
    seen: list[int] = []
    resumed = trained(
        site, views=views, epochs=6, folder=tmp_path, on_epoch=lambda row: seen.append(row["epoch"]), **settings
    )
    assert seen == [4, 5, 6], "only what was missing is trained"
    assert timeless(resumed.rows) == timeless(straight.rows)
    assert parcel.to_bytes(resumed.parcel) == parcel.to_bytes(straight.parcel)


def test_an_interruption_within_an_epoch_falls_back_to_the_last_whole_one(digits: DataBundle, tmp_path: Path) -> None:
    class Breaking(Supervised):
        steps = 0

        def after_step(self, *_: Any) -> None:
            self.steps += 1
            if self.steps == 10:  # 7 steps an epoch: in the middle of the second
                raise KeyboardInterrupt

    site = make_site(digits, 100)
    with pytest.raises(KeyboardInterrupt):
        trained(site, epochs=3, folder=tmp_path, objective=Breaking(SupervisedSettings()))
    assert load_checkpoint(tmp_path / "site-0.ckpt")[1]["epoch"] == 1
    assert fingerprint(trained(site, epochs=3, folder=tmp_path)) == fingerprint(trained(site, epochs=3))


def test_an_interruption_in_the_first_epoch_leaves_nothing_behind(digits: DataBundle, tmp_path: Path) -> None:
    class Breaking(Supervised):
        def after_step(self, *_: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(make_site(digits, 100), folder=tmp_path, objective=Breaking(SupervisedSettings()))
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_refused(digits: DataBundle, tmp_path: Path) -> None:
    site = make_site(digits, 60)
    with pytest.raises(KeyboardInterrupt):
        trained(site, folder=tmp_path, on_epoch=stop_after(1))
    path = tmp_path / "site-0.ckpt"
    whole = path.read_bytes()
    for bad in (b"", whole[: len(whole) // 2], b"\xff" * 64):
        path.write_bytes(bad)
        with pytest.raises(BadInput, match="delete it to start this site again"):
            trained(site, folder=tmp_path)


def test_a_checkpoint_of_another_training_is_refused(digits: DataBundle, tmp_path: Path) -> None:
    site = make_site(digits, 60)
    with pytest.raises(KeyboardInterrupt):
        trained(site, folder=tmp_path, on_epoch=stop_after(1))
    others: list[tuple[Site, dict[str, Any]]] = [
        (site, {"lr": 0.2}),
        (site, {"views": ViewSettings(flip=0.5)}),
        (replace(site, origin="another split"), {}),
        (replace(site, class_names=tuple(reversed(site.class_names))), {}),
    ]
    for other, words in others:
        with pytest.raises(BadInput, match="a training with other settings or images; delete it"):
            trained(other, folder=tmp_path, **words)
    assert fingerprint(trained(site, folder=tmp_path)) == fingerprint(trained(site))


# -- patience


def test_patience_stops_and_keeps_the_best_weights(digits: DataBundle, tmp_path: Path) -> None:
    site = make_site(digits, 40, val=60)
    settings: dict[str, Any] = {"epochs": 30, "patience": 3, "optimizer": "adamw", "lr": 0.05, "schedule": "constant"}
    result = trained(site, MLP, folder=tmp_path, snapshots=1, **settings)
    losses = [row["val_loss"] for row in result.rows]
    best = int(np.argmin(losses)) + 1
    assert len(losses) == best + 3 < 30
    assert result.parcel.manifest.meta["best_epoch"] == best
    assert result.parcel.manifest.meta["epochs"] == best + 3
    kept = parcel.read(tmp_path / "snapshots" / f"{best:05d}" / "site-0.parcel").weights
    last = parcel.read(tmp_path / "snapshots" / f"{best + 3:05d}" / "site-0.parcel").weights
    assert all(torch.equal(result.parcel.weights[name], kept[name]) for name in kept)
    assert not all(torch.equal(result.parcel.weights[name], last[name]) for name in last)
    # The second way: the loss of these weights, computed afresh.
    with torch.no_grad():
        loss = F.cross_entropy(result.parcel.network()(MLP.prepare(site.val.images)), site.val.labels)
    assert float(loss) == pytest.approx(min(losses), abs=1e-5)


@pytest.mark.parametrize("at", [1, 2, 4, 6])
def test_patience_survives_an_interruption(digits: DataBundle, tmp_path: Path, at: int) -> None:
    site = make_site(digits, 40, val=60)
    settings: dict[str, Any] = {"epochs": 30, "patience": 3, "optimizer": "adamw", "lr": 0.05, "schedule": "constant"}
    straight = trained(site, MLP, **settings)
    assert len(straight.rows) >= 6
    with pytest.raises(KeyboardInterrupt):
        trained(site, MLP, folder=tmp_path, on_epoch=stop_after(at), **settings)
    resumed = trained(site, MLP, folder=tmp_path, **settings)
    assert fingerprint(resumed) == fingerprint(straight)
    assert timeless(resumed.rows) == timeless(straight.rows)


def test_patience_needs_validation_data(digits: DataBundle) -> None:
    with pytest.raises(BadInput, match=r"site-0 has none.*split\.val"):
        trained(make_site(digits, 40), patience=2)


def test_validation_rows_without_patience_choose_nothing(digits: DataBundle) -> None:
    watched, blind = trained(make_site(digits, 60, val=30)), trained(make_site(digits, 60))
    assert {"val_loss", "val_accuracy"} <= watched.rows[-1].keys()
    assert all(torch.equal(watched.parcel.weights[n], t) for n, t in blind.parcel.weights.items())


# -- divergence


def test_divergence_is_said_and_the_last_good_state_kept(digits: DataBundle, tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"site-0 diverged in epoch \d+: .*loss.*Lower train\.lr") as caught:
        trained(make_site(digits, 30), MLP, folder=tmp_path, epochs=50, lr=1e6, batch=30, schedule="constant")
    assert caught.value.exit_code == 3
    tensors, state = load_checkpoint(tmp_path / "site-0.ckpt")
    assert state["epoch"] >= 1
    assert f"after epoch {state['epoch']} is kept" in str(caught.value)
    assert len(state["rows"]) == state["epoch"]
    assert all(bool(t.isfinite().all()) for t in tensors.values())


class Steep(Supervised):
    """A loss a thousand times as steep: with a learning rate of 3e38 the first step leaves the finite numbers, its loss
    does not."""

    def loss(self, model: Network, batch: Batch, progress: Tensor) -> Terms:
        terms = super().loss(model, batch, progress)
        return Terms(1000 * terms.total, terms.parts)


@pytest.mark.parametrize(("epochs", "val"), [(1, 0), (3, 0), (1, 10)])
def test_weights_that_leave_the_finite_numbers_in_the_last_step_of_an_epoch_are_noticed(
    digits: DataBundle, tmp_path: Path, epochs: int, val: int
) -> None:
    site = make_site(digits, 30, val)
    with pytest.raises(Diverged, match="in epoch 1"):
        trained(
            site,
            MLP,
            objective=Steep(SupervisedSettings()),
            folder=tmp_path,
            epochs=epochs,
            lr=3e38,
            batch=30,
            momentum=0.0,
        )
    assert list(tmp_path.glob("*.ckpt")) == [], "no good state to keep"


# -- odd sites


@pytest.mark.parametrize(("samples", "only"), [(1, None), (2, None), (3, None), (20, 7), (63, None), (65, None)])
def test_every_site_trains_however_small_or_lopsided(digits: DataBundle, samples: int, only: int | None) -> None:
    watching = Watching()
    site = make_site(digits, samples, only=only)
    result = trained(site, objective=watching, batch=64)
    assert all(bool(t.isfinite().all()) for t in result.parcel.weights.values())
    assert watching.classes == set(site.train.labels.tolist())
    assert result.parcel.manifest.samples == samples
    assert list(result.parcel.manifest.counts or ()) == site.counts
    assert not all(torch.equal(watching.start[n], t) for n, t in result.parcel.weights.items()), "it did train"


def test_a_site_without_images_or_of_another_shape_is_refused(digits: DataBundle) -> None:
    with pytest.raises(BadInput, match="site-0 has no training images"):
        trained(make_site(digits, 0))
    with pytest.raises(BadInput, match="does not fit site-0"):
        trained(make_site(digits, 10), CNN.replace(classes=5))
    with pytest.raises(BadInput, match="does not fit site-0"):
        trained(make_site(digits, 10), CNN.replace(channels=3))


# -- the rest


def test_bf16_runs_on_a_cpu(digits: DataBundle) -> None:
    site = make_site(digits, 200)
    half, full = trained(site, precision="bf16", epochs=4), trained(site, precision="fp32", epochs=4)
    assert half.rows[-1]["loss"] < half.rows[0]["loss"]
    assert not same_weights(half, full)
    assert same_weights(trained(site, precision="auto", epochs=4), full), "digits are small work"
    assert all(t.dtype == torch.float32 for n, t in half.parcel.weights.items() if "num_batches" not in n)


LARGE = ModelSpec(name="cnn-small", classes=10, channels=3, size=(32, 32))


@pytest.mark.parametrize(
    ("able", "spec", "asked", "found"),
    [
        (True, LARGE, "auto", "bf16"),
        (False, LARGE, "auto", "fp32"),
        (True, CNN, "auto", "fp32"),  # 8x8 pixels: little to gain
        (True, LARGE, "fp32", "fp32"),
        (False, LARGE, "bf16", "bf16"),
    ],
)
def test_auto_is_bf16_where_a_cpu_has_it_and_the_network_is_large(
    able: bool, spec: ModelSpec, asked: Precision, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flyby.training.steps.halves_well", lambda: able)
    assert precision_of(asked, spec, CPU) == found


def test_a_frozen_backbone_keeps_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flyby.training.steps.halves_well", lambda: True)
    named = own(LARGE, LARGE.build(torch.Generator()).state_dict())
    spec = LARGE.replace(name=named.name, backbone=named.backbone)
    assert cost_of(spec).multiply_adds >= WORTH_HALVING
    assert precision_of("auto", spec, CPU) == "fp32"


def test_a_gpu_decides_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert precision_of("auto", CNN, torch.device("cuda")) == "auto"


def test_a_cpu_told_to_do_as_an_older_one_does_not_halve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this CPU can do: both variables take its instructions away."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True, raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert halves_well()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not halves_well()
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")  # as ATEN_CPU_CAPABILITY=avx2 says
    assert not halves_well()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory, or not, in its own way")
def test_a_site_keeps_the_memory_of_its_last_step() -> None:
    def new_pages() -> int:
        """That the system had to find and clear for ten blocks of 40 MB, one after the other."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            torch.ones(10 << 20)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with as_a_site("cpu"):
        new_pages()
        kept = new_pages()
    with as_a_site("cuda"):
        given_back = new_pages()
    assert kept * 10 < given_back


def test_a_large_network_learns_as_well_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``auto`` does on a CPU that halves well, here on any: losses of four epochs stay within 3 %, and held-out
    images are judged in the arithmetic of training."""
    site, spec = striped_site("site-0", size=16, count=120), small_spec(size=16, width=1.0)
    assert cost_of(spec).multiply_adds >= WORTH_HALVING
    full = trained(site, spec, epochs=4, precision="fp32")
    monkeypatch.setattr("flyby.training.steps.halves_well", lambda: True)
    half = trained(site, spec, epochs=4)
    assert not same_weights(half, full)
    assert same_weights(half, trained(site, spec, epochs=4, precision="bf16"))
    for one, other in zip(half.rows, full.rows, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.03)
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=0.03)


def test_snapshots_are_written_every_nth_epoch(digits: DataBundle, tmp_path: Path) -> None:
    result = trained(make_site(digits, 40), epochs=5, snapshots=2, folder=tmp_path)
    names = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "snapshots").rglob("*.parcel"))
    assert names == ["snapshots/00002/site-0.parcel", "snapshots/00004/site-0.parcel"]
    snapshot = parcel.read(tmp_path / names[1])
    assert snapshot.manifest.meta["epochs"] == 4
    assert snapshot.manifest.spec == CNN
    # Writing them changes nothing: the same training without snapshots sends the same weights.
    plain = trained(make_site(digits, 40), epochs=5)
    assert all(torch.equal(value, result.parcel.weights[name]) for name, value in plain.parcel.weights.items())


def test_the_parcel_says_how_it_was_made(digits: DataBundle) -> None:
    manifest = trained(make_site(digits, 40), epochs=2, lr=0.1).parcel.manifest
    assert manifest.sender == "site-0"
    assert manifest.method == "supervised"
    assert manifest.provenance["seed"] == 0
    train = manifest.provenance["train"]
    assert isinstance(train, dict)
    assert (train["epochs"], train["lr"], train["batch"]) == (2, 0.1, 16)
    assert manifest.meta["epochs"] == manifest.meta["best_epoch"] == 2


def test_label_smoothing_by_hand() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor([[2.0, 0.0], [0.0, 1.0]])

    batch = Batch(torch.zeros(2, 1, 1, 1), torch.tensor([0, 0]), 1)
    plain = math.log(1 + math.exp(-2)), math.log(1 + math.exp(1))  # -log softmax of the right class
    wrong = math.log(1 + math.exp(2)), math.log(1 + math.exp(-1))
    for smoothing in (0.0, 0.2):
        terms = Supervised(SupervisedSettings(label_smoothing=smoothing)).loss(Fixed(), batch, torch.ones(()))  # type: ignore[arg-type]
        by_hand = sum((1 - smoothing / 2) * p + smoothing / 2 * w for p, w in zip(plain, wrong, strict=True)) / 2
        assert float(terms.total) == pytest.approx(by_hand, abs=1e-6)
        assert float(terms.parts["train_accuracy"]) == 0.5


def test_an_optimizers_state_survives_its_file(tmp_path: Path) -> None:
    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for i in range(steps):
            model(torch.full((2, 3, 4, 4), float(i + 1))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def fresh(kind: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Conv2d(3, 5, 3)
        for i, p in enumerate(model.parameters()):
            nn.init.uniform_(p, -0.1, 0.1, generator=generator(i))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, make_optimizer(model, supervised(), TrainSettings(optimizer=kind, lr=0.001))

    for kind in ("sgd", "adam", "adamw"):
        model, optimizer = fresh(kind)
        stepped(model, optimizer, 2)
        save_checkpoint(
            tmp_path / "a.ckpt",
            {**optimizer_tensors(optimizer), **{f"m/{n}": t for n, t in model.state_dict().items()}},
            {},
        )
        tensors, _ = load_checkpoint(tmp_path / "a.ckpt")
        again, restored = fresh(kind)
        again.load_state_dict({n.removeprefix("m/"): t for n, t in tensors.items() if n.startswith("m/")})
        restore_optimizer(restored, {n: t for n, t in tensors.items() if not n.startswith("m/")})
        stepped(model, optimizer, 2)
        stepped(again, restored, 2)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)), kind


def test_parts_know_their_length(digits: DataBundle) -> None:
    part = Part(torch.zeros((3, 8, 8, 1), dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
    assert len(part) == len(part.to("cpu")) == 3
    assert make_site(digits, 5).counts == np.bincount(digits.train.labels[:5], minlength=10).tolist()
