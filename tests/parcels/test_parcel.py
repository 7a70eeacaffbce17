from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flyby import files
from flyby.errors import BadInput
from flyby.models.spec import ModelSpec
from flyby.parcels import parcel
from flyby.parcels.codecs import CODECS, codec, parse_json
from flyby.parcels.parcel import (
    Corrupt,
    Manifest,
    NotAParcel,
    NotFinite,
    Parcel,
    ParcelError,
    SchemaMismatch,
    TooLarge,
    Truncated,
    WrongShape,
)

NAMES = tuple(CODECS)
HEADER = 28
MIB16 = 16 << 20
TINY = ModelSpec(name="mlp", classes=2, channels=1, size=(2, 2), widths={"fc1": 3, "fc2": 2})
CONV = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8), widths={"conv1": 5, "conv2": 4, "conv3": 7})


def weights_of(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    return dict(spec.build(torch.Generator().manual_seed(seed)).state_dict())


def made(spec: ModelSpec = TINY, **changes: Any) -> Parcel:
    settings: dict[str, Any] = {
        "sender": "site-0",
        "method": "aurora",
        "spec": spec,
        "class_names": [f"class {i}" for i in range(spec.classes)],
        "weights": weights_of(spec),
        "samples": 5 * spec.classes,
        "counts": [5] * spec.classes,
        "extras": {"prototypes": torch.arange(spec.classes * 2.0).reshape(-1, 2), "held": torch.tensor([True, False])},
        "meta": {"anchor_seed": 0, "lambda": 3.2, "mixed": [1, 1.0, True, None, "é"]},
        "provenance": {"seed": 7, "train": {"lr": 0.05}},
    }
    return parcel.make(**(settings | changes))


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


# Round trips


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", [TINY, CONV])
def test_a_file_holds_what_memory_holds(tmp_path: Path, spec: ModelSpec, name: str) -> None:
    sent = made(spec, codec=name)
    path = tmp_path / "a.parcel"
    assert parcel.write(sent, path) == path.stat().st_size == sent.size
    received = parcel.read(path)
    assert received.manifest == sent.manifest == parcel.read_manifest(path)
    assert equal(received.weights, sent.weights)
    assert equal(received.extras, sent.extras)
    assert list(received.weights) == list(weights_of(spec))
    assert parcel.to_bytes(received) == parcel.to_bytes(sent) == path.read_bytes()
    assert parcel.to_bytes(parcel.from_bytes(parcel.to_bytes(received))) == path.read_bytes()


def test_fp32_changes_nothing_and_integers_never_change() -> None:
    weights = weights_of(CONV)
    weights["backbone.bn1.num_batches_tracked"] += 2**40 + 1
    assert equal(made(CONV, weights=weights).weights, weights)
    for name in NAMES:
        assert int(made(CONV, weights=weights, codec=name).weights["backbone.bn1.num_batches_tracked"]) == 2**40 + 1


def test_the_same_parcel_is_the_same_bytes_whatever_the_order() -> None:
    weights, extras = weights_of(TINY), {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.int16)}
    one = made(weights=weights, extras=extras)
    other = made(
        weights=dict(reversed(weights.items())),
        extras=dict(reversed(extras.items())),
        meta={"mixed": (1, 1.0, True, None, "é"), "lambda": 3.2, "anchor_seed": 0},
    )
    assert parcel.to_bytes(one) == parcel.to_bytes(other)
    assert one.digest == other.digest == hashlib.sha256(one.manifest.to_bytes()).hexdigest()
    assert made(meta={"x": 1}).digest != made(meta={"x": 1.0}).digest
    assert made(meta={"x": True}).manifest.meta["x"] is True


def test_the_network_is_the_one_that_was_sent() -> None:
    network = CONV.build(torch.Generator().manual_seed(3))
    network.train()
    network(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)))  # moves the batch-norm statistics
    network.eval()
    images = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    rebuilt = made(CONV, weights=network.state_dict()).network()
    assert not rebuilt.training
    assert torch.equal(rebuilt(images), network(images))


def test_a_parcel_does_not_follow_later_training() -> None:
    weights = weights_of(TINY)
    sent = made(weights=weights)
    before = parcel.to_bytes(sent)
    for tensor in weights.values():
        tensor.add_(1)
    assert parcel.to_bytes(sent) == before


