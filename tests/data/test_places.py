"""Where images were taken: names that tell it, a map cut into regions, ground held out in blocks. Maps are made up, so
that every number can be checked by hand; what the satellites' own data says is measured where it is present."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from flyby.data.dataset import Dataset
from flyby.data.places import blocks, from_names, nearest, on_map, parts_by_block, regions
from flyby.data.sources import load
from flyby.data.splits import Split, SplitSettings, make_split
from flyby.errors import BadInput

DEGREE = 111.195  # km from one degree of latitude to the next, on a ball of Earth's mean radius


def the_map(labels: Any, places: Any) -> Dataset:
    labels = np.asarray(labels, dtype=np.int64)
    images = np.zeros((len(labels), 1, 1, 1), dtype=np.uint8)
    return Dataset(images, labels, ("a", "b"), "map", places=np.asarray(places, dtype=np.float64))


def towns(count: int, each: int, apart: float = 1.0) -> Dataset:
    """Towns on the equator ``apart`` degrees from each other, each with tiles a metre apart; labels alternate within a
    town."""
    places = [(apart * town + tile / 1e5, 0.0) for town in range(count) for tile in range(each)]
    return the_map(np.arange(count * each) % 2, places)


def split_of(data: Dataset, seed: int = 0, **settings: Any) -> Split:
    return make_split(data, SplitSettings(**settings), seed)


def gap(data: Dataset, rows: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> float:
    assert data.places is not None
    return float(nearest(data.places[rows], data.places[others])[0].min())


# -- names


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("nowildfire/-113.917243,51.101323.jpg", (-113.917243, 51.101323)),
        ("damage/-93.578271_30.779923999999998.jpeg", (-93.578271, 30.779923999999998)),
        ("12.5,-7.25.tif", (12.5, -7.25)),
    ],
)
def test_a_name_that_tells_a_place(name: str, place: tuple[float, float]) -> None:
    found = from_names([name])
    assert found is not None
    assert found.tolist() == [list(place)]


@pytest.mark.parametrize(
    "name", ["7_12.png", "a.png", "1.5.png", "1.5,2.5,3.5.png", "200.5,10.5.png", "5.5,91.5.png", None, ""]
)
def test_a_name_that_tells_none_spoils_all(name: str | None) -> None:
    assert from_names(["1.5,2.5.png", name]) is None


def test_places_come_with_a_folder_of_images_and_through_the_cache(tmp_path: Path) -> None:
    for number in range(8):
        folder = tmp_path / "tiles" / ("fire" if number % 2 else "none")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / f"-73.{number}5,45.25.png")
    for _ in range(2):  # read, then from the cache
        data = load(str(tmp_path / "tiles"), cache=tmp_path / "cache").train
        assert data.places is not None
        assert [f"{x:.2f} {y}" for x, y in data.places] == [f"-73.{n}5 45.25" for n in (1, 3, 5, 7, 0, 2, 4, 6)]
        assert data.images[:, 0, 0, 0].tolist() == [1, 3, 5, 7, 0, 2, 4, 6], "each image keeps its own place"
    held = load(str(tmp_path / "tiles"), holdout=0.25, cache=tmp_path / "cache")
    assert held.test is not None
    for part in (held.train, held.test):
        assert part.places is not None
        assert [round(-100 * (x + 73)) // 10 for x, _ in part.places] == part.images[:, 0, 0, 0].tolist()


# -- the map


def test_distances() -> None:
    far, which = nearest(np.array([(0.0, 0.0), (0.0, 89.0)]), np.array([(0.0, 1.0), (180.0, 89.0), (0.0, -2.0)]))
    assert which.tolist() == [0, 1], "over the pole"
    assert far == pytest.approx([DEGREE, 2 * DEGREE], rel=1e-3)
    assert nearest(np.zeros((1, 2)), np.zeros((0, 2)))[0].tolist() == [np.inf]


def test_a_map_has_its_scale_and_may_lie_across_the_date_line() -> None:
    x, y = on_map(np.array([(179.5, 60.0), (-179.5, 60.0)])).T
    assert abs(x[1] - x[0]) == pytest.approx(DEGREE * 0.5, rel=1e-3), "cos 60 is a half"
    assert y[0] == y[1]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_regions_are_even_and_do_not_cross(count: int) -> None:
    places = np.random.RandomState(count).uniform(-1, 1, (210, 2))
    cut = regions(places, count, np.random.RandomState(0))
    assert sorted(np.concatenate(cut).tolist()) == list(range(210))
    assert max(map(len, cut)) - min(map(len, cut)) <= 2
    # A straight line parts any two of them: so it does their hulls, which have no point of the other inside.
    from scipy.spatial import Delaunay

    for one in cut:
        inside = Delaunay(places[one]).find_simplex(places) >= 0
        assert set(np.flatnonzero(inside)) == set(one)


def test_images_of_one_place_stay_together() -> None:
    places = np.repeat(np.random.RandomState(0).uniform(-1, 1, (40, 2)), 5, axis=0)
    for seed in range(5):
        for one in regions(places, 7, np.random.RandomState(seed)):
            assert len(one) == 5 * len(np.unique(places[one], axis=0))


def test_blocks_are_squares() -> None:
    places = np.array([(0.0, 0.0), (0.001, 0.001), (1.0, 0.0), (0.0, 1.0)])
    same = [blocks(places, 5, np.random.RandomState(seed)) for seed in range(20)]
    assert all(len(set(found[[0, 2, 3]])) == 3 for found in same), "a degree is 111 km"
    assert sum(found[0] == found[1] for found in same) >= 18, "0.16 km: apart only where the grid runs between them"


# -- who sees what


def test_by_place_each_site_has_ground_of_its_own() -> None:
    data = towns(12, 20)
    split = split_of(data, name="by-place", clients=4, patches=3)
    assert data.places is not None
    for name, share in split.shares.items():
        mine = np.concatenate([share.train, share.val, share.test])
        others = np.setdiff1d(np.arange(240), mine)
        assert len(mine) == 60, name
        assert len({row // 20 for row in mine}) == 3, "three whole towns"
        assert gap(data, mine, others) > 100, "towns are a degree apart"


def test_by_place_holds_out_blocks() -> None:
    """Six towns a site, each a block: three parts in whole towns, 15 % being nearest to one of six."""
    data = towns(24, 20)
    split = split_of(data, name="by-place", clients=4, patches=6)
    for share in split.shares.values():
        parts = [share.train, share.val, share.test]
        assert [len({row // 20 for row in part}) for part in parts] == [4, 1, 1]
        assert [len(part) for part in parts] == [80, 20, 20]
        assert gap(data, share.test, np.concatenate([share.train, share.val])) > 100
    near = split_of(data, name="by-place", clients=4, patches=6, holdout="random")
    assert all(gap(data, share.test, share.train) < 0.01 for share in near.shares.values()), "what blocks are for"
    assert split_of(data, 1, name="by-place", clients=4, patches=6).hash != split.hash


def test_small_blocks_where_large_ones_cannot_be_held_out() -> None:
    """One town of 2.2 km: blocks of 16, 8 and 4 km hold all of it or half, and no part of 15 % can be made of them."""
    labels, places = np.zeros(20, dtype=np.int64), np.array([(tile / 1000, 0.0) for tile in range(20)])
    role, km = parts_by_block(places, labels, (0.15, 0.15), None, np.random.RandomState(0))
    assert km <= 1
    assert [int((role == part).sum()) for part in (1, 2)] == [3, 3] or km > 0.1
    assert min(np.bincount(role)) >= 2
    fixed, km = parts_by_block(places, labels, (0.15, 0.15), 100.0, np.random.RandomState(0))
    assert (km, set(fixed)) == (100.0, {0}), "as asked, and then nothing can be held out"


def test_other_splits_hold_out_the_same_blocks_everywhere() -> None:
    """A neighbour's model must not have been trained beside a tile that judges this site."""
    data = towns(40, 12)
    near = split_of(data, name="fol", clients=4, alpha=100.0, min_size=20)
    far = split_of(data, name="fol", clients=4, alpha=100.0, min_size=20, holdout="blocks")
    for split, least, most in ((near, 0, 0.01), (far, 100, np.inf)):
        train = np.concatenate([share.train for share in split.shares.values()])
        test = np.concatenate([share.test for share in split.shares.values()])
        assert least <= gap(data, test, train) <= most
        assert len(test) == pytest.approx(72, abs=12)
    together = {who: np.concatenate([s.train, s.val, s.test]) for who, s in near.shares.items()}
    for who, share in far.shares.items():
        assert set(together[who]) == {*share.train, *share.val, *share.test}, "who holds what is the same"


