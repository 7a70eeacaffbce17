"""The command line: what it answers, and what bad input gets: one line, exit code 2, nothing half-written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from factories import (
    Answer,
    call,
    done,
    encode,
    execute,
    make_images,
    make_npz,
    make_stripes,
    make_tree,
    one_line,
    result_of,
    stripes,
)
from flyby import __version__
from flyby.models import ModelSpec
from flyby.parcels import parcel

SPEC = ModelSpec(name="mlp", classes=3, channels=1, size=(8, 8), widths={"fc1": 4, "fc2": 3})
TINY = ("--method", "fedavg", "--model", "mlp", "--epochs", 2, "--engine", "inline", "--device", "cpu", "--quiet")

PLAIN = ("--method", "fedavg", "--model", "mlp", "--epochs", 1)


def made(
    sender: str = "site-a", spec: ModelSpec = SPEC, names: tuple[str, ...] = ("rows", "columns", "checks")
) -> parcel.Parcel:
    weights = dict(spec.build(torch.Generator().manual_seed(0)).state_dict())
    return parcel.make(
        sender=sender, method="supervised", spec=spec, class_names=names, weights=weights, samples=6, counts=[2, 2, 2]
    )


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a finished run and a parcel, made once."""
    folder = tmp_path_factory.mktemp("shelf")
    data = make_stripes(folder / "stripes.npz")
    done("run", "--data", data, "--clients", 2, "--alpha", 100, "--out", folder / "run", *TINY)
    parcel.write(made(), folder / "good.parcel")
    (folder / "image.png").write_bytes(encode(stripes(1)[0][0]))
    (folder / "note.txt").write_text("not an image")
    return folder


# -- what is answered


def test_version_help_and_the_module(shelf: Path) -> None:
    assert done("--version").out == f"flyby {__version__}\n"
    assert done("--help").out == done().out
    for name in ("run", "train", "inspect", "fuse", "evaluate", "predict", "methods", "data", "report"):
        assert f"│ {name} " in done().out
    assert execute("--version") == Answer(0, f"flyby {__version__}\n", "")


def test_methods_say_what_crosses(shelf: Path) -> None:
    rows = {row["method"]: row for row in done("methods", "--json").json}
    assert {"local", "fedavg", "ensemble"} <= set(rows)
    assert rows["local"]["exchanges"] == "nothing"
    assert rows["local"]["fusion"] is None
    assert (rows["fedavg"]["needs"], rows["fedavg"]["fusion"]) == (["weights"], "fedavg")
    assert rows["ensemble"]["mixed_architectures"] is True
    text = done("methods").out
    assert all(name in text for name in rows)


def test_data_lists_sources_and_splits(shelf: Path) -> None:
    listed = done("data", "--json").json
    assert {"digits", "parquet", "folders", "npz"} <= {row["name"] for row in listed["sources"]}
    assert {"dirichlet", "dirichlet-plain", "iid", "fol", "by-label", "by-column"} <= {
        row["split"] for row in listed["splits"]
    }
    assert all(row["rule"] for row in listed["splits"])
    assert "dirichlet-plain" in done("data").out


def test_run_answers_with_its_result(shelf: Path, tmp_path: Path) -> None:
    words = ("run", "--data", shelf / "stripes.npz", "--clients", 2, "--alpha", 100, "--out", tmp_path / "again", *TINY)
    assert done(*words, "--json").json == result_of(tmp_path / "again")
    answer = done(*words, "--resume")
    assert answer.out.startswith("fedavg ")
    assert f"accuracy {result_of(tmp_path / 'again')['accuracy']:.4f}" in answer.out
    assert str(tmp_path / "again" / "report.html") in answer.out
    assert answer.err == ""


def test_local_stands_once_beside_the_rules_of_others(shelf: Path, tmp_path: Path) -> None:
    words = ("--data", shelf / "stripes.npz", "--clients", 2, "--alpha", 100, "--out", tmp_path / "out", *TINY[2:])
    done("run", *words, "--method", "local,ensemble", "--fusion", "fedavg,ensemble")
    names = ("local", "ensemble-fedavg", "ensemble-ensemble")
    assert {path.parent.name for path in tmp_path.glob("out/*/result.json")} == set(names)
    local, averaged, together = (result_of(tmp_path / "out" / name) for name in names)
    assert local["bytes_up"] == 0 < averaged["bytes_up"] == together["bytes_up"]


