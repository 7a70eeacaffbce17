"""The grids over frozen backbones: they are whole, and every split gives the same accuracy from one look at images."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from flyby.models.backbones import Frozen
from flyby.models.spec import ModelSpec
from flyby.parcels import parcel
from flyby.study.catalogue import Study, read_study
from flyby.study.grid import cells, read_rows, run_study
from flyby.study.tables import render

SETS = ("cifar10", "cifar100", "digits", "hurricane", "svhn", "wildfire")


@pytest.mark.parametrize("name", SETS)
def test_a_grid_has_each_split_once(name: str) -> None:
    found = list(cells(read_study(f"backbones-{name}")[1]))
    assert len({cell.key for cell in found}) == len(found) == (16 if name == "digits" else 32)
    shapes = {(c.config.split.name, c.config.split.alpha, c.config.split.clients) for c in found}
    assert len(shapes) == 8  # three alphas and iid, among 5 and among 50
    assert {c.config.method for c in found} == {"ridge", "lda"}


def test_every_split_has_the_same_accuracy_from_one_look_at_each_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grid of digits with a small backbone of our own in place of EfficientNet, and fewer sites."""
    spec = ModelSpec(name="cnn-small", classes=10, channels=1, size=(8, 8), width=0.5)
    names = tuple("0123456789")
    weights = dict(spec.build().state_dict())
    made = parcel.make(sender="public", method="fedavg", spec=spec, class_names=names, samples=1, weights=weights)
    parcel.write(made, tmp_path / "public.parcel")
    whole = read_study("backbones-digits")[1]
    settings = [one for one in whole.settings if not one.startswith("model.")]
    settings += [f"model.backbone={tmp_path / 'public.parcel'}"]
    study = Study(**whole.model_dump() | {"clients": [3, 12], "alphas": [0.1, 0.5], "settings": settings})
    shown: list[int] = []
    seen = Frozen._seen

    def counted(self: Frozen, x: Tensor) -> Tensor:
        shown.append(0 if x.is_meta else len(x))
        return seen(self, x)

    monkeypatch.setattr(Frozen, "_seen", counted)
    rows = tmp_path / "grid.jsonl"
    assert run_study(study, rows, tmp_path / "work", engine="inline", device="cpu", quiet=True) == (12, 0)
    assert 1797 <= sum(shown) < 1797 + 16 * (3 + 1)  # 3 sites of the first split and the test images fill up a piece
    found = read_rows(rows)
    assert len({row["split_hash"] for row in found}) == 6
    for method in ("ridge", "lda"):
        mine = {row["accuracy"] for row in found if row["method"] == method}
        assert len(mine) == 1
        assert mine.pop() > 0.5
    assert "| ridge | ridge | " in render(study, rows)
    assert "| clients' method | server rule | accuracy |" in render(study, rows)
