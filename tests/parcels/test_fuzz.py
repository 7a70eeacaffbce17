"""The parcel reader under attack: 20,000 damaged and forged files in a watched process, the dearest files known, and
named ones."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import WAIT, done
from flyby import files
from flyby.errors import BadInput
from flyby.models.spec import ModelSpec
from flyby.parcels import container, parcel
from flyby.parcels.codecs import CODECS, parse_header, parse_json
from flyby.parcels.parcel import Corrupt, NotFinite, ParcelError, TooLarge, Truncated, WrongShape

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from forgeries import BIDI, HUGE, Forgery, honest  # noqa: E402

GOOD = honest()
MIB = 1 << 20
SMALL = {"name": "mlp", "classes": 2, "channels": 1, "size": [2, 2]}


def fuzz(*words: object) -> dict[str, Any]:
    """``benchmarks/fuzz.py`` in a process of its own: its memory is limited, and what it does is watched."""
    ended = subprocess.run(
        [sys.executable, str(BENCHMARKS / "fuzz.py"), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert ended.returncode == 0, (ended.returncode, ended.stdout[-3000:], ended.stderr[-3000:])
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def watched(code: str) -> str:
    """What a few lines print that use the rules of ``benchmarks/fuzz.py``, in a process of their own (an audit hook
    stays for ever)."""
    lines = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\nimport fuzz, torch\n{code}"
    return subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, timeout=WAIT, check=True
    ).stdout


# The loop


def test_twenty_thousand_cases(tmp_path: Path) -> None:
    found = fuzz("--cases", 20_000, "--seed", 0, "--memory", 512, "--slowest", 30, "--keep", tmp_path)
    assert found["cases"] == 20_000
    assert found["findings"] == []
    seen = found["outcomes"]
    assert set(seen) <= {
        "accepted",
        "ParcelError",
        "NotAParcel",
        "Truncated",
        "SchemaMismatch",
        "Corrupt",
        "WrongShape",
        "NotFinite",
        "TooLarge",
    }
    assert len(seen) >= 8, "each check was reached"
    assert min(seen["WrongShape"], seen["accepted"]) > 1000, "many got past the outer checks"
    assert len(found["damage"]) == 9
    assert list(tmp_path.iterdir()) == []


def test_the_dearest_files_stay_within_512_mib(tmp_path: Path) -> None:
    found = fuzz("--costly", "--memory", 512, "--slowest", 120, "--keep", tmp_path)
    assert found["findings"] == []
    assert len(found["costly"]) == 10
    assert {case["outcome"] for case in found["costly"].values()} == {"accepted", "Corrupt"}


def test_the_rules_would_notice(tmp_path: Path) -> None:
    """A watch that sees nothing and a limit that limits nothing would make the two tests above worthless."""
    seen = watched(f"""
import os, subprocess, tempfile
from pathlib import Path
watch = fuzz.Watch()
def does(action):
    fuzz.read_one = lambda *_: (action(), "accepted")[1]
    print(len(fuzz.tried("case", b"content", None, True, 60, Path({str(tmp_path)!r}), watch)[2]), end=" ")
does(lambda: open({str(tmp_path / "written")!r}, "w").close()); does(lambda: os.remove({str(tmp_path / "written")!r}))
does(lambda: exec("1")); does(lambda: eval("1")); does(lambda: subprocess.run(["true"]))
does(lambda: __import__("wave")); does(lambda: 1 / 0)
does(lambda: None); does(lambda: open(fuzz.__file__, "rb").close())
print(len(fuzz.tried("case", b"", None, True, 0, Path({str(tmp_path)!r}), watch)[2]))  # no case takes no time at all
fuzz.limit_memory(64)
for kind, size in ((torch.ByteTensor, 128), (bytearray, 128), (bytearray, 16)):
    try:
        kind(size << 20); print("taken")
    except (RuntimeError, MemoryError):
        print("refused")
