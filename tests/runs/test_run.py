"""Runs: a folder that is whole, numbers that learn, many processes that agree with one, and interruptions that leave no
trace."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from factories import (
    call,
    command,
    done,
    execute,
    finish,
    make_npz,
    make_parquet,
    make_stripes,
    members,
    one_line,
    result_of,
    rows_of,
    same_run,
    start,
    stripes,
    wait_for,
)
from flyby.data.splits import Split
from flyby.errors import BadInput
from flyby.fusion import FUSIONS, Fusion
from flyby.objectives import OBJECTIVES
from flyby.parcels import parcel
from flyby.runs.folder import Run
from flyby.runs.methods import check_pair
from flyby.runs.progress import Progress
from flyby.training.checkpoint import load_checkpoint

FILES = ["config.json", "global", "ledger.json", "metrics.jsonl", "parcels", "report.html", "result.json"]
FILES += ["right.json", "split.json"]
QUICK = ("--device", "cpu", "--engine", "inline", "--quiet")
NAMES = ("rows", "columns", "checks")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stripes(tmp_path_factory.mktemp("data") / "stripes.npz")


def words(data: Path, out: Path, *more: object) -> tuple[object, ...]:
    """A run of three small sites; ``more`` wins over what stands before it."""
    standard = ("--method", "fedavg", "--data", data, "--clients", 3, "--alpha", 1, "--model", "mlp", "--epochs", 3)
    return ("run", *standard, "--out", out, *QUICK, *more)


# -- the numbers of the first milestone

DIGITS = ("run", "--data", "digits", "--clients", 5, "--epochs", 20, "--seed", 0)


def test_fedavg_on_nearly_even_digits_reaches_its_floor(tmp_path: Path) -> None:
    out = tmp_path / "even"
    answer = done(*DIGITS, "--method", "fedavg", "--alpha", 100, "--split", "dirichlet-plain", "--out", out)
    assert result_of(out)["accuracy"] >= 0.85
    assert "training fedavg: site-0 epoch 20/20 loss" in answer.err  # plain lines where there is no terminal
    assert str(out / "report.html") in answer.out


@pytest.mark.usefixtures("undrawn")
def test_ensemble_beats_fedavg_on_uneven_digits_and_the_uploads_are_trained_once(tmp_path: Path) -> None:
    answer = done(
        *DIGITS, "--method", "fedavg,ensemble", "--alpha", 0.1, "--out", tmp_path / "both", "--json", "--quiet"
    )
    assert answer.err == ""
    fedavg, ensemble = answer.json["fedavg"], answer.json["ensemble"]
    assert ensemble["accuracy"] > fedavg["accuracy"] + 0.1
    assert (fedavg["trained"], ensemble["trained"]) == (5, 0)
    assert fedavg["split_hash"] == ensemble["split_hash"]
    assert fedavg["local_accuracy"] == ensemble["local_accuracy"]


# -- the run folder


def test_a_run_folder_is_whole(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done(*words(data, out, "--set", "codec=fp16"))
    assert sorted(p.name for p in out.iterdir() if not p.name.startswith(".")) == FILES
    result = result_of(out)
    for key in (
        "method",
        "split_hash",
        "accuracy",
        "per_client",
        "uploads",
        "bytes_up",
        "bytes_down",
        "seconds",
        "seed",
        "versions",
    ):
        assert key in result
    split = Split.load(out / "split.json")
    assert result["split_hash"] == split.hash
    assert (result["method"], result["seed"], result["uploads"]) == ("fedavg", 0, 3)
    assert list(result["per_client"]) == list(split.shares) == ["site-0", "site-1", "site-2"]
    assert set(result["versions"]) == {"flyby", "python", "torch", "numpy"}
    assert result["seconds"] == pytest.approx(sum(result["timings"].values()), abs=0.01)

    parcels = [out / "parcels" / f"{name}.parcel" for name in split.shares]
    ledger = json.loads((out / "ledger.json").read_text())["crossings"]
    assert [(c["sender"], c["receiver"]) for c in ledger] == [(name, "server") for name in split.shares]
    assert [c["bytes"] for c in ledger] == [path.stat().st_size for path in parcels]
    assert [c["digest"] for c in ledger] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in parcels]
    assert result["bytes_up"] == sum(path.stat().st_size for path in parcels)
    assert result["bytes_down"] == 0

    rows = rows_of(out)
    assert [(row["site"], row["epoch"]) for row in rows] == [
        (name, epoch) for name in split.shares for epoch in (1, 2, 3)
    ]
    assert all({"loss", "train_accuracy", "lr"} <= set(row) for row in rows)
    config = json.loads((out / "config.json").read_text())
    assert (config["codec"], config["resolved"]["train"]["epochs"]) == ("fp16", 3)
    for path, name in zip(parcels, split.shares, strict=True):
        manifest = parcel.read(path).manifest
        assert (manifest.sender, manifest.codec, list(manifest.counts or ())) == (name, "fp16", split.counts[name])


def test_local_sends_nothing_and_is_judged_by_its_own_classes(data: Path, tmp_path: Path) -> None:
    result = done(*words(data, tmp_path / "out", "--method", "local", "--json")).json
    assert (result["uploads"], result["bytes_up"], result["fusion"]) == (0, 0, None)
    assert not (tmp_path / "out" / "global").exists()
    assert result["accuracy"] == pytest.approx(np.mean(list(result["local_accuracy"].values())))
    assert "nothing sent" in done(*words(data, tmp_path / "out", "--method", "local", "--resume")).out


@pytest.mark.usefixtures("undrawn")
def test_sites_with_test_data_of_their_own_are_judged_on_it(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = done(
        *words(data, out, "--set", "split.test=0.25", "--set", "split.val=0.25", "--set", "train.patience=2", "--json")
    ).json
    shares = Split.load(out / "split.json").shares
    for name, share in shares.items():
        assert len(share.test) > 0
        steps = result["per_client"][name] * len(share.test)
        assert steps == pytest.approx(round(steps))  # a share of its own test images, not of the common ones
    assert all("val_loss" in row for row in rows_of(out))


@pytest.mark.usefixtures("undrawn")
def test_another_fusion_than_the_method_s_own(data: Path, tmp_path: Path) -> None:
    result = done(*words(data, tmp_path / "out", "--fusion", "ensemble", "--set", "fusion.mean=logits", "--json")).json
    assert (result["method"], result["fusion"]) == ("fedavg", "ensemble")
    assert json.loads((tmp_path / "out" / "global" / "model.json").read_text())["settings"]["mean"] == "logits"


@pytest.mark.usefixtures("undrawn")
def test_a_proxy_serves_the_server_and_may_not_be_the_test_set(data: Path, tmp_path: Path) -> None:
    proxy = make_npz(tmp_path / "proxy.npz", images=stripes(30, seed=9)[0], labels=stripes(30)[1])
    recalibrated = ("--set", "fusion.recalibrate=true", "--model", "cnn-small", "--set", "model.width=0.1")
    done(*words(data, tmp_path / "out", *recalibrated, "--set", f"proxy={proxy}"))
    x, y = stripes(60, seed=1)  # what make_stripes gives as the test split
    names = np.array(NAMES)
    same = make_npz(tmp_path / "test.npz", images=x, labels=y, class_names=names)
    answer = call(*words(data, tmp_path / "cheat", *recalibrated, "--set", f"proxy={same}"))
    assert "proxy images are test images" in one_line(answer)
    assert not (tmp_path / "cheat" / "result.json").exists()


def test_data_without_test_images_is_refused_where_none_may_be_held_out(tmp_path: Path) -> None:
    images, labels = stripes(30)
    whole = make_npz(tmp_path / "whole.npz", images=images, labels=labels)
    assert "data.holdout" in one_line(call(*words(whole, tmp_path / "out", "--set", "data.holdout=0")))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("undrawn")
def test_broken_images_are_noted(tmp_path: Path) -> None:
    images, labels = stripes(150)
    rows: list[Any] = [np.repeat(image, 3, axis=2) for image in images]
    rows[7] = b"not an image"
    make_parquet(tmp_path / "data", "train", rows, labels, NAMES)
    loud = [word for word in words(tmp_path / "data", tmp_path / "out", "--epochs", 1) if word != "--quiet"]
    assert "1 broken image(s) skipped" in done(*loud).err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_silent_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"site": "site-3", "epoch": 2, "loss": 0.5, "samples_per_second": 1234.0}
    for quiet in (False, True):
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        with Progress("training fedavg", epochs=2, sites=1, quiet=quiet) as bar:
            bar.on_epoch(row | {"epoch": 1})
            bar.on_epoch(row)
        assert bar.done == 2
        assert ("training fedavg" in screen.getvalue()) is not quiet


def test_a_rule_that_asks_for_more_than_the_sites_send_is_refused_before_training() -> None:
    class Needy(Fusion):
        name = "needy"
        needs = frozenset({"weights", "horoscopes"})

        def fuse(self, *_: Any, **__: Any) -> Any:
            raise AssertionError

    check_pair(OBJECTIVES["supervised"], FUSIONS["fedavg"])
    with pytest.raises(
        BadInput,
        match=r"'needy' needs horoscopes, which objective 'supervised' does not provide.*fit it as it is: .*fedavg",
    ):
        check_pair(OBJECTIVES["supervised"], Needy)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused(data: Path, tmp_path: Path) -> None:
    assert "use --device cpu" in one_line(call(*words(data, tmp_path / "out", "--device", "cuda")))
    assert not (tmp_path / "out").exists()


# -- comparisons


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_trains_equal_uploads_once_and_is_the_runs_it_holds(data: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    results = done(*words(data, both, "--method", "local,fedavg,ensemble", "--json")).json
    assert [results[name]["trained"] for name in ("local", "fedavg", "ensemble")] == [3, 0, 0]
    assert sorted(p.name for p in both.iterdir() if not p.name.startswith(".")) == [
        "ensemble",
        "fedavg",
        "local",
        "report.html",
        "uploads",
    ]
    for name in ("fedavg", "ensemble"):
        done(*words(data, tmp_path / name, "--method", name))
        same_run(both / name, tmp_path / name)
    text = done(*words(data, both, "--method", "local,fedavg,ensemble", "--resume")).out
    assert [line.split()[0] for line in text.splitlines()] == ["local", "fedavg", "ensemble", "report:"]
    assert "already holds a run" in one_line(call(*words(data, both, "--method", "local,fedavg,ensemble")))


@pytest.mark.usefixtures("undrawn")
def test_methods_with_other_uploads_do_not_share_them(data: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    done(*words(data, both, "--method", "fedavg,ensemble", "--seed", 1))
    (key,) = [p.name for p in (both / "uploads").iterdir()]
    other = tmp_path / "other"
    done(*words(data, other, "--method", "fedavg,ensemble", "--seed", 2))
    assert [p.name for p in (other / "uploads").iterdir()] != [key]


def test_a_comparison_refuses_a_folder_with_strange_files(data: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert "'thesis.txt'" in one_line(call(*words(data, tmp_path, "--method", "fedavg,ensemble")))
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["thesis.txt"]


# -- what a folder refuses


@pytest.mark.usefixtures("undrawn")
def test_a_folder_holds_one_run(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = done(*words(data, out, "--json")).json
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert "already holds a run; add --resume" in one_line(call(*words(data, out)))
    message = one_line(call(*words(data, out, "--resume", "--seed", 1, "--set", "train.lr=0.01")))
    assert "other settings (seed, train)" in message
    assert done(*words(data, out, "--resume", "--json")).json == first
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_a_folder_with_strange_files_is_refused(data: Path, tmp_path: Path) -> None:
    for name in ("thesis.txt", "result.json"):
        out = tmp_path / name.partition(".")[0]
        out.mkdir()
        (out / name).write_text("mine")
        for more in ((), ("--resume",)):
            message = one_line(call(*words(data, out, *more)))
            assert "is not empty" in message
            assert name in message
        assert [p.name for p in out.iterdir() if not p.name.startswith(".")] == [name]
        assert (out / name).read_text() == "mine"


@pytest.mark.usefixtures("undrawn")
def test_a_second_process_in_the_same_folder_is_refused(data: Path, tmp_path: Path) -> None:
    with Run(tmp_path / "out").locked():
        message = one_line(execute(*words(data, tmp_path / "out")))
        assert "another flyby process is working in" in message
    assert not (tmp_path / "out").exists()  # nothing was written, so nothing stays
    done(*words(data, tmp_path / "out"))


def test_a_lock_on_a_folder_that_was_just_taken_away_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    real = fcntl.flock

    def late(handle: Any, how: int) -> None:
        (out / ".lock").unlink()
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(Exception, match="another flyby process"), Run(out).locked():
        pytest.fail("the lock is on a file that nobody else can see")


@pytest.mark.usefixtures("undrawn")
def test_resume_refuses_data_that_changed(tmp_path: Path) -> None:
    path, out = make_stripes(tmp_path / "stripes.npz"), tmp_path / "out"
    done(*words(path, out))
    (out / "result.json").unlink()
    make_stripes(path, count=210)
    assert "the data changed" in one_line(call(*words(path, out, "--resume")))


@pytest.mark.usefixtures("undrawn")
def test_resume_refuses_an_upload_of_other_settings(data: Path, tmp_path: Path) -> None:
    done(*words(data, tmp_path / "a"))
    done(*words(data, tmp_path / "b", "--set", "train.lr=0.01"))
    (tmp_path / "a" / "result.json").unlink()
    shutil.copy(tmp_path / "b" / "parcels" / "site-1.parcel", tmp_path / "a" / "parcels" / "site-1.parcel")
    assert "was made by other settings" in one_line(call(*words(data, tmp_path / "a", "--resume")))


def test_resume_writes_a_report_that_is_missing(data: Path, tmp_path: Path) -> None:
    done(*words(data, tmp_path / "out"))
    (tmp_path / "out" / "report.html").unlink()
    done(*words(data, tmp_path / "out", "--resume"))
    assert (tmp_path / "out" / "report.html").exists()


# -- one participant at a time


def test_sites_in_processes_of_their_own_do_what_one_run_does(tmp_path: Path) -> None:
    """Two hospitals train on their own folders, a server fuses what they sent, somebody judges: the same bytes as the
    simulation."""
    images, labels = stripes(150)
    colour = np.repeat(images, 3, axis=3)
    owner = np.array(["north" if i % 5 < 3 else "south" for i in range(150)])
    tests, truth = stripes(45, seed=1)
    held = np.repeat(tests, 3, axis=3)
    make_parquet(tmp_path / "all", "train", colour, labels, NAMES, shards=2, columns={"site": owner.tolist()})
    make_parquet(tmp_path / "all", "test", held, truth, NAMES, columns={"site": ["nobody"] * 45})
    recipe = (
        "--method",
        "fedavg",
        "--model",
        "cnn-small",
        "--epochs",
        3,
        "--seed",
        7,
        "--device",
        "cpu",
        "--set",
        "model.width=0.25",
    )
    simulated = tmp_path / "simulated"
    done(
        "run",
        *recipe,
        "--data",
        tmp_path / "all",
        "--split",
        "by-column",
        "--set",
        "data.column=site",
        "--out",
        simulated,
        "--engine",
        "inline",
    )

    sites = []
    for name in ("north", "south"):
        make_parquet(tmp_path / name, "train", colour[owner == name], labels[owner == name], NAMES)
        place = ("--data", tmp_path / name, "--out", tmp_path / f"{name}.parcel", "--site", name)
        words = command("train", *recipe, *place, "--holdout", 0, "--quiet")
        sites.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True))
    for site in sites:
        assert finish(site).code == 0, site.stderr
    parcels = [tmp_path / "south.parcel", tmp_path / "north.parcel"]  # as they happened to arrive
    done("fuse", *parcels, "--out", tmp_path / "global", "--no-export")
    judged = done("evaluate", tmp_path / "global", "--data", tmp_path / "all", "--json")

    for name in ("north", "south"):
        alone = parcel.read(tmp_path / f"{name}.parcel").manifest
        within = parcel.read(simulated / "parcels" / f"{name}.parcel").manifest
        assert alone.tensors == within.tensors  # dtypes, shapes and SHA-256 of every tensor
        assert (alone.sender, alone.spec, alone.counts, alone.samples) == (
            within.sender,
            within.spec,
            within.counts,
            within.samples,
        )
    assert (tmp_path / "global" / "model.safetensors").read_bytes() == (
        simulated / "global" / "model.safetensors"
    ).read_bytes()
    assert judged.json["accuracy"] == result_of(simulated)["accuracy"]
    assert judged.json["per_class"] == result_of(simulated)["per_class"]
    assert judged.json["images"] == 45
    assert result_of(simulated)["accuracy"] > 0.6  # chance is a third: the agreement is not one of two broken models


def test_an_interrupted_site_goes_on_with_the_same_command(data: Path, tmp_path: Path) -> None:
    def train(out: Path) -> tuple[object, ...]:
        setting = ("--set", "train.snapshots=20", "--set", "model.width=0.25", "--device", "cpu", "--quiet")
        return (
            "train",
            "--no-report",
            "--data",
            data,
            "--model",
            "cnn-small",
            "--epochs",
            60,
            "--site",
            "north",
            "--out",
            out,
            *setting,
        )

    done(*train(tmp_path / "whole.parcel"))
    process = start(*train(tmp_path / "cut.parcel"))
    wait_for(lambda: any(tmp_path.glob(".cut.parcel.*/snapshots/*/north.parcel")), "snapshot", process=process)
    assert one_line(finish(process, signal.SIGINT), code=130) == "interrupted; the same command goes on from here"
    (kept,) = tmp_path.glob(".cut.parcel.*/north.ckpt")
    assert 20 <= load_checkpoint(kept)[1]["epoch"] < 60
    assert not (tmp_path / "cut.parcel").exists()
    done(*train(tmp_path / "cut.parcel"))
    assert (tmp_path / "cut.parcel").read_bytes() == (tmp_path / "whole.parcel").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.parcel", "whole.parcel"]


# -- interruptions


def long_words(data: Path, out: Path, engine: str) -> tuple[object, ...]:
    """Long enough to be caught in the middle; snapshots show from outside how far it is. AURORA has most to remember:
    parameters and buffers of its own."""
    setting = ("--set", "model.width=0.25", "--set", "train.snapshots=8")
    return words(data, out, "--method", "aurora", "--model", "cnn-small", "--epochs", 24, "--engine", engine, *setting)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    done(*long_words(data, out, "inline"))
    return out


def finished_later(data: Path, out: Path, engine: str, undisturbed: Path) -> None:
    """The run was stopped and left nobody behind; --resume brings it to the same bytes."""
    assert not (out / "result.json").exists()
    assert "add --resume" in one_line(call(*long_words(data, out, engine)))
    done(*long_words(data, out, engine), "--resume")
    same_run(undisturbed, out)
    left = [
        p for p in out.rglob("*") if p.suffix in (".part", ".ckpt") or (p.name.startswith(".") and p.name != ".lock")
    ]
    assert left == []


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "the start": lambda out: (out / "config.json").exists(),
    "the middle of a site": lambda out: any(out.glob("parcels/snapshots/00008/*.parcel")),
    "one site done": lambda out: any(out.glob("parcels/*.parcel")),
    "all sites done": lambda out: (out / "ledger.json").exists(),
}


@pytest.mark.parametrize(
    ("engine", "moment"),
    [("inline", "the middle of a site"), ("processes", "the start"), ("processes", "the middle of a site")],
)
@pytest.mark.usefixtures("undrawn")
def test_ctrl_c_then_resume_gives_the_same_bytes(
    engine: str, moment: str, data: Path, tmp_path: Path, undisturbed: Path
) -> None:
    out = tmp_path / "out"
    process = start(*long_words(data, out, engine))
    wait_for(lambda: MOMENTS[moment](out), moment, process=process)
    if moment == "the start":
        wait_for(lambda: len(members(process.pid)) >= 3, "workers", process=process)
    answer = finish(process, signal.SIGINT)  # to the whole group, as a terminal does it
    assert one_line(answer, code=130) == "interrupted; the same command with --resume goes on from here"
    assert answer.out == ""
    wait_for(lambda: members(process.pid) == [], "the workers to end")
    if engine == "inline":
        (kept,) = (out / "parcels").glob("*.ckpt")
        assert 8 <= load_checkpoint(kept)[1]["epoch"] < 24
    finished_later(data, out, "inline", undisturbed)


@pytest.mark.parametrize(
    ("engine", "moment", "group"),
    [
        ("processes", "the middle of a site", False),
        ("processes", "one site done", True),
        ("inline", "all sites done", True),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_a_killed_run_resumes_to_the_same_bytes(
    engine: str, moment: str, group: bool, data: Path, tmp_path: Path, undisturbed: Path
) -> None:
    """SIGKILL, to the group or to the parent alone: workers that lose their parent end by themselves."""
    out = tmp_path / "out"
    process = start(*long_words(data, out, engine))
    wait_for(lambda: MOMENTS[moment](out), moment, process=process)
    assert finish(process, signal.SIGKILL, group=group).code == -signal.SIGKILL
    wait_for(lambda: members(process.pid) == [], "the workers to end")
    finished_later(data, out, "inline", undisturbed)


@pytest.mark.usefixtures("undrawn")
def test_a_kill_between_checkpoints_goes_back_to_the_last_one(data: Path, tmp_path: Path, undisturbed: Path) -> None:
    out = tmp_path / "out"
    every_epoch = "import flyby.cli, flyby.training.checkpoint as t; t.SECONDS = t.SHARE = 0.0; flyby.cli.main()"
    told = [command()[0], "-c", every_epoch, *map(str, long_words(data, out, "inline"))]
    process = subprocess.Popen(told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for((out / "parcels" / "snapshots" / "00008" / "site-1.parcel").exists, "the second site", process=process)
    finish(process, signal.SIGKILL)
    assert 7 <= load_checkpoint(out / "parcels" / "site-1.ckpt")[1]["epoch"] < 24
    (out / "parcels" / ".site-1.ckpt.x.part").write_text("half")
    finished_later(data, out, "inline", undisturbed)


def test_a_rule_that_learns_from_proxy_images_is_refused_without_any_before_training(
    data: Path, tmp_path: Path
) -> None:
    assert "name some with --set proxy=PATH" in one_line(call(*words(data, tmp_path / "out", "--method", "feddf")))
    assert not (tmp_path / "out").exists()