def test_channels_last_and_half_weights_are_stored_plainly() -> None:
    weights = {n: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for n, t in weights_of(CONV).items()}
    assert parcel.to_bytes(made(CONV, weights=weights)) == parcel.to_bytes(made(CONV))
    half = {n: t.half() if t.is_floating_point() else t for n, t in weights_of(CONV).items()}
    assert all(t.dtype != torch.float16 for t in made(CONV, weights=half).weights.values())


def test_a_changed_parcel_is_not_written(tmp_path: Path) -> None:
    sent = made()
    sent.weights["backbone.fc1.bias"].add_(1)
    with pytest.raises(Corrupt, match="changed after"):
        parcel.write(sent, tmp_path / "a.parcel")
    with pytest.raises(Corrupt, match="not those of its manifest"):
        parcel.to_bytes(dataclasses.replace(made(), extras={}))
    assert list(tmp_path.iterdir()) == []


def test_the_payload_is_a_safetensors_file_and_a_signature_is_kept() -> None:
    signed = dataclasses.replace(made(CONV, codec="int4"), signature=b"signed" * 10)
    data = parcel.to_bytes(signed)
    assert signed.size == len(data) == made(CONV, codec="int4").size + 60
    assert parcel.from_bytes(data).signature == b"signed" * 10
    _, _, manifest, signature, payload = struct.unpack_from("<HHIIQ", data, 8)
    assert HEADER + manifest + signature + payload == len(data)
    assert json.loads(data[HEADER : HEADER + manifest])["sender"] == "site-0"
    stored = safetensors.torch.load(data[-payload:])
    assert stored.keys() == signed.manifest.tensors.keys()
    assert torch.equal(stored["extra::prototypes"], signed.extras["prototypes"])
    assert torch.equal(
        CODECS["int4"].decode("backbone.conv2.weight", stored, (4, 5, 3, 3)), signed.weights["backbone.conv2.weight"]
    )


def test_small_codecs_make_small_files() -> None:
    spec = ModelSpec(name="mlp", classes=10, channels=1, size=(32, 32), widths={"fc1": 256, "fc2": 128})
    sizes = {name: made(spec, codec=name, extras={}).size for name in NAMES}
    assert sizes["fp32"] == pytest.approx(4 * spec.parameter_count(), rel=0.01)
    assert sizes["fp32"] / sizes["fp16"] == pytest.approx(2, rel=0.02)
    assert sizes["fp32"] / sizes["bf16"] == pytest.approx(2, rel=0.02)
    assert sizes["fp32"] / sizes["int8"] == pytest.approx(4, rel=0.05)
    assert sizes["fp32"] / sizes["int4"] == pytest.approx(6.4, rel=0.07)


# Codecs


def test_int8_by_hand() -> None:
    stored = CODECS["int8"].encode("w", torch.tensor([[127.0, -63.4, 0.6], [0.0, 0.0, 0.0], [-254.0, 1.0, 3.0]]))
    assert stored["w"].tolist() == [[127, -63, 1], [0, 0, 0], [-127, 0, 2]]  # 1/2 and 3/2 round to even
    assert stored["w::scale"].tolist() == [1.0, 0.0, 2.0]
    assert CODECS["int8"].decode("w", stored, (3, 3)).tolist() == [
        [127.0, -63.0, 1.0],
        [0.0, 0.0, 0.0],
        [-254.0, 0.0, 4.0],
    ]


def test_int4_by_hand() -> None:
    stored = CODECS["int4"].encode("w", torch.tensor([[7.0, -3.0, 1.2], [0.0, 14.0, -14.0]]))
    # q + 8, low half first, and 8 where a row has no value: (15, 5) (9, 8) and (8, 15) (1, 8)
    assert stored["w"].tolist() == [[15 + 16 * 5, 9 + 16 * 8], [8 + 16 * 15, 1 + 16 * 8]]
    assert stored["w::scale"].tolist() == [[1.0], [2.0]]
    assert CODECS["int4"].decode("w", stored, (2, 3)).tolist() == [[7.0, -3.0, 1.0], [0.0, 14.0, -14.0]]


def test_int4_scales_each_group_of_32() -> None:
    row = torch.cat([torch.full((32,), 7.0), torch.full((32,), 700.0), torch.full((1,), 0.07)]).reshape(1, -1)
    stored = CODECS["int4"].encode("w", row)
    assert stored["w"].shape == (1, 33)
    assert stored["w::scale"].tolist() == [[1.0, 100.0, pytest.approx(0.01, rel=2e-5)]]


