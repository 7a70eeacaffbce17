"""Out of flyby: what onnxruntime says of a model is what torch says, for every server rule that there is; and the
exported folder runs where there is neither flyby nor torch."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from factories import WAIT, make_images, stripes
from flyby.data.dataset import Dataset
from flyby.data.site import Part, Site
from flyby.deploy.onnx import FILES, check_free, export_folder, write_onnx
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, Inbox, Server
from flyby.fusion.base import Fusion
from flyby.fusion.predictor import PREDICTORS, Ensemble, Predictor, Single
from flyby.models import ModelSpec
from flyby.models.shelf import Shelf
from flyby.objectives import OBJECTIVES
from flyby.objectives.base import Objective
from flyby.parcels import parcel
from flyby.parcels.parcel import Parcel
from flyby.runs.backbones import own
from flyby.statistics.catalogue import STATISTICS

# Looked for, and imported where they are used: whoever only collects the tests needs none of their seconds.
MISSING = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the extra onnx is not installed: {MISSING}")

NAMES = ("ant", "bee", "cat")
# Work that a rule may be asked to do less of: the form of what it makes is the same.
LITTLE = {"epochs": 1, "steps": 1, "images": 16, "batch": 8, "iterations": 1}
MLP = ModelSpec(name="mlp", classes=3, channels=1, size=(8, 8), widths={"fc1": 6, "fc2": 6})  # the quickest to trace
TILES = ModelSpec(name="mlp", classes=3, channels=5, size=(4, 4), width=0.1, pixels="float32")
CNN = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8), widths={"conv1": 4, "conv2": 5, "conv3": 6})


@pytest.fixture(scope="module", autouse=True)
def one_table() -> Iterator[None]:
    """torch makes its table of operators anew for every export, two thirds of the time of a small one: once is enough
    here."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            real = functools.cache(ONNXRegistry.from_torchlib)
            patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(real))
        except (ImportError, AttributeError):
            pass  # another torch: the tests are slower, and the same
        yield


def objective_for(rule: Fusion) -> Objective:
    """The first objective whose sites send what the rule needs."""
    for kind in OBJECTIVES.values():
        settings = kind.settings_type(send=tuple(sorted(rule.needs & set(STATISTICS))))
        if rule.needs <= kind.provided(settings) | {"weights"}:
            return kind(settings)
    raise AssertionError(f"no objective sends what {rule.name} needs")


def sent_by(objective: Objective, k: int, spec: ModelSpec = MLP, seed: int | None = None) -> Parcel:
    """What site k sends, untrained."""
    drawn = torch.Generator().manual_seed(k if seed is None else seed)
    images, labels = (torch.from_numpy(one) for one in stripes(30, seed=k))
    part = Part(images, labels)
    site = Site(f"site-{k}", part, part, part, NAMES)
    spec = type(objective).adapt_spec(spec, objective.settings)
    network = spec.build(drawn).eval()
    objective.prepare(network, site, 0)
    extras, meta = objective.extras(network, site, 0)
    facts: dict[str, Any] = {"sender": site.id, "method": objective.name, "spec": spec, "class_names": NAMES}
    facts |= {"samples": 30, "counts": (10, 10, 10), "meta": meta}
    return parcel.make(weights=network.state_dict(), extras=extras, **facts)


def fused(rule: Fusion, objective: Objective | None = None, spec: ModelSpec = MLP) -> Predictor:
    sums = "feature-sums" in rule.needs  # whose sites look through the same eyes
    parcels = [sent_by(objective or objective_for(rule), k, spec, 0 if sums else k) for k in range(2)]
    proxy = Dataset(*stripes(16, seed=9), NAMES, "proxy")
    return rule.fuse(Inbox(parcels), Server(None if rule.data_free else proxy))


def ruled(name: str, **words: Any) -> Fusion:
    kind = FUSIONS[name]
    little = {key: value for key, value in LITTLE.items() if key in kind.settings_type.model_fields}
    return kind(kind.settings_type(**little, **words))


def told_alike(predictor: Predictor, path: Path, images: Any) -> None:
    """onnxruntime and torch say the same of these images, all at once and a few at a time."""
    import onnxruntime

    write_onnx(predictor, path)
    session = onnxruntime.InferenceSession(path)
    with torch.no_grad():
        wanted = predictor.chances(predictor(torch.from_numpy(images))).numpy()
    found = session.run(["probabilities"], {"images": images})[0]
    assert np.abs(found - wanted).max() < 1e-4
    assert (found.argmax(1) == wanted.argmax(1)).mean() > 0.99  # ties of untrained networks
    assert np.abs(found.sum(1) - 1).max() < 1e-4
    if predictor.least == 1:
        assert np.abs(session.run(None, {"images": images[:1]})[0] - wanted[:1]).max() < 1e-4
    assert len(np.unique(found.round(5), axis=0)) > 10, "it says the same of every image"


PICTURES = stripes(200, seed=5)[0]


EVERY = os.environ.get("FLYBY_TEST_ONNX") == "all"  # an export takes two seconds of a core, and there are many rules


def test_onnx_is_torch_for_every_server_rule(tmp_path: Path) -> None:
    """Each rule is fused from tiny uploads, and one of each kind of predictor compared; FLYBY_TEST_ONNX=all compares
    them all. Shares are under a temperature; ``best`` has members that look at all turns of an image."""
    seen: dict[str, list[str]] = {}
    bearings = OBJECTIVES["bearings"]
    for name in FUSIONS:
        turning = bearings(bearings.settings_type(shift="turns", most_classes=10)) if name == "best" else None
        predictor = fused(ruled(name), turning).eval()
        rules = seen.setdefault(predictor.kind, [])
        rules.append(name)
        if len(rules) == 1 or EVERY:
            predictor.temperature = 0.7
            told_alike(predictor, tmp_path / f"{name}.onnx", PICTURES)
    assert sorted(name for rules in seen.values() for name in rules) == sorted(FUSIONS)
    assert set(seen) == set(PREDICTORS), "a kind of predictor that no rule makes was not compared"


