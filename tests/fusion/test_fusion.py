"""Fusion: averages and ensembles by hand, one parcel in memory at a time, and predictors that survive their folder."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flyby.data.dataset import Dataset
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, Inbox, evaluation, load_predictor, save_predictor
from flyby.fusion.base import Server, weights_of
from flyby.fusion.predictor import PREDICTORS, Ensemble, Predictor, Single
from flyby.fusion.weights.average import AverageSettings, EnsembleFusion, EnsembleSettings, FedAvg
from flyby.models import ModelSpec
from flyby.names import natural
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel
from flyby.rng import generator

CNN = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8), widths={"conv1": 4, "conv2": 5, "conv3": 6})
MLP = ModelSpec(name="mlp", classes=3, channels=1, size=(8, 8), widths={"fc1": 6, "fc2": 4})
NAMES = ("ant", "bee", "cat")


def made(sender: str = "site-0", spec: ModelSpec = CNN, samples: int = 30, seed: int = 0, **changes: Any) -> Parcel:
    weights = dict(spec.build(generator(seed, "weights")).state_dict())
    for i, (name, value) in enumerate(weights.items()):  # running statistics as training leaves them
        if "running" in name:
            weights[name] = torch.empty_like(value).uniform_(0.5, 1.5, generator=generator(seed, i))
    counts = None if changes.get("counts", ()) is None else [samples - 2 * (samples // 3), samples // 3, samples // 3]
    settings: dict[str, Any] = {
        "method": "supervised",
        "class_names": NAMES,
        "weights": weights,
        "samples": samples,
        "counts": counts,
    }
    return parcel.make(sender=sender, spec=spec, **(settings | changes))


def constant(sender: str, samples: int, value: float, batches: int) -> Parcel:
    weights = {
        name: torch.full(shape, batches if name.endswith("num_batches_tracked") else value, dtype=dtype)
        for name, (shape, dtype) in CNN.shapes().items()
    }
    return made(sender, samples=samples, weights=weights)


def speaking(sender: str, probabilities: Sequence[float], samples: int = 30) -> Parcel:
    """A network that answers every image with these probabilities: all weights 0, the head's bias their logarithm."""
    weights = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in MLP.shapes().items()}
    weights["head.bias"] = torch.tensor(probabilities).log()
    return made(sender, MLP, samples, weights=weights)


def images(count: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, 8, 8, 1), generator=generator(seed, "images"), dtype=torch.uint8)


def unlabelled(count: int) -> Dataset:
    return Dataset(images(count).numpy(), np.zeros(count, dtype=np.int64), NAMES, "proxy")


def state_bytes(predictor: Predictor) -> bytes:
    return b"".join(t.contiguous().numpy().tobytes() for t in predictor.state_dict().values())