""")
    assert seen.split() == ["1"] * 7 + ["0", "0", "1"] + ["refused", "refused", "taken"]
    assert (tmp_path / "case.parcel").exists()


# Named cases


def refusal(action: Callable[[], object], printable: bool = True) -> str | None:
    """What was said against something, in one printable line; None if it was taken. Any other error is the test's."""
    try:
        action()
    except BadInput as error:
        said = str(error)
    else:
        return None
    assert said.isprintable() or not printable
    return said


def refused(
    edit: Callable[[Forgery], object], kind: type[ParcelError], message: str | None = None, data: bytes = GOOD[0]
) -> None:
    forged = Forgery(data)
    edit(forged)
    made = forged.bytes()
    tracemalloc.start()
    try:
        with pytest.raises(kind, match=message) as caught:
            parcel.from_bytes(made)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(caught.value) is kind
    assert str(caught.value).isprintable()
    assert peak < 16 * MIB + 20 * len(made)


def first(forged: Forgery) -> dict[str, Any]:
    entry: dict[str, Any] = next(iter(forged.table.values()))
    return entry


def alike(**changes: Any) -> Callable[[Forgery], None]:
    """The same change of a tensor in the manifest and in the payload's header."""

    def edit(forged: Forgery) -> None:
        name = next(iter(forged.table))
        forged.table[name].update(changes)
        forged.manifest["tensors"][name].update({key: value for key, value in changes.items() if key != "data_offsets"})

    return edit


def many_classes(forged: Forgery) -> None:
    forged.manifest |= {"class_names": [f"c{i}" for i in range(100_000)], "counts": None}
    forged.manifest["spec"]["classes"] = 100_000


@pytest.mark.parametrize(
    ("edit", "kind", "message"),
    [
        (alike(shape=[2**47], data_offsets=[0, 2**49]), Corrupt, "offsets"),
        (alike(shape=[2**40], data_offsets=[0, 2**42]), Corrupt, "starts at byte|tensors take"),
        (alike(shape=[2**63]), Corrupt, "shape"),
        (alike(shape=[2**64, 2**64]), Corrupt, "shape"),
        (alike(shape=[-1]), Corrupt, "shape"),
        (alike(shape=[-(2**63), -1]), Corrupt, "shape"),
        (alike(shape=[10**4000]), Corrupt, "shape"),
        (alike(shape=[0, 2**47, 2**47]), Corrupt, "impossible shape"),
        (alike(dtype="F31"), Corrupt, "dtype"),
        (alike(dtype="f32"), Corrupt, "dtype"),
        (alike(dtype="complex64"), Corrupt, "dtype"),
        (lambda f: f.manifest["spec"].update(widths=HUGE), WrongShape, "where its model has"),
        (lambda f: f.manifest["spec"].update(size=[4096, 4096], channels=64), WrongShape, "where its model has"),
        (lambda f: f.manifest.update(spec={**SMALL, "width": 64.0}), WrongShape, "where its model has"),
        (
            lambda f: f.manifest.update(spec={**SMALL, "name": "resnet34", "width": 64.0}),
            WrongShape,
            "lacks|does not have",
        ),
        (lambda f: f.manifest["spec"].update(projector=[65536] * 4), WrongShape, "lacks|where its model has"),
        (lambda f: f.manifest["spec"].update(projector=[65536] * 5), Corrupt, "projector"),
        (lambda f: f.manifest["spec"].update(width=1e308), Corrupt, "width"),
        (lambda f: f.manifest["spec"].update(width=-1.0), Corrupt, "width"),
        (lambda f: f.manifest["spec"].update(size=[2**63, 1]), Corrupt, "size"),
        (lambda f: f.manifest["spec"].update(classes=2**63), Corrupt, "classes"),
        (many_classes, WrongShape, "where its model has"),
        (lambda f: f.manifest.update(samples=2**63, counts=None), Corrupt, "samples"),
        (lambda f: f.manifest.update(samples=-1, counts=None), Corrupt, "samples"),
        (lambda f: f.manifest.update(tensors={str(i): {} for i in range(20_000)}), Corrupt, "20000 tensors"),
    ],
)
def test_promises_of_something_huge_or_impossible(
    edit: Callable[[Forgery], object], kind: type[ParcelError], message: str
) -> None:
    refused(edit, kind, message)


