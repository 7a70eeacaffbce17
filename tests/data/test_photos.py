"""Photographs as they are out there: of any size, turned, grey, transparent, damaged. What becomes of each is known,
said once, and takes little memory."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from factories import NAMES, call, done, encode, make_images, make_npz, make_parquet, make_tree, random_parcel
from flyby.data import cache as store
from flyby.data import photos, sources
from flyby.data.arrays import bundle_from
from flyby.data.dataset import DataBundle, Sizes, holding
from flyby.data.settings import DataSettings
from flyby.data.sources import Reading
from flyby.data.splits import SPLITS
from flyby.data.tiles import middle
from flyby.errors import BadInput
from flyby.parcels import parcel
from flyby.runs.config import data_of, make_config

Pixels = npt.NDArray[np.uint8]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYBY_CACHE", str(tmp_path / "cache"))


def smooth(height: int, width: int) -> Pixels:
    """A picture without fine detail: every way to make it smaller gives nearly the same."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([255 * y / height, 255 * x / width, 127 * (y / height + x / width)], axis=2).astype(np.uint8)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def large() -> bytes:
    return encode(smooth(2000, 3000), "JPEG")


def tree(root: Path, sizes: list[tuple[int, int]], kind: str = "PNG") -> Path:
    labels = np.arange(len(sizes)) % 3
    return make_tree(root, [encode(smooth(*size), kind) for size in sizes], labels, kind=kind)


# -- sizes


@pytest.mark.parametrize(
    ("sizes", "becomes"),
    [
        ([(32, 32)] * 3, (32, 32)),
        ([(128, 128)] * 3, (128, 128)),
        ([(100, 80)] * 3, (100, 80)),
        ([(129, 80)] * 3, (64, 64)),
        ([(32, 32), (32, 32), (32, 33)], (64, 64)),
        ([(20, 20), (600, 400), (40, 90)], (64, 64)),
    ],
)
@pytest.mark.parametrize("kind", ["folders", "parquet"])
def test_one_small_size_stays_and_the_rest_become_squares(
    tmp_path: Path, sizes: list[tuple[int, int]], becomes: tuple[int, int], kind: str
) -> None:
    if kind == "folders":
        tree(tmp_path / "d", sizes)
    else:
        make_parquet(tmp_path / "d", "train", [encode(smooth(*size)) for size in sizes], np.arange(3))
    bundle = sources.load(str(tmp_path / "d"))
    assert bundle.train.size == becomes
    assert (bundle.sizes is None) == (becomes == sizes[0])


def test_arrays_stay_as_they_were_made(tmp_path: Path) -> None:
    images = np.stack([smooth(140, 130)] * 3)
    path = make_npz(tmp_path / "a.npz", images=images, labels=np.arange(3))
    assert np.array_equal(sources.load(str(path)).train.images, images)


@pytest.mark.parametrize("size", [(90, 60), (60, 90), (77, 41), (64, 64)])
def test_the_short_side_is_resized_and_the_centre_kept(size: tuple[int, int]) -> None:
    whole, (height, width) = Image.fromarray(smooth(*size)), size
    found = photos.decode(encode(smooth(*size)), (16, 16)).astype(int)
    # A second way: all of it resized to four times the wanted size, cropped, and each 4x4 block averaged.
    scale = 64 / min(size)
    large = np.asarray(whole.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR), int)
    top, left = (large.shape[0] - 64) // 2, (large.shape[1] - 64) // 2
    blocks = large[top : top + 64, left : left + 64].reshape(16, 4, 16, 4, 3).mean(axis=(1, 3))
    assert np.abs(found - blocks).max() <= 3
    assert photos.decode(smooth(*size), (16, 16)).shape == (16, 16, 3)


def test_the_middle_worked_out_by_hand() -> None:
    assert middle((100, 100), (7, 7)) is None
    assert middle((90, 60), (3, 2)) is None
    assert middle((90, 60), (16, 16)) == (0, 15, 60, 75)
    assert middle((60, 90), (16, 16)) == (15, 0, 75, 60)
    assert middle((10, 6), (4, 5)) == pytest.approx((0, 2.6, 6, 7.4))  # 6 wide, so 6 * 4 / 5 = 4.8 high