BACKBONE = ModelSpec(name="cnn-small", classes=4, channels=3, size=(12, 12), width=0.25)


def test_onnx_is_torch_on_a_backbone_and_for_tiles(tmp_path: Path) -> None:
    """Grey images are coloured and enlarged for a backbone of convolutions; tiles are float32 in five channels."""
    named = own(BACKBONE, BACKBONE.build(torch.Generator().manual_seed(1)).state_dict())
    spec = ModelSpec(name=named.name, backbone=named.backbone, classes=3, channels=1, size=(8, 8))
    told_alike(Single([spec], NAMES, [spec.build()]), tmp_path / "backbone.onnx", PICTURES)
    tiles = np.random.RandomState(0).randn(200, 4, 4, 5).astype(np.float32)
    told_alike(Single([TILES], NAMES, [TILES.build()]), tmp_path / "tiles.onnx", tiles)


# -- the folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Predictor, Path]:
    spec = CNN.replace(channels=3, size=(10, 8))
    predictor = Single([spec], NAMES, [spec.build(torch.Generator().manual_seed(4))])
    out = tmp_path_factory.mktemp("out") / "onnx"
    card = {"fusion": "fedavg", "sites": 2, "license": "apache-2.0"}
    assert export_folder(predictor, out, card) == ["README.md", "classes.json", "model.onnx", "run.py"]
    return predictor, out


def test_the_folder_runs_without_flyby_and_torch(folder: tuple[Predictor, Path], tmp_path: Path) -> None:
    """``run.py`` reads a turned JPEG, a transparent PNG and a grey one as flyby does."""
    from flyby.data.sources import read_image

    predictor, out = folder
    smooth = Image.fromarray(np.kron(make_images(1, (6, 9))[0], np.ones((50, 50, 1), np.uint8)))
    turned = Image.Exif()
    turned[0x0112] = 6
    smooth.save(tmp_path / "turned.jpg", exif=turned)
    Image.fromarray(make_images(1, (30, 20), 4)[0], "RGBA").save(tmp_path / "clear.png")
    Image.fromarray(stripes(1, size=16)[0][0, :, :, 0]).save(tmp_path / "grey.png")
    paths = [tmp_path / name for name in ("turned.jpg", "clear.png", "grey.png")]
    alone = (
        "import runpy, sys\nsys.argv, sys.modules['flyby'], sys.modules['torch'] = sys.argv[1:], None, None\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    (tmp_path / "broken.png").write_bytes(b"")
    words = [sys.executable, "-c", alone, str(out / "run.py"), "broken.png", *map(str, paths), "nowhere.png"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=WAIT, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [line.split(" cannot be read: ")[0] for line in ended.stderr.splitlines()] == ["broken.png", "nowhere.png"]
    pixels = torch.from_numpy(np.stack([read_image(path, 3, (10, 8)) for path in paths]))
    with torch.no_grad():
        shares = predictor.chances(predictor(pixels))
    for line, path, share in zip(ended.stdout.splitlines(), paths, shares, strict=True):
        name, told = line.removeprefix(f"{path}: ").removesuffix(")").split(" (")
        assert name == NAMES[int(share.argmax())]
        assert abs(float(told) - float(share.max())) < 0.02


def test_the_folder_says_what_it_is(folder: tuple[Predictor, Path]) -> None:
    _, out = folder
    facts = json.loads((out / "classes.json").read_text())
    assert facts == {
        **{"classes": list(NAMES), "height": 10, "width": 8, "channels": 3, "pixels": "uint8", "mode": "RGB"},
    }
    card = (out / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "uint8 N x 10 x 8 x 3 (any N)" in card
    assert "model.pt2" not in card
    lines = [line for line in (out / "run.py").read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 25
    check_free(out)  # an older one may be replaced
    assert {path.name for path in out.iterdir()} <= set(FILES)


def test_tiles_are_read_as_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flyby.deploy.onnx.write_onnx", lambda predictor, path: path.write_bytes(b""))
    export_folder(Single([TILES], NAMES, [TILES.build()]), tmp_path / "onnx", {})
    text = (tmp_path / "onnx" / "run.py").read_text()
    assert "np.load(path, allow_pickle=False)" in text
    assert "PIL" not in text
    compile(text, "run.py", "exec")


# -- what cannot be


def test_a_model_on_a_shelf_and_a_rule_without_a_word_in_onnx_are_one_sentence(tmp_path: Path) -> None:
    shelf = Shelf(2, lambda place: MLP.build())
    with pytest.raises(BadInput, match=r"2 networks are too many to be held at once.*flyby fuse --compact"):
        write_onnx(Ensemble([MLP, MLP], NAMES, shelf), tmp_path / "model.onnx")

    class Odd(Single):
        kind = "odd"

        def combine(self, voices: Any, images: torch.Tensor) -> torch.Tensor:
            return torch.special.bessel_j0(voices[0])

    with pytest.raises(BadInput, match="the rule 'odd' does something that ONNX has no word for") as caught:
        write_onnx(Odd([MLP], NAMES, [MLP.build()]), tmp_path / "model.onnx")
    assert "\n" not in str(caught.value)


def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(BadInput, match=r"pip install 'flyby\[onnx\]'"):
        write_onnx(Single([MLP], NAMES, [MLP.build()]), tmp_path / "model.onnx")