def test_a_short_file_that_promises_much_is_refused_by_its_size() -> None:
    start = parcel.MAGIC + struct.pack("<HHIIQ", 1, 0, 0, 0, 1 << 40)
    with pytest.raises(Truncated, match="28 of the 1099511627804 bytes"):
        parcel.from_bytes(start)


def test_offsets_that_overlap_or_leave_gaps() -> None:
    def second(forged: Forgery) -> dict[str, Any]:
        entry: dict[str, Any] = list(forged.table.values())[1]
        return entry

    def shift(forged: Forgery, by: int) -> None:
        offsets = second(forged)["data_offsets"]
        second(forged)["data_offsets"] = [offsets[0] + by, offsets[1] + by]

    refused(lambda f: shift(f, 4), Corrupt, "starts at byte")
    refused(lambda f: shift(f, -4), Corrupt, "starts at byte")
    refused(
        lambda f: second(f).update(data_offsets=first(f)["data_offsets"], shape=first(f)["shape"]),
        Corrupt,
        "starts at byte",
    )
    refused(
        lambda f: f.data.update({next(iter(f.data)): next(iter(f.data.values())) + b"\0\0\0\0"}),
        Corrupt,
        "tensors take",
    )


def test_a_tensor_named_twice() -> None:
    honest_text: list[bytes] = []

    def check(text: bytes) -> bytes:
        honest_text.append(text)
        made = text.rstrip()[:-1] + b"," + text[1:]
        assert list(json.loads(made)) == list(json.loads(text)), "Python's own reader would not have noticed"
        return made

    refused(lambda f: setattr(f, "table_text", check), Corrupt, "a key stands twice")
    assert honest_text


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "..",
        ".",
        ".hidden",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "a\0b",
        "\0",
        "x" * 129,
        BIDI,
        "\u202e",
        "a b",
        "a\n",
        "",
        "é",
        "\ud800",
    ],
)
def test_names_that_are_paths_or_tricks(name: str) -> None:
    refused(lambda f: f.manifest.update(sender=name), Corrupt, "sender|JSON|UTF-8|utf-8")
    if not name.startswith("."):  # an extra is a name in a table, never one of a file
        refused(lambda f: f.manifest.update(extras=[name]), Corrupt, "extras|JSON|UTF-8|utf-8")

    def rename(forged: Forgery) -> None:
        for holder in (forged.table, forged.data, forged.manifest["tensors"]):
            holder[name] = holder.pop(next(iter(forged.table)) if holder is forged.table else next(iter(holder)))

    forged = Forgery(GOOD[0])
    rename(forged)
    assert refusal(lambda: parcel.from_bytes(forged.bytes())) is not None


def test_an_extra_with_dots_stays_in_its_table(tmp_path: Path) -> None:
    """``extra::..`` is allowed as a name: nothing makes a path of it."""
    made = parcel.from_bytes(GOOD[0])
    again = parcel.make(
        sender="a",
        method="m",
        spec=made.manifest.spec,
        class_names=made.manifest.class_names,
        samples=1,
        weights=made.weights,
        extras={"..": torch.ones(1)},
    )
    parcel.write(again, tmp_path / "a.parcel")
    assert list(parcel.read(tmp_path / "a.parcel").extras) == [".."]
    assert [p.name for p in tmp_path.iterdir()] == ["a.parcel"]