def scores(predictor: Predictor, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = predictor(x)
    return out


# -- FedAvg


@pytest.mark.parametrize(("weights", "mean"), [("size", (30 * 1 + 10 * 5) / 40), ("uniform", 3.0)])
def test_fedavg_by_hand(weights: Any, mean: float) -> None:
    inbox = Inbox([constant("a", 30, 1.0, batches=7), constant("b", 10, 5.0, batches=9)])
    fused = FedAvg(AverageSettings(weights=weights)).fuse(inbox).networks[0].state_dict()
    assert fused.keys() == CNN.shapes().keys()
    for name, value in fused.items():
        assert value.dtype == CNN.shapes()[name][1]
        expected = 9 if name.endswith("num_batches_tracked") else mean
        assert torch.equal(value, torch.full_like(value, expected)), name
    assert "backbone.bn2.running_var" in fused, "the BatchNorm buffers are averaged too"


def test_fedavg_is_the_weighted_mean_of_every_tensor() -> None:
    parcels = [made(f"site-{k}", samples=n, seed=k) for k, n in enumerate((30, 60, 9))]
    fused = FedAvg().fuse(Inbox(parcels)).networks[0].state_dict()
    for name, value in fused.items():
        if value.is_floating_point():
            by_hand = sum(p.weights[name].double() * p.manifest.samples / 99 for p in parcels)
            assert torch.allclose(value.double(), torch.as_tensor(by_hand), atol=1e-6)


def test_fedavg_of_one_is_that_one() -> None:
    only = made()
    assert torch.equal(scores(FedAvg().fuse(Inbox([only])), images()), only.network()(CNN.prepare(images())).detach())


def test_fusing_changes_no_parcel() -> None:
    parcels = [made("a"), made("b", seed=1)]
    before = [parcel.to_bytes(p) for p in parcels]
    for kind in ("fedavg", "ensemble"):
        FUSIONS[kind]().fuse(Inbox(parcels))
    assert [parcel.to_bytes(p) for p in parcels] == before, "to_bytes compares the tensors with their hashes"


@pytest.mark.parametrize("kind", ["fedavg", "ensemble"])
def test_the_order_of_arrival_changes_no_byte(tmp_path: Path, kind: str) -> None:
    senders = ["site-10", "site-2", "site-02", "site-1", "zoo", "site-x"]
    paths = []
    for k, sender in enumerate(senders):
        parcel.write(made(sender, samples=9 + 7 * k, seed=k), tmp_path / f"{k}.parcel")
        paths.append(tmp_path / f"{k}.parcel")
    orders = [paths, paths[::-1], paths[2:] + paths[:2], [paths[i] for i in (3, 1, 2, 0, 5, 4)]]
    assert len({state_bytes(FUSIONS[kind]().fuse(Inbox(order))) for order in orders}) == 1
    assert [m.sender for m in Inbox(paths).manifests] == ["site-1", "site-02", "site-2", "site-10", "site-x", "zoo"]
    assert state_bytes(FUSIONS[kind]().fuse(Inbox([parcel.read(p) for p in paths]))) == state_bytes(
        FUSIONS[kind]().fuse(Inbox(paths))
    )


@given(st.lists(st.text("0123456789abc²٣-", min_size=1, max_size=6), unique=True, max_size=6))
def test_natural_order_is_one_order(names: list[str]) -> None:
    assert (
        len({tuple(sorted(order, key=natural)) for order in itertools.islice(itertools.permutations(names), 24)}) == 1
    )


def test_natural_order_counts() -> None:
    assert sorted(["s10", "s9", "s1b", "s1a", "10", "2"], key=natural) == ["2", "10", "s1a", "s1b", "s9", "s10"]


FUSE_AND_MEASURE = """
import sys
from pathlib import Path
import torch
from flyby.parcels import parcel
from flyby.fusion import FUSIONS, Inbox

def peak():
    # Not resource.getrusage: its maximum outlives exec, so it would start at the parent's.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:")) * 1024

torch.set_num_threads(1)
tiny, paths = (sorted(Path(folder).iterdir()) for folder in sys.argv[1:])
FUSIONS["fedavg"]().fuse(Inbox(tiny))  # what is loaded on first use is not counted
one = parcel.read(paths[0])
before = peak()
predictor = FUSIONS["fedavg"]().fuse(Inbox(paths))
print((peak() - before) / sum(t.nbytes for t in one.weights.values()))
assert all(torch.allclose(t, one.weights[n], atol=1e-5) for n, t in predictor.networks[0].state_dict().items())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_two_hundred_parcels_take_the_memory_of_a_few() -> None:
    def fill(folder: str, count: int, **widths: int) -> None:
        spec = ModelSpec(name="mlp", classes=3, channels=3, size=(16, 16), widths=widths)
        first = made(spec=spec)
        for k in range(count):
            manifest = first.manifest.model_copy(update={"sender": f"site-{k}"})
            Path(folder, f"{k}.parcel").write_bytes(parcel.to_bytes(dataclasses.replace(first, manifest=manifest)))

    with (
        tempfile.TemporaryDirectory() as tiny,
        tempfile.TemporaryDirectory() as many,
    ):  # 800 MB: not left among pytest's folders
        fill(tiny, 3, fc1=2, fc2=2)
        fill(many, 200, fc1=1024, fc2=204)  # a million parameters
        env = {
            **os.environ,
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }  # what is freed is given back at once, so that the peak is what was held
        done = subprocess.run(
            [sys.executable, "-c", FUSE_AND_MEASURE, tiny, many], env=env, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 4, "peak memory beyond one loaded parcel, in models"


# -- what may be fused


def refused(parcels: list[Parcel], rule: str = "fedavg") -> str:
    with pytest.raises(BadInput) as caught:
        FUSIONS[rule]().fuse(Inbox(parcels))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_parcels_that_do_not_belong_together_are_refused() -> None:
    assert "fedavg needs one architecture, but b sent mlp and a cnn-small" in refused([made("a"), made("b", MLP)])
    wider = CNN.replace(widths={**CNN.widths, "conv1": 9})
    assert "other widths" in refused([made("a"), made("b", wider)])
    assert "two parcels come from 'a'" in refused([made("a"), made("a", seed=1)])
    for rule in FUSIONS:
        larger = CNN.replace(size=(10, 10))
        assert "they cannot be fused" in refused([made("a"), made("b", larger)], rule)
    with pytest.raises(BadInput, match="no parcels to fuse"):
        Inbox([])


def test_counts_that_were_not_shared_are_asked_for_by_name() -> None:
    assert Inbox([made("a", samples=31), made("b", samples=9)]).counts.tolist() == [[11, 10, 10], [3, 3, 3]]
    with pytest.raises(BadInput, match="b did not share its class counts"):
        _ = Inbox([made("a"), made("b", counts=None)]).counts


def test_client_weights() -> None:
    inbox = Inbox([made("a", samples=30), made("b", samples=10)])
    assert weights_of(inbox, "size") == [0.75, 0.25]
    assert weights_of(inbox, "uniform") == [0.5, 0.5]
    nothing = Inbox([made("a", samples=0)])
    assert weights_of(nothing, "uniform") == [1.0]
    with pytest.raises(BadInput, match="add up to nothing"):
        weights_of(nothing, "size")


# -- ensembles


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.6, 0.25, 0.15]),
        ({"weights": "size"}, [0.7, 0.175, 0.125]),  # 3/4 and 1/4
        ({"mean": "logits"}, [math.sqrt(0.8 * 0.4), math.sqrt(0.1 * 0.4), math.sqrt(0.1 * 0.2)]),
        ({"mean": "logits", "weights": "size"}, [0.8**0.75 * 0.4**0.25, 0.1**0.75 * 0.4**0.25, 0.1**0.75 * 0.2**0.25]),
    ],
)
def test_ensembles_by_hand(settings: dict[str, Any], expected: list[float]) -> None:
    inbox = Inbox([speaking("a", [0.8, 0.1, 0.1], samples=30), speaking("b", [0.4, 0.4, 0.2], samples=10)])
    found = scores(EnsembleFusion(EnsembleSettings(**settings)).fuse(inbox), images(4))
    assert found.shape == (4, 3)
    assert torch.allclose(found.exp(), torch.tensor(expected).expand(4, 3), atol=1e-6)


def test_an_ensemble_mixes_architectures_and_normalisations() -> None:
    other = MLP.replace(mean=(0.1,), std=(0.7,))
    parcels = [made("a"), made("b", MLP, seed=1), made("c", other, seed=2)]
    found = scores(EnsembleFusion().fuse(Inbox(parcels)), images())
    with torch.no_grad():
        by_hand = torch.stack([p.network()(p.manifest.spec.prepare(images())).softmax(1) for p in parcels]).mean(0)
    assert torch.allclose(found.exp(), by_hand, atol=1e-6)


def test_a_certain_ensemble_stays_finite() -> None:
    certain = speaking("a", [1.0, 1e-30, 1e-30])
    certain.weights["head.bias"].copy_(torch.tensor([1000.0, -1000.0, -1000.0]))
    assert bool(scores(EnsembleFusion().fuse(Inbox([certain])), images()).isfinite().all())
    with pytest.raises(BadInput, match=r"unknown ensemble mean 'logit'; did you mean 'logits'"):
        Ensemble([MLP], NAMES, mean="logit")


@pytest.mark.parametrize("kind", ["fedavg", "ensemble"])
def test_a_fused_predictor_predicts_at_once(kind: str) -> None:
    predictor = FUSIONS[kind]().fuse(Inbox([made("a"), made("b", seed=1)]))
    before = state_bytes(predictor)
    together, alone = predictor(images()), torch.cat([predictor(x[None]) for x in images()])
    assert torch.allclose(together, alone, atol=1e-5), "no statistics of the batch at hand"
    assert state_bytes(predictor) == before


# -- BatchNorm recalibration


@pytest.mark.parametrize(("count", "sizes"), [(40, [40]), (257, [129, 128])])
def test_recalibrated_statistics_are_those_of_the_proxy(count: int, sizes: list[int]) -> None:
    parcels = [made("a"), made("b", seed=1)]
    proxy = unlabelled(count)
    plain = FedAvg().fuse(Inbox(parcels)).networks[0].state_dict()
    fused = FedAvg(AverageSettings(recalibrate=True)).fuse(Inbox(parcels), Server(proxy=proxy)).networks[0]
    found = fused.state_dict()
    expected: dict[str, Tensor] = {}
    for x in torch.split(CNN.prepare(torch.from_numpy(proxy.images)), sizes):
        for i in (1, 2, 3):
            x = F.conv2d(x, plain[f"backbone.conv{i}.weight"], padding=1)
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=True)
            for key, value in ((f"backbone.bn{i}.running_mean", mean), (f"backbone.bn{i}.running_var", var)):
                expected[key] = expected.get(key, torch.zeros(())) + value / len(sizes)
            biased = x.var((0, 2, 3), unbiased=False)
            x = (x - mean.view(1, -1, 1, 1)) / (biased.view(1, -1, 1, 1) + 1e-5).sqrt()
            x = (
                x * plain[f"backbone.bn{i}.weight"].view(1, -1, 1, 1) + plain[f"backbone.bn{i}.bias"].view(1, -1, 1, 1)
            ).relu()
            x = F.max_pool2d(x, 2) if i == 2 else x
    assert len(expected) == 6
    for name, value in found.items():
        if name in expected:
            assert torch.allclose(value, expected[name], atol=1e-5), name
            assert not torch.allclose(value, plain[name], atol=1e-3), "they did change"
        elif not name.endswith("num_batches_tracked"):
            assert torch.equal(value, plain[name]), "nothing but the statistics changes"
    assert not fused.training
    assert {m.momentum for m in fused.modules() if isinstance(m, torch.nn.BatchNorm2d)} == {0.1}


@pytest.mark.parametrize("proxy", [None, unlabelled(0)])
def test_recalibration_needs_images(proxy: Dataset | None) -> None:
    with pytest.raises(BadInput, match="needs unlabelled images; give them with --proxy"):
        FedAvg(AverageSettings(recalibrate=True)).fuse(Inbox([made("a")]), Server(proxy=proxy))


def test_recalibration_refuses_images_of_another_shape() -> None:
    proxy = Dataset(np.zeros((4, 9, 8, 1), dtype=np.uint8), np.zeros(4, dtype=np.int64), NAMES, "p")
    with pytest.raises(BadInput, match="9x8"):
        FedAvg(AverageSettings(recalibrate=True)).fuse(Inbox([made("a")]), Server(proxy=proxy))


# -- the deployable folder

SAVED: dict[str, Callable[[], Predictor]] = {
    "fedavg": lambda: FedAvg().fuse(Inbox([made("a"), made("b", seed=1)])),
    "ensemble": (
        lambda: EnsembleFusion(EnsembleSettings(weights="size")).fuse(
            Inbox([made("a"), made("b", MLP, samples=9, seed=1)])
        )
    ),
    "logits": lambda: EnsembleFusion(EnsembleSettings(mean="logits")).fuse(Inbox([made("a"), made("b", MLP, seed=1)])),
}


@pytest.mark.parametrize("kind", sorted(SAVED))
def test_a_saved_predictor_gives_the_same_scores(tmp_path: Path, kind: str) -> None:
    predictor = SAVED[kind]()
    folder = save_predictor(predictor, tmp_path / "run" / "global", {"method": kind, "sites": 2}, export=False)
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "model.json", "model.safetensors"]
    for place in (folder, tmp_path / "run"):  # the folder of a run stands for the model in it
        loaded = load_predictor(place)
        assert torch.equal(scores(loaded, images()), scores(predictor, images()))
        assert loaded.class_names == NAMES
        assert not loaded.training
        assert state_bytes(loaded) == state_bytes(predictor)
    card = (folder / "README.md").read_text()
    assert f"- method: {kind}" in card
    assert "model.pt2" not in card


def test_saving_replaces_an_old_model_whole(tmp_path: Path) -> None:
    save_predictor(SAVED["ensemble"](), tmp_path / "model", export=False)
    (tmp_path / "model" / "model.pt2").write_bytes(b"old")
    save_predictor(SAVED["fedavg"](), tmp_path / "model", export=False)
    assert not (tmp_path / "model" / "model.pt2").exists()
    assert isinstance(load_predictor(tmp_path / "model"), Single)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", ["fedavg", "ensemble"])
def test_the_exported_program_gives_the_same_scores_for_any_batch(tmp_path: Path, kind: str) -> None:
    predictor = SAVED[kind]()
    folder = save_predictor(predictor, tmp_path / "model")
    program = torch.export.load(folder / "model.pt2").module()
    for count in (1, 2, 5):
        assert torch.allclose(program(images(count)), scores(predictor, images(count)), atol=1e-5)
    assert 'torch.export.load("model.pt2")' in (folder / "README.md").read_text()


def test_a_parcel_is_a_predictor_too(tmp_path: Path) -> None:
    sent = made("a")
    parcel.write(sent, tmp_path / "a.parcel")
    assert torch.equal(
        scores(load_predictor(tmp_path / "a.parcel"), images()), sent.network()(CNN.prepare(images())).detach()
    )


def rewrite(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "model.json").read_text())
        (folder / "model.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v is not ...}))

    return change


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "model.json").unlink(), "no model.json"),
    "no tensors": (lambda f: (f / "model.safetensors").unlink(), "damaged"),
    "half the tensors": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
        "damaged",
    ),
    "empty tensors": (lambda f: (f / "model.safetensors").write_bytes(b""), "damaged"),
    "half the config": (lambda f: (f / "model.json").write_text('{"kind":'), "not readable JSON"),
    "a list": (lambda f: (f / "model.json").write_text("[1]"), "damaged"),
    "null": (lambda f: (f / "model.json").write_text("null"), "damaged"),
    "no kind": (rewrite(kind=...), "damaged"),
    "a strange kind": (rewrite(kind="singel"), "unknown predictor kind 'singel'; did you mean 'single'"),
    "a kind that is a list": (rewrite(kind=[]), "damaged"),
    "no specs": (rewrite(specs=[]), "damaged"),
    "specs of nothing": (rewrite(specs=[None]), "spec"),
    "another spec": (rewrite(specs=[MLP.model_dump(mode="json")]), "damaged"),
    "a class too few": (rewrite(class_names=["ant", "bee"]), "damaged"),
    "strange settings": (rewrite(settings=[1]), "damaged"),
    "a later format": (rewrite(format=2), "format 2"),
    "no format": (rewrite(format=...), "damaged"),
}


@pytest.mark.parametrize("how", sorted(DAMAGE))
def test_a_damaged_folder_is_refused(tmp_path: Path, how: str) -> None:
    save_predictor(SAVED["fedavg"](), tmp_path / "model", export=False)
    change, says = DAMAGE[how]
    change(tmp_path / "model")
    with pytest.raises(BadInput, match=says) as caught:
        load_predictor(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nothing does not exist; name a model folder"):
        load_predictor(tmp_path / "nothing")
    with pytest.raises(BadInput, match=r"not a model"):
        load_predictor(tmp_path)
    (tmp_path / "file").write_text("hello")
    with pytest.raises(BadInput, match="not a parcel"):
        load_predictor(tmp_path / "file")
    assert {"single", "ensemble"} <= PREDICTORS.keys()


# -- evaluation

#                        right: yes             no               yes              yes
SCORES = torch.tensor([[3.0, 1.0, 0.0], [0.0, 0.1, 0.2], [0.0, 9.0, 8.0], [1.0, 0.0, 0.5]])
LABELS = torch.tensor([0, 1, 1, 0])


def test_accuracies_by_hand() -> None:
    assert evaluation.accuracy(SCORES, LABELS) == 0.75
    assert evaluation.per_class(SCORES, LABELS, 3) == [1.0, 0.5, None]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([10, 30, 0], (10 * 1.0 + 30 * 0.5) / 40),
        ([10, 0, 0], 1.0),
        ([10, 30, 1000], 0.625),
        ([0, 0, 5], 0.0),
        ([0, 0, 0], 0.0),
    ],
)
def test_own_accuracy_weighs_the_classes_as_the_client_has_them(counts: list[int], expected: float) -> None:
    assert evaluation.own_accuracy([1.0, 0.5, None], counts) == pytest.approx(expected)


def test_scores_in_pieces_are_the_scores() -> None:
    predictor = SAVED["ensemble"]().train()
    whole = evaluation.scores_of(predictor, images(7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "BATCH", 3)
        assert torch.allclose(evaluation.scores_of(predictor, images(7)), whole, atol=1e-5)
    assert whole.shape == (7, 3)
    assert not whole.requires_grad
    assert evaluation.scores_of(predictor, images(0)).shape == (0, 3)


def test_a_model_is_judged_on_data_that_fits_it() -> None:
    predictor = SAVED["fedavg"]()
    data = Dataset(images(6).numpy(), np.arange(6) % 3, NAMES, "test")
    found, part = evaluation.evaluate_dataset(predictor, data)
    assert torch.equal(found, scores(predictor, images(6)))
    assert part.labels.tolist() == [0, 1, 2, 0, 1, 2]
    for other, says in (
        (Dataset(np.zeros((3, 9, 9, 1), np.uint8), np.arange(3), NAMES, ""), "--size 8"),
        (Dataset(np.zeros((3, 8, 8, 3), np.uint8), np.arange(3), NAMES, ""), "the data has"),
        (Dataset(data.images, data.labels, ("ant", "bee", "dog"), ""), r"does not know: dog \(2 images\)"),
    ):
        with pytest.raises(BadInput, match=says):
            evaluation.evaluate_dataset(predictor, other)
