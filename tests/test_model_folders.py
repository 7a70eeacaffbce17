"""A model folder in strangers' hands: signed as parcels are, checked before it is used, and loaded by a way that runs
nothing of it."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import flyby
from factories import WAIT, call, done, one_line, random_parcel
from flyby.fusion.predictor import FILES, load_predictor
from flyby.parcels import parcel, signing
from flyby.parcels.signing import FOLDER_FILE, BadSignature, Trust

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, keys of two people, a trust file that knows the first, an image."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("lab", "thief"):
        signing.new_key(name, folder)
    trust = Trust()
    trust.add("lab", signing.read_public(folder / "lab.pub"))
    trust.save(folder / "trust.json")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "x.png")
    parcel.write(random_parcel("a"), folder / "a.parcel")
    done("fuse", folder / "a.parcel", "--fusion", "fedavg", "--out", folder / "model")
    return folder


@pytest.fixture
def model(place: Path, tmp_path: Path) -> Path:
    """A copy of the model, signed by the lab."""
    for path in (place / "model").iterdir():
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    signing.sign_folder(tmp_path / "model", signing.read_private(place / "lab.key"))
    return tmp_path / "model"


def asked(place: Path, model: Path, *words: object) -> tuple[object, ...]:
    return ("predict", model, place / "x.png", *words)


# -- signing


def test_a_signed_folder_is_used_by_those_who_trust_its_signer(place: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "global").mkdir(parents=True)
    for path in (place / "model").iterdir():
        (tmp_path / "run" / "global" / path.name).write_bytes(path.read_bytes())
    told = done("sign", tmp_path / "run", "--key", place / "lab.key", "--json").json  # a run folder means its model
    assert told["sender"] == "lab"
    assert told["files"] == [
        *("README.md", "ledger.json", "model.json", "model.pt2", "model.safetensors", "report.html"),
    ]
    model, trust = tmp_path / "run" / "global", ("--trust", place / "trust.json", "--require-signed")
    assert done(*asked(place, model, *trust)).err == ""
    data = tmp_path / "data.npz"
    images, names = np.zeros((6, 8, 8, 1), np.uint8), np.array(random_parcel("a").manifest.class_names)
    np.savez(data, images=images, labels=np.arange(6) % 3, class_names=names)
    assert done("evaluate", tmp_path / "run", "--data", data, *trust, "--json").json["images"] == 6
    assert flyby.load_model(model, trust=place / "trust.json", require_signed=True).class_names
    assert "signed by lab with" in done("sign", model, "--key", place / "lab.key").out  # again: nothing stands in it


@pytest.mark.parametrize("name", ["README.md", "ledger.json", "model.json", "model.pt2", "model.safetensors"])
@pytest.mark.parametrize("how", ["changed", "gone", "added"])
def test_a_signed_folder_that_was_tampered_with_is_one_line(place: Path, model: Path, name: str, how: str) -> None:
    """With a trust file and without: a signature that does not fit is never used."""
    path = model / name
    if how == "changed":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "gone":
        path.unlink()
    else:
        stranger = path.read_bytes()
        path.unlink()
        signing.sign_folder(model, signing.read_private(place / "lab.key"))
        path.write_bytes(stranger)
    if name == "model.json" and how == "gone":
        assert "is not a model" in one_line(call(*asked(place, model)))
        return
    for words in ((), ("--trust", place / "trust.json"), ("--trust", place / "trust.json", "--require-signed")):
        said = one_line(call(*asked(place, model, *words)))
        assert name in said
        assert {"changed": "was changed after lab signed", "gone": "is gone", "added": "nobody signed"}[how] in said
    assert "signed" in one_line(call("evaluate", model, "--data", "digits"))
    with pytest.raises(BadSignature, match="sign"):
        load_predictor(model)


def test_every_word_of_the_signature_file_counts(place: Path, model: Path) -> None:
    said = json.loads((model / FOLDER_FILE).read_text())
    thief = signing.read_public(place / "thief.pub")
    for bent in (
        said | {"sender": "thief"},
        said | {"files": said["files"] | {"model.json": "0" * 64}},
        said | {"files": {}},
        said | {"signature": ""},
        said | {"signature": "AAAA"},
        said | {"signature": "not base64"},
        said | {"signature": said["signature"][:-8] + "AAAAAAA="},
        said | {"schema_version": 2},
        said | {"more": 1},
        said | {"files": said["files"] | {"../trust.json": "0" * 64}},
        {key: value for key, value in said.items() if key != "sender"},
        [],
        thief.text,
    ):
        (model / FOLDER_FILE).write_text(json.dumps(bent))
        one_line(call(*asked(place, model, "--trust", place / "trust.json", "--require-signed")))
        if bent != said | {"signature": ""}:
            one_line(call(*asked(place, model)))
    for junk in ("", "[" * 200_000, "\0", " " * 70_000):
        (model / FOLDER_FILE).write_text(junk)
        one_line(call(*asked(place, model)))


def test_a_signature_of_a_parcel_is_none_of_a_folder(place: Path, model: Path) -> None:
    """The same key over the same words in another place: each kind of signature has a prefix of its own."""
    seal = signing.read_folder(model)
    assert signing.Signed(seal.sender, seal.content, seal.block).signer("x") is not None
    moved = signing.CONTEXT + seal.content.removeprefix(signing.FOLDER_CONTEXT)
    with pytest.raises(BadSignature):
        signing.Signed(seal.sender, moved, seal.block).signer("x")


def test_who_signed_decides_as_it_does_for_parcels(place: Path, model: Path, tmp_path: Path) -> None:
    trust, strict = ("--trust", place / "trust.json"), ("--trust", place / "trust.json", "--require-signed")
    unknown = done(*asked(place, model))  # signed, and nobody says whose key it is
    assert "valid, by key" in unknown.err
    assert "--trust FILE" in unknown.err
    signing.sign_folder(model, signing.read_private(place / "thief.key"))
    assert "NOT TRUSTED: thief is not in the trust file" in done(*asked(place, model, *trust)).err
    assert "the trust file does not have thief" in one_line(call(*asked(place, model, *strict)))
    renamed = signing.read_private(place / "thief.key")._replace(sender="lab")
    signing.sign_folder(model, renamed)
    for words in (trust, strict):
        assert "not the key that lab is trusted with" in one_line(call(*asked(place, model, *words)))
    signing.sign_folder(model, signing.read_private(place / "lab.key")._replace(sender="other"))
    for words in (trust, strict):
        assert "signed with the key of lab" in one_line(call(*asked(place, model, *words)))
    (model / FOLDER_FILE).unlink()
    assert done(*asked(place, model)).err == ""
    assert "is not signed, so anybody may have made it" in done(*asked(place, model, *trust)).err
    assert "is not signed; its maker can sign it" in one_line(call(*asked(place, model, *strict)))
    assert "needs --trust FILE" in one_line(call(*asked(place, model, "--require-signed")))


def test_a_parcel_that_is_asked_is_held_to_its_signature_too(place: Path, tmp_path: Path) -> None:
    item = signing.sign(random_parcel("lab"), signing.read_private(place / "lab.key"))
    parcel.write(item, tmp_path / "lab.parcel")
    strict = ("--trust", place / "trust.json", "--require-signed")
    assert done(*asked(place, tmp_path / "lab.parcel", *strict)).err == ""
    parcel.write(random_parcel("lab"), tmp_path / "cut.parcel")
    assert "is not signed, and lab signs" in one_line(call(*asked(place, tmp_path / "cut.parcel", *strict[:2])))
    data = bytearray((tmp_path / "lab.parcel").read_bytes())
    data[data.index(item.signature) + 50] ^= 1
    (tmp_path / "lab.parcel").write_bytes(data)
    assert "does not fit its content" in one_line(call(*asked(place, tmp_path / "lab.parcel")))


def test_inspect_shows_the_files_of_a_folder_and_who_signed_them(place: Path, model: Path) -> None:
    trust = ("--trust", place / "trust.json")
    told = done("inspect", model, *trust, "--json").json
    assert told["signature"]["trusted_as"] == "lab"
    assert told["files"]["model.json"] == (model / "model.json").stat().st_size
    assert "trusted as lab" in " ".join(done("inspect", model, *trust).out.split())
    odd = model.rename(model.with_name("[bold]\x1b[31m\u202e"))
    (odd / "model.json").write_text("{}")
    shown = done("inspect", odd, *trust).out
    assert "NOT VALID" in shown
    assert not set("\x1b\u202e") & set(shown)
    (odd / FOLDER_FILE).unlink()
    assert done("inspect", odd, "--json").json["signature"]["note"] == "none"


def test_what_cannot_be_signed_is_one_line(place: Path, model: Path, tmp_path: Path) -> None:
    key = ("--key", place / "lab.key")
    assert "--out is for a parcel" in one_line(call("sign", model, *key, "--out", tmp_path / "x"))
    assert "is not a model" in one_line(call("sign", tmp_path, *key))
    (model / os.fsdecode(b"caf\xe9")).write_text("x")
    assert "cannot be signed" in one_line(call("sign", model, *key))
    nameless = tmp_path / "nameless.key"
    nameless.write_text((place / "lab.key").read_text().partition("\n")[2])
    nameless.chmod(0o600)
    assert "does not name its owner" in one_line(call("sign", model, "--key", nameless))


def test_a_signed_folder_is_replaced_whole(place: Path, model: Path) -> None:
    assert FOLDER_FILE in FILES
    done("fuse", place / "a.parcel", "--fusion", "fedavg", "--no-export", "--out", model)
    assert not (model / FOLDER_FILE).exists()


# -- loading


class Evil:
    """What a pickle may say."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.mark),)


