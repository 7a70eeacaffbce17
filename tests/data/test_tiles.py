"""Tiles: more than 8 bits and any number of channels, from the file to a model and back, beside photographs that stay
byte for byte what they were."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from factories import call, done, make_images, make_npz, one_line, result_of
from flyby.data import cache as store
from flyby.data import photos, sources
from flyby.data.arrays import bundle_from
from flyby.data.dataset import channel_statistics
from flyby.data.site import site_of, whole_site
from flyby.data.splits import SplitSettings, make_split
from flyby.data.views import ViewSettings, augment
from flyby.errors import BadInput
from flyby.models import ModelSpec
from flyby.parcels import parcel
from flyby.rng import generator
from flyby.runs.config import make_config, plan
from flyby.statistics.calibration import scraps

Tiles = npt.NDArray[Any]
BANDS = (1200.0, 900.0, 3000.0, 2400.0, 400.0)
NAMES = ("field", "forest", "water")


def make_tiles(count: int, seed: int = 0, dtype: str = "uint16", side: int = 8) -> tuple[Tiles, Tiles]:
    """Tiles of five channels in three classes, each brighter in a channel of its own."""
    labels = np.arange(count) % 3
    tiles = np.array(BANDS) + 150 * np.random.RandomState(seed).randn(count, side, side, len(BANDS))
    tiles[np.arange(count), :, :, labels] += 600
    return tiles.clip(0, 65535).astype(dtype), labels


def make_folder(root: Path, tiles: Tiles, labels: Tiles, kind: str = "npy", **how: Any) -> Path:
    for row, (tile, label) in enumerate(zip(tiles, labels, strict=True)):
        path = root / NAMES[label] / f"{row:03d}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "npy":
            np.save(path, tile)
        else:
            import tifffile

            tifffile.imwrite(path, tile, **how)
    return root


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBY_CACHE", str(tmp_path / "cache"))


def rejected(name: Path, **options: Any) -> str:
    with pytest.raises(BadInput) as caught:
        sources.load(str(name), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- reading


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_one_array_or_many_files_are_the_same_data(tmp_path: Path, dtype: str) -> None:
    tiles, labels = make_tiles(12, dtype="float64")
    tiles = (tiles / 20 if dtype == "uint8" else tiles).astype(dtype)
    order = np.argsort(labels, kind="stable")
    tiles, labels = tiles[order], labels[order]
    names = np.array(NAMES)
    one = sources.load(str(make_npz(tmp_path / "a.npz", images=tiles, labels=labels, class_names=names))).train
    many = sources.load(str(make_folder(tmp_path / "npy", tiles, labels))).train
    contiguous = {"photometric": "minisblack", "planarconfig": "contig"}
    tiff = sources.load(str(make_folder(tmp_path / "tif", tiles, labels, "tif", **contiguous))).train
    for data in (one, many, tiff):
        assert isinstance(data.images, np.memmap)
        assert data.images.dtype == dtype
        assert np.array_equal(data.images, tiles)
        assert data.digest == one.digest == bundle_from(tiles, labels, NAMES).train.digest
    assert one.pixels == ("uint8" if dtype == "uint8" else "float32")
    images, _ = one.tensors()
    assert (images.dtype, images.shape) == (getattr(torch, one.pixels), (12, 8, 8, 5))
    assert np.array_equal(images.numpy(), tiles)


def test_equal_bytes_of_another_kind_are_other_data() -> None:
    tiles, labels = make_tiles(6)
    as_floats = np.frombuffer(tiles.tobytes(), "<f4").reshape(6, 8, 4, 5)
    digests = {bundle_from(x, labels).train.digest for x in (tiles, as_floats, tiles.astype("float32"))}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("how", "turn"),
    [
        ({"photometric": "minisblack", "planarconfig": "separate"}, (2, 0, 1)),  # bands one after another
        ({"photometric": "minisblack", "compression": "zlib", "planarconfig": "contig"}, (0, 1, 2)),
        ({"photometric": "minisblack", "metadata": {"axes": "CYX"}}, (2, 0, 1)),
        ({}, (0, 1, 2)),  # written without a word about what is what
        ({"byteorder": ">", "photometric": "minisblack", "planarconfig": "contig"}, (0, 1, 2)),
        ({"bigtiff": True, "photometric": "minisblack", "planarconfig": "contig"}, (0, 1, 2)),
    ],
)
def test_tiff_in_all_its_layouts(tmp_path: Path, how: dict[str, Any], turn: tuple[int, ...]) -> None:
    tiles, labels = make_tiles(3)
    root = make_folder(tmp_path / "t", tiles.transpose(0, *(axis + 1 for axis in turn)), labels, "tif", **how)
    assert np.array_equal(sources.load(str(root)).train.images, tiles)


def test_photographs_in_tiff_files_stay_photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tifffile", None)
    for channels in (1, 3, 4):
        image = make_images(1, channels=channels)[0]
        Image.fromarray(image[:, :, 0] if channels == 1 else image).save(tmp_path / "a.tif")
        read = photos.decode(tmp_path / "a.tif")
        assert read.dtype == np.uint8
        assert read.shape == (8, 8, min(channels, 3))
        assert channels == 4 or np.array_equal(read, image)
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "deep.png")
    assert photos.decode(tmp_path / "deep.png").dtype == np.uint8, "only TIFF keeps 16 bits"


def test_without_tifffile_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_folder(tmp_path / "t", *make_tiles(6), "tif")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    assert "pip install 'flyby[tiff]'" in rejected(root)
    assert "flyby[tiff]" in one_line(call("train", "--data", root, "-q", "--out", tmp_path / "a.parcel"))


def test_other_sizes_keep_the_numbers(tmp_path: Path) -> None:
    tiles = np.full((3, 8, 8, 5), 40_000, np.uint16) + np.arange(5, dtype=np.uint16)
    small = sources.load(str(make_folder(tmp_path / "t", tiles, np.arange(3))), size=4).train
    assert small.images.dtype == np.uint16
    assert np.array_equal(small.images, tiles[:, :4, :4])
    ramp = np.linspace(-50, 50, 8, dtype=np.float32)[None, :, None].repeat(8, 0).repeat(2, 2)
    halved = photos.decode(ramp, (4, 4))
    assert halved.dtype == np.float32
    assert np.allclose(halved[0, :, 0], -halved[0, ::-1, 0], atol=1e-4)


def test_what_cannot_be_taken(tmp_path: Path) -> None:
    tiles, labels = make_tiles(6, dtype="float32")
    tiles[1, 2, 3, 4] = tiles[4, 0, 0] = np.nan
    tiles[5, 1, 1, 1] = np.inf
    root = make_folder(tmp_path / "nan", tiles, labels)
    said = rejected(root)
    assert "3 of 6 tiles hold numbers that are not finite (no data?), the first forest/001.npy with 1 of them" in said
    assert "7 in all" in said
    assert "not finite" in rejected(make_npz(tmp_path / "nan.npz", images=tiles, labels=labels))
    with pytest.raises(BadInput, match="7 numbers that are not finite"):
        bundle_from(tiles, labels)
    assert not list((tmp_path / "cache" / "decoded").glob("*/entry.json")), "nothing of it stays"
    mixed = make_folder(tmp_path / "mixed", make_tiles(6)[0][:3], labels[:3])
    np.save(mixed / "water" / "x.npy", make_tiles(1, dtype="float32")[0][0])
    assert "tiles differ in kind (field/000.npy is uint16, water/x.npy is float32)" in rejected(mixed)
    np.save(mixed / "water" / "x.npy", make_tiles(1)[0][0][:, :, :4])
    assert "images differ in channels (field/000.npy has 5, water/x.npy has 4)" in rejected(mixed)
    np.save(mixed / "water" / "x.npy", make_tiles(1)[0][0].transpose(2, 0, 1))
    assert "channels first" in rejected(mixed)
    np.save(mixed / "water" / "x.npy", np.zeros((8, 8, 65), np.uint16))
    assert "65 channels" in rejected(mixed)
    np.save(mixed / "water" / "x.npy", make_tiles(1)[0][0].astype(np.int64))
    assert "x.npy is int64; give uint8" in rejected(mixed)
    with pytest.raises(BadInput, match="class folders"):  # a float photograph that was normalised, or a tile
        bundle_from(tiles[:, :, :, :3] - 1000, labels)


# -- statistics


def test_statistics_are_those_of_all_pixels_to_four_digits() -> None:
    tiles, labels = make_tiles(600)
    tiles[:, :, :, 4] = 7
    data = bundle_from(tiles, labels, NAMES).train
    mean, std = channel_statistics(data)
    flat = tiles.reshape(-1, 5).astype(np.float64)
    assert mean == tuple(float(f"{value:.4g}") for value in flat.mean(0))
    assert std[:4] == tuple(float(f"{value:.4g}") for value in flat.std(0)[:4])
    assert std[4] == 1
    rows = np.array([3, 599])
    assert channel_statistics(data, rows)[0][0] == float(f"{tiles[rows][..., 0].mean():.4g}")


def test_a_spec_normalises_tiles_in_their_own_units_and_bytes_as_ever() -> None:
    tiles, _ = make_tiles(4, dtype="float32")
    spec = ModelSpec(
        name="mlp", classes=3, channels=5, size=(8, 8), pixels="float32", mean=BANDS, std=(100.0, 200.0, 1.0, 2.0, 4.0)
    )
    x = torch.from_numpy(tiles)
    kept = x.clone()
    expected = ((x - torch.tensor(BANDS)) / torch.tensor(spec.std)).permute(0, 3, 1, 2)
    assert torch.equal(spec.prepare(x), expected)
    assert torch.equal(x, kept), "the images themselves stay"
    assert torch.equal(augment(x, ViewSettings(), *spec.statistics(), generator(0)), expected)
    assert torch.equal(spec.replace(mean=(), std=()).prepare(x), x.permute(0, 3, 1, 2))
    with pytest.raises(BadInput, match="must be float32"):
        spec.prepare(x.byte())
    with pytest.raises(BadInput, match="must be uint8"):
        spec.replace(pixels="uint8").prepare(x)
    assert ModelSpec.from_dict(spec.model_dump(mode="json")) == spec
    assert "pixels" not in spec.replace(pixels="uint8").model_dump(), "photographs are described as ever"
    noise = spec.prepare(spec.noise(64, generator(0)))
    assert noise.shape == (64, 5, 8, 8)
    assert -2 <= float(noise.min()) < -1.9 < 1.9 < float(noise.max()) <= 2


def test_private_training_takes_no_statistics_from_its_images(tmp_path: Path) -> None:
    path = make_npz(tmp_path / "a.npz", images=make_tiles(12)[0], labels=make_tiles(12)[1])
    words = ["train", "--data", path, "--out", tmp_path / "a.parcel", "--model", "mlp", "--epochs", 1, "-q"]
    words += [
        w for text in ("train.dp_epsilon=8", "counts=noisy", "objective.calibrate=false") for w in ("--set", text)
    ]
    assert "not private" in one_line(call(*words))


def test_statistics_of_a_run_are_of_training_images_alone(tmp_path: Path) -> None:
    tiles, labels = make_tiles(60)
    bundle = bundle_from(tiles, labels, NAMES)
    split = make_split(bundle.train, SplitSettings(clients=2, alpha=10, test=0.2, val=0.1, min_size=2), 0)
    rows = np.concatenate([share.train for share in split.shares.values()])
    todo = plan(make_config("local"), bundle)
    assert todo.recipe.spec.mean == ()
    spec = todo.normalised(bundle.train, rows).recipe.spec
    assert (spec.mean, spec.std) == channel_statistics(bundle.train, rows)
    assert spec.mean != channel_statistics(bundle.train)[0]
    given = plan(make_config("local", assignments=["model.mean=[1,2,3,4,5]"]), bundle).normalised(bundle.train, rows)
    assert (given.recipe.spec.mean, given.recipe.spec.std) == ((1, 2, 3, 4, 5), spec.std)


# -- what is done to them on the way


def test_replicas_and_scraps_are_tiles_too() -> None:
    tiles, labels = make_tiles(30)
    bundle = bundle_from(tiles, labels, NAMES)
    split = make_split(bundle.train, SplitSettings(clients=1, alpha=10, replicas=1), 0)
    site = site_of(bundle, split, next(iter(split.shares)))
    assert (len(site.train), site.pixels) == (60, "float32")
    mean = site.train.images.mean((1, 2))
    assert (mean[:30] - mean[30:]).abs().max() < 300, "a gently changed copy"
    assert not torch.equal(site.train.images[:30], site.train.images[30:])
    made = scraps(whole_site(bundle, "a").train.images, generator(0))
    assert (made.dtype, len(made)) == (torch.float32, 90)


def test_views_of_tiles_pad_with_their_mean_and_change_all_channels_alike() -> None:
    tiles = torch.full((64, 8, 8, 5), 300.0)
    mean, std = torch.full((5,), 290.0), torch.full((5,), 5.0)
    padded = augment(tiles, ViewSettings(crop="pad", pad=2), mean, std, generator(0))
    assert set(padded.unique().tolist()) == {0.0, 2.0}, "a border is the mean, not zero kelvin"
    x = augment(tiles, ViewSettings(jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=1, grey=0.5), mean, std, generator(0))
    shift = x - 2
    assert torch.allclose(shift, shift[:, :1, :1, :1].expand_as(shift)), "a flat tile has no contrast to change"
    assert 0.3 < float(shift.abs().max()) <= 0.4


# -- from end to end


def test_two_sites_fuse_evaluate_predict_and_orient(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        (x, y), (xt, yt) = make_tiles(45, seed), make_tiles(15, seed + 9)
        arrays = {"x_train": x, "y_train": y, "x_test": xt, "y_test": yt, "class_names": np.array(NAMES)}
        make_npz(tmp_path / f"{name}.npz", **arrays)
    facts = done("data", tmp_path / "a.npz", "--json").json
    assert (facts["dtype"], facts["shape"]) == ("uint16", [8, 8, 5])
    agreed = [w for key in ("mean", "std") for w in ("--set", f"model.{key}={facts[key]}")]
    assert f"model.mean={facts['mean']}".replace(" ", "") in done("data", tmp_path / "a.npz").out
    common = ("--method", "fedavg", "--model", "cnn-small", "--epochs", 3, "-q", "--set", "model.width=0.25")
    for name, words, out in (("a", agreed, "a"), ("b", agreed, "b"), ("b", (), "own")):
        done("train", "--data", tmp_path / f"{name}.npz", *common, *words, "--out", tmp_path / f"{out}.parcel")
    spec = parcel.read_manifest(tmp_path / "a.parcel").spec
    assert (spec.channels, spec.pixels, list(spec.mean)) == (5, "float32", facts["mean"])
    assert parcel.read_manifest(tmp_path / "own.parcel").spec.mean != spec.mean
    pair = (tmp_path / "a.parcel", tmp_path / "b.parcel")
    done("fuse", *pair, "--fusion", "fedavg", "--out", tmp_path / "model")
    judged = done("evaluate", tmp_path / "model", "--data", tmp_path / "b.npz", "--json").json
    assert judged["accuracy"] > 0.8
    folder = make_folder(tmp_path / "new", *make_tiles(6, 5))
    said = done("predict", tmp_path / "model", *sorted(folder.rglob("*.npy")), "--json").json
    assert {row["class"] for row in said} == set(NAMES)
    program = torch.export.load(tmp_path / "model" / "model.pt2").module()
    assert program(torch.from_numpy(make_tiles(2)[0].astype("float32"))).shape == (2, 3)
    mixed = (tmp_path / "a.parcel", tmp_path / "own.parcel")
    assert "needs one normalisation" in one_line(call("fuse", *mixed, "--fusion", "fedavg", "--out", tmp_path / "no"))
    assert "draws images of 8 bits" in one_line(call("fuse", *pair, "--fusion", "dense", "--out", tmp_path / "no"))
    (tmp_path / "inbox").mkdir()
    (tmp_path / "own.parcel").rename(tmp_path / "inbox" / "own.parcel")
    small = ("--set", "epochs=1", "--set", "distill_epochs=1", "--set", "distill_steps=0", "--method", "fol-n")
    words = ("--own", pair[0], "--received", tmp_path / "inbox", "--data", tmp_path / "a.npz", "--no-export", *small)
    assert done("orient", *words, "--out", tmp_path / "personal", "--json").json["used"] == 1
    assert done("evaluate", tmp_path / "personal", "--data", tmp_path / "a.npz", "--json").json["accuracy"] > 0.8


def test_a_run_reads_the_tiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "tiles", *make_tiles(36))
    words = ("run", "--data", folder, "--clients", 2, "--alpha", 10, "--epochs", 2, "--model", "mlp", "-q")
    views = [w for text in ("views.turns=true", "views.vertical=.5", "views.noise=.1") for w in ("--set", text)]
    done(*words, "--method", "ensemble", *views, "--engine", "inline", "--out", tmp_path / "one")

    def fail(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(store, "seen", fail)
    done(*words, "--method", "ensemble", *views, "--engine", "inline", "--out", tmp_path / "two")
    one, two = result_of(tmp_path / "one"), result_of(tmp_path / "two")
    assert one["accuracy"] == two["accuracy"] > 0.5
    sent = [parcel.read_manifest(p) for p in sorted((tmp_path / "one" / "parcels").glob("*.parcel"))]
    assert len({m.spec for m in sent}) == 1, "sites of a run normalise alike"
    assert sent[0].provenance["views"]["noise"] == 0.1  # type: ignore[index,call-overload]
    assert "draws images of 8 bits" in one_line(call(*words, "--method", "dense", "--out", tmp_path / "three"))


def test_the_page_about_tiles_says_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("north", "south")):
        (x, y), (xt, yt) = make_tiles(45, seed), make_tiles(15, seed + 9)
        arrays = {"x_train": x, "y_train": y, "x_test": xt, "y_test": yt, "class_names": np.array(NAMES)}
        make_npz(tmp_path / f"{name}.npz", **arrays)
    make_folder(tmp_path / "new", *make_tiles(3, 5))
    page = (Path(__file__).parents[2] / "docs" / "tiles.md").read_text()
    block, printed = page.split("```sh\n")[1].split("```")[0], page.split("```\n")[2]
    said = []
    for line in block.strip().splitlines():
        quick: tuple[str, ...] = ("--no-export",) if " fuse " in line or " orient " in line else ()
        quick += ("--set", "distill_steps=0", "--set", "epochs=1") if " orient " in line else ()
        if " fuse " in line:
            (tmp_path / "inbox").mkdir()
            (tmp_path / "inbox" / "south.parcel").write_bytes((tmp_path / "south.parcel").read_bytes())
        said.append(done(*line.split()[1:], *quick).out)
    assert said[0] == printed
    assert float(said[4].split()[1]) > 0.8
    assert "field (" in said[5]