shapes = st.one_of(
    st.tuples(),
    st.tuples(st.integers(1, 9)),
    st.tuples(st.integers(1, 5), st.integers(1, 70)),
    st.tuples(*[st.integers(1, 4)] * 4),
    st.just((3, 0)),
)


@st.composite
def tensors(draw: st.DrawFn, largest: float = 2.0**120) -> Tensor:
    shape = draw(shapes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tensor = torch.randn(shape, generator=generator) * draw(st.sampled_from([1.0, 1e-3, 1e3, 1e-30]))
    flat = tensor.reshape(-1)
    limit = torch.tensor(largest, dtype=torch.float32).item()
    for value in draw(st.lists(st.floats(-limit, limit, width=32), max_size=min(6, len(flat)))):
        flat[draw(st.integers(0, len(flat) - 1))] = value
    return tensor


def round_trip(name: str, tensor: Tensor) -> Tensor:
    stored = CODECS[name].encode("w", tensor)
    layout = CODECS[name].layout("w", tensor.dtype, tuple(tensor.shape))
    assert {n: (t.dtype, tuple(t.shape)) for n, t in stored.items()} == layout
    decoded = CODECS[name].decode("w", stored, tuple(tensor.shape))
    assert decoded.dtype == torch.float32
    assert decoded.shape == tensor.shape
    again = CODECS[name].encode("w", decoded)
    assert all(torch.equal(again[n], stored[n]) for n in stored), "encoding a decoded tensor must give the same bytes"
    assert torch.equal(CODECS[name].decode("w", again, tuple(tensor.shape)), decoded)
    return decoded


SLACK = 1 + 2.0**-15  # scales keep 17 bits
FLUSHED = 127 * 2.0**-126  # rows below this are stored as zeros


@settings(max_examples=400, deadline=None)
@given(tensors(largest=torch.finfo(torch.float32).max))
def test_fp32_is_exact_and_integer_codecs_keep_their_bounds(tensor: Tensor) -> None:
    assert torch.equal(round_trip("fp32", tensor), tensor)
    for name in ("int8", "int4"):
        decoded = round_trip(name, tensor)
        error = (decoded.double() - tensor.double()).abs()
        if tensor.ndim < 2 or tensor.numel() == 0:
            assert torch.equal(decoded, tensor)
            continue
        rows = tensor.double().abs().reshape(tensor.shape[0], -1)
        groups = [rows] if name == "int8" else list(rows.split(32, dim=1))
        bound = torch.cat([(g.amax(1, keepdim=True) / (254 if name == "int8" else 14)).expand_as(g) for g in groups], 1)
        assert bool((error.reshape(rows.shape) <= bound * SLACK + FLUSHED).all())


@settings(max_examples=200, deadline=None)
@given(tensors(largest=65504.0))
def test_short_floats_keep_their_bounds(tensor: Tensor) -> None:
    for name, relative, absolute in (("fp16", 2.0**-11, 2.0**-25), ("bf16", 2.0**-8, 2.0**-134)):
        error = (round_trip(name, tensor).double() - tensor.double()).abs()
        assert bool((error <= torch.clamp(tensor.double().abs() * relative, min=absolute)).all())


def test_a_value_beyond_a_short_float_is_an_error_that_names_it() -> None:
    big = weights_of(TINY) | {"backbone.fc1.bias": torch.tensor([0.0, 70000.0, 1.0])}
    with pytest.raises(ParcelError, match=r"site-0.*backbone\.fc1\.bias.*7e\+04.*float16.*fp32"):
        made(weights=big, codec="fp16")
    assert float(made(weights=big, codec="bf16").weights["backbone.fc1.bias"][1]) == pytest.approx(70000, rel=2**-8)
    with pytest.raises(BadInput, match="bfloat16"):
        CODECS["bf16"].encode("w", torch.tensor([torch.finfo(torch.float32).max]))
    with pytest.raises(BadInput, match="unknown codec 'int3'; did you mean 'int8' or 'int4'"):
        codec("int3")


# Making


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sender": "two words"}, "sender"),
        ({"sender": ""}, "sender"),
        ({"sender": "s" * 129}, "sender"),
        ({"sender": 3}, "sender"),
        ({"method": "new\nline"}, "method"),
        ({"class_names": ["one"]}, "1 class names for a model of 2"),
        ({"counts": [10]}, "1 class counts"),
        ({"counts": [5, 6]}, "add up to 11"),
        ({"counts": [-1, 11]}, "counts"),
        ({"samples": 10.0}, "samples"),
        ({"codec": "zip"}, "unknown codec"),
        ({"meta": {"x": float("nan")}}, "JSON"),
        ({"meta": {"x": {"deep": 1}}}, "meta"),
        ({"meta": {"x": torch.tensor(1)}}, "JSON"),
        ({"provenance": {"x": "\ud800"}}, "JSON"),
        ({"provenance": {"x": "y" * (17 << 20)}}, "manifest has"),
        ({"extras": {"a b": torch.ones(1)}}, "extras"),
        ({"extras": {"z": torch.ones(1, dtype=torch.complex64)}}, "complex64"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParcelError, match=message) as caught:
        made(**changes)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1100


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "lacks"),
        (weights_of(TINY) | {"other": torch.ones(1)}, "'other' that its model does not have"),
        (weights_of(TINY) | {"backbone.fc1.bias": torch.ones(4)}, r"\(4,\).*\(3,\)"),
        (weights_of(TINY) | {"backbone.fc1.bias": torch.ones(3, dtype=torch.int64)}, "int64"),
    ],
)
def test_weights_must_be_those_of_the_spec(weights: dict[str, Tensor], message: str) -> None:
    with pytest.raises(WrongShape, match=message):
        made(weights=weights)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_nothing_that_is_not_finite_is_sent(value: float) -> None:
    with pytest.raises(NotFinite, match=r"backbone\.fc1\.bias"):
        made(weights=weights_of(TINY) | {"backbone.fc1.bias": torch.tensor([0.0, value, 0.0], dtype=torch.float64)})
    if value != 1e39:
        with pytest.raises(NotFinite, match="prototypes"):
            made(extras={"prototypes": torch.tensor([value])})


