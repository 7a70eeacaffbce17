"""A real node that lives through rounds: the same bytes as in a simulated population, whatever happens in between."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from factories import (
    STRIPES,
    WAIT,
    call,
    done,
    make_npz,
    make_tree,
    one_line,
    random_parcel,
    striped_site,
    stripes,
    trained,
)
from flyby.data.arrays import bundle_from
from flyby.data.site import site_of, whole_site
from flyby.data.sources import load
from flyby.data.splits import Split
from flyby.errors import BadInput
from flyby.files import digest
from flyby.fusion.predictor import save_predictor
from flyby.meeting import Schedule
from flyby.meeting.pipeline import Personal
from flyby.parcels import parcel
from flyby.parcels.ledger import Ledger, SecondCrossing
from flyby.runs import node as node_module
from flyby.runs import nodefolder, progress
from flyby.runs.nodefolder import NodeFolder
from flyby.runs.population import Node, Population

ME = "site-1"
SHORT = ("--set", "orient.epochs=2", "--set", "orient.distill_epochs=2", "--set", "orient.distill_steps=20")
QUIET = ("--device", "cpu", "--no-export")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def export(path: Path, data: str, split: Path, name: str) -> Path:
    """One site of a run as a file of its own: the very training and validation images, in their order."""
    bundle = load(data, holdout=0.0)
    site = site_of(bundle, Split.load(split), name)
    arrays = {"x_train": site.train.images, "y_train": site.train.labels, "x_val": site.val.images}
    arrays |= {"y_val": site.val.labels}
    names = np.array(bundle.train.class_names)
    return make_npz(path, **{key: value.numpy() for key, value in arrays.items()}, class_names=names)


def inbox_of(folder: Path, parcels: Path, senders: Sequence[str]) -> Path:
    """What was received, in the order in which it came: that of the names."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, sender in enumerate(senders):
        shutil.copy(parcels / f"{sender}.parcel", folder / f"{place:02d}-{sender}.parcel")
    return folder


# -- digits: three rounds of one node, simulated and real


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`flyby run` over three rounds; beside it, what the node had made after each of them."""
    top = tmp_path_factory.mktemp("simulated")
    real = Population.round

    def spied(self: Population, node: Node, inbox: Sequence[parcel.Parcel], number: int, judged: bool) -> Personal:
        made = real(self, node, inbox, number, judged)
        parcel.write(made.own, top / f"own-{number}.parcel")
        save_predictor(made.predictor, top / f"personal-{number}", export=False)
        return made

    words = "--data digits --split fol --min-size 40 --clients 9 --alpha 2 --rounds 3 --buffer 4 --top 3 --model mlp"
    words += f" --set data.holdout=0 --epochs 8 --seed 5 --eval-nodes {ME} --engine inline --device cpu --quiet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Population, "round", spied)
        done("run", "--method", "fol", *words.split(), *SHORT, "--out", top / "run")
    return top


def test_three_rounds_of_a_real_node_are_those_of_a_run(simulated: Path, tmp_path: Path) -> None:
    run = simulated / "run"
    data = export(tmp_path / "mine.npz", "digits", run / "split.json", ME)
    schedule = Schedule.load(run / "schedule.json")
    node = tmp_path / "node"
    first = ("--own", run / "parcels" / f"{ME}.parcel", "--seed", 5, "--set", "buffer=4", "--set", "top=3", *SHORT)
    for number in (1, 2, 3):
        inbox = inbox_of(tmp_path / str(number), run / "parcels", schedule.senders(ME, number))
        words = first if number == 1 else ()
        facts = done("orient", "--node", node, "--received", inbox, "--data", data, *words, *QUIET, "--json").json
        assert (facts["round"], facts["version"], facts["new"]) == (number, number, list(schedule.senders(ME, number)))
        assert (node / f"own/{number}.parcel").read_bytes() == (simulated / f"own-{number}.parcel").read_bytes()
        model = (simulated / f"personal-{number}" / "model.safetensors").read_bytes()
        assert (node / "personal" / "model.safetensors").read_bytes() == model
    assert model == (run / "personal" / ME / "model.safetensors").read_bytes()
    told = read(run / "nodes" / f"{ME}.json")["rounds"]
    history = read(node / "node.json")["rounds"]
    assert [one["chosen"] for one in history] == [
        [c["sender"] for c in one["candidates"] if c["chosen"]] for one in told
    ]
    assert any(set(two["chosen"]) & set(one["kept"]) for one, two in itertools.pairwise(history))
    crossed = [(c.sender, c.round) for c in Ledger.load(run / "ledger.json").crossings if c.receiver == ME]
    assert [(c.sender, c.round) for c in Ledger.load(node / "ledger.json").crossings] == crossed


# -- a small node with three neighbours, for all that can happen to it

QUICK = ("--set", "epochs=1", "--set", "distill_epochs=1", "--set", "distill_steps=0", "--set", "top=3", *QUIET)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The node's images and model, and its neighbours' models: two of the first week, one of the second, and a newer
    one of the first neighbour."""
    top = tmp_path_factory.mktemp("world")
    site = striped_site("me", 1)
    arrays = {"x_train": site.train.images, "y_train": site.train.labels, "x_val": site.val.images}
    arrays |= {"y_val": site.val.labels}
    make_npz(top / "mine.npz", **{k: v.numpy() for k, v in arrays.items()}, class_names=np.array(STRIPES))
    for seed, (name, week) in enumerate({"me": "", "ann": "1", "bob": "1", "cid": "2"}.items()):
        (top / week).mkdir(exist_ok=True)
        parcel.write(trained(striped_site(name, seed + 1)), top / week / f"{name}.parcel")
    (top / "later").mkdir()
    parcel.write(trained(striped_site("ann", 9)), top / "later" / "ann.parcel")
    return top


