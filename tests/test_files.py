"""The foundations: files that are whole or absent, named randomness, settings and errors that teach."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from flyby import files
from flyby.data.views import ViewSettings
from flyby.errors import BadInput, Diverged, FlybyError, unknown
from flyby.rng import generator, legacy_numpy, seed_of
from flyby.settings import build, parse_assignment

# -- canonical JSON

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(values)
def test_canonical_json_is_json_and_does_not_mind_the_order(value: Any) -> None:
    text = files.canonical(value)
    assert json.loads(text) == value
    assert files.canonical(json.loads(text)) == text
    if isinstance(value, dict):
        assert files.canonical(dict(reversed(list(value.items())))) == text


def test_canonical_by_hand() -> None:
    assert files.canonical({"b": [1, 2.5, None], "a": "é"}) == '{"a":"é","b":[1,2.5,null]}'.encode()
    assert files.digest({}) == "44136fa355b3678a", "sha256 of {}"
    assert len(files.digest({}, 40)) == 40
    for bad in (math.nan, math.inf, {"x": [-math.inf]}):
        with pytest.raises(ValueError, match="JSON"):
            files.canonical(bad)


# -- whole or absent


def test_a_file_takes_its_name_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "a.bin"
    with files.atomic_open(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
        file.write(b" and half")
    assert path.read_bytes() == b"half and half"
    assert [p.name for p in path.parent.iterdir()] == ["a.bin"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_no_litter(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"old": 1})

    def fail() -> None:
        with files.atomic_open(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        fail()
    assert files.read_json(path) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, [0] * 5000)
    stop = threading.Event()

    def write() -> None:
        for n in range(1, 60):
            files.write_json(path, [n] * 5000)
        stop.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while not stop.is_set():
        found = files.read_json(path)
        assert len(found) == 5000
        assert len(set(found)) == 1
        seen.add(found[0])
    thread.join()
    assert seen


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.write_text(path, "old")
    code = f"""
import os, signal
from flyby import files
with files.atomic_open({str(path)!r}) as file:
    file.write(b"new")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert path.read_text() == "old"


