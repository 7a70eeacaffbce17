"""Memory follows the file. Small files that describe large things come to the real commands in one process whose whole
address space is capped, and each is refused in one sentence; what is allowed is done under the same cap.

The cap is ``RLIMIT_AS`` = 1.5 GB, of which Python with torch and flyby takes .62 GB before the first command. One
process takes all bombs in turn: a refusal must leave nothing behind either.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save

from factories import WAIT, make_stripes, random_parcel, renamed, small_spec, striped_site, trained
from flyby import files
from flyby.errors import BadInput
from flyby.fusion.predictor import FORMAT
from flyby.models import ModelSpec
from flyby.parcels import codecs, parcel, signing
from flyby.parcels.codecs import parse_json
from flyby.parcels.container import head, raw
from flyby.parcels.gate import Gate, Policy
from flyby.parcels.parcel import Parcel

CAP = 1_500_000_000
WIDE = {"conv1": 65536, "conv2": 1, "conv3": 1}
MB = 1_000_000

# Runs every command of the list on its stdin in turn, as the flyby program would, and says how each ended.
DRIVER = """
import contextlib, io, json, os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
import torch
torch.set_num_threads(1)
from flyby import cli

def peak(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

for words in json.loads(sys.stdin.read()):
    with contextlib.suppress(OSError):
        open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before, out, err = peak("VmRSS"), io.StringIO(), io.StringIO()
    sys.argv, code = ["flyby", *words], "traceback"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as left:
            code = left.code or 0
        except BaseException as error:
            err.write(repr(error))
    row = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "grew": peak("VmHWM") - before}
    print(json.dumps(row), flush=True)
