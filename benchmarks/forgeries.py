"""Parcels that are not what they should be: honest ones, blind damage to them, and a forger's, with every length and
hash made right again."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flyby import files
from flyby.models.heads import HEADS
from flyby.models.networks import ARCHITECTURES
from flyby.models.spec import ModelSpec
from flyby.parcels import parcel
from flyby.parcels.codecs import CODECS, DTYPES

START = 28  # bytes before the manifest
HUGE = {"fc1": 65536, "fc2": 65536}  # a network of 16 GiB
BIDI = "site-\u202elecrap.\u202c"
NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 3, 7, 127, 128, 255, 256, 2**15, 2**16, 2**31, 2**32 - 1, 2**48, 2**53 + 1, 2**63 - 1, 2**63, 2**64),
    *(-(2**63), 10**30, 10**4000, 0.0, -0.0, 0.5, 1e-320, 1e308, 3.4e38),
]
WORDS: list[Any] = [
    *("", "\0", "\n", "..", "../../x", "/etc/passwd", "C:\\x", ".", "é", BIDI, "a" * 300, "x" * 70_000, "\x1b[31m"),
    *("__class__", "extra::a", "a::scale", "extra::", "int8", "int4", "fp16", "F64", "BOOL", "I8", "F8_E4M3"),
    *ARCHITECTURES,
    *HEADS,
]
THINGS: list[Any] = [
    *(None, True, False, [], {}, [[]], [0], {"a": 0}, [0] * 20, [1] * 300, {"$ref": "#"}, [None], ["a", "b"]),
]
TOKENS = [
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"0", b"9" * 30, b"1" + b"0" * 10_000, b"1e400", b"1E2", b"-0"),
    *(b"1.0", b"null", b"true", b"NaN", b"Infinity", b"-Infinity", b"\\u0000", b"\\ud800", b"\xff", b"\xef\xbb\xbf"),
    *(b"\0", b"[" * 3000, b'{"a":' * 3000, b'"F16"', b"::scale", b" "),
]


def honest() -> list[bytes]:
    """Small parcels of every codec and head, with and without extras and a signature."""
    kinds = [
        {"name": "mlp", "widths": {"fc1": 3, "fc2": 2}, "size": (2, 2)},
        {
            "name": "mlp",
            "widths": {"fc1": 2, "fc2": 5},
            "size": (1, 3),
            "head": "prototype",
            "logit_scale": True,
            "projector": (3, 4),
        },
        {
            "name": "cnn-small",
            "widths": {"conv1": 1, "conv2": 2, "conv3": 3},
            "size": (4, 4),
            "head": "etf",
            "mean": (0.4,),
            "std": (0.3,),
        },
    ]
    found = []
    for number, codec in enumerate(CODECS):
        for kind in kinds:
            spec = ModelSpec(classes=2 + number % 2, channels=1, **kind)  # type: ignore[arg-type]
            sent = parcel.make(
                sender=f"site-{number}",
                method="fuzz",
                spec=spec,
                class_names=[f"class {i}" for i in range(spec.classes)],
                samples=5 * spec.classes,
                weights=spec.build(torch.Generator().manual_seed(number)).state_dict(),
                counts=[5] * spec.classes,
                codec=codec,
                extras=(
                    {"a": torch.arange(3.0), "held": torch.tensor([True, False]), "none": torch.empty(0, 2)}
                    if number % 2
                    else {}
                ),
                meta={"lambda": 3.2, "mixed": [1, 1.0, True, None, "é"]},
                provenance={"seed": 7, "train": {"lr": 0.05}},
            )
            found.append(
                parcel.to_bytes(parcel.Parcel(sent.manifest, sent.weights, sent.extras, b"signature" * (number % 3)))
            )
    return found


class Forgery:
    """A parcel taken apart; :meth:`bytes` puts it together again with every length and hash right, whatever was done to
    its parts."""

    def __init__(self, data: bytes) -> None:
        _, _, manifest, signature, payload = struct.unpack_from("<HHIIQ", data, 8)
        self.manifest: dict[str, Any] = json.loads(data[START : START + manifest])
        self.signature = data[START + manifest : START + manifest + signature]
        (length,) = struct.unpack_from("<Q", data, len(data) - payload)
        start = len(data) - payload + 8
        self.table: dict[str, Any] = json.loads(data[start : start + length])
        self.table.pop("__metadata__")
        self.data = {
            name: data[start + length + entry["data_offsets"][0] : start + length + entry["data_offsets"][1]]
            for name, entry in self.table.items()
        }
        self.manifest_text: bytes | None = None
        self.table_text: Callable[[bytes], bytes] = bytes

    def hashed(self) -> None:
        """Make the offsets and hashes those of the tensors as they are now."""
        end = 0
        for name, raw in self.data.items():
            self.table[name]["data_offsets"] = [end, end := end + len(raw)]
            self.manifest["tensors"][name]["sha256"] = hashlib.sha256(raw).hexdigest()

    def bytes(self) -> bytes:
        text = self.manifest_text
        if text is None:
            text = json.dumps(self.manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
                "utf-8", "surrogatepass"
            )
        table = {"__metadata__": {"manifest": hashlib.sha256(text).hexdigest()}, **self.table}
        header = self.table_text(json.dumps(table, separators=(",", ":")).encode())
        payload = struct.pack("<Q", len(header)) + header + b"".join(self.data.values())
        return (
            parcel.MAGIC
            + struct.pack("<HHIIQ", 1, 0, len(text), len(self.signature), len(payload))
            + text
            + self.signature
            + payload
        )


# Blind damage


def flipped(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
    start = chance.randrange(len(data) + 1)
    return chance.choice(
        (
            data[:start],
            data[start:],
            data[:start] + data[start + chance.randint(1, 40) :],
            data + chance.randbytes(chance.randint(1, 40)),
        )
    )


def spliced(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
    other = chance.choice(others)
    start, source, length = chance.randrange(len(data)), chance.randrange(len(other)), chance.choice((1, 4, 8, 30, 400))
    return data[:start] + other[source : source + length] + data[start + chance.choice((0, length)) :]


def other_lengths(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
    changed = bytearray(data)
    (manifest,) = struct.unpack_from("<I", data, 12)
    (signature,) = struct.unpack_from("<I", data, 16)
    for _ in range(chance.choice((1, 1, 2))):
        code, place = chance.choice(
            (("<H", 8), ("<H", 10), ("<I", 12), ("<I", 16), ("<Q", 20), ("<Q", START + manifest + signature))
        )
        (value,) = struct.unpack_from(code, changed, place)
        new = chance.choice(
            (
                value + chance.randint(-9, 9),
                *(n for n in NUMBERS if isinstance(n, int)),
                len(data),
                chance.getrandbits(64),
            )
        )
        struct.pack_into(code, changed, place, new % (1 << 8 * struct.calcsize(code)))
    return bytes(changed)


# A forger's damage


def somewhere(chance: random.Random, tree: Any) -> tuple[Any, Any]:
    """A container within a JSON value and a key or index of it; small depths as likely as great ones."""
    place: tuple[Any, Any] = tree, chance.choice(list(tree))
    while chance.random() < 0.7:
        value = place[0][place[1]]
        if not isinstance(value, dict | list) or not value:
            break
        place = value, chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
    return place


def edited(chance: random.Random, tree: Any) -> None:
    """One edit of a JSON value: a value replaced, nudged, taken out, doubled or renamed."""
    container, key = somewhere(chance, tree)
    value, turn = container[key], chance.randrange(8)
    if turn == 0:
        del container[key]
    elif turn == 1 and isinstance(container, dict):
        container[str(chance.choice((*WORDS, *container)))] = container.pop(key)
    elif turn == 2:
        (
            container.update({str(chance.choice(WORDS)): value})
            if isinstance(container, dict)
            else container.extend([value] * chance.choice((1, 2, 300)))
        )
    elif turn == 3 and isinstance(value, int | float):
        container[key] = value + chance.choice((-1, 1, 0.5, 2**32))
    elif turn == 4 and isinstance(value, str):
        container[key] = value + chance.choice([w for w in WORDS if w])
    else:
        container[key] = chance.choice(chance.choice((NUMBERS, WORDS, THINGS)))


def lying_manifest(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
    forged = Forgery(data)
    edited(
        chance,
        forged.manifest[chance.choice(("tensors", "meta", "provenance"))] if chance.random() < 0.3 else forged.manifest,
    )
    return forged.bytes()


def lying_spec(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Another network under the same tensors, or one that promises to be huge."""
    forged = Forgery(data)
    spec = forged.manifest["spec"]
    for _ in range(chance.choice((1, 1, 2, 3))):
        key = chance.choice(list(ModelSpec.model_fields))
        likely: list[Any] = [
            1,
            2,
            3,
            64,
            4096,
            65536,
            100_000,
            0.01,
            64.0,
            [1, 1],
            [4096, 4096],
            [65536] * 4,
            HUGE,
            {"conv1": 9},
        ]
        spec[key] = chance.choice((*likely, *THINGS, *chance.sample(NUMBERS, 3), *chance.sample(WORDS, 6)))
    if type(spec.get("classes")) is int and 0 < spec["classes"] <= 300:
        forged.manifest |= {"class_names": ["c"] * spec["classes"], "counts": None}
    return forged.bytes()