# Files that are not, or no longer, parcels


def test_the_system_errors_are_parcel_errors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    cases = {
        tmp_path / "absent": "does not exist",
        tmp_path: "is a folder",
        tmp_path / "pipe": "not a regular file",
        "a\0b": "cannot read",
    }
    for path, message in cases.items():
        for action in (parcel.read, parcel.read_manifest):
            with pytest.raises(ParcelError, match=message):
                action(path)  # type: ignore[arg-type]
    if os.geteuid():
        (tmp_path / "locked").write_bytes(b"x")
        (tmp_path / "locked").chmod(0)
        with pytest.raises(ParcelError, match="cannot read"):
            parcel.read(tmp_path / "locked")


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", Truncated, "empty"),
        (b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(200), NotAParcel, "JPEG"),
        (b"PK\x03\x04" + bytes(200), NotAParcel, "PyTorch checkpoint"),
        (b"\x89FLYBY\n" + bytes(200), NotAParcel, "text mode"),
        (b"hello", NotAParcel, "not a parcel"),
        (b"\x89FL", Truncated, "header"),
        (b"\x89FLYBY\r\n", Truncated, "header"),
    ],
)
def test_other_files_are_recognised(tmp_path: Path, content: bytes, kind: type[ParcelError], message: str) -> None:
    path = tmp_path / "a.parcel"
    path.write_bytes(content)
    for action in (parcel.read, parcel.read_manifest):
        with pytest.raises(kind, match=f"^{re.escape(str(path))}.*{message}"):
            action(path)  # type: ignore[operator]


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    data = parcel.to_bytes(made(codec="int8"))
    path = tmp_path / "a.parcel"
    for length in range(len(data)):
        with pytest.raises(Truncated):
            parcel.from_bytes(data[:length])
        if length % 50 == 0:
            path.write_bytes(data[:length])
            with pytest.raises(Truncated, match=re.escape(str(path))):
                parcel.read_manifest(path)
    with pytest.raises(Corrupt, match="1 bytes after its end"):
        parcel.from_bytes(data + b"\0")