"""


def driven(commands: list[Any], script: str = DRIVER) -> list[dict[str, Any]]:
    """What became of each, under the cap."""
    environment = os.environ | {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", script, str(CAP)],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=WAIT,
        env=environment,
        check=False,
    )
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(rows) == len(commands), (ended.returncode, ended.stderr[-2000:])
    return rows


# -- making them


def zeros(spec: ModelSpec, sender: str = "evil", **more: Any) -> Parcel:
    weights = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.shapes().items()}
    names = ["rows", "columns", "checks"] if spec.classes == 3 else [f"c{i}" for i in range(spec.classes)]
    return parcel.make(
        sender=sender, method="fedavg", spec=spec, class_names=names, samples=3, counts=None, weights=weights, **more
    )


def forged(path: Path, edit: Callable[[dict[str, Any]], object], text: bytes | None = None) -> Path:
    """A small honest parcel whose manifest says something else; lengths and hashes are right."""
    item = zeros(small_spec())
    manifest = parse_json(item.manifest.to_bytes())
    edit(manifest)
    start, entries = head(
        text or files.canonical(manifest), b"", {n: (i.dtype, i.shape) for n, i in item.manifest.tensors.items()}
    )
    path.write_bytes(start + b"".join(raw(item.weights[name]) for name in entries))
    return path


def of_spec(**changes: Any) -> Callable[[Path], Path]:
    def edit(manifest: dict[str, Any]) -> None:
        spec = {**manifest["spec"], **changes}
        fields = ModelSpec.model_fields
        manifest["spec"] = {name: value for name, value in spec.items() if value != fields[name].default}  # canonical
        manifest["class_names"] = [f"c{i}" for i in range(min(spec["classes"], 100_000))]

    return lambda path: forged(path, edit)


def written(item: Callable[[], Parcel]) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        parcel.write(item(), path)
        return path

    return make


def sparse(size: int, start: bytes = b"") -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        path.write_bytes(start)
        os.truncate(path, size)
        return path

    return make


def deep(path: Path) -> Path:
    return forged(path, lambda m: None, b'{"provenance":' + b"[" * 500_000 + b"]" * 500_000 + b"}")


def long(path: Path) -> Path:
    return forged(path, lambda m: None, b'{"provenance":[' + b"0," * 5_000_000 + b"0]}")


def half_extra(path: Path) -> Path:
    parcel.write(zeros(small_spec(), extras={"junk": torch.zeros(60 * MB, dtype=torch.float16)}), path)
    return path


def model(path: Path, specs: list[dict[str, Any]], tensors: bytes | None = None, **more: Any) -> Path:
    path.mkdir()
    names = [f"c{i}" for i in range(min(specs[0].get("classes", 2), 100_000))] if specs else []
    config = {"format": FORMAT, "kind": "single", "specs": specs, "class_names": names, "settings": {}, "card": {}}
    (path / "model.json").write_text(json.dumps(config | more))
    if tensors is not None:
        (path / "model.safetensors").write_bytes(tensors)
    return path


def folder(**changes: Any) -> Callable[[Path], Path]:
    """A ``model.json`` of some hundred bytes, beside a file of tensors that is as small."""
    spec = {"name": "cnn-small", "classes": 3, "channels": 1, "size": [8, 8], **changes}
    return lambda path: model(path, [spec], save({"networks.0.head.bias": torch.zeros(3)}))


MEMBER = {"name": "mlp", "classes": 2, "channels": 1, "size": [8, 8]}


def hollow(path: Path) -> Path:
    """The right networks, and one tensor more: 3 GB of nothing in a sparse file."""
    spec = ModelSpec.from_dict(MEMBER)
    kinds = {torch.float32: ("F32", 4), torch.int64: ("I64", 8)}
    shapes: dict[str, Any] = {f"networks.0.{name}": what for name, what in spec.shapes().items()}
    shapes["weights"] = (750 * MB,), torch.float32
    table, end = {}, 0
    for name, (shape, dtype) in shapes.items():
        word, width = kinds[dtype]
        start, end = end, end + width * int(torch.Size(shape).numel())
        table[name] = {"dtype": word, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    model(path, [MEMBER], struct.pack("<Q", len(text)) + text, kind="ensemble")
    os.truncate(path / "model.safetensors", 8 + len(text) + end)
    return path


class Bomb(NamedTuple):
    make: Callable[[Path], Path]
    says: str  # a part of the sentence that refuses it


PARCELS: Mapping[str, Bomb] = {
    "wide": Bomb(written(lambda: zeros(ModelSpec(name="cnn-small", classes=3, size=(32, 32), widths=WIDE))), "memory"),
    "wide at 224": Bomb(of_spec(size=[224, 224], widths=WIDE), "--max-memory"),
    "1024 pixels": Bomb(of_spec(size=[1024, 1024], width=1.0), "--max-memory"),
    "4096 pixels": Bomb(of_spec(size=[4096, 4096]), "--max-side"),
    "100000 pixels": Bomb(of_spec(size=[100_000, 100_000]), "size"),
    "a long strip": Bomb(of_spec(name="mlp", size=[1, 4096]), "--max-side"),
    "64 channels": Bomb(of_spec(size=[1024, 1024], channels=64), "--max-memory"),
    "all widths": Bomb(of_spec(name="resnet34", width=64.0, size=[32, 32]), "--max-parameters"),
    "a wide perceptron": Bomb(of_spec(name="mlp", widths={"fc1": 65536, "fc2": 65536}), "--max-parameters"),
    "projector": Bomb(of_spec(projector=[65536] * 4), "--max-parameters"),
    "wide into classes": Bomb(of_spec(projector=[65536], classes=10_000), "--max-parameters"),
    "many classes": Bomb(of_spec(classes=100_000), "--max-classes"),
    "too many classes": Bomb(of_spec(classes=10**9), "classes"),
    "anchors": Bomb(of_spec(head="etf", classes=10_000, projector=[65536]), "--max-parameters"),
    "many widths": Bomb(of_spec(widths={f"w{i}": -1 for i in range(100_000)}), "100000 widths"),
    "many means": Bomb(of_spec(mean=["x"] * 100_000), "100000 mean"),
    "deep manifest": Bomb(deep, "JSON"),
    "long manifest": Bomb(long, "more than 262144 values"),
    "sparse": Bomb(sparse(1 << 40), "--max-bytes"),
    "sparse within the limit": Bomb(sparse(3 << 30), "not a parcel"),
    "sparse parcel": Bomb(
        lambda path: sparse(3 << 30, forged(path, lambda m: None).read_bytes())(path), "bytes after its end"
    ),
}
# Not refused, and not large either: what one image takes decides how many are answered at a time.
ALLOWED: Mapping[str, Callable[[Path], Path]] = {
    "512 pixels": written(
        lambda: zeros(ModelSpec(name="cnn-small", classes=3, channels=1, size=(512, 512), width=0.5))
    ),
    "almost too wide": written(
        lambda: zeros(ModelSpec(name="cnn-small", classes=3, size=(32, 32), widths={**WIDE, "conv1": 40_000}))
    ),
    "120 MB of half floats": half_extra,
}
MODELS: Mapping[str, Bomb] = {
    "wide": Bomb(folder(widths=WIDE, size=[32, 32]), "--max-memory"),
    "all widths": Bomb(folder(name="resnet34", width=64.0, size=[32, 32]), "--max-parameters"),
    "a wide perceptron": Bomb(folder(name="mlp", widths={"fc1": 65536, "fc2": 65536}), "--max-parameters"),
    "just allowed": Bomb(folder(name="mlp", widths={"fc1": 65536, "fc2": 3000}), "take 803,519,372 bytes"),
    "projector": Bomb(folder(projector=[65536] * 4), "--max-parameters"),
    "1024 pixels": Bomb(folder(size=[1024, 1024]), "--max-memory"),
    "100000 pixels": Bomb(folder(size=[100_000, 100_000]), "size"),
    "many classes": Bomb(folder(classes=100_000), "--max-classes"),
    "many widths": Bomb(folder(widths={f"w{i}": -1 for i in range(300_000)}), "300000 widths"),
    "10000 members": Bomb(
        lambda path: model(path, [MEMBER] * 10_000, save({"weights": torch.zeros(9)}), kind="ensemble"),
        "its 10000 network(s) take 1,991,760,000 bytes",
    ),
    "10000 members and a gate": Bomb(
        lambda path: model(path, [{**MEMBER, "size": [900, 900]}] * 10_000, b"", kind="gated"), "its 10000 network(s)"
    ),
    "deep": Bomb(lambda path: model(path, [], card=None, settings=None) and _nested(path), "JSON"),
    "20 MB of JSON": Bomb(lambda path: model(path, [MEMBER], card={"x": "y" * 20 * MB}), "more than the 16777216"),
    "no tensors": Bomb(lambda path: model(path, [MEMBER]), "has 0"),
    "hollow": Bomb(hollow, "'weights' is ((750000000,)"),
}


def _nested(path: Path) -> Path:
    (path / "model.json").write_bytes(b'{"format":' + b"[" * 500_000 + b"]" * 500_000 + b"}")
    return path


# -- setting them off


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bombs")


@pytest.fixture(scope="module")
def inbox(place: Path) -> dict[str, Path]:
    made = {name: bomb.make(place / f"{name.replace(' ', '-')}.parcel") for name, bomb in PARCELS.items()}
    assert made["wide"].stat().st_size < 11 * MB
    assert all(path.stat().st_size < 11 * MB for name, path in made.items() if "sparse" not in name)
    return made


@pytest.fixture(scope="module")
def data(place: Path) -> Path:
    return make_stripes(place / "stripes.npz", 30, 9)


def refused(row: dict[str, Any], says: str) -> None:
    assert row["code"] == 2, row
    assert row["err"].startswith("flyby: "), row
    assert row["err"].count("\n") == 1, row
    assert says in row["err"], row
    assert "enough memory" not in row["err"], row  # the cap did not have to say it
    assert row["grew"] < 150 * MB, row


def test_parcels_that_would_take_gigabytes_are_refused_by_every_command(
    place: Path, inbox: dict[str, Path], data: Path
) -> None:
    picture = place / "x.png"
    picture.write_bytes(b"")
    ways: dict[str, Callable[[Path], list[object]]] = {
        "fuse": lambda path: ["fuse", path, "--out", place / "out", "--device", "cpu"],
        "inspect": lambda path: ["inspect", path],
        "evaluate": lambda path: ["evaluate", path, "--data", data, "--device", "cpu"],
        "predict": lambda path: ["predict", path, picture, "--device", "cpu"],
    }
    cases = [(name, way) for name in PARCELS for way in ways]
    rows = driven([[str(word) for word in ways[way](inbox[name])] for name, way in cases])
    for (name, way), row in zip(cases, rows, strict=True):
        # Others than the gate look at the first bytes of a file before its size.
        refused(row, "not a parcel" if name == "sparse" and way != "fuse" else PARCELS[name].says)
    assert not (place / "out").exists()


def test_model_folders_of_a_few_hundred_bytes_are_refused(place: Path, data: Path) -> None:
    made = {name: bomb.make(place / f"model-{name.replace(' ', '-')}") for name, bomb in MODELS.items()}
    assert (made["wide"] / "model.json").stat().st_size < 406
    picture = place / "y.png"
    picture.write_bytes(b"")
    cases = [(name, way) for name in MODELS for way in ("evaluate", "predict")]
    rows = driven(
        [
            [way, str(made[name]), *(["--data", str(data)] if way == "evaluate" else [str(picture)]), "--device", "cpu"]
            for name, way in cases
        ]
    )
    for (name, _), row in zip(cases, rows, strict=True):
        refused(row, MODELS[name].says)


def test_what_is_allowed_is_done_within_the_cap(place: Path, data: Path) -> None:
    """A network that takes 70 or 330 MB per image, and an extra of 120 MB, which once took five times as much."""
    made = [make(place / f"allowed-{i}.parcel") for i, make in enumerate(ALLOWED.values())]
    sized = [path.stat().st_size for path in made]
    rows = driven(
        [
            ["fuse", str(p), "--out", str(place / f"done-{i}"), "--no-export", "--device", "cpu"]
            for i, p in enumerate(made)
        ]
        + [["inspect", str(p), "--json"] for p in made]
        + [["evaluate", str(place / "done-0"), "--data", str(data), "--size", "512", "--device", "cpu"]]
    )
    assert [row["code"] for row in rows[:2]] == [0, 0], rows
    assert [row["code"] for row in rows[3:6]] == [0, 0, 0], rows
    for row, size in zip(rows[:6], 2 * sized, strict=True):
        assert "Traceback" not in row["err"], row
        assert "memory" not in row["err"], row
        assert row["grew"] < 1.2 * size + 700 * MB, row
    assert max(rows[2]["grew"], rows[5]["grew"]) < 1.25 * sized[2] + 60 * MB, rows
    assert rows[6]["code"] == 0, rows
    assert rows[6]["grew"] < 700 * MB, rows


def test_a_node_goes_on_without_them(place: Path, inbox: dict[str, Path], data: Path) -> None:
    received = place / "received"
    received.mkdir()
    for name in ("wide", "1024 pixels", "all widths", "many classes", "long manifest", "sparse"):
        os.link(inbox[name], received / inbox[name].name)
    parcel.write(trained(striped_site("me", seed=9, count=30), epochs=1), place / "me.parcel")
    words = ["orient", "--own", place / "me.parcel", "--received", received, "--data", data, "--out", place / "mine"]
    words += ["--method", "fol-n", "--set", "epochs=1", "--no-export", "--device", "cpu", "--json"]
    (row,) = driven([[str(word) for word in words]])
    assert row["code"] == 0, row
    facts = json.loads(row["out"])
    assert sorted(one["stage"] for one in facts["refused"]) == ["cost", "cost", "cost", "cost", "header", "size"]
    assert row["grew"] < 200 * MB, row


# -- reading costs what the file holds

# One path per line of the list: what reading it and looking at its norms adds to the process, at its peak.
READER = """
import gc, json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
import torch
torch.set_num_threads(1)
from flyby.parcels import parcel, plausible