def test_a_hundred_megabytes_of_json_are_not_read(tmp_path: Path) -> None:
    long = 100_000_000
    manifest = tmp_path / "manifest.parcel"
    with manifest.open("wb") as file:
        file.write(parcel.MAGIC + struct.pack("<HHIIQ", 1, 0, long, 0, 0) + b"{")
        file.truncate(28 + long)
    text = files.canonical(Forgery(GOOD[0]).manifest)
    header = tmp_path / "header.parcel"
    with header.open("wb") as file:
        file.write(
            parcel.MAGIC + struct.pack("<HHIIQ", 1, 0, len(text), 0, 8 + long) + text + struct.pack("<Q", long) + b"{"
        )
        file.truncate(28 + len(text) + 8 + long)
    for path, kind, message in (
        (manifest, TooLarge, "manifest of 100000000"),
        (header, Corrupt, "header of 100000000 bytes, beyond 16777216"),
    ):
        for action in (parcel.read, parcel.read_manifest):
            tracemalloc.start()
            try:
                with pytest.raises(kind, match=message):
                    action(path)  # type: ignore[operator]
                assert tracemalloc.get_traced_memory()[1] < MIB
            finally:
                tracemalloc.stop()


@pytest.mark.parametrize(
    "value",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e400",
        b"1" + b"0" * 10_000,
        b"-1" + b"0" * 10_000,
        b"0" * 10_000,
        b'"\\ud800"',
        b"\xff\xfe",
        b"'a'",
        b"0x10",
        b"1_000",
        b"+1",
        b".5",
        b"1.",
        b"tru",
        b"/**/1",
        b"",
    ],
)
def test_values_that_json_should_not_have(value: bytes) -> None:
    def in_manifest(forged: Forgery) -> None:
        forged.manifest_text = files.canonical(forged.manifest).replace(b'"seed":7', b'"seed":' + value)
        assert value in forged.manifest_text or not value

    refused(in_manifest, Corrupt)
    refused(lambda f: setattr(f, "table_text", lambda text: b'{"x":' + value + b"," + text[1:]), Corrupt)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("scale", [float("inf"), -float("inf"), float("nan"), -1.0, 3.4e38])