def test_every_flipped_bit_is_noticed() -> None:
    data = parcel.to_bytes(made(CONV, codec="int4"))
    chance = random.Random(0)
    head = data.index(b"__metadata__") + 100
    positions = [
        *range(8 * HEADER),
        *chance.sample(range(8 * head), 900),
        *chance.sample(range(8 * head, 8 * len(data)), 900),
    ]
    for position in positions:
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(ParcelError):
            parcel.from_bytes(bytes(flipped))


def test_mutations_never_crash_and_never_change_a_weight() -> None:
    sent = made(codec="int8")
    data = parcel.to_bytes(sent)
    chance = random.Random(1)
    for _ in range(3000):
        mutant = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            start = chance.randrange(len(mutant))
            end = start + chance.randint(0, 12)
            source = chance.randrange(len(data))
            mutant[start:end] = chance.choice(
                [chance.randbytes(end - start), data[source : source + end - start], b"", chance.randbytes(3)]
            )
        try:
            received = parcel.from_bytes(bytes(mutant))
        except ParcelError:
            continue
        assert equal(received.weights, sent.weights)
        assert received.manifest == sent.manifest


# Files whose maker lies: consistent hashes, wrong content


class Forgery:
    """A parcel taken apart; ``bytes`` puts it together again with all lengths and hashes right, whatever was done to
    its parts."""

    def __init__(self, sent: Parcel) -> None:
        data = parcel.to_bytes(sent)
        _, _, manifest, _, payload = struct.unpack_from("<HHIIQ", data, 8)
        self.version, self.flags = 1, 0
        self.manifest: dict[str, Any] = json.loads(data[HEADER : HEADER + manifest])
        (length,) = struct.unpack_from("<Q", data, len(data) - payload)
        start = len(data) - payload + 8
        self.table: dict[str, Any] = json.loads(data[start : start + length])
        self.data = bytearray(data[start + length :])
        self.manifest_text: bytes | None = None
        self.table_text: bytes | None = None
        self.table_length: int | None = None
        self.lengths: dict[int, int] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Replace the values of a stored tensor, and its hash."""
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        start, end = self.table[name]["data_offsets"]
        assert end - start == len(raw)
        self.data[start:end] = raw
        self.manifest["tensors"][name]["sha256"] = hashlib.sha256(raw).hexdigest()

    def bytes(self) -> bytes:
        manifest = self.manifest_text or files.canonical(self.manifest)
        self.table["__metadata__"] = {"manifest": hashlib.sha256(manifest).hexdigest()}
        table = self.table_text or json.dumps(self.table).encode()
        payload = (
            struct.pack("<Q", len(table) if self.table_length is None else self.table_length) + table + bytes(self.data)
        )
        lengths = [len(manifest), 0, len(payload)]
        for index, value in self.lengths.items():
            lengths[index] = value
        return parcel.MAGIC + struct.pack("<HHIIQ", self.version, self.flags, *lengths) + manifest + payload

    def refused(self, kind: type[ParcelError], message: str) -> None:
        with pytest.raises(kind, match=message) as caught:
            parcel.from_bytes(self.bytes(), name="forged.parcel")
        assert type(caught.value) is kind
        assert str(caught.value).startswith("forged.parcel")
        assert str(caught.value).isprintable()


def forge(edit: Callable[[Forgery], object], **changes: Any) -> Forgery:
    forgery = Forgery(made(**changes))
    edit(forgery)
    return forgery


def test_an_honest_forgery_is_read() -> None:
    sent = made(codec="int8")
    assert equal(parcel.from_bytes(Forgery(sent).bytes()).weights, sent.weights)


@pytest.mark.parametrize(
    ("edit", "kind", "message"),
    [
        (lambda f: setattr(f, "version", 2), SchemaMismatch, "schema 2 and this flyby reads schema 1; use"),
        (lambda f: setattr(f, "flags", 4), SchemaMismatch, "flags 0x4"),
        (lambda f: f.manifest.update(schema_version=2), Corrupt, "schema_version"),
        (lambda f: f.lengths.update({0: 17 << 20}), TooLarge, "manifest of 17825792"),
        (lambda f: f.lengths.update({1: 1 << 20}), TooLarge, "signature of 1048576"),
        (lambda f: f.lengths.update({2: 2**63}), Truncated, "claims"),
        (lambda f: f.lengths.update({2: 2**64 - 1}), Truncated, "claims"),
        (lambda f: setattr(f, "table_length", 2**63), Corrupt, "header of 9223372036854775808"),
        (lambda f: setattr(f, "table_length", 0), Corrupt, "JSON"),
        (lambda f: f.data.clear(), Corrupt, "tensors take"),
        (lambda f: f.data.extend(b"\0"), Corrupt, "tensors take"),
        (lambda f: f.manifest.update(surprise=1), Corrupt, "surprise"),
        (lambda f: f.manifest.pop("sender"), Corrupt, "sender"),
        (lambda f: f.manifest["spec"].update(name="../../evil"), Corrupt, "unknown model"),
        (lambda f: f.manifest["spec"].update(size=[10**9, 1]), Corrupt, "size"),
        (lambda f: f.manifest["spec"].update(classes=3), Corrupt, "2 class names for a model of 3"),
        (
            lambda f: f.manifest.update(
                spec=f.manifest["spec"] | {"classes": 3}, class_names=["a", "b", "c"], counts=None
            ),
            WrongShape,
            "model has",
        ),
        (lambda f: f.manifest["spec"].update(widths={"fc1": 65536}), WrongShape, "where its model has"),
        (lambda f: f.manifest.update(codec="fp17"), ParcelError, "unknown codec 'fp17'"),
        (lambda f: f.manifest.update(codec="int8"), WrongShape, "backbone"),
        (lambda f: f.manifest.update(extras=[]), WrongShape, "names the extras"),
        (lambda f: f.manifest.update(extras=["prototypes", "held"]), Corrupt, "sorted"),
        (lambda f: f.manifest["tensors"].pop("backbone.fc1.bias"), Corrupt, "manifest says None"),
        (lambda f: f.manifest["tensors"]["backbone.fc1.bias"].update(shape=[4]), Corrupt, "payload"),
        (lambda f: f.manifest["tensors"]["backbone.fc1.bias"].update(shape=[-3]), Corrupt, "shape"),
        (lambda f: f.manifest["tensors"]["backbone.fc1.bias"].update(dtype="F8_E4M3"), Corrupt, "dtype"),
        (lambda f: f.manifest["tensors"]["backbone.fc1.bias"].update(sha256="0" * 64), Corrupt, "SHA-256 differs"),
        (lambda f: f.table["backbone.fc1.bias"].update(shape=[1, 3]), Corrupt, "manifest says"),
        (lambda f: f.table["backbone.fc1.bias"].update(shape=[2]), Corrupt, "does not fit its offsets"),
        (lambda f: f.table["backbone.fc1.bias"].update(shape=[-1, -3]), Corrupt, "impossible shape"),
        (lambda f: f.table["backbone.fc1.bias"].update(shape=[True, 3]), Corrupt, "impossible shape"),
        (lambda f: f.table["backbone.fc1.bias"].update(shape=[2**40] * 5), Corrupt, "impossible shape"),
        (lambda f: f.table["backbone.fc1.bias"].update(shape=[0] + [2**40] * 5), Corrupt, "impossible shape"),
        (lambda f: f.table["backbone.fc1.bias"].update(shape=[1] * 17), Corrupt, "impossible shape"),
        (lambda f: f.table["backbone.fc1.bias"].update(dtype="I32"), Corrupt, "manifest says"),
        (lambda f: f.table["backbone.fc1.bias"].update(dtype=["F32"]), Corrupt, "unknown dtype"),
        (lambda f: f.table["backbone.fc1.bias"].update(data_offsets=[4, 16]), Corrupt, "starts at byte"),
        (lambda f: f.table["backbone.fc1.bias"].update(data_offsets=[2**47, 2**47 + 12]), Corrupt, "starts at byte"),
        (lambda f: f.table["backbone.fc1.bias"].update(data_offsets=[-12, 0]), Corrupt, "offsets"),
        (lambda f: f.table["backbone.fc1.bias"].update(data_offsets=[0.0, 12.0]), Corrupt, "offsets"),
        (lambda f: f.table["backbone.fc1.bias"].update(extra=1), Corrupt, "described by"),
        (lambda f: f.table.update({"\x1b[31m": 3}), Corrupt, "described by"),
        (
            lambda f: f.put("backbone.fc1.bias", torch.tensor([0.0, float("nan"), 0.0])),
            NotFinite,
            r"backbone\.fc1\.bias",
        ),
        (lambda f: f.put("extra::prototypes", torch.full((2, 2), float("inf"))), NotFinite, "prototypes"),
        (lambda f: f.put("extra::held", torch.tensor([1, 2], dtype=torch.uint8)), Corrupt, "booleans"),
    ],
)
def test_lies_are_refused(edit: Callable[[Forgery], object], kind: type[ParcelError], message: str) -> None:
    forge(edit).refused(kind, message)


@pytest.mark.parametrize(
    ("name", "edit", "kind"),
    [
        ("int8", lambda f: f.put("backbone.fc1.weight::scale", torch.tensor([1.0, -1.0, 0.0])), Corrupt),
        ("int8", lambda f: f.put("backbone.fc1.weight::scale", torch.tensor([1.0, float("nan"), 0.0])), NotFinite),
        ("int8", lambda f: f.put("backbone.fc1.weight::scale", torch.full((3,), 3e38)), NotFinite),
        ("int8", lambda f: f.put("backbone.fc1.weight", torch.full((3, 4), -128, dtype=torch.int8)), Corrupt),
        ("int4", lambda f: f.put("backbone.fc1.weight", torch.zeros(3, 2, dtype=torch.uint8)), Corrupt),
        ("int4", lambda f: f.put("backbone.fc2.weight", torch.full((2, 2), 0x99, dtype=torch.uint8)), Corrupt),
        ("fp16", lambda f: f.put("backbone.fc1.bias", torch.tensor([1.0, float("inf"), 0.0]).half()), NotFinite),
    ],
)
def test_lying_codes_are_refused(name: str, edit: Callable[[Forgery], object], kind: type[ParcelError]) -> None:
    forge(edit, codec=name).refused(kind, "backbone")


def twice(text: bytes, key: bytes) -> bytes:
    return text[:1] + key + b":0," + text[1:]


@pytest.mark.parametrize(
    "text",
    [
        lambda f: twice(files.canonical(f.manifest), b'"codec"'),
        lambda f: files.canonical(f.manifest).replace(b'"lambda":3.2', b'"lambda":NaN'),
        lambda f: files.canonical(f.manifest).replace(b'"lambda":3.2', b'"lambda":-Infinity'),
        lambda f: files.canonical(f.manifest).replace(b'"lambda":3.2', b'"lambda":1e999'),
        lambda f: files.canonical(f.manifest).replace(b'"seed":7', b'"seed":1e999'),
        lambda f: files.canonical(f.manifest).replace(b'"seed":7', b'"seed":' + b"9" * 5000),
        lambda f: files.canonical(f.manifest).replace(b'"seed":7', b'"seed":"\\ud800"'),
        lambda f: files.canonical(f.manifest).replace(b'"seed":7', b'"seed":' + b"[" * 300 + b"]" * 300),
        lambda f: files.canonical(f.manifest).replace(b'"seed":7', b'"seed":"\xff"'),
        lambda f: json.dumps(f.manifest).encode(),
        lambda f: json.dumps(f.manifest).encode("utf-16"),
        lambda f: b"[" * 200_000,
        lambda f: b'{"a":' * 200_000,
        lambda f: b"[]",
        lambda f: b"null",
        lambda f: b" ",
        lambda f: b"[" + b"0," * (1 << 19) + b"0]",
    ],
)
def test_bad_json_is_refused(text: Callable[[Forgery], bytes]) -> None:
    forge(lambda f: setattr(f, "manifest_text", text(f))).refused(Corrupt, "manifest")
    bad = text(Forgery(made()))
    if not bad.startswith(b'{"') or bad.startswith(b'{"a'):  # not a manifest at all: no payload header either
        forge(lambda f: setattr(f, "table_text", bad)).refused(Corrupt, "payload's header")


def test_a_name_may_stand_once_in_the_payload_header() -> None:
    forgery = Forgery(made())
    forgery.bytes()
    forgery.table_text = twice(json.dumps(forgery.table).encode(), b'"backbone.fc1.bias"')
    forgery.refused(Corrupt, "twice")
    with pytest.raises(BadInput, match="twice"):
        parse_json(b'{"a":{"b":1,"b":1}}')


def test_mutations_with_right_hashes_never_crash() -> None:
    """The hashes stop careless damage early; a careful forger passes them, so the checks behind them are shaken too."""
    chance = random.Random(2)
    honest = Forgery(made(codec="int8"))
    honest.bytes()
    texts = files.canonical(honest.manifest), json.dumps(honest.table).encode()
    pieces = [
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"-",
        b"0",
        b"9" * 20,
        b"1e400",
        b"null",
        b"true",
        b"\\u0000",
        b"\xff",
        b"[[",
        b'"F16"',
        b"::scale",
    ]
    refused = 0
    for turn in range(4000):
        text = bytearray(texts[turn % 2])
        start = chance.randrange(len(text))
        source = chance.randrange(len(text))
        text[start : start + chance.randint(0, 6)] = chance.choice(
            [chance.choice(pieces), bytes(text[source : source + chance.randint(1, 30)])]
        )
        honest.manifest_text, honest.table_text = (bytes(text), None) if turn % 2 == 0 else (None, bytes(text))
        try:
            parcel.from_bytes(honest.bytes())
        except ParcelError as error:
            refused += str(error).isprintable()
    assert 3500 < refused < 4000  # a changed digit of the seed is a good parcel


def test_overlapping_tensors_are_refused() -> None:
    """Two tensors of the same size that share their bytes leave room for something hidden at the end."""
    forgery = Forgery(made(extras={"a": torch.ones(4), "b": torch.ones(4)}))
    forgery.table["extra::b"] = forgery.table["extra::a"]
    forgery.refused(Corrupt, "starts at byte")


def test_a_payload_that_belongs_to_another_manifest_is_refused() -> None:
    forgery = Forgery(made())
    forgery.bytes()
    forgery.table_text = json.dumps(forgery.table).encode()
    forgery.manifest["counts"] = [9, 1]
    forgery.refused(Corrupt, "does not belong to its manifest")


def test_read_manifest_checks_what_it_reads_and_reads_no_tensor(tmp_path: Path) -> None:
    path = tmp_path / "a.parcel"
    forgery = forge(lambda f: f.data.__setitem__(0, f.data[0] ^ 1))
    path.write_bytes(forgery.bytes())
    assert isinstance(parcel.read_manifest(path), Manifest)
    with pytest.raises(Corrupt, match="SHA-256"):
        parcel.read(path)
    forgery.manifest["sender"] = "not a name"
    path.write_bytes(forgery.bytes())
    with pytest.raises(Corrupt, match="sender"):
        parcel.read_manifest(path)


# Sizes


def test_max_bytes_limits_the_file_and_what_it_decodes_to(tmp_path: Path) -> None:
    path = tmp_path / "a.parcel"
    size = parcel.write(made(extras={}), path)
    assert parcel.read(path, max_bytes=size).size == size
    with pytest.raises(TooLarge, match=f"{size} bytes, more than the {size - 1} allowed"):
        parcel.read(path, max_bytes=size - 1)
    spec = ModelSpec(name="mlp", classes=2, channels=1, size=(32, 32))
    size = parcel.write(made(spec, codec="int4"), path)
    with pytest.raises(TooLarge, match=f"decodes to {4 * spec.parameter_count()} bytes"):
        parcel.read(path, max_bytes=2 * size)
    assert parcel.read(path, max_bytes=4 * spec.parameter_count()).size == size


def peak(data: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(ParcelError):
            parcel.from_bytes(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_memory_is_taken_for_claims() -> None:
    spec = {"widths": {"fc1": 65536, "fc2": 65536}}  # a model of 16 GiB
    edits: list[Callable[[Forgery], object]] = [
        lambda f: f.lengths.update({0: MIB16}),
        lambda f: f.lengths.update({2: 3 << 30}),
        lambda f: setattr(f, "table_length", MIB16),
        lambda f: f.table["backbone.fc1.bias"].update(shape=[2**30], data_offsets=[0, 2**32]),
        lambda f: f.manifest["spec"].update(spec),
    ]
    for edit in edits:
        data = forge(edit).bytes()
        with pytest.raises(ParcelError):
            parcel.from_bytes(data)  # the first time also fills caches
        assert peak(data) < 1 << 20


def test_a_sparse_file_that_claims_much_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.parcel"
    data = parcel.to_bytes(made())
    path.write_bytes(data)
    os.truncate(path, 5 << 30)
    with pytest.raises(TooLarge, match="5368709120 bytes"):
        parcel.read(path)
    with pytest.raises(Corrupt, match="after its end"):
        parcel.read(path, max_bytes=6 << 30)
