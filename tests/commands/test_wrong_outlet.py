"""Wrong words to the commands that use a model: predict, serve, export, evaluate. Each is one sentence and exit 2, and
nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from factories import NAMES, call, make_npz, one_line, random_parcel, small_spec, stripes
from flyby.deploy import serve
from flyby.fusion.ensembles.standardised import StandardisedPredictor
from flyby.fusion.predictor import Single, save_predictor
from flyby.parcels import parcel, signing

SPEC = small_spec()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Things to name: a good model and its damaged brothers, a parcel, images and what is none."""
    root = tmp_path_factory.mktemp("wrong")
    save_predictor(Single([SPEC], NAMES, [SPEC.build()]), root / "model", {"sites": 1}, export=False)
    parcel.write(random_parcel("a"), root / "a.parcel")
    (root / "half.parcel").write_bytes((root / "a.parcel").read_bytes()[:-100])
    Image.fromarray(stripes(1)[0][0, :, :, 0]).save(root / "x.png")
    (root / "half.png").write_bytes((root / "x.png").read_bytes()[:40])
    (root / "note.txt").write_text("hello")
    (root / "empty").mkdir()
    (root / "notes").mkdir()
    (root / "notes" / "note.txt").write_text("hello")
    np.save(root / "tile.npy", np.zeros((8, 8, 5), np.float32))
    images, labels = stripes(12)
    make_npz(root / "data.npz", images=images, labels=labels, class_names=np.array(NAMES))
    make_npz(root / "other.npz", images=images, labels=labels, class_names=np.array(["x", "y", "z"]))

    def brother(name: str, change: Callable[[Path], object]) -> None:
        shutil.copytree(root / "model", root / name)
        change(root / name)

    def rewritten(**facts: object) -> Callable[[Path], object]:
        def change(folder: Path) -> None:
            config = json.loads((folder / "model.json").read_text())
            (folder / "model.json").write_text(json.dumps(config | facts))

        return change

    brother("no-tensors", lambda f: (f / "model.safetensors").unlink())
    brother("half-tensors", lambda f: os.truncate(f / "model.safetensors", 500))
    brother("junk-tensors", lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 5000))
    brother("junk-json", lambda f: (f / "model.json").write_text("{"))
    brother("list-json", lambda f: (f / "model.json").write_text("[]"))
    brother("future", rewritten(format=99))
    brother("strange", rewritten(kind="sinlge"))
    brother("few-names", rewritten(class_names=["one"]))
    brother("hot", rewritten(temperature=0.0))
    signing.new_key("lab", root)
    brother("signed", lambda f: signing.sign_folder(f, signing.read_private(root / "lab.key")))
    brother("tampered", lambda f: signing.sign_folder(f, signing.read_private(root / "lab.key")))
    (root / "tampered" / "README.md").write_text("buy something")
    together = small_spec(head="prototype")
    rule = StandardisedPredictor([together], NAMES, [together.build()], moments="batch")
    save_predictor(rule, root / "together", export=False)
    os.symlink(root / "empty", root / "link")
    return root