def poisoned(program: Path, mark: Path) -> None:
    """Puts into a program of PyTorch what makes a folder when it is read."""
    with zipfile.ZipFile(program) as old:
        parts = {info.filename: old.read(info) for info in old.infolist()}
    (inputs,) = [name for name in parts if "sample_inputs" in name]
    buffer = io.BytesIO()
    torch.save(Evil(mark), buffer, pickle_module=pickle)
    with zipfile.ZipFile(program, "w") as new:
        for name, data in parts.items():
            new.writestr(name, buffer.getvalue() if name == inputs else data)


def ran(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Some code in a Python of its own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=WAIT, check=False)


def python_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.S | re.M)


def test_loading_the_program_runs_what_it_says_and_flyby_runs_nothing(place: Path, tmp_path: Path) -> None:
    """Why the pages say so: if PyTorch ever refuses such a program, they may say less."""
    model = tmp_path / "model"
    model.mkdir()
    for path in (place / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    poisoned(model / "model.pt2", tmp_path / "mark")
    done("predict", model, place / "x.png")
    flyby.load_model(model)
    assert not (tmp_path / "mark").exists()
    ran(f"import torch; torch.export.load({str(model / 'model.pt2')!r})", tmp_path)
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("page", ["README.md of the folder", "docs/loading.md"])
def test_pages_put_first_what_runs_nothing_and_say_what_the_program_does(place: Path, page: str) -> None:
    text = ((place / "model" / "README.md") if "folder" in page else ROOT / page).read_text()
    safe, program = python_of(text)
    assert "flyby.load_model(" in safe
    assert "torch.export.load" in program
    warning = text[: text.index("torch.export.load")]
    assert "runs whatever it says" in " ".join(warning.split())
    assert "--require-signed" in text
    code = "import sys; sys.modules['sklearn'] = None\n" + safe
    ended = ran(code, place / "model")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(random_parcel("a").manifest.class_names)


def test_a_folder_without_a_program_speaks_of_none(tmp_path: Path) -> None:
    parcel.write(random_parcel("a"), tmp_path / "a.parcel")
    done("fuse", tmp_path / "a.parcel", "--fusion", "fedavg", "--no-export", "--out", tmp_path / "model")
    (safe,) = python_of((tmp_path / "model" / "README.md").read_text())
    assert 'flyby.load_model(".")' in safe


def test_a_class_name_that_turns_the_writing_is_shown_and_turns_nothing(place: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in (place / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "model.json").read_text())
    turned = ["\u202elive", "\u2067cat", "\x1b[31mdog"]
    (model / "model.json").write_text(json.dumps(config | {"class_names": turned}))
    answer = call("predict", model, place / "x.png")
    if answer.code == 0:
        assert not set("\u202e\u2067\x1b") & set(answer.out + answer.err)
    else:
        one_line(answer)


def test_what_a_killed_command_left_in_the_folder_does_not_keep_the_next_one_out(place: Path, tmp_path: Path) -> None:
    words = ("fuse", place / "a.parcel", "--fusion", "ensemble", "--no-export", "--out", tmp_path / "m")
    done(*words)
    (tmp_path / "m" / ".report.html.vjqkhrwx.part").write_text("half a page")
    done(*words)
    assert not [path.name for path in (tmp_path / "m").iterdir() if path.name.startswith(".")]
    (tmp_path / "m" / ".thesis.html.vjqkhrwx.part").write_text("somebody else's")
    assert "holds something else than a model of flyby ('.thesis.html.vjqkhrwx.part')" in one_line(call(*words))