def test_it_is_said_once_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flyby")
    sizes = [(48, 64), (200, 150), (70, 70)]  # height and width
    bundle = sources.load(str(tree(tmp_path / "d", sizes)))
    bundle.tell()
    assert caplog.messages == [
        "note: 3 images of 3 sizes (from 64x48 to 150x200): short side to 64, centre 64x64 kept;"
        " --size chooses another",
        "3 classes: cat 1, dog 1, owl 1",
    ]
    held = sources.load(str(tmp_path / "d"), holdout=0.4)
    assert held.sizes == bundle.sizes, "what is held out was read in the same way"
    asked = sources.load(str(tmp_path / "d"), size=32)
    assert asked.notes == ["3 images of 3 sizes (from 64x48 to 150x200): short side to 32, centre 32x32 kept"]


def test_lines_of_one_size() -> None:
    assert Sizes(9, 1, (350, 350), (350, 350)).line((64, 64)) == (
        "9 images of 350x350: resized to 64x64; --size chooses another"
    )
    assert Sizes(9, 1, (1500, 2000), (1500, 2000), asked=True).line((64, 64)) == (
        "9 images of 2000x1500: short side to 64, centre 64x64 kept"
    )
    assert Sizes(9, 2, (9, 9), (90, 60), asked=True).line((6, 8)).endswith(": resized, centre 8x6 kept")


def test_a_fit_other_than_64(tmp_path: Path) -> None:
    data = str(tree(tmp_path / "d", [(200, 300)] * 3))
    assert sources.load(data, reading=Reading(fit=48)).train.size == (48, 48)
    assert DataSettings(name=data, fit=40).load().train.size == (40, 40)
    assert DataSettings(name=data).load().train.size == (64, 64), "the key of the cache knows the size"
    assert not {"fit", "channels", "nested", "test"} & set(DataSettings().model_dump()), "old runs keep their names"


def test_a_backbone_says_how_large_images_are_read() -> None:
    config = make_config("ridge", assignments=["model.backbone=efficientnet-lite0", "model.backbone_size=96"])
    assert data_of(config).fit == 96
    assert data_of(make_config("fedavg")).fit is None
    words = ["model.backbone=efficientnet-lite0", "model.backbone_size=96", "data.size=32"]
    assert data_of(make_config("ridge", assignments=words)).fit is None