# (the command in the folder of these things, what its one sentence says)
WRONG = [
    # what is no model, to each of the four
    ("predict nowhere x.png", "nowhere does not exist; name a model folder"),
    ("serve nowhere", "nowhere does not exist"),
    ("export nowhere --out o", "nowhere does not exist"),
    ("evaluate nowhere --data data.npz", "nowhere does not exist"),
    ("fuse --add half.parcel nowhere", "nowhere does not exist"),
    ("fuse --add half.parcel note.txt", "note.txt is a file, and no model folder"),
    ("predict empty x.png", "empty is not a model: it has no model.json"),
    ("serve empty", "empty is not a model"),
    ("export notes --out o", "notes is not a model"),
    ("predict note.txt x.png", "is not a parcel"),
    ("serve x.png", "is not a parcel"),
    ("export data.npz --out o", "is not a parcel"),
    ("serve half.parcel", "half.parcel"),
    # damaged models
    ("predict no-tensors x.png", "no-tensors is damaged"),
    ("serve half-tensors", "half-tensors is damaged"),
    ("export half-tensors --out o", "half-tensors is damaged"),
    ("evaluate junk-tensors --data data.npz", "junk-tensors is damaged"),
    ("predict junk-json x.png", "not readable JSON"),
    ("serve list-json", "list-json is damaged"),
    ("export future --out o", "has model format 99"),
    ("predict strange x.png", "did you mean 'single'?"),
    ("serve few-names", "few-names is damaged"),
    ("predict hot x.png", "its temperature is 0.0"),
    ("serve tampered", "README.md was changed after lab signed it"),
    ("export tampered --out o", "README.md was changed after lab signed it"),
    # who signed it
    ("serve model --require-signed", "needs --trust FILE"),
    ("export model --out o --trust note.txt", "note.txt"),
    ("predict model x.png --trust nowhere.json", "nowhere.json"),
    # images
    ("predict model nowhere.png", "there is no image file nowhere.png"),
    ("predict model empty", "the folder empty holds no images"),
    ("predict model notes", "the folder notes holds no images"),
    ("predict model note.txt", "note.txt cannot be decoded as an image"),
    ("predict model half.png", "half.png cannot be decoded as an image"),
    ("predict model a.parcel", "a.parcel cannot be decoded as an image"),
    ("predict model tile.npy", "tile.npy holds float32 in 5 channels"),
    ("predict model half.png note.txt nowhere.png", "(and 2 more that cannot be used)"),
    ("predict together x.png", "one image has none"),
    ("predict model", "Missing argument"),
    # numbers and words
    ("predict model x.png --top 0", "0 is not in the range x>=1"),
    ("predict model x.png --top -3", "-3 is not in the range x>=1"),
    ("predict model x.png --top many", "'many' is not a valid integer"),
    ("predict model x.png --csv empty", "cannot write empty"),
    ("predict model x.png --csv note.txt/t.csv", "cannot write note.txt/t.csv"),
    ("predict model x.png --device gpu", "unknown device 'gpu'"),
    ("predict model x.png --max-side 4", "max-side"),
    ("predict model x.png --topp 3", "No such option"),
    # the server
    ("serve model --port 70000", "70000 is not in the range 0<=x<=65535"),
    ("serve model --port -1", "-1 is not in the range"),
    ("serve model --port http", "'http' is not a valid integer"),
    ("serve model --port {taken}", "is taken by another program; give another one: --port"),
    ("serve model --port 0 --host 203.0.113.7", "cannot listen on 203.0.113.7"),
    ("serve model --port 0 --host no.such.host.invalid", "cannot listen on no.such.host.invalid"),
    ("serve together --port 0", "must be asked about 2 images at once"),
    ("serve model x.png", "unexpected extra argument"),
    # the export
    ("export model", "Missing option '--out'"),
    ("export model --out notes", "holds something else than an exported model ('note.txt')"),
    ("export model --out model", "holds something else than an exported model"),
    ("export model --out note.txt", "note.txt is a file; name a folder"),
    ("export model --out note.txt/o", "cannot write note.txt/o"),
    ("export model --out link", "link is a link"),
    ("export model --out o --license my_licence!", "is no name of a licence"),
    ("fuse a.parcel --out o --fusion fedavg --license {long}", "is no name of a licence"),
    # the card
    ("evaluate signed --data data.npz --card", "is signed, so its card stays as it is"),
    ("evaluate a.parcel --data data.npz --card", "is a parcel, which has no card"),
    ("evaluate model --data nowhere", "nowhere"),
    ("evaluate model --data empty", "empty"),
    ("evaluate model --data note.txt", "unknown kind"),
]


@pytest.mark.parametrize(("words", "says"), WRONG, ids=[words for words, _ in WRONG])
def test_one_sentence_and_exit_2(shelf: Path, words: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shelf)
    monkeypatch.setattr(serve.Server, "serve_forever", lambda self: pytest.fail("it serves"))
    monkeypatch.setattr("flyby.deploy.onnx.write_onnx", lambda predictor, path: path.write_bytes(b"x"))
    before = sorted(path.name for path in shelf.iterdir())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        filled = words.format(taken=taken.getsockname()[1], long="x" * 90)
        said = one_line(call(*filled.split()))
    assert says in said
    assert "Traceback" not in said
    assert sorted(path.name for path in shelf.iterdir()) == before, "something was left behind"


def test_there_are_enough_of_them() -> None:
    assert len({words for words, _ in WRONG}) == len(WRONG) >= 25