def test_scales_that_are_not_numbers(codec: str, scale: float) -> None:
    data = next(d for d in GOOD if Forgery(d).manifest["codec"] == codec)

    def edit(forged: Forgery) -> None:
        name = next(n for n in forged.table if n.endswith("::scale"))
        forged.data[name] = struct.pack("<f", scale) * (len(forged.data[name]) // 4)
        forged.hashed()

    refused(edit, Corrupt if scale == -1.0 else NotFinite, "scale|weight", data)


def test_a_hostile_provenance_does_not_reach_the_terminal(tmp_path: Path) -> None:
    forged = Forgery(GOOD[0])
    for versions in (3, [1], {"flyby": "\x1b[2J"}, None):
        forged.manifest["provenance"] = {
            "versions": versions,
            "seed": "\x1b]0;gone\x07",
            "privacy": {"total_epsilon": ["\x1b[31m"]},
        }
        path = tmp_path / "a.parcel"
        path.write_bytes(forged.bytes())
        text = done("inspect", path).out
        assert all(c.isprintable() for c in text.replace("\n", ""))
        assert "trained by" in text
    forged.manifest["provenance"] = {"privacy": 3}
    path.write_bytes(forged.bytes())
    assert "privacy" not in done("inspect", path).out


# Properties

names = st.text(max_size=12) | st.sampled_from(list(ModelSpec.model_fields))
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from([2**63, 10**400, "mlp", "cnn-small", "linear"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(names, inner, max_size=5), max_leaves=12
)


@settings(max_examples=250)
@given(st.sampled_from(sorted(Forgery(GOOD[0]).manifest)), values, st.sampled_from(GOOD))
def test_any_value_in_any_place_of_a_manifest(key: str, value: Any, data: bytes) -> None:
    forged = Forgery(data)
    forged.manifest[key] = value
    refusal(lambda: parcel.from_bytes(forged.bytes()))


likely = {
    "name": st.sampled_from(["mlp", "cnn-small", "lenet", "cnn-fol", "vgg-wildfire", "resnet18", "mobilenetv2"]),
    "classes": st.integers(2, 100_000),
    "channels": st.integers(1, 64),
    "size": st.lists(st.integers(1, 4096), min_size=2, max_size=2),
    "head": st.sampled_from(["linear", "prototype", "etf"]),
    "width": st.floats(0.001, 64),
    "stem": st.sampled_from(["cifar", "imagenet"]),
    "widths": st.dictionaries(st.sampled_from(["fc1", "conv1", "conv2", "x"]), st.integers(1, 65536), max_size=3),
    "logit_scale": st.booleans(),
    "projector": st.lists(st.integers(1, 65536), max_size=4),
    "mean": st.lists(st.floats(-100, 100), max_size=3),
}


@settings(max_examples=250)
@given(
    st.fixed_dictionaries(
        {k: likely[k] for k in ("name", "classes", "size")},
        optional={k: v for k, v in likely.items() if k not in ("name", "classes", "size")},
    )
)
def test_a_spec_is_refused_or_described_without_taking_its_memory(given_spec: dict[str, Any]) -> None:
    """The largest of these networks would take petabytes; its shapes are known all the same."""
    try:
        shapes = ModelSpec.from_dict(given_spec).shapes()
    except BadInput:
        return
    assert all(min(shape, default=1) >= 1 for shape, _ in shapes.values())


@settings(max_examples=150)
@given(st.dictionaries(names, values, max_size=4))
def test_any_dictionary_as_a_spec(given_spec: dict[str, Any]) -> None:
    assert len(refusal(lambda: ModelSpec.from_dict(given_spec).shapes(), printable=False) or "") < 2000


@settings(max_examples=150)
@given(
    values
    | st.dictionaries(
        names, st.fixed_dictionaries({"dtype": scalars, "shape": values, "data_offsets": values}), max_size=3
    ),
    st.integers(0, 100),
)
def test_any_json_as_a_payload_header(value: Any, length: int) -> None:
    try:
        metadata, entries = parse_header(json.dumps(value).encode(), length)
    except BadInput:
        return
    assert sum(entry.end - entry.start for entry in entries.values()) == length
    assert metadata is None or metadata == value["__metadata__"]


@settings(max_examples=150)
@given(st.binary(max_size=60))
def test_any_bytes_as_json_and_as_a_file(data: bytes) -> None:
    with pytest.raises(ParcelError):
        parcel.from_bytes(data)
    with pytest.raises(ParcelError):
        parcel.from_bytes(parcel.MAGIC + data)
    try:
        assert isinstance(parse_json(data), dict)
    except BadInput:
        return


@settings(max_examples=100)
@given(st.sampled_from(sorted(CODECS)), st.lists(st.integers(1, 40), max_size=3), st.randoms(use_true_random=False))
def test_any_bytes_as_stored_numbers(codec: str, extents: list[int], chance: Any) -> None:
    """Whatever lies in the file, a tensor of the layout's shapes decodes to the spec's shape, or is refused."""
    shape = tuple(extents)
    stored = {}
    for name, (dtype, size) in CODECS[codec].layout("w", torch.float32, shape).items():
        raw = bytearray(chance.randbytes(dtype.itemsize * torch.Size(size).numel()))
        stored[name] = torch.frombuffer(raw, dtype=dtype).reshape(size)
    try:
        decoded = CODECS[codec].decode("w", stored, shape)
        container.check_finite("a", "w", decoded)
    except BadInput:
        return
    assert (tuple(decoded.shape), decoded.dtype) == (shape, torch.float32)


def test_a_large_tensor_is_found_infinite_wherever_it_is() -> None:
    tensor = torch.zeros((1 << 22) + 5)
    container.check_finite("a", "w", tensor)
    for place in (0, 1 << 22, (1 << 22) + 4):
        bad = tensor.clone()
        bad[place] = float("inf")
        with pytest.raises(NotFinite):
            container.check_finite("a", "w", bad)


def test_a_reader_takes_what_the_file_has_not_what_it_says() -> None:
    """A file that shrinks while it is read, as one that is still being copied may."""

    class Short(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:-1]) if len(buffer) > 8 else super().readinto(buffer)

    with pytest.raises(Truncated, match="became shorter"):
        parcel._read(Short(GOOD[0]), len(GOOD[0]), "a", 1 << 30)
    assert hashlib.sha256(parcel.to_bytes(parcel.from_bytes(GOOD[0]))).digest() == hashlib.sha256(GOOD[0]).digest()