def test_what_lies_in_the_cache_serves_whoever_wants_that_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = str(tree(tmp_path / "d", [(300, 200)] * 3))
    first = sources.load(data).train.digest

    def fail(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(store, "_write", fail)
    assert sources.load(data, size=(64, 64), reading=Reading(channels=3)).train.digest == first
    for other in ({"size": 63}, {"reading": Reading(fit=63)}, {"reading": Reading(channels=1)}):
        with pytest.raises(AssertionError, match="decoded again"):
            sources.load(data, **other)  # type: ignore[arg-type]


def test_a_size_may_have_two_sides(tmp_path: Path) -> None:
    data = str(tree(tmp_path / "d", [(30, 20), (50, 80), (9, 9)]))
    assert sources.load(data, size=(10, 14)).train.images.shape == (3, 10, 14, 3)
    path = make_npz(tmp_path / "a.npz", images=np.stack([smooth(30, 20)] * 3), labels=np.arange(3))
    assert sources.load(str(path), size=(10, 14)).train.images.shape == (3, 10, 14, 3)


# -- memory


def test_a_large_jpeg_is_never_decoded_at_full_resolution(large: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    data, met = large, list[tuple[int, int]]()
    real = photos.flattened
    monkeypatch.setattr(photos, "flattened", lambda image: met.append(image.size) or real(image))  # type: ignore[func-returns-value]
    found = photos.decode(data, (64, 64))
    assert met == [(750, 500)]
    assert np.abs(found.astype(int) - photos.decode(smooth(2000, 3000), (64, 64)).astype(int)).max() <= 3
    photos.decode(data, (300, 300))
    assert met[1] == (1500, 1000), "at least twice what is wanted"
    photos.decode(encode(smooth(350, 350), "JPEG"), (64, 64))
    assert met[2] == (350, 350), "small ones whole, as ever"


@pytest.mark.skipif(
    "VmHWM" not in (Path("/proc/self/status").read_text() if Path("/proc/self/status").exists() else ""),
    reason="this system does not say how much memory a process took at most",
)
def test_decoding_takes_little_memory(tmp_path: Path, large: bytes) -> None:
    (tmp_path / "a.jpg").write_bytes(large)
    code = (
        "import re, sys; from pathlib import Path; from flyby.data import photos; from PIL import Image\n"
        "photos.decode(Path(sys.argv[1]).parent / 'b.jpg', (64, 64))\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "start = peak(); photos.decode(Path(sys.argv[1]), (64, 64)); small = peak() - start\n"
        "Image.open(sys.argv[1]).load(); print(small, peak() - start)"
    )
    (tmp_path / "b.jpg").write_bytes(encode(smooth(64, 64), "JPEG"))
    words = [sys.executable, "-c", code, str(tmp_path / "a.jpg")]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    small, whole = map(int, answer.stdout.split())  # kilobytes
    assert small < 8_000 < 15_000 < whole


def test_a_small_image_first_does_not_let_large_ones_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large: list[int] = []
    real = photos.flattened
    monkeypatch.setattr(photos, "flattened", lambda i: large.append(max(i.size)) or real(i))  # type: ignore[func-returns-value]
    bundle = sources.load(str(tree(tmp_path / "d", [(40, 40), (900, 1200), (900, 1200), (40, 40)], "JPEG")))
    assert bundle.train.size == (64, 64)
    assert max(large) == 600


# -- turned, grey, transparent, deep


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_every_way_to_hold_a_camera(turn: int, kind: str) -> None:
    upright = smooth(24, 40)
    # What the sensor saw, so that EXIF's turn brings it upright: by numpy, not by Pillow's own table.
    stored: dict[int, Callable[[Pixels], Pixels]] = {
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.transpose(1, 0, 2),
        6: lambda x: np.rot90(x, 1),  # shown turned by 90 degrees clockwise
        7: lambda x: np.rot90(x, 2).transpose(1, 0, 2),
        8: lambda x: np.rot90(x, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = turn
    options: dict[str, Any] = {"exif": exif} | ({"quality": 95} if kind == "JPEG" else {})
    options |= {"lossless": True} if kind == "WEBP" else {}
    data = saved(Image.fromarray(np.ascontiguousarray(stored[turn](upright))), kind, **options)
    found = photos.decode(data).astype(int)
    assert found.shape == upright.shape
    assert np.abs(found - upright).max() <= (12 if kind == "JPEG" else 0)
    small, wanted = photos.decode(data, (8, 8)).astype(int), photos.decode(upright, (8, 8)).astype(int)
    assert np.abs(small - wanted).max() <= (4 if kind == "JPEG" else 1)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_spoils_no_picture() -> None:
    picture = Image.fromarray(smooth(8, 16))
    for exif in (b"Exif\0\0nonsense", b"Exif\0\0II*\0\xff\xff\xff\xff"):
        assert photos.decode(saved(picture, "JPEG", exif=exif)).shape == (8, 16, 3)
    odd = Image.Exif()
    odd[0x0112] = 77
    assert photos.decode(saved(picture, "JPEG", exif=odd)).shape == (8, 16, 3)


MODES: dict[str, tuple[str, str, int]] = {
    "grey": ("L", "PNG", 1),
    "bits": ("1", "PNG", 1),
    "grey with alpha": ("LA", "PNG", 1),
    "deep grey": ("I;16", "PNG", 1),
    "colour": ("RGB", "JPEG", 3),
    "alpha": ("RGBA", "PNG", 3),
    "palette": ("P", "PNG", 3),
    "gif": ("P", "GIF", 3),
    "printed": ("CMYK", "JPEG", 3),
    "lossy grey": ("L", "JPEG", 1),
}


@pytest.mark.parametrize("name", MODES)
def test_every_mode_becomes_grey_or_rgb(name: str) -> None:
    mode, kind, channels = MODES[name]
    flat = np.full((6, 9, 3), 200, np.uint8)
    image = Image.fromarray(np.full((6, 9), 200 * 256, np.uint16)) if mode == "I;16" else Image.fromarray(flat)
    image = image if mode == "I;16" else image.quantize(4) if mode == "P" else image.convert(mode)
    found = photos.decode(saved(image, kind))
    assert (found.shape, found.dtype) == ((6, 9, channels), np.uint8)
    if mode != "1":
        assert np.abs(found.astype(int) - 200).max() <= 6


def test_of_an_animation_the_first_image_is_taken() -> None:
    still, moved = (Image.fromarray(np.full((4, 4, 3), value, np.uint8)) for value in (40, 200))
    found = photos.decode(saved(still, "GIF", save_all=True, append_images=[moved]))
    assert np.abs(found.astype(int) - 40).max() <= 3


def test_mixed_modes_become_rgb_and_channels_can_be_asked_for(tmp_path: Path) -> None:
    colour = smooth(8, 8)
    grey = Image.fromarray(colour).convert("L")
    images = [saved(grey, "PNG"), saved(Image.fromarray(colour), "PNG"), saved(grey.convert("LA"), "PNG")]
    data = str(make_tree(tmp_path / "d", images, [0, 1, 2]))
    assert sources.load(data).train.images.shape == (3, 8, 8, 3)
    plain = sources.load(data, reading=Reading(channels=1)).train.images
    assert plain.shape == (3, 8, 8, 1)
    assert np.array_equal(plain[1, :, :, 0], np.asarray(grey))
    all_grey = str(make_tree(tmp_path / "g", [images[0]] * 3, [0, 1, 2]))
    assert sources.load(all_grey).train.channels == 1
    rgb = DataSettings(name=all_grey, channels=3).load().train.images
    assert rgb.shape == (3, 8, 8, 3)
    assert np.array_equal(rgb[0, :, :, 1], np.asarray(grey))
    with pytest.raises(BadInput, match="holds uint8 in 1 channels where 5 are wanted"):
        sources.load(data, reading=Reading(channels=5))


# -- damaged files


def damaged() -> dict[str, bytes]:
    whole = encode(smooth(60, 80), "JPEG")
    return {
        "cut.jpg": whole[: len(whole) // 2],
        "empty.jpg": b"",
        "text.jpg": b"dear diary",
        "half.png": b"\x89PNG\r\n",
    }


def test_damaged_files_are_counted_named_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "flyby")
    root = tree(tmp_path / "d", [(60, 80), (50, 50)] * 4, "JPEG")
    for name, data in damaged().items():
        (root / "cat" / name).write_bytes(data)
    bundle = sources.load(str(root))
    assert len(bundle.train) == 8
    assert sorted(bundle.broken) == ["cat/cut.jpg", "cat/empty.jpg", "cat/half.png", "cat/text.jpg"]
    bundle.tell()
    assert caplog.messages == ["note: 4 broken image(s) skipped: cat/cut.jpg, cat/empty.jpg, cat/half.png and 1 more"]


def test_few_damaged_files_are_said_without_alarm(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "flyby")
    train = bundle_from(np.zeros((400, 2, 2), np.uint8), np.arange(400) % 2).train
    DataBundle("d", train, broken=("a",)).tell()
    assert caplog.messages == []
    assert DataBundle("d", train, broken=("a",)).notes == ["1 broken image(s) skipped: a"]


def test_nothing_whole_is_refused(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "d", [b"x", b"", b"y"], [0, 1, 2])
    with pytest.raises(BadInput, match="all 3 images cannot be decoded"):
        sources.load(str(root))
    both = tmp_path / "both"
    make_tree(both / "train", [b"x"], [0])
    make_tree(both / "test", make_images(3), [0, 1, 2])
    with pytest.raises(BadInput, match=r"none of the training images of .* can be decoded"):
        sources.load(str(both))


def test_a_file_that_may_not_be_read_is_a_broken_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, real = tree(tmp_path / "d", [(20, 20)] * 6), Path.open

    def denied(path: Path, *words: Any, **more: Any) -> Any:
        if path.name == "00004.png":
            raise PermissionError(13, "Permission denied")
        return real(path, *words, **more)

    monkeypatch.setattr(Path, "open", denied)
    shut = photos.seen
    monkeypatch.setattr(
        store, "seen", lambda item, frame: shut(item.open("rb").read() if isinstance(item, Path) else item, frame)
    )
    assert sources.load(str(root)).broken == ("dog/00004.png",)
    monkeypatch.undo()
    monkeypatch.setenv("FLYBY_CACHE", str(tmp_path / "cache"))
    assert sources.load(str(root)).broken == (), "once it can be read it is"


# -- classes before training


def test_what_there_is_of_each_class() -> None:
    assert holding(["cat", "dog"], [3, 0]) == "2 classes: cat 3, dog 0"
    assert holding(["cat"], [3]) == "1 class: cat 3"
    names, counts = [f"c{i}" for i in range(13)], [5, 9, 0, 7, 1, 5, 5, 5, 5, 5, 5, 5, 2]
    assert holding(names, counts) == (
        "13 classes, 59 images: most c1 9, c3 7, c0 5; fewest c12 2, c4 1, c2 0; 1 of them without images"
    )


def test_one_level_too_high_is_seen(tmp_path: Path) -> None:
    for site in ("hospital-a", "hospital-b"):
        make_tree(tmp_path / "d" / site, make_images(3), [0, 1, 2])
    with pytest.raises(BadInput, match=r"one level too high.*hospital-a: cat, dog, owl.*--data .*d/hospital-a\)"):
        sources.load(str(tmp_path / "d"))
    asked = sources.load(str(tmp_path / "d"), reading=Reading(nested=True)).train
    assert asked.class_names == ("hospital-a", "hospital-b")
    assert sources.load(str(tmp_path / "d" / "hospital-a")).train.class_names == NAMES
    make_tree(tmp_path / "e" / "photos", make_images(3), [0, 1, 2])
    with pytest.raises(BadInput, match=r"one level too high.*--data .*e/photos\)"):
        sources.load(str(tmp_path / "e"))
    make_tree(tmp_path / "f" / "train" / "hospital-a", make_images(3), [0, 1, 2])
    make_tree(tmp_path / "f" / "train" / "hospital-b", make_images(3), [0, 1, 2])
    with pytest.raises(BadInput, match="one level too high"):
        sources.load(str(tmp_path / "f"))


def test_what_only_looks_nested_is_taken(tmp_path: Path) -> None:
    make_tree(tmp_path / "a" / "cat", make_images(2), [0, 1], ("tabby", "siamese"))
    make_tree(tmp_path / "a" / "dog", make_images(2), [0, 1], ("poodle", "collie"))
    assert sources.load(str(tmp_path / "a")).train.class_names == ("cat", "dog")
    make_tree(tmp_path / "b" / "cat", make_images(2), [0, 1], ("indoors", "outdoors"))
    make_tree(tmp_path / "b" / "dog", make_images(2), [0, 1], ("indoors", "outdoors"))
    (tmp_path / "b" / "dog" / "one.png").write_bytes(encode(make_images(1)[0]))
    assert sources.load(str(tmp_path / "b")).train.counts() == [2, 3], "a class folder with images of its own is one"


# -- own test images, and models of their own size


def test_test_images_from_another_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = tree(tmp_path / "train-here", [(300, 200), (90, 90)] * 3)
    test = make_tree(
        tmp_path / "other", [encode(smooth(50, 70)), b"junk", encode(smooth(9, 9))], [1, 1, 0], ("owl", "cat")
    )
    bundle = DataSettings(name=str(train), test=str(test)).load()
    assert len(bundle.train) == 6, "nothing is held out beside them"
    assert bundle.test is not None
    assert bundle.test.images.shape == (2, 64, 64, 3)
    assert bundle.test.class_names == NAMES
    assert bundle.test.counts() == [1, 0, 1]
    assert bundle.broken == ("cat/00001.png",)
    assert caplog.messages == []
    DataSettings(name=str(train), test=str(train)).load()
    assert "6 of the 6 test images" in caplog.messages[0]
    moved = DataSettings(name=str(train), test=str(test)).absolute()
    assert (moved.name, moved.test) == (str(train), str(test))
    make_tree(test, [encode(smooth(9, 9))], [0], ("fox",))
    with pytest.raises(BadInput, match=r"has classes that the training data does not know: fox \(1 images\)"):
        DataSettings(name=str(train), test=str(test)).load()


def test_models_take_images_of_any_size(tmp_path: Path) -> None:
    """A model of 8x8 grey images, asked about colour photographs of many sizes."""
    model = tmp_path / "a.parcel"
    parcel.write(random_parcel("a"), model)
    names = random_parcel("a").manifest.class_names
    images = [encode(smooth(*size)) for size in ((30, 20), (50, 80), (9, 9), (300, 200), (10, 10), (12, 12))]
    data = make_tree(tmp_path / "d", [*images, b"junk"], [0, 1, 2, 0, 1, 2, 0], names)
    seen = done("evaluate", model, "--data", data, "--json")
    assert seen.json["images"] == 6
    said = "note: 6 images of 6 sizes (from 9x9 to 200x300): short side to 8, centre 8x8 kept"
    assert said in seen.err
    assert f"note: 1 broken image(s) skipped: {names[0]}/00006.png" in seen.err
    done("predict", model, *sorted(data.rglob("*0.png"))[:1])
    other = make_tree(tmp_path / "e", make_images(3, (20, 30)), [0, 1, 2], names)
    found = done("audit", model, "--members", data, "--others", other, "--json")
    assert "1 broken image(s)" in found.err
    assert found.json["members"] == 6
    assert "(8, 8)" in call("evaluate", model, "--data", data, "--size", 16).err


# -- Parquet


def test_labels_of_parquet_may_be_words(tmp_path: Path) -> None:
    make_parquet(tmp_path / "d", "train", make_images(4), ["dog", "cat", "owl", "cat"], None, shards=2)
    make_parquet(tmp_path / "d", "test", make_images(2), ["owl", "emu"], None)
    bundle = sources.load(str(tmp_path / "d"))
    assert bundle.train.class_names == ("cat", "dog", "emu", "owl")
    assert bundle.train.labels.tolist() == [1, 0, 3, 0]
    assert bundle.test is not None
    assert bundle.test.labels.tolist() == [3, 2]
    make_parquet(tmp_path / "e", "train", make_images(2), ["dog", None], None)
    with pytest.raises(BadInput, match="1 rows without a label"):
        sources.load(str(tmp_path / "e"))
    make_parquet(tmp_path / "f", "train", make_images(2), ["dog", "cat"], None)
    make_parquet(tmp_path / "f", "test", make_images(2), [0, 1], None)
    with pytest.raises(BadInput, match="labels its images with numbers"):
        sources.load(str(tmp_path / "f"))


# -- the page


def test_the_page_names_every_setting_and_source() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    table = page.split("## Settings")[1]
    assert set(re.findall(r"`data\.(\w+)`", table)) == set(DataSettings.model_fields) - {"name"}
    assert all(f".{word}" in page for word in ("csv", "tsv", "npz"))
    assert f"{photos.FIT} x {photos.FIT}" in page
    assert f"no side above {photos.SMALL} pixels" in page
    assert f"where that leaves {photos.DRAFT} pixels" in page
    assert "by-column" in SPLITS