def test_without_out_a_run_names_its_own_folder(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done("run", "--data", shelf / "stripes.npz", "--clients", 2, "--alpha", 100, "--seed", 3, *TINY)
    assert (tmp_path / "runs" / "fedavg-stripes.npz-a100-s3" / "result.json").exists()


def test_inspect_says_what_a_parcel_says(shelf: Path) -> None:
    path = shelf / "good.parcel"
    facts = done("inspect", path, "--json").json
    assert (facts["sender"], facts["samples"], facts["counts"], facts["codec"]) == ("site-a", 6, [2, 2, 2], "fp32")
    assert facts["bytes"] == path.stat().st_size
    assert facts["parameters"] == (64 * 4 + 4) + (4 * 3 + 3) + (3 * 3 + 3)
    text = done("inspect", path).out
    for word in ("site-a", "mlp", "287 parameters", "rows: 2, columns: 2, checks: 2", f"{path.stat().st_size:,} bytes"):
        assert word in text


def test_evaluate_agrees_with_the_run(shelf: Path) -> None:
    facts = done("evaluate", shelf / "run", "--data", shelf / "stripes.npz", "--json").json
    result = result_of(shelf / "run")
    assert facts["accuracy"] == result["accuracy"]
    assert facts["per_class"] == result["per_class"]
    assert facts["images"] == 60
    assert (
        done("evaluate", shelf / "run" / "global", "--data", shelf / "stripes.npz", "--json").json["accuracy"]
        == result["accuracy"]
    )
    alone = done(
        "evaluate", shelf / "run" / "parcels" / "site-0.parcel", "--data", shelf / "stripes.npz", "--json"
    ).json
    assert alone["accuracy"] == result["local_accuracy"]["site-0"]
    text = done("evaluate", shelf / "run", "--data", shelf / "stripes.npz").out
    assert f"accuracy {result['accuracy']:.4f} on 60 images" in text
    assert "columns" in text


def test_a_source_says_itself_what_it_is_judged_by(tmp_path: Path) -> None:
    done("train", "--data", "digits", "--out", tmp_path / "a.parcel", *PLAIN, "--quiet")
    facts = done("evaluate", tmp_path / "a.parcel", "--data", "digits", "--json").json
    assert facts["images"] == 359, "a fifth of each class"
    mine = make_npz(tmp_path / "digits-of-mine.npz", images=make_images(20, channels=1), labels=np.arange(20) % 10)
    facts = done("evaluate", tmp_path / "a.parcel", "--data", mine, "--json").json
    assert facts["images"] == 20, "a file has no share of its own, whatever it is called"


def test_predict_names_a_class_for_every_image(shelf: Path) -> None:
    image = shelf / "image.png"
    rows = done("predict", shelf / "run", image, image, "--json").json
    assert [row["image"] for row in rows] == [str(image)] * 2
    assert rows[0]["class"] in ("rows", "columns", "checks")
    assert 1 / 3 <= rows[0]["probability"] <= 1
    assert rows[0] == rows[1]
    assert done("predict", shelf / "run", image).out == f"{image}: {rows[0]['class']} ({rows[0]['probability']:.2f})\n"


def test_train_and_fuse_answer_with_facts(shelf: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        words = ("train", "--data", shelf / "stripes.npz", "--out", tmp_path / f"{name}.parcel", *PLAIN, "--quiet")
        facts = done(*words, "--json", "--holdout", 0, "--no-report").json
        assert facts["sender"] == name
        assert (facts["samples"], facts["counts"]) == (240, [80, 80, 80])
        assert facts["bytes"] == (tmp_path / f"{name}.parcel").stat().st_size
    answer = done("train", "--data", shelf / "stripes.npz", "--out", tmp_path / "c.parcel", *PLAIN)
    assert answer.out.startswith(f"{tmp_path / 'c.parcel'}: ")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a.parcel",
        "b.parcel",
        "c.parcel",
        "c.report.html",
    ]  # no working folder is left
    both = (tmp_path / "a.parcel", tmp_path / "b.parcel")
    facts = done(
        "fuse", *both, "--fusion", "ensemble", "--set", "weights=size", "--out", tmp_path / "e", "--no-export", "--json"
    ).json
    assert (facts["kind"], facts["sites"]) == ("ensemble", 2)
    assert facts["bytes_up"] == sum(path.stat().st_size for path in both)
    assert facts["files"] == ["README.md", "ledger.json", "model.json", "model.safetensors"]
    answer = done("fuse", *both, "--out", tmp_path / "e", "--no-export")  # an older model may be replaced
    assert "single from 2 sites" in answer.out


def test_a_fused_folder_runs_without_flyby(shelf: Path, tmp_path: Path) -> None:
    done("fuse", shelf / "good.parcel", "--out", tmp_path / "model")
    images = torch.from_numpy(stripes(5)[0])
    with torch.no_grad():
        scores = torch.export.load(tmp_path / "model" / "model.pt2").module()(images)
        assert torch.equal(scores, made().network()(SPEC.prepare(images)))
    assert 'torch.export.load("model.pt2")' in (tmp_path / "model" / "README.md").read_text()


def test_report_can_be_written_again(shelf: Path) -> None:
    path = shelf / "run" / "report.html"
    before = path.read_bytes()
    path.unlink()
    assert done("report", shelf / "run", "--json").json == {"report": str(path)}
    assert path.read_bytes() == before
    assert done("report", shelf / "run").out == f"report: {path}\n"


def test_a_diverged_run_ends_with_three(shelf: Path, tmp_path: Path) -> None:
    words = (
        "--data",
        shelf / "stripes.npz",
        "--clients",
        2,
        "--alpha",
        100,
        "--out",
        tmp_path / "out",
        "--set",
        "train.lr=1e30",
        *TINY,
    )
    message = one_line(call("run", *words), code=3)
    assert "diverged in epoch" in message
    assert "train.lr" in message
    assert not (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("run",), "with --resume goes on"),
        (("train", "--data", "x", "--out", "y"), "the same command goes on"),
        (("methods",), "interrupted"),
    ],
)
def test_ctrl_c_is_one_line_and_130(words: tuple[str, ...], hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name in ("flyby.runs.config.make_config", "flyby.runs.methods.catalogue"):
        monkeypatch.setattr(name, interrupt)
    assert hint in one_line(call(*words), code=130)


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("flyby.runs.methods.catalogue", fail)
    monkeypatch.setattr("sys.argv", ["flyby", "methods"])
    from flyby import cli

    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main()


# -- bad input

# Words after `flyby run --data stripes.npz --clients 2 --alpha 100`, and what the one line must say.
BAD_SETTINGS: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "alpha 0": (("--alpha", 0), ("alpha must be above 0",)),
    "alpha -1": (("--alpha", -1), ("alpha must be above 0",)),
    "alpha nan": (("--alpha", "nan"), ("alpha must be above 0",)),
    "alpha not a number": (("--alpha", "much"), ("--alpha", "much")),
    "more clients than samples": (("--clients", 241), ("241 clients cannot share 240 samples", "--clients")),
    "clients 0": (("--clients", 0), ("clients", "0")),
    "epochs 0": (("--epochs", 0), ("train.epochs = 0",)),
    "unreachable min size": (("--min-size", 200), ("min_size 200", "--min-size")),
    "unknown method": (("--method", "fedavgg"), ("unknown method 'fedavgg'", "did you mean 'fedavg'")),
    "no method": (("--method", ","), ("flyby methods",)),
    "one unknown among methods": (
        ("--method", "local,ensembel"),
        ("unknown method 'ensembel'", "did you mean 'ensemble'"),
    ),
    "unknown model": (("--model", "resnet81"), ("unknown model 'resnet81'", "'resnet18'")),
    "unknown split": (("--split", "dirichlet-plane"), ("unknown split 'dirichlet-plane'", "'dirichlet-plain'")),
    "unknown fusion": (("--fusion", "fedavgs"), ("unknown fusion 'fedavgs'", "did you mean 'fedavg'")),
    "unknown engine": (("--engine", "process"), ("unknown engine 'process'", "did you mean 'processes'")),
    "unknown device": (("--device", "cpuu"), ("unknown device 'cpuu'", "did you mean 'cpu'")),
    "unknown codec": (("--set", "codec=fp31"), ("unknown codec 'fp31'", "'fp32'")),
    "unknown setting": (("--set", "train.learning=1"), ("unknown train setting 'learning'",)),
    "near setting": (("--set", "train.epoch=1"), ("unknown train setting 'epoch'", "did you mean 'epochs'")),
    "unknown bare setting": (("--set", "epoch=1"), ("unknown setting 'epoch'", "train.epochs")),
    "unknown section": (("--set", "trian.lr=1"), ("unknown settings section 'trian'", "did you mean 'train'")),
    "ambiguous setting": (("--set", "size=1", "--set", "name=digits"), ("could mean", "data.name")),
    "set without equals": (("--set", "train.lr"), ("--set takes key=value", "train.lr")),
    "set without key": (("--set", "=3"), ("--set takes key=value",)),
    "set not YAML": (("--set", "train.lr=[1"), ("cannot be read",)),
    "setting of the wrong kind": (("--set", "train.lr=fast"), ("train.lr = 'fast'",)),
    "setting out of range": (("--set", "train.momentum=1.5"), ("train.momentum = 1.5",)),
    "negative learning rate": (("--set", "train.lr=-1"), ("train.lr = -1",)),
    "image size 0": (("--size", 0), ("size",)),
    "model too large for the images": (("--model", "vgg-wildfire", "--size", 4), ("vgg-wildfire", "4x4")),
    "patience without validation data": (("--set", "train.patience=2"), ("train.patience", "split.val")),
    "column that is not there": (("--split", "by-column", "--set", "data.column=site"), ("'site'",)),
    "by-column without a column": (("--split", "by-column"), ("data.column",)),
    "nothing left to train on": (("--set", "split.val=0.6", "--set", "split.test=0.6"), ("split.val",)),
    "recalibration without images": (("--set", "fusion.recalibrate=true"), ("recalibrate",)),
    "out under a file": (("--out", "{shelf}/note.txt/out"), ("note.txt", "--out")),
    "unknown option": (("--methods", "fedavg"), ("--methods",)),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_is_one_line(case: str, shelf: Path, tmp_path: Path) -> None:
    words, said = BAD_SETTINGS[case]
    out = tmp_path / "out"
    standard = ("--data", shelf / "stripes.npz", "--clients", 2, "--alpha", 100, "--out", out, *TINY)
    message = one_line(call("run", *standard, *(str(word).replace("{shelf}", str(shelf)) for word in words)))
    for phrase in said:
        assert phrase in message
    assert not (out / "result.json").exists()
    if case not in (
        "recalibration without images",
        "patience without validation data",
    ):  # these are noticed in the work itself
        assert list(tmp_path.iterdir()) == []


def empty_folder(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


BAD_DATA: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing path": (lambda f: f / "nowhere", "does not exist"),
    "near name": (lambda f: Path("digit"), "did you mean 'digits'"),
    "empty folder": (empty_folder, "is empty"),
    "one class folder": (lambda f: make_tree(f / "tree", make_images(20), [0] * 20, ("cat",)), "one class"),
    "class folders without images": (lambda f: make_tree(f / "tree", [], [], ("cat", "dog")), "hold no images"),
    "one class only": (
        lambda f: make_npz(f / "a.npz", images=make_images(20), labels=np.zeros(20, np.int64)),
        "one class",
    ),
    "one class present": (
        lambda f: make_npz(
            f / "a.npz", images=make_images(20), labels=np.zeros(20, np.int64), class_names=np.array(["a", "b"])
        ),
        "one class only",
    ),
    "label above the range": (
        lambda f: make_npz(
            f / "a.npz", images=make_images(4), labels=np.array([0, 1, 2, 7]), class_names=np.array(["a", "b", "c"])
        ),
        "label 7",
    ),
    "label below the range": (
        lambda f: make_npz(f / "a.npz", images=make_images(4), labels=np.array([0, 1, 2, -1])),
        "label -1",
    ),
    "fewer labels than images": (
        lambda f: make_npz(f / "a.npz", images=make_images(4), labels=np.array([0, 1])),
        "one label for each",
    ),
    "not an archive": (lambda f: make_npz(f / "a.npz", images=make_images(4)).rename(f / "b.npz"), "labels"),
    "a text file": (lambda f: (f / "a.txt").write_text("x") and f / "a.txt", "unknown kind"),  # type: ignore[dict-item,return-value]
    "text called npz": (lambda f: (f / "a.npz").write_text("x") and f / "a.npz", "not a readable .npz"),  # type: ignore[dict-item,return-value]
}


@pytest.mark.parametrize("command", ["run", "train"])
@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_one_line(case: str, command: str, shelf: Path, tmp_path: Path) -> None:
    if (case, command) == ("one class present", "train"):
        pytest.skip("a real site may hold one class of many")
    make, said = BAD_DATA[case]
    out = tmp_path / "out"
    assert said in one_line(
        call(command, "--data", make(tmp_path), "--out", out, "--epochs", 1, "--model", "mlp", "--quiet")
    )
    assert not out.exists()


def forged(**changes: Any) -> bytes:
    """A parcel that agrees with itself and not with the truth."""
    honest = made()
    weights = changes.pop("weights", honest.weights)
    tensors = {
        name: info.model_copy(update={"sha256": hashlib.sha256(weights[name].numpy().tobytes()).hexdigest()})
        for name, info in honest.manifest.tensors.items()
    }
    head, order = parcel._head(honest.manifest.model_copy(update={"tensors": tensors, **changes}), b"")
    return head + b"".join(weights[name].numpy().tobytes() for name in order)


def with_nan() -> bytes:
    weights = {name: tensor.clone() for name, tensor in made().weights.items()}
    next(iter(weights.values())).view(-1)[0] = float("nan")
    return forged(weights=weights)


def bent(position: int, mask: int = 1) -> bytes:
    data = bytearray(parcel.to_bytes(made()))
    data[position] ^= mask
    return bytes(data)


BAD_PARCELS: dict[str, tuple[Callable[[], bytes], str]] = {
    "truncated": (lambda: parcel.to_bytes(made())[:-100], "ask for the parcel again"),
    "truncated in the header": (lambda: parcel.to_bytes(made())[:12], "ends within its header"),
    "bit-flipped tensor": (lambda: bent(-3), "SHA-256 differs"),
    "bit-flipped manifest": (lambda: bent(60), "cannot be used"),
    "another schema version": (lambda: bent(8, 2), "schema 3"),
    "NaN": (with_nan, "NaN"),
    "lying shape": (lambda: forged(spec=SPEC.replace(widths={"fc1": 5, "fc2": 3})), "where its model has"),
    "a JPEG": (lambda: encode(make_images(1)[0], "JPEG"), "looks like a JPEG image"),
    "empty": (lambda: b"", "is empty"),
    "text": (lambda: b"hello", "is not a parcel"),
}


def test_the_forgeries_differ_from_the_real_one_only_in_what_they_lie_about() -> None:
    assert forged() == parcel.to_bytes(made())


@pytest.mark.parametrize("case", BAD_PARCELS)
def test_a_bad_parcel_is_one_line(case: str, shelf: Path, tmp_path: Path) -> None:
    make, said = BAD_PARCELS[case]
    path = tmp_path / "bad.parcel"
    path.write_bytes(make())
    for words in (
        ("inspect", path),
        ("fuse", path, "--out", tmp_path / "out"),
        ("evaluate", path, "--data", shelf / "stripes.npz"),
        ("predict", path, shelf / "image.png"),
    ):
        message = one_line(call(*words))
        assert said in message
        assert "bad.parcel" in message
    assert [p.name for p in tmp_path.iterdir()] == ["bad.parcel"]


def test_a_folder_or_nothing_in_place_of_a_parcel_is_one_line(shelf: Path, tmp_path: Path) -> None:
    assert "is not a node's folder" in one_line(call("inspect", tmp_path))
    assert "does not exist" in one_line(call("inspect", tmp_path / "none.parcel"))
    assert "is a folder" in one_line(call("fuse", tmp_path, "--out", tmp_path / "out"))
    assert "does not exist" in one_line(call("fuse", tmp_path / "none.parcel", "--out", tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


WIDE = SPEC.replace(widths={"fc1": 5, "fc2": 3})
MIXED: dict[str, tuple[parcel.Parcel, tuple[object, ...], str]] = {
    "two architectures": (made("site-b", WIDE), (), "fedavg needs one architecture"),
    "other images": (made("site-b", SPEC.replace(size=(6, 6))), ("--fusion", "ensemble"), "cannot be fused"),
    "the same sender": (made("site-a"), (), "two parcels come from 'site-a'"),
    "unknown fusion": (made("site-b"), ("--fusion", "ensembel"), "did you mean 'ensemble'"),
    "unknown fusion setting": (made("site-b"), ("--set", "weight=size"), "did you mean 'weights'"),
    "bad fusion setting": (made("site-b"), ("--set", "weights=heavy"), "fusion.weights = 'heavy'"),
    "missing proxy": (made("site-b"), ("--proxy", "no/where"), "does not exist"),
}


@pytest.mark.parametrize("case", MIXED)
def test_parcels_that_do_not_fit_are_one_line(case: str, shelf: Path, tmp_path: Path) -> None:
    other, words, said = MIXED[case]
    parcel.write(other, tmp_path / "other.parcel")
    assert said in one_line(
        call(
            "fuse",
            shelf / "good.parcel",
            tmp_path / "other.parcel",
            "--fusion",
            "fedavg",
            *words,
            "--out",
            tmp_path / "out",
        )
    )
    assert [p.name for p in tmp_path.iterdir()] == ["other.parcel"]


def test_mixed_architectures_may_stand_together_in_an_ensemble(shelf: Path, tmp_path: Path) -> None:
    parcel.write(made("site-b", WIDE), tmp_path / "other.parcel")
    words = ("--fusion", "ensemble", "--out", tmp_path / "out", "--no-export")
    assert done("fuse", shelf / "good.parcel", tmp_path / "other.parcel", *words, "--json").json["kind"] == "ensemble"


def test_fuse_replaces_nothing_but_a_model(shelf: Path, tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("years of work")
    assert "name a new folder" in one_line(call("fuse", shelf / "good.parcel", "--out", tmp_path / "papers"))
    assert "is a file" in one_line(
        call("fuse", shelf / "good.parcel", "--out", tmp_path / "papers" / "thesis.txt", "--no-export")
    )
    assert (tmp_path / "papers" / "thesis.txt").read_text() == "years of work"


def test_train_refuses_a_bad_place_or_name_before_it_trains(shelf: Path, tmp_path: Path) -> None:
    data = ("--data", shelf / "stripes.npz", "--model", "mlp", "--epochs", 3000, "--quiet")  # it would be noticed
    assert "is a folder" in one_line(call("train", *data, "--out", tmp_path))
    assert "'my site'" in one_line(call("train", *data, "--out", tmp_path / "my site.parcel"))
    assert "cannot be called" in one_line(call("train", *data, "--out", tmp_path / "a.parcel", "--site", "../a"))
    assert "give it one with --site" in one_line(call("train", *data, "--out", tmp_path / "Köln.parcel"))
    assert "note.txt" in one_line(call("train", *data, "--out", shelf / "note.txt" / "a.parcel"))
    assert list(tmp_path.iterdir()) == []


def test_evaluate_and_predict_refuse_what_does_not_fit(shelf: Path, tmp_path: Path) -> None:
    data = shelf / "stripes.npz"
    assert "no model.json" in one_line(call("evaluate", tmp_path, "--data", data))
    assert "does not exist" in one_line(call("evaluate", tmp_path / "nowhere", "--data", data))
    assert "is not a parcel" in one_line(call("evaluate", shelf / "note.txt", "--data", data))
    assert "does not exist" in one_line(call("evaluate", shelf / "run", "--data", tmp_path / "nowhere"))
    assert "--size 8" in one_line(call("evaluate", shelf / "run", "--data", data, "--size", 16))
    assert "classes that the model does not know: 0 (36 images)" in one_line(
        call("evaluate", shelf / "run", "--data", "digits")
    )
    assert "cannot be decoded" in one_line(call("predict", shelf / "run", shelf / "note.txt"))
    assert "no image file" in one_line(call("predict", shelf / "run", tmp_path / "none.png"))
    assert "no model.json" in one_line(call("predict", tmp_path, shelf / "image.png"))


def test_a_damaged_model_folder_is_one_line(shelf: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    done("fuse", shelf / "good.parcel", "--out", model, "--no-export")
    whole = (model / "model.safetensors").read_bytes()
    config = json.loads((model / "model.json").read_text())
    judge = ("evaluate", model, "--data", shelf / "stripes.npz")
    for content in (b"", whole[:-10], b"\xff" * 64):
        (model / "model.safetensors").write_bytes(content)
        assert "is damaged" in one_line(call(*judge))
    (model / "model.safetensors").write_bytes(whole)
    for change in (
        {"kind": "sngle"},
        {"specs": []},
        {"specs": [{"name": "mlp"}]},
        {"class_names": None},
        {"settings": 1},
    ):
        (model / "model.json").write_text(json.dumps(config | change))
        one_line(call(*judge))
    for text in ("{", "[]", "3"):
        (model / "model.json").write_text(text)
        one_line(call(*judge))


def test_report_on_what_is_no_run_is_one_line(shelf: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere", shelf / "note.txt"):
        one_line(call("report", path))
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nonsense",), "nonsense"),
        (("inspect",), "Missing argument"),
        (("train",), "Missing option"),
        (("run", "--seed", "x"), "--seed"),
        (("--nope",), "--nope"),
    ],
)
def test_words_that_are_no_command_are_one_line(words: tuple[str, ...], said: str) -> None:
    assert said in one_line(call(*words))