def words_of(world: Path, node: Path, week: object, *more: object) -> tuple[object, ...]:
    return ("orient", "--node", node, "--received", world / str(week), "--data", world / "mine.npz", *QUICK, *more)


@pytest.fixture(scope="module")
def weeks(world: Path) -> list[Path]:
    """The folder of a node after its first round, and after its second."""
    done(*words_of(world, world / "after-1", 1, "--own", world / "me.parcel"))
    shutil.copytree(world / "after-1", world / "after-2")
    done(*words_of(world, world / "after-2", 2))
    return [world / "after-1", world / "after-2"]


@pytest.fixture
def node(weeks: list[Path], tmp_path: Path) -> Path:
    """A node after its first round."""
    return shutil.copytree(weeks[0], tmp_path / "node")


def content(node: Path) -> dict[str, bytes]:
    """All bytes of a node's folder that are not a stop-watch's; its history without the seconds."""
    found = {path.relative_to(node).as_posix(): path.read_bytes() for path in node.rglob("*") if path.is_file()}
    state = json.loads(found.pop("node.json"))
    rounds = [{k: v for k, v in one.items() if k != "seconds"} for one in state["rounds"]]
    kept = {name: found.pop(name) for name in sorted(found) if name.startswith("kept/")}
    weights = {name: parcel.from_bytes(raw).weights for name, raw in kept.items()}
    told = {name: {key: value.numpy().tobytes() for key, value in one.items()} for name, one in weights.items()}
    del found["personal/orient.json"]
    return found | {"rounds": json.dumps(rounds).encode(), "kept": repr(told).encode()}


def test_a_round_that_is_given_twice_is_done_once(world: Path, node: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in node.rglob("*")}
    answer = done(*words_of(world, node, 1))
    assert "round 1 stands: nothing new came (0 new, 0 refused, 2 seen before)" in answer.out
    assert {path: path.stat().st_mtime_ns for path in node.rglob("*")} == before