def test_wishes_that_a_map_cannot_meet() -> None:
    bare = Dataset(np.zeros((20, 1, 1, 1), np.uint8), np.arange(20) % 2, ("a", "b"), "bare")
    for settings in ({"name": "by-place"}, {"name": "fol", "min_size": 2, "holdout": "blocks"}):
        with pytest.raises(BadInput, match="longitude and latitude"):
            split_of(bare, clients=2, **settings)
    with pytest.raises(BadInput, match=r"need 16 places, the data has 10; lower --clients or split\.patches"):
        split_of(the_map(np.arange(20) % 2, [(i // 2, 0.0) for i in range(20)]), name="by-place", clients=2)


# -- the satellites' own data

DATA = Path(os.environ.get("FLYBY_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")


def satellite(name: str, part: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Places and labels of a release, without its images."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(DATA / name / f"{part}-00000-of-00001.parquet") as file:
        table = file.read(columns=["image.path", "label"])
    places = from_names([row["path"] for row in table["image"].to_pylist()])
    assert places is not None
    return places, table["label"].to_numpy()


@pytest.mark.parametrize(
    ("name", "close", "same", "known", "random", "in_blocks"),
    [("wildfire-64", 0.618, 0, 0.999, 0.609, 0.078), ("hurricane", 0.994, 1408, 0.5, 0.989, 0.001)],
)
def test_how_near_the_satellites_test_tiles_lie(
    name: str, close: float, same: int, known: float, random: float, in_blocks: float
) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"the {name} images are not here (set FLYBY_TEST_DATA)")
    (places, labels), (judging, answers) = satellite(name, "train"), satellite(name, "test")
    far, which = nearest(judging, places)
    assert (far <= 1).mean() == pytest.approx(close, abs=6e-4)
    assert (far < 1e-6).sum() == same
    assert (labels[which] == answers).mean() > known
    data = the_map(labels, places)
    for holdout, share in (("random", random), ("blocks", in_blocks)):
        split = split_of(data, name="fol", clients=70, alpha=0.7, holdout=holdout)
        train, test = (
            np.concatenate([getattr(one, part) for one in split.shares.values()]) for part in ("train", "test")
        )
        assert (nearest(places[test], places[train])[0] <= 1).mean() == pytest.approx(share, abs=6e-4)
