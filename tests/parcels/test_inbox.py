"""An inbox reads each parcel once where memory allows, and one at a time where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from factories import random_parcel
from flyby.errors import BadInput
from flyby.fusion.weights.layers import Revised
from flyby.models.shelf import Shelf
from flyby.parcels import inbox, parcel
from flyby.parcels.inbox import Inbox


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    for k, name in enumerate(("site-10", "site-2", "site-1")):
        parcel.write(random_parcel(name, seed=k), tmp_path / f"{k}.parcel")
    return sorted(tmp_path.iterdir())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read, as they are read."""
    found: list[str] = []
    real = parcel.read
    monkeypatch.setattr(parcel, "read", lambda path: (found.append(path.name), real(path))[1])
    return found


def test_a_parcel_is_read_once(paths: list[Path], reads: list[str]) -> None:
    box = Inbox(paths)
    assert reads == [], "manifests are enough to begin with"
    assert [item.manifest.sender for item in box] == ["site-1", "site-2", "site-10"]
    assert len(box.networks()) == len(list(box)) == 3
    assert box.read(2) is box.read(2)
    assert reads == ["2.parcel", "1.parcel", "0.parcel"]


def test_what_is_too_large_is_read_each_time(
    paths: list[Path], reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(parcel.decoded_bytes(parcel.read_manifest(path)) for path in paths)
    monkeypatch.setattr(inbox, "IN_MEMORY", 2 * size - 1)
    box = Inbox(paths)
    assert len(list(box)) == len(list(box)) == 3
    assert len(reads) == 6
    assert isinstance(box.networks(), list), "the networks alone still fit"
    monkeypatch.setattr(inbox, "IN_MEMORY", 0)
    del reads[:]
    shelf = Inbox(paths).networks()
    assert isinstance(shelf, Shelf)
    assert reads == []
    assert len(list(shelf)) == 3
    assert reads == ["2.parcel", "1.parcel", "0.parcel"]


def test_what_is_in_memory_stays_what_it_is(paths: list[Path], reads: list[str]) -> None:
    items = [parcel.from_bytes(path.read_bytes()) for path in paths]
    assert [item.digest for item in Inbox(items)] == [item.digest for item in reversed(items)]
    assert reads == []


def test_decoded_bytes_are_those_of_the_tensors() -> None:
    weights = random_parcel("a").weights
    for codec in ("fp32", "fp16", "int4"):
        facts = {**random_parcel("a").manifest.facts, "codec": codec}
        made = parcel.make(weights=weights, extras={"e": torch.zeros(3, 5, dtype=torch.float16)}, **facts)
        held = sum(t.nbytes for t in [*made.weights.values(), *made.extras.values()])
        assert parcel.decoded_bytes(made.manifest) == held


def test_parcels_may_be_revised_on_their_way(paths: list[Path]) -> None:
    box = Inbox(paths)
    halved = Revised(box, lambda item: {name: t / 2 for name, t in item.weights.items()})
    assert [item.manifest for item in halved] == box.manifests
    for one, other in zip(box, halved, strict=True):
        assert all(torch.equal(other.weights[name], t / 2) for name, t in one.weights.items())


def test_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="no parcels"):
        Inbox([])


def test_some_senders_are_read_once_however_often_they_are_asked_for(paths: list[Path], reads: list[str]) -> None:
    box = Inbox(paths)
    assert [item.manifest.sender for item in box.of({"site-10", "site-1"})] == ["site-1", "site-10"]
    assert [item.manifest.sender for item in box.of(["site-2", "site-1"])] == ["site-1", "site-2"]
    assert reads == ["2.parcel", "0.parcel", "1.parcel"]
