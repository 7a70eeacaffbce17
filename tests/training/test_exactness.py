"""The fast paths give the numbers of plainly written ones: training, ensembles read one network at a time, workers from
the fork server."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import forkserver as server
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from factories import WAIT, jobs_of, make_stripes, train_site
from flyby.data.dataset import DataBundle
from flyby.data.site import Part, Site, part_of
from flyby.data.views import PLAIN, SALT, ViewSettings, augment
from flyby.engines import forkserver
from flyby.engines.processes import run_processes, workers_peak_mb
from flyby.fusion import FUSIONS, Inbox, evaluation, load_predictor, predictor, save_predictor
from flyby.fusion.evaluation import scores_of
from flyby.models import ModelSpec, Network
from flyby.models.shelf import Shelf
from flyby.objectives import OBJECTIVES
from flyby.parcels import inbox, parcel
from flyby.rng import generator
from flyby.training.settings import TrainSettings
from flyby.training.steps import batches

CURVE = 1e-5  # how far an epoch's mean loss may be from the reference's, as a share of it (1e-7 was found)
SEED, EPOCHS, BATCH, TAU = 3, 4, 32, 0.07


def site_of_digits(digits: DataBundle, samples: int = 160) -> Site:
    part = part_of(digits.train, range(samples))
    return Site(
        "site-0",
        part,
        Part(part.images[:0], part.labels[:0]),
        Part(part.images[:0], part.labels[:0]),
        digits.train.class_names,
        False,
    )


def plain_contrast(features: Tensor, labels: Tensor) -> Tensor:
    """Supervised contrast by its definition, anchor after anchor."""
    total = torch.zeros(())
    for i in range(len(labels)):
        others = [a for a in range(len(labels)) if a != i]
        positives = [p for p in others if labels[p] == labels[i]]
        if positives:
            scores = features[others] @ features[i] / TAU
            total = (
                total - torch.stack([features[p] @ features[i] / TAU - scores.logsumexp(0) for p in positives]).mean()
            )
    return total / len(labels)


def salt_loss(model: Network, x: Tensor, labels: Tensor) -> Tensor:
    features = model.features(x)
    features = features / features.norm(dim=1, keepdim=True)
    prototypes: Tensor = model.head.prototypes  # type: ignore[assignment]
    own = F.cross_entropy(prototypes @ prototypes.T, torch.arange(len(prototypes)))
    return 2 * F.cross_entropy(features @ prototypes.T, labels) + plain_contrast(features, labels) + own


def reference(
    site: Site, spec: ModelSpec, views: ViewSettings, settings: TrainSettings, salt: bool
) -> tuple[list[float], Network]:
    """The loop one would write first: float32, ordinary memory layout, torch.optim.SGD without fusing, the loss as its
    formula reads."""
    model = spec.build(generator(SEED, "shared", "init")).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, foreach=False, fused=False)
    mean, std = spec.statistics()
    curve = []
    for epoch in range(1, EPOCHS + 1):
        rng = generator(SEED, site.id, "views", epoch)
        losses = []
        for rows in batches(len(site.train), BATCH, generator(SEED, site.id, "order", epoch), torch.device("cpu")):
            x = augment(site.train.images[rows], views, mean, std, rng).contiguous(
                memory_format=torch.contiguous_format
            )
            labels = site.train.labels[rows].repeat(views.views)
            loss = salt_loss(model, x, labels) if salt else F.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if settings.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            losses.append(float(loss.detach()))
        curve.append(sum(losses) / len(losses))
    return curve, model


@pytest.mark.parametrize("name", ["supervised", "salt"])
def test_the_fast_loop_follows_a_plain_one(digits: DataBundle, name: str) -> None:
    site = site_of_digits(digits)
    kind = OBJECTIVES[name]
    objective = kind(kind.settings_type())
    spec = kind.adapt_spec(
        ModelSpec(name="cnn-small", classes=10, channels=1, size=(8, 8), width=0.25), objective.settings
    )
    settings = TrainSettings(
        epochs=EPOCHS, batch=BATCH, schedule="constant", lr=0.02, clip=1.0 if name == "salt" else None
    )
    views = SALT.model_copy(update={"flip": 0.0}) if name == "salt" else PLAIN
    curve, model = reference(site, spec, views, settings, salt=name == "salt")
    trained = train_site(site, spec, objective, settings, views, SEED)
    losses = [row["loss"] for row in trained.rows]
    assert losses == pytest.approx(curve, rel=CURVE)
    assert curve[-1] < 0.9 * curve[0], "both must learn, or nothing was compared"
    for key, weight in model.named_parameters():
        assert torch.allclose(trained.parcel.weights[key], weight, rtol=0, atol=1e-5), key


def parcels_in(folder: Path, count: int = 5) -> list[Path]:
    spec = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8), width=0.25, head="prototype")
    paths = []
    for k in range(count):
        rng = generator("exactness", k)
        counts = [5 + k, 5, 0 if k else 3]
        made = parcel.make(
            sender=f"site-{k}",
            method="salt",
            spec=spec,
            class_names=("a", "b", "c"),
            samples=sum(counts),
            counts=counts,
            counts_kind="exact",
            weights=dict(spec.build(rng).state_dict()),
            extras={"calibration": torch.rand(3, 3, generator=rng)},
        )
        paths.append(folder / f"site-{k}.parcel")
        parcel.write(made, paths[-1])
    return paths


@pytest.mark.parametrize("rule", ["ensemble", "experts", "experts-softmax", "experts-gate", "experts-calibrated"])
def test_members_that_speak_one_at_a_time_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    paths = parcels_in(tmp_path)
    images = torch.randint(0, 256, (70, 8, 8, 1), dtype=torch.uint8, generator=generator("images"))
    together = FUSIONS[rule]().fuse(Inbox(paths))
    assert together.shelf is None
    monkeypatch.setattr(evaluation, "BATCH", 16)
    monkeypatch.setattr(evaluation, "LOOKS", evaluation.Looks(most=0))  # every network looks again
    expected = scores_of(together, images)
    save_predictor(together, tmp_path / "together", export=False)

    monkeypatch.setattr(inbox, "IN_MEMORY", 0)
    monkeypatch.setattr(predictor, "IN_MEMORY", 0)
    streamed = FUSIONS[rule]().fuse(Inbox(paths))
    assert isinstance(streamed.shelf, Shelf)
    assert len(streamed.networks) == 0, "nothing is held"
    assert torch.equal(scores_of(streamed, images), expected)
    monkeypatch.setattr(evaluation, "VOICES", 4 * 5 * 3 * 32)  # pieces of 32 images
    assert torch.equal(scores_of(streamed, images), expected)
    assert torch.equal(streamed(images[:16]), expected[:16])

    save_predictor(streamed, tmp_path / "streamed")
    assert not (tmp_path / "streamed" / "model.pt2").exists()
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("together", "streamed"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    for name in ("together", "streamed"):
        again = load_predictor(tmp_path / name)
        assert isinstance(again.shelf, Shelf)
        assert torch.equal(scores_of(again, images), expected)


def test_a_shelf_is_read_one_network_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "IN_MEMORY", 0)
    made = FUSIONS["experts"]().fuse(Inbox(parcels_in(tmp_path, 3)))
    assert made.shelf is not None
    reads: list[int] = []
    read = made.shelf.read
    made.shelf.read = lambda place: (reads.append(place), read(place))[1]  # type: ignore[func-returns-value]
    monkeypatch.setattr(evaluation, "BATCH", 16)
    scores_of(made, torch.zeros(50, 8, 8, 1, dtype=torch.uint8))
    assert reads == [0, 1, 2], "once each, however many batches"


def test_the_fork_server_has_one_thread_and_all_imports(tmp_path: Path) -> None:
    before = dict(os.environ)
    jobs = jobs_of(make_stripes(tmp_path / "stripes.npz", count=60, test=30), tmp_path, epochs=1)
    run_processes(jobs[:2], lambda row: None)
    assert dict(os.environ) == before
    pid = server._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
    assert "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    workers = min(2, os.cpu_count() or 1)
    assert 40 * workers < workers_peak_mb() < 2000 * workers
    run_processes([], lambda row: None)
    assert workers_peak_mb() == 0, "a run that trained nothing had no workers"


def test_the_server_is_started_before_torch_is_imported() -> None:
    """And whoever reads the output of a command that fails at once does not wait for the server's imports: it goes with
    its parent."""
    code = "import sys; from flyby.engines import forkserver as f; f.start(); print('torch' in sys.modules); f.stop()"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT
        ).stdout.strip()
        == "False"
    )


def test_when_the_server_is_worth_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert forkserver.worth_starting(None, "auto")
    assert forkserver.worth_starting("processes", "cpu")
    assert not forkserver.worth_starting("inline", "cpu")
    assert not forkserver.worth_starting("processes", "cuda")
    monkeypatch.setattr(os.path, "exists", lambda path: True)  # there is a GPU
    assert not forkserver.worth_starting(None, "auto")
    assert forkserver.worth_starting(None, "cpu")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert not forkserver.worth_starting(None, "cpu")


def test_a_gpu_s_workers_are_spawned() -> None:
    assert forkserver.context_for("cuda").get_start_method() == "spawn"
    assert forkserver.context_for("cpu").get_start_method() == ("forkserver" if sys.platform == "linux" else "spawn")