def test_files_obey_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        files.write_text(tmp_path / "a", "x")
        with files.atomic_folder(tmp_path / "f") as folder:
            (folder / "x").touch()
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o750


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "below", tmp_path):  # a file as a folder, a folder as a file
        with pytest.raises(BadInput, match="cannot write"):
            files.write_text(path, "x")
    with pytest.raises(BadInput, match="is a file; name a folder"), files.atomic_folder(tmp_path / "file"):
        pass
    with pytest.raises(BadInput, match="cannot write"), files.atomic_folder(tmp_path / "file" / "below"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_named_by_a_folder_that_lasts(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with files.atomic_folder(tmp_path / "out") as tmp, files.atomic_folder(tmp / "inner") as deep:
        assert f"disk of {tmp_path} (" in str(files.unwritable(deep / "model.pt2", full))


def test_json_for_people(tmp_path: Path) -> None:
    value = {"z": 0.1, "a": ["é", None, 1e-9]}
    files.write_json(tmp_path / "a.json", value)
    assert files.read_json(tmp_path / "a.json") == value
    assert list(files.read_json(tmp_path / "a.json")) == ["z", "a"], "the order is the writer's"
    assert (tmp_path / "a.json").read_text().endswith("}\n")
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "b.json", math.nan)
    assert not (tmp_path / "b.json").exists()


def test_json_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.json does not exist"):
        files.read_json(tmp_path / "none.json")
    for bad in (b"", b"{", b"\xff\xfe", b"{'a': 1}"):
        (tmp_path / "a.json").write_bytes(bad)
        with pytest.raises(BadInput, match=r"a\.json is not readable JSON"):
            files.read_json(tmp_path / "a.json")
    with pytest.raises(BadInput, match="not readable"):
        files.read_json(tmp_path)


@pytest.mark.parametrize("before", [None, {"old": b"1", "both": b"1"}, {}])
def test_a_folder_is_replaced_whole(tmp_path: Path, before: dict[str, bytes] | None) -> None:
    path = tmp_path / "up" / "out"
    if before is not None:
        path.mkdir(parents=True)
        for name, data in before.items():
            (path / name).write_bytes(data)
    with files.atomic_folder(path) as folder:
        assert folder.parent == path.parent, "the same file system: the rename is atomic"
        (folder / "both").write_bytes(b"2")
        (folder / "sub").mkdir()
    assert {p.name for p in path.iterdir()} == {"both", "sub"}
    assert (path / "both").read_bytes() == b"2"
    assert [p.name for p in path.parent.iterdir()] == ["out"]


def test_a_failed_folder_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()

    def fail() -> None:
        with files.atomic_folder(tmp_path / "out") as folder:
            (folder / "new").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["old"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_file_digest(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert files.file_digest(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


# -- randomness


def test_seeds_are_pinned() -> None:
    assert seed_of(0, "site-0", "order", 1) == 646413547847134036
    assert legacy_numpy(0, "split", "iid").randint(0, 1000, 5).tolist() == [837, 851, 655, 113, 332]
    assert torch.randint(0, 1000, (5,), generator=generator(0, "site-0", "order", 1)).tolist() == [
        943,
        661,
        461,
        31,
        795,
    ]


@given(st.lists(st.integers() | st.text("abc019-", max_size=5), min_size=1, max_size=4))
def test_a_key_gives_one_stream(key: list[Any]) -> None:
    assert 0 <= seed_of(*key) < 2**63
    assert torch.equal(torch.rand(8, generator=generator(*key)), torch.rand(8, generator=generator(*key)))
    assert np.array_equal(legacy_numpy(*key).rand(8), legacy_numpy(*key).rand(8))


def test_other_keys_give_other_streams() -> None:
    keys = [
        (s, f"site-{k}", stage, e)
        for s in range(4)
        for k in (1, 11, 2)
        for stage in ("order", "views")
        for e in (1, 2, 12)
    ]
    assert len({seed_of(*key) for key in keys}) == len(keys)
    assert seed_of(1, 12) != seed_of(11, 2) != seed_of(112)
    assert len({float(legacy_numpy(*key).rand()) for key in keys}) == len(keys)


def test_asking_for_a_generator_leaves_the_global_ones_alone() -> None:
    states = torch.get_rng_state(), pickle.dumps(np.random.get_state())
    torch.rand(3, generator=generator(1))
    legacy_numpy(1).rand(3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert pickle.dumps(np.random.get_state()) == states[1]


# -- settings


class Oven(BaseModel):
    model_config = ConfigDict(extra="forbid")
    heat: float = Field(200.0, gt=0)
    minutes: int = 30
    name: str = "oven"
    trays: tuple[int, int] = (1, 2)


def refused(values: dict[Any, Any], kind: type[BaseModel] = Oven) -> str:
    with pytest.raises(BadInput) as caught:
        build(kind, values, "oven")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_settings_are_built_or_the_wrong_one_is_named() -> None:
    assert build(Oven, {"heat": 180}, "oven").heat == 180.0
    assert refused({"heat": -1}) == "oven.heat = -1 will not do: input should be greater than 0"
    assert refused({"minuets": 5}) == "unknown oven setting 'minuets'; did you mean 'minutes'?"
    assert refused({"minutes": "soon"}).startswith("oven.minutes = 'soon' will not do: input should be a valid integer")
    assert refused({"trays": (1, "x")}).startswith("oven.trays.1 = 'x' will not do")
    assert "heat, minutes, name, trays" in refused({"qqqqqqq": 1})
    assert "string" in refused({1: 2})
    assert refused({"scale": (0.9, 0.1)}, ViewSettings).endswith("will not do: give the smaller number first")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train.lr=0.01", "train.lr", 0.01),
        ("train.lr=1e-3", "train.lr", 0.001),
        ("a=5", "a", 5),
        ("a=true", "a", True),
        ("a=null", "a", None),
        ("a=", "a", None),
        ("a=word", "a", "word"),
        ("a=[1, 2]", "a", [1, 2]),
        ("a=x=y", "a", "x=y"),
        (" a = 2 ", "a", 2),
        ("a='1e-3'", "a", "1e-3"),
        ("a='007'", "a", "007"),
        ("a=two words", "a", "two words"),
        ("a={b: 1}", "a", {"b": 1}),
    ],
)
def test_assignments(text: str, key: str, value: Any) -> None:
    found = parse_assignment(text)
    assert found == (key, value)
    assert type(found[1]) is type(value)


@pytest.mark.parametrize("text", ["", "lr", "=5", " =5", "a=[1", "a={", "a='x"])
def test_assignments_that_are_none(text: str) -> None:
    with pytest.raises(BadInput, match="--set"):
        parse_assignment(text)


# -- errors


def test_exit_codes() -> None:
    assert (FlybyError.exit_code, BadInput.exit_code, Diverged.exit_code) == (2, 2, 3)
    assert issubclass(BadInput, FlybyError)
    assert issubclass(Diverged, FlybyError)


def test_unknown_names_suggest_the_nearest() -> None:
    known = ["fedavg", "ensemble", "local"]
    assert str(unknown("method", "FedAgv", known)) == "unknown method 'FedAgv'; did you mean 'fedavg'?"
    assert str(unknown("method", "zzz", known)) == "unknown method 'zzz'; known: ensemble, fedavg, local."
    assert str(unknown("axis", "ab", ["abc", "abd"])) in (
        "unknown axis 'ab'; did you mean 'abc' or 'abd'?",
        "unknown axis 'ab'; did you mean 'abd' or 'abc'?",
    )