def now(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

for path in json.loads(sys.stdin.read()):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = now("VmRSS")
    item = parcel.read(path)
    plausible.norms(item, path, plausible.Policy())
    held = sum(t.nbytes for t in (*item.weights.values(), *item.extras.values()))
    del item
    print(json.dumps({"held": held, "grew": now("VmHWM") - before}), flush=True)
"""


def test_reading_takes_little_more_than_what_is_read(place: Path) -> None:
    """Whatever the codec, one large tensor or many: the peak is what the parcel holds in the end, and 16 MB more."""
    spec = small_spec("mlp", size=64, widths={"fc1": 2048, "fc2": 512})
    made = {codec: zeros(spec, codec=codec) for codec in ("fp16", "int8", "int4")}
    for kind in (torch.float16, torch.float32, torch.bool):
        made[str(kind)] = zeros(small_spec(), extras={"junk": torch.zeros(40 * MB // kind.itemsize, dtype=kind)})
    paths = [place / f"read-{i}.parcel" for i in range(len(made))]
    for path, item in zip([paths[0], *paths], [made["fp16"], *made.values()], strict=True):
        parcel.write(item, path)
    rows = driven([str(path) for path in [paths[0], *paths]], READER)[1:]  # the first also loads what loads lazily
    for name, path, row in zip(made, paths, rows, strict=True):
        stored = max((one.numel() * 4 for one in made[name].weights.values()), default=0) if "int" in name else 0
        assert row["grew"] < max(row["held"], path.stat().st_size) + stored + 16 * MB, (name, row)


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (5, 64), (2, 3, 33), (70, 7), (1, 4097)])
def test_four_bits_are_decoded_in_tiles(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    codec = codecs.codec("int4")
    stored = codec.encode("w", values)
    whole = codec.decode("w", stored, shape)
    for tile in (1, 2, 5):
        monkeypatch.setattr(codecs, "TILE", tile)
        assert torch.equal(codec.decode("w", stored, shape), whole)
    # The last row's last byte: a value of -8 is refused wherever it stands.
    stored["w"][-1, -1] = 0
    with pytest.raises(BadInput, match="int4"):
        codec.decode("w", stored, shape)


# -- who decides


def sized(sender: str, size: int, seed: int = 0, **more: Any) -> Parcel:
    return random_parcel(sender, small_spec(size=size, **more), seed=seed)


def let_in(gate: Gate, items: list[Parcel]) -> list[str]:
    for item in items:
        gate.check(item)
    gate.settle()
    return sorted(one.manifest.sender for one in gate.waiting)


def test_most_decide_the_size_and_never_the_order(tmp_path: Path) -> None:
    small = [sized(f"s{i}", 8, i) for i in range(2)]
    large = [sized(f"a{i}", 16, i) for i in range(3)]
    for items in (small + large, large + small, large[::-1] + small):
        assert let_in(Gate(), items) == ["a0", "a1", "a2"]
    for items in (small + large[:2], large[:2] + small):  # as many: the smaller images, which cost less
        assert let_in(Gate(), items) == ["s0", "s1"]
    # One model under three names is one voice, and its names only matter once.
    copies = [renamed(large[0], f"copy{i}") for i in range(3)]
    assert let_in(Gate(), copies + small) == ["s0", "s1"]
    # A trusted sender outvotes any number of strangers, whether they sign or not.
    secret, public, _ = signing.new_key("hospital", tmp_path)
    stranger, _, _ = signing.new_key("a0", tmp_path)
    trust = signing.Trust()
    trust.add("hospital", signing.read_public(public))
    known = signing.sign(sized("hospital", 8, 7), signing.read_private(secret))
    signed = signing.sign(large[0], signing.read_private(stranger))
    for items in ([known, signed, *large[1:]], [signed, *large[1:], known]):
        assert let_in(Gate(trust=trust), items) == ["hospital"]
    # The same for the architecture, where a rule needs one.
    wide, narrow = [sized(f"w{i}", 8, i, width=0.5) for i in range(2)], [sized(f"n{i}", 8, i) for i in range(2)]
    chosen = []
    for items in (wide + narrow, narrow + wide):
        gate = Gate()
        for item in items:
            gate.check(item)
        chosen.append(sorted(one.manifest.sender for one in gate.settle(rule="fedavg")))
    assert chosen[0] == chosen[1]
    assert chosen[0] in (["w0", "w1"], ["n0", "n1"])


def test_validation_images_are_decoded_at_the_size_of_most(place: Path, data: Path) -> None:
    """Two files tie: whichever is named first, the images are decoded at 8 pixels, and 512 is refused unread."""
    small, large = place / "tie-small.parcel", place / "tie-large.parcel"
    parcel.write(trained(striped_site("site", seed=3, count=48), epochs=3), small)
    parcel.write(sized("aaa", 512), large)
    end = ["--validation", str(data), "--min-sites", "1", "--fusion", "fedavg", "--no-export", "--device", "cpu"]
    end += ["--json"]
    orders = [[small, large], [large, small]]
    rows = driven([["fuse", *map(str, o), "--out", str(place / f"tie-{i}"), *end] for i, o in enumerate(orders)])
    for row in rows:
        assert row["code"] == 0, row
        facts = json.loads(row["out"])
        assert [(one["sender"], one["stage"]) for one in facts["refused"]] == [("aaa", "fit")]
        assert row["grew"] < 100 * MB, row


def test_what_costs_far_more_than_the_others_is_refused_before_it_is_trained_through() -> None:
    honest = [sized(f"n{i}", 32, i) for i in range(3)]
    dear = sized("dear", 32, widths={"conv1": 8192, "conv2": 1, "conv3": 1})
    gate = Gate()
    assert let_in(gate, [dear, *honest]) == ["n0", "n1", "n2"]
    assert [(one.sender, one.stage) for one in gate.refused] == [("dear", "cost")]
    assert "bytes per image where n0" in gate.refused[0].reason
    assert let_in(Gate(Policy(cost_floor=1 << 30)), [dear, *honest]) == ["dear", "n0", "n1", "n2"]