def test_what_is_not_named_again_stays_as_it_was(world: Path, node: Path) -> None:
    """And what is named holds from then on."""
    words = ("orient", "--node", node, "--received", world / "2", "--data", world / "mine.npz", *QUIET)
    done(*words, "--set", "top=2", "--seed", 7, "--method", "fol-n")
    state = read(node / "node.json")
    assert state["settings"] == {"epochs": 1, "distill_epochs": 1, "distill_steps": 0, "top": 2}
    assert (state["seed"], state["method"], state["number"]) == (7, "fol-n", 2)
    assert [(one["seed"], one["method"], one["settings"]["top"]) for one in state["rounds"]] == [
        (0, "fol", 3),
        (7, "fol-n", 2),
    ]
    shown = done("inspect", node).out
    assert "me" in shown
    assert "fol-n" in shown
    assert done("inspect", node, "--json").json["rounds"] == state["rounds"]


def test_a_round_says_that_it_goes_on(world: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENT", 0.001)
    words = ("orient", "--node", node, "--received", world / "2", "--data", world / "mine.npz", *QUIET)
    assert "round 2 of me (" in done(*words, "--method", "fol-n").err


def test_the_personal_model_may_go_elsewhere(world: Path, tmp_path: Path) -> None:
    words = words_of(world, tmp_path / "node", 1, "--own", world / "me.parcel", "--out", tmp_path / "sent", "--json")
    facts = done(*words).json
    assert facts["out"] == str(tmp_path / "sent")
    assert not (tmp_path / "node" / "personal").exists()
    own = parcel.read(tmp_path / "node" / "own" / "1.parcel")
    assert parcel.read(tmp_path / "sent" / "me.parcel").digest == own.digest
    assert (own.manifest.meta["version"], facts["before"].keys()) == (1, {"accuracy", "log_loss"})
    assert NodeFolder.start(tmp_path / "new", own).state.number == 1, "a new folder counts on from there"
    assert "flyby: --node keeps a ledger" in call(*words_of(world, tmp_path / "x", 1, "--ledger", "l.json")).err


def test_a_newer_model_of_a_neighbour_is_refused_unless_asked_for(world: Path, node: Path, tmp_path: Path) -> None:
    answer = done(*words_of(world, node, "later"))
    assert "second crossing" in answer.err
    assert "--again takes it" in answer.err
    assert "nothing new came" in answer.out
    facts = done(*words_of(world, node, "later", "--again", "--json")).json
    assert (facts["new"], facts["again"], facts["round"]) == (["ann"], ["ann"], 2)
    ledger = Ledger.load(node / "ledger.json")
    assert [(c.sender, c.round, c.again) for c in ledger.crossings] == [("ann", 1, 0), ("bob", 1, 0), ("ann", 2, 1)]
    assert ledger.total_bytes == sum(c.bytes for c in ledger.crossings)
    assert "again" not in read(node / "ledger.json")["crossings"][0], "the form of other ledgers stays as it was"
    used = [one["sender"] for one in read(node / "personal" / "orient.json")["candidates"]]
    assert sorted(used) == ["ann", "bob", "self"], "the newer one is in the older one's place"
    assert "nothing new came" in done(*words_of(world, node, "later", "--again")).out, "the same file is no newer model"


def test_a_ledger_counts_only_what_was_asked_for(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.record("a", "b", 1, "x")
    with pytest.raises(SecondCrossing):
        ledger.record("a", "b", 1, "y")
    ledger.record("a", "b", 1, "y", 2, again=True)
    ledger.save(tmp_path / "ledger.json")
    assert Ledger.load(tmp_path / "ledger.json").crossings == ledger.crossings
    rows = read(tmp_path / "ledger.json")
    for wrong in (2, 0):
        rows["crossings"][1]["again"] = wrong
        (tmp_path / "ledger.json").write_text(json.dumps(rows))
        with pytest.raises(BadInput, match="crossing 1 is not valid"):
            Ledger.load(tmp_path / "ledger.json")


@pytest.mark.parametrize("step", ["adapting", "own", "kept", "ledger", "model", "state"])
def test_an_interrupted_round_is_done_again_with_the_same_result(
    step: str, world: Path, weeks: list[Path], node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is tidied up in the folder, so that this is what a kill leaves as well."""

    def stop(*words: object, **more: object) -> None:
        raise KeyboardInterrupt

    def stop_at(name: str) -> Callable[..., int]:
        real = parcel.write
        return lambda item, path: stop() if f"/{name}/" in str(path) else real(item, path)

    places: dict[str, tuple[object, str, object]] = {
        "adapting": (node_module, "orient", stop),
        "own": (parcel, "write", stop_at("own")),
        "kept": (parcel, "write", stop_at("kept")),
        "ledger": (Ledger, "save", stop),
        "model": (node_module, "save_predictor", stop),
        "state": (nodefolder, "write_json", stop),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*places[step])
        assert call(*words_of(world, node, 2)).code == 130
    assert NodeFolder.load(node).state == NodeFolder.load(weeks[0]).state
    if step in ("adapting", "own"):
        assert content(node) == content(weeks[0])
    done(*words_of(world, node, 2))
    assert content(node) == content(weeks[1])


def test_a_first_round_that_was_killed_leaves_nothing(world: Path, weeks: list[Path], tmp_path: Path) -> None:
    """SIGKILL just before the round would count."""
    code = "import os, sys; from flyby.runs import nodefolder; from flyby.cli import main;"
    code += "nodefolder.write_json = lambda *words: os.kill(os.getpid(), 9); sys.argv[0] = 'flyby'; main()"
    words = words_of(world, tmp_path / "node", 1, "--own", world / "me.parcel")
    killed = subprocess.run([sys.executable, "-c", code, *map(str, words)], timeout=WAIT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "node").exists()
    done(*words)
    assert content(tmp_path / "node") == content(weeks[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node", "node.report.html"]


def test_new_images_never_change_sides(tmp_path: Path) -> None:
    """What was held out once is held out for ever, and so is what was trained on; a copy of a training image judges
    nothing."""
    images, labels = stripes(60)
    own = random_parcel("me")
    folder = NodeFolder.start(None, own)
    marked = [(image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True)]
    sides: dict[str, set[tuple[bytes, int]]] = {"train": set(), "val": set()}
    for count in (40, 60):
        bundle = bundle_from(images[:count], labels[:count], STRIPES)
        site, marks = folder.site(bundle, 0)
        now = {
            part: {(i.numpy().tobytes(), int(y)) for i, y in zip(held.images, held.labels, strict=True)}
            for part, held in (("train", site.train), ("val", site.val))
        }
        assert now["train"] | now["val"] == set(marked[:count])
        assert not now["train"] & now["val"]
        assert all(sides[part] <= now[part] for part in sides)
        assert len(now["val"]) == pytest.approx(0.15 * count, abs=1)
        folder.state, sides = folder.state.model_copy(update=marks), now
    first = whole_site(bundle_from(images[:40], labels[:40], STRIPES), "me", 0.15, 0)
    again, _ = NodeFolder.start(None, own).site(bundle_from(images[:40], labels[:40], STRIPES), 0)
    assert torch.equal(first.train.images, again.train.images), "the first time, as flyby train holds out"
    twice = np.concatenate([images[:40], images[:40]])
    site, _ = NodeFolder.start(None, own).site(bundle_from(twice, np.concatenate([labels[:40]] * 2), STRIPES), 0)
    seen = {image.numpy().tobytes() for image in site.train.images}
    assert not [1 for image in site.val.images if image.numpy().tobytes() in seen]


def test_a_model_that_is_not_accepted_does_not_fly(world: Path, node: Path) -> None:
    flying = (node / "personal" / "model.safetensors").read_bytes()
    answer = done(*words_of(world, node, 2, "--accept", "--set", "accept=1e9"))
    assert "its model is of round 1: the new one was not accepted" in answer.out
    assert "the new model stays out" in answer.err
    state = read(node / "node.json")
    assert (state["number"], state["own"]["file"], state["rounds"][-1]["version"]) == (2, "own/1.parcel", 1)
    assert not (node / "own" / "2.parcel").exists()
    assert (node / "personal" / "model.safetensors").read_bytes() == flying


def test_images_without_labels_and_a_budget(world: Path, node: Path, tmp_path: Path) -> None:
    """New images are news, with labels or without."""
    make_tree(tmp_path / "seen", *stripes(12, seed=5), STRIPES)
    words = words_of(world, node, 1, "--unlabelled", tmp_path / "seen", "--seconds", 100)
    assert "round 2: 0 new, 0 refused, 2 seen before" in done(*words).out
    assert read(node / "personal" / "orient.json")["distill_images"] == 60 + 12
    assert read(node / "node.json")["settings"]["seconds"] == 100
    assert "nothing new came" in done(*words).out


# -- what is refused


def test_what_a_node_cannot_do(world: Path, node: Path, tmp_path: Path) -> None:
    def said(*words: object) -> str:
        return one_line(call(*words))

    fresh = tmp_path / "fresh"
    assert "is not a node's folder (no node.json)" in said(*words_of(world, fresh, 1))
    own = ("--own", world / "1" / "ann.parcel")
    assert "is the folder of me already, with its model of round 1; leave --own out" in said(
        *words_of(world, node, 1, *own)
    )
    (fresh / "inbox").mkdir(parents=True)
    assert "holds something and is not a node's folder" in said(*words_of(world, fresh, 1, *own))
    assert "name --own FILE.parcel and --out FOLDER, or --node" in said(
        "orient", "--received", world / "1", "--data", world / "mine.npz"
    )
    assert "lies in the node's folder" in said(*words_of(world, node, 2, "--out", node / "x"))
    assert "must be finite" in said(*words_of(world, node, 2, "--set", "accept=.inf"))
    images, labels = stripes(60)
    other = make_npz(tmp_path / "other.npz", images=images, labels=labels, class_names=np.array(["x", "y", "z"]))
    before = content(node)
    assert "classes that the node's own model does not know: x" in said(*words_of(world, node, 2, "--data", other))
    assert "is not a folder" in said(*words_of(world, node, 2, "--unlabelled", tmp_path / "nowhere"))
    assert "holds no images" in said(*words_of(world, node, 2, "--unlabelled", world / "1"))
    assert "unknown orient setting" in said(*words_of(world, node, 2, "--set", "tpo=3"))
    assert content(node) == before


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("node.json", lambda text: text.replace(b'"number": 1', b'"number": 2'), "was changed after it was written"),
        ("node.json", lambda text: text[:-20], "not readable JSON"),
        ("node.json", lambda text: b"[]", "not the state of a node"),
        ("node.json", lambda text: b'{"schema_version": 9}', "has schema 9"),
        ("ledger.json", lambda text: text.replace(b"bob", b"tim"), "does not fit together"),
        ("ledger.json", None, "does not exist"),
        ("own/1.parcel", None, "does not exist"),
        ("own/1.parcel", lambda data: data[:-1], "bytes that its header claims"),
        ("kept/1-0.parcel", None, "does not exist"),
    ],
)
def test_a_broken_folder_is_refused(
    name: str, change: Callable[[bytes], bytes] | None, message: str, world: Path, node: Path
) -> None:
    if change is None:
        (node / name).unlink()
    else:
        (node / name).write_bytes(change((node / name).read_bytes()))
    assert message in one_line(call(*words_of(world, node, 2)))


def test_files_of_another_node_are_refused(world: Path, node: Path) -> None:
    shutil.copy(node / "own" / "0.parcel", node / "own" / "1.parcel")
    assert "is not the one that node.json names" in one_line(call(*words_of(world, node, 2)))
    state = read(node / "node.json")
    del state["digest"]
    for changes, message in (({"node": "ann"}, "does not fit together"), ({"number": "2"}, "number: Input should be")):
        changed = {**state, "own": {"file": "own/0.parcel", "digest": parcel.read(node / "own/0.parcel").digest}}
        changed |= changes
        (node / "node.json").write_text(json.dumps({**changed, "digest": digest(changed)}))
        assert message in one_line(call(*words_of(world, node, 2)))
