"""Many sites through hubs into one server, on small numbers: what benchmarks/hubs.py does with 100,000."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from flyby.data.site import Part, Site
from flyby.errors import BadInput
from flyby.fusion.closed.base import Linear
from flyby.parcels import parcel
from flyby.parcels.gate import Gate
from flyby.parcels.inbox import Inbox
from flyby.parcels.ledger import Ledger
from flyby.runs.config import make_config, plan
from flyby.runs.server import Order, change_model, fuse_parcels, make_region
from flyby.training.loop import train_site

SITES, HUBS, WIDTH = 60, 4, 24


@pytest.fixture(scope="module")
def hubs() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "hubs.py"
    spec = importlib.util.spec_from_file_location("hubs", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["hubs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(hubs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found, seconds = hubs.through_hubs(SITES, HUBS, hubs.Sender(WIDTH, "float64"), tmp_path_factory.mktemp("tree"))
    assert set(seconds) == {"sites", "hubs", "server"}
    return Path(found)


def dense(hubs: ModuleType, lam: float) -> Linear:
    """Ridge over all images as least squares, with rows for the penalty: no sums anywhere."""
    parts = [hubs.images_of(site) for site in range(SITES)]
    network = hubs.Sender(WIDTH, "float64").network
    with torch.no_grad():
        x = network.features(network.prepare(torch.cat([part.images for part in parts]))).double()
    labels = torch.cat([part.labels for part in parts])
    unit = float((x - x.mean(0)).square().sum() / WIDTH)
    rows = torch.cat((F.pad(x, (0, 1), value=1.0), F.pad((lam * unit) ** 0.5 * torch.eye(WIDTH).double(), (0, 1))))
    targets = torch.cat((F.one_hot(labels, 10).double(), torch.zeros(WIDTH, 10, dtype=torch.float64)))
    whole = torch.linalg.lstsq(rows, targets).solution
    return Linear(whole[:-1].T, whole[-1])


def test_the_head_is_that_of_all_images_in_one_place(hubs: ModuleType, model: Path) -> None:
    sender = hubs.Sender(WIDTH, "float64")
    one = hubs.solved(hubs.in_one_place(SITES, sender))
    assert hubs.far(hubs.head_of(model), one) < 1e-10
    ledger = Ledger.load(model / "ledger.json")
    assert (ledger.uploads(), ledger.sites()) == (HUBS, SITES)
    flat = Inbox(sender.parcel_of(f"site-{k}", hubs.images_of(k)) for k in range(SITES))
    assert hubs.far(hubs.solved(flat), one) < 1e-10
    rough = hubs.Sender(WIDTH, "float32")
    flat = Inbox(rough.parcel_of(f"site-{k}", hubs.images_of(k)) for k in range(SITES))
    assert 1e-10 < hubs.far(hubs.solved(flat), one) < 1e-4


def test_the_head_is_that_of_least_squares(
    hubs: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = hubs.rule_named
    monkeypatch.setattr(hubs, "rule_named", lambda name: usual(name, ["lam=0.01"]))
    assert hubs.far(hubs.head_of(model), dense(hubs, 0.01)) < 1e-9


def test_a_site_of_the_benchmark_sends_what_a_site_sends(hubs: ModuleType) -> None:
    sender, train = hubs.Sender(WIDTH, "float64"), hubs.images_of(3)
    config = make_config("ridge", assignments=["objective.send=[feature-sums:dtype=float64;least=1]"])
    recipe = plan(config, config.data.load()).recipe.model_copy(update={"spec": sender.spec})
    none = Part(train.images[:0], train.labels[:0])
    real = train_site(Site("site-3", train, none, none, hubs.CLASSES), recipe, method="ridge").parcel
    made = sender.parcel_of("site-3", train)
    assert real.manifest.tensors == made.manifest.tensors
    for name in ("sender", "method", "spec", "class_names", "samples", "counts", "extras"):
        assert getattr(real.manifest, name) == getattr(made.manifest, name)


def region(hubs: ModuleType, folder: Path, hub: str, sites: list[int]) -> Path:
    sender, paths = hubs.Sender(WIDTH, "float64"), []
    for site in sites:
        paths.append(folder / f"{hub}-site-{site}.parcel")
        parcel.write(sender.parcel_of(f"site-{site}", hubs.images_of(site)), paths[-1])
    out = folder / f"{hub}.parcel"
    facts = make_region(paths, out, Order(out, device="cpu"), Gate(receiver=hub))
    assert facts["sites"] == len(sites)
    return out


def test_a_site_in_two_hubs_counts_once_and_a_hub_can_come_late(hubs: ModuleType, tmp_path: Path) -> None:
    north, south, both = (
        region(hubs, tmp_path, hub, sites) for hub, sites in (("north", [0, 1, 2]), ("south", [3, 4]), ("both", [2, 5]))
    )
    order = Order(tmp_path / "global", export=False, device="cpu")
    with pytest.raises(BadInput, match=r"site-2 counts in .* and again in"):
        fuse_parcels([north, south, both], order)
    fuse_parcels([north], order)
    change_model(order.out, [south], [], order, Gate())
    assert hubs.far(hubs.head_of(order.out), hubs.solved(hubs.in_one_place(5, hubs.Sender(WIDTH, "float64")))) < 1e-10


def test_the_growth_is_drawn(hubs: ModuleType) -> None:
    stages = {"sites": 1.0, "hubs": 2.0, "server": 0.1}
    rows = [{"sites": n, "stages": stages, "peak_mb": 300.0 + n, "one_site": {"peak_mb": 290.0}} for n in (100, 1000)]
    assert hubs.growth.png(rows).startswith(b"\x89PNG")
    drawn = hubs.growth("hubs", "growth", rows)
    assert "1,000" in drawn
    assert "all hubs" in drawn


def test_images_are_of_two_or_three_classes(hubs: ModuleType) -> None:
    parts = [hubs.images_of(site) for site in range(40)]
    assert {len(part) for part in parts} == {hubs.IMAGES}
    assert max(len(part.labels.unique()) for part in parts) == 3
    counts = np.bincount(torch.cat([part.labels for part in parts]).numpy(), minlength=10)
    assert counts.min() > 0
