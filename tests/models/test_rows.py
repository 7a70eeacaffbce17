"""Rows of numbers for images: an image is looked at once, whoever brings it, and its row is the same in any company."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from factories import make_images
from flyby.data import cache
from flyby.data.cache import root_of
from flyby.data.sources import load
from flyby.data.splits import SplitSettings, make_split
from flyby.errors import BadInput
from flyby.models import rows
from flyby.models.features import pooled_of
from flyby.models.rows import rows_of
from flyby.models.spec import ModelSpec
from flyby.runs.backbones import own

PIECE = 8


class Eye:
    """Looks at images and remembers how many it was shown at a time; fails at the image whose first pixel is 66."""

    def __init__(self) -> None:
        self.shown: list[int] = []

    def __call__(self, images: Tensor) -> Tensor:
        self.shown.append(len(images))
        if bool((images[:, 0, 0, 0] == 66).any()):
            raise KeyboardInterrupt
        return images.flatten(1)[:, :3].float() / 255

    @property
    def pieces(self) -> int:
        return len(self.shown)


@pytest.fixture
def images() -> Tensor:
    made = torch.from_numpy(make_images(40, channels=1, seed=3))
    made[made == 66] = 67
    return made


def seen(eye: Callable[[Tensor], Tensor], images: Tensor, family: str, label: str = "") -> Tensor:
    return rows_of([family], images, eye, (3,), PIECE, label)


def test_a_new_split_of_known_images_costs_nothing(images: Tensor) -> None:
    eye = Eye()
    whole = seen(eye, images, "splits")
    assert torch.equal(whole, images.flatten(1)[:, :3].float() / 255)
    assert eye.shown == [PIECE] * 5
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for part in torch.split(order, 7):
        assert torch.equal(seen(eye, images[part], "splits"), whole[part])
    assert eye.pieces == 5
    more = torch.cat((images, 255 - images[:3], 255 - images[:3]))  # three new ones, each of them twice
    found = seen(eye, more, "splits")
    assert eye.shown[5:] == [PIECE]
    assert torch.equal(found[40:43], found[43:])
    assert torch.equal(found[:40], whole)
    assert not torch.equal(found[40], whole[0])
    seen(eye, images, "another family")
    assert eye.pieces == 11


def test_another_process_knows_them_too(images: Tensor) -> None:
    eye = Eye()
    whole = seen(eye, images, "processes")
    rows._shelf.cache_clear()
    assert torch.equal(seen(eye, images, "processes"), whole)
    assert eye.pieces == 5


def test_damage_costs_a_second_look_and_no_wrong_number(images: Tensor) -> None:
    eye = Eye()
    whole = seen(eye, images, "damage")
    fresh = max((root_of(None) / "features").iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
    for content in (b"", b"\x93NUMPY nonsense", None):
        path = next(iter(fresh.glob("*.rows.npy")))
        path.unlink() if content is None else path.write_bytes(content)
        eye.shown.clear()
        assert torch.equal(seen(eye, images, "damage"), whole)
        assert eye.pieces == 5
        assert torch.equal(seen(eye, images, "damage"), whole)
        assert eye.pieces == 5
        rows._shelf.cache_clear()
        assert torch.equal(seen(eye, images, "damage"), whole)
        assert eye.pieces == 5


def test_what_was_seen_before_an_interruption_stays_known(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BLOCK", 4 * 3 * PIECE)  # a block is one piece
    eye, bad = Eye(), images.clone()
    bad[30, 0, 0, 0] = 66
    with pytest.raises(KeyboardInterrupt):
        seen(eye, bad, "interrupted")
    assert eye.pieces == 4
    eye.shown.clear()
    assert torch.equal(seen(eye, images, "interrupted"), images.flatten(1)[:, :3].float() / 255)
    assert eye.pieces == 2  # 24 of the 40 were known


def test_numbers_that_are_none_are_not_kept_and_the_image_is_named(images: Tensor) -> None:
    def blind(piece: Tensor) -> Tensor:
        seen = piece.flatten(1)[:, :3].float()
        return torch.where(piece.flatten(1)[:, :1] == images[21, 0, 0, 0], torch.nan, seen)

    place = int((images[:, 0, 0, 0] == images[21, 0, 0, 0]).nonzero()[0, 0])
    for _ in range(2):
        with pytest.raises(BadInput, match=f"not finite for image {place} of site-7"):
            seen(blind, images, "blind", "site-7")


def test_a_cache_that_cannot_be_written_only_costs_time(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise BadInput("no room left")

    monkeypatch.setattr(rows, "atomic_open", full)
    eye = Eye()
    for _ in range(2):
        assert len(seen(eye, images, "full disk")) == 40
    assert eye.pieces == 10


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    images: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "flyby")
    monkeypatch.setattr(rows, "SPEAK_SECONDS", 0.0)
    seen(Eye(), images, "lines", "site-3")
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("features of site-3: 8 of 40 images, about ")
    caplog.clear()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    seen(Eye(), images, "bar", "site-4")
    drawn = capsys.readouterr().err
    assert "features of site-4" in drawn
    assert "━" in drawn
    assert not caplog.records
    assert not cache.bars
    cache.bars.append("somebody else's")
    try:
        seen(Eye(), images, "second bar", "site-5")
    finally:
        cache.bars.clear()
    assert "━" not in capsys.readouterr().err
    assert caplog.records  # lines in its place
    caplog.clear()
    seen(Eye(), images, "second bar", "site-5")  # all are known: there is nothing to tell
    assert "site-5" not in capsys.readouterr().err
    assert not caplog.records


def test_eight_splits_of_a_data_set_are_one_pass_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the rows of an image are the same bytes whoever was looked at beside it."""
    spec = ModelSpec(name="cnn-small", classes=10, channels=1, size=(8, 8), width=0.25)
    named = own(spec, spec.build(torch.Generator().manual_seed(11)).state_dict())
    network = ModelSpec(name=named.name, backbone=named.backbone, classes=10, channels=1, size=(8, 8)).build()
    data, shown = load("digits").train, []
    backbone = network.backbone.forward
    monkeypatch.setattr(network.backbone, "forward", lambda x: shown.append(len(x)) or backbone(x))
    images = data.tensors()[0]
    first: dict[bytes, bytes] = {}
    for seed, (alpha, clients) in enumerate([(0.05, 5), (0.1, 5), (0.5, 5), (1e6, 5), (0.05, 50), (0.5, 50)]):
        split = make_split(data, SplitSettings(alpha=alpha, clients=clients, min_size=1), seed)
        for share in split.shares.values():
            found = pooled_of(network, images[torch.as_tensor(np.asarray(share.train))])
            assert found is not None
            for row, place in zip(found, share.train, strict=True):
                name = images[place].numpy().tobytes()
                assert first.setdefault(name, row.numpy().tobytes()) == row.numpy().tobytes()
    assert sum(shown) <= len(data) + 5 * 16  # each of the first split's sites fills one piece up