def lying_table(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """The payload's header alone: dtypes, shapes, offsets that overlap or leave gaps."""
    forged = Forgery(data)
    if chance.random() < 0.5:
        edited(chance, forged.table)
    else:
        entry = forged.table[chance.choice(list(forged.table))]
        index = chance.randrange(2)
        entry["data_offsets"][index] = chance.choice((entry["data_offsets"][index] + chance.randint(-8, 8), *NUMBERS))
    return forged.bytes()


def lying_tensor(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Values, dtype, shape or name of a tensor, changed alike in the manifest, the table and the payload."""
    forged = Forgery(data)
    name = chance.choice(list(forged.table))
    raw, entry, info = forged.data[name], forged.table[name], forged.manifest["tensors"][name]
    turn = chance.randrange(5)
    if turn == 0:
        bad = struct.pack("<f", chance.choice((float("nan"), float("inf"), -float("inf"), 3e38, -1.0, 1e-45, -0.0))) * (
            len(raw) // 4 + 1
        )
        forged.data[name] = chance.choice(
            (bad, chance.randbytes(len(raw) + 4), b"\x80" * (len(raw) + 4), b"\0" * (len(raw) + 4))
        )[: len(raw)]
    elif turn == 1:
        entry["dtype"] = info["dtype"] = chance.choice(list(DTYPES))
        forged.data[name] = chance.randbytes(DTYPES[entry["dtype"]].itemsize * torch.Size(entry["shape"]).numel())
    elif turn == 2:
        shape = chance.choice(([], [0], [1], [2, 2], [0, 2**40], entry["shape"][::-1], [*entry["shape"], 1]))
        entry["shape"], info["shape"] = shape, shape
        forged.data[name] = (raw * 5)[: DTYPES[entry["dtype"]].itemsize * torch.Size(shape).numel()]
    elif turn == 3:
        new = str(chance.choice((*WORDS, "extra::b", *forged.table)))
        for holder in (forged.table, forged.data, forged.manifest["tensors"]):
            holder[new] = holder.pop(name)
        forged.manifest["extras"] = sorted(n.removeprefix("extra::") for n in forged.table if n.startswith("extra::"))
    else:
        forged.manifest["codec"] = chance.choice(list(CODECS))
    forged.hashed()
    return forged.bytes()


def lying_text(chance: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """JSON damaged as text: brackets, doubled keys, numbers that are none, bytes that are no UTF-8."""
    forged = Forgery(data)

    def damage(text: bytes) -> bytes:
        start, source = chance.randrange(len(text)), chance.randrange(len(text))
        new = chance.choice(
            (
                chance.choice(TOKENS),
                text[source : source + chance.randint(1, 30)],
                b'"codec":"fp32",' if text[start:].startswith(b'"') else b"",
            )
        )
        return text[:start] + new + text[start + chance.randint(0, 6) :]

    if chance.random() < 0.6:
        forged.manifest_text = damage(files.canonical(forged.manifest))
    else:
        forged.table_text = damage
    return forged.bytes()


BLIND = (flipped, cut, spliced, other_lengths)
DAMAGE = (*BLIND, lying_manifest, lying_manifest, lying_spec, lying_table, lying_tensor, lying_tensor, lying_text)


def costly(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The dearest files found so far for their size: as many values, or as long ones, as the limits of the reader let
    through."""
    many, long = (1 << 18) - 300, 15 << 20

    def forged(edit: Callable[[Forgery], object]) -> bytes:
        made = Forgery(data)
        edit(made)
        return made.bytes()

    yield "a bad class name each", forged(lambda f: f.manifest.update(class_names=[1] * many))
    yield (
        "an empty tensor description each",
        forged(lambda f: f.manifest.update(tensors={str(i): {} for i in range(many)})),
    )
    yield "a bad width each", forged(lambda f: f.manifest["spec"].update(widths={str(i): "x" for i in range(many)}))
    yield "an unknown key each", forged(lambda f: f.manifest.update({f"k{i}": 0 for i in range(many)}))
    yield "much provenance", forged(lambda f: f.manifest.update(provenance={"k": [[] for _ in range(many)]}))
    yield "long whole numbers", forged(lambda f: f.manifest.update(provenance={"k": [10**4200] * 3500}))
    yield "a long wide string", forged(lambda f: f.manifest.update(provenance={"k": "a" * long + "\U0001f600"}))
    yield "a long wide key", forged(lambda f: f.manifest.update({"a" * long + "\U0001f600": 1}))
    yield "a long tensor name", forged(lambda f: f.table.update({"a" * long + "\U0001f600": 1}))
    none = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    yield "many empty tensors", forged(lambda f: f.table.update({str(i): none for i in range(many // 5)}))
