"""What clients say, kept once, gives the accuracy that the rule itself gives: ``benchmarks/rule_forms.py``. And the
queue that keeps it, ``benchmarks/study_queue.py``."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F

from factories import WAIT
from flyby.runs.config import make_config
from flyby.runs.pipeline import Options, run
from flyby.study.catalogue import read_study
from flyby.study.grid import cells

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FORMS = runpy.run_path(str(BENCHMARKS / "rule_forms.py"))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("judge", ["test", "held-out"])
def test_kept_voices_are_judged_as_the_run_was(
    judge: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"crowd": 0.5, "seen": 0.2, "enough": 30.0, "exponent": 1.0}
    asked = [f"fusion.{name}={value}" for name, value in form.items()]
    config = make_config(
        "best",
        data={"name": "digits"},
        split={"name": "dirichlet", "clients": 3, "alpha": 0.3},
        seed=1,
        epochs=1,
        assignments=[
            *asked,
            "split.val=0.2",
            f"judge={judge}",
            "locals=false",
            "objective.test=false",
            "objective.send=[moments]",
        ],
    )
    found = run(config, tmp_path / "run", Options(engine="inline", device="cpu", quiet=True))
    np.savez(tmp_path / "run.npz", **FORMS["listen"](tmp_path / "run", "cpu"))
    heard = FORMS["Heard"](tmp_path / "run.npz", FORMS["PARTS"][judge])
    assert heard.accuracy(form) == pytest.approx(found.accuracy, abs=0.01), "16-bit cosines may move an image"
    assert heard.accuracy({"crowd": 0.0, "seen": 0.0, "exponent": 0.5}) != pytest.approx(heard.accuracy(form), abs=1e-9)
    for name in ("seen", "crowd", "exponent"):
        monkeypatch.setitem(FORMS["GRID"], name, FORMS["GRID"][name][:1])
    FORMS["choose"]([tmp_path / "run.npz"], FORMS["PARTS"][judge], 2)
    assert capsys.readouterr().out.count("behind at most") == 2
    FORMS["scale"]([tmp_path / "run.npz"], FORMS["PARTS"][judge], tmp_path / "scales.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "scales.jsonl").read_text().splitlines()]
    assert [row["scale"] for row in rows] == list(FORMS["SCALES"])
    said = 2 * heard.scores({"enough": 1.0}).double()
    assert rows[1]["log_loss"] == pytest.approx(float(F.cross_entropy(said, heard.labels)), rel=1e-6)
    sure = said.softmax(1).amax(1)
    assert rows[1]["calibration_error"] >= abs(float(sure.mean()) - heard.accuracy({"enough": 1.0})) - 1e-9


def test_jobs_leave_a_queue_in_order_and_wait_for_their_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    take = runpy.run_path(str(BENCHMARKS / "study_queue.py"))["take"]
    queue, data = tmp_path / "queue.jsonl", tmp_path / "data"
    names = ("far", "near", "digits")
    jobs = [{"name": name, "study": "summit-choose-digits", "change": {"data": [name]}} for name in names]
    queue.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    (data / "near").mkdir(parents=True)
    assert [take(queue, data)["name"] for _ in range(2)] == ["near", "digits"], "digits come with flyby"
    assert take(queue, data) == {}, "what is left waits"
    (data / "far").mkdir()
    assert take(queue, data)["name"] == "far"
    assert take(queue, data) is None
    queue.write_text(json.dumps({**jobs[2], "study": "nobody-knows-it"}) + "\n" + json.dumps(jobs[2]) + "\n")
    assert [take(queue, data)["study"] for _ in range(2)] == ["nobody-knows-it", "summit-choose-digits"], (
        "no worker ends"
    )


def test_every_job_that_waits_for_a_gpu_is_part_of_its_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = runpy.run_path(str(BENCHMARKS / "study_queue.py"))
    grid_of, expected = module["grid_of"], module["expected"]
    told = (BENCHMARKS / "queues" / "README.md").read_text()
    for queue in sorted((BENCHMARKS / "queues").glob("*.jsonl")):
        long = re.search(rf"^\| `{queue.name}` \| (\d+) \| ([\d,]+)", told, flags=re.M)
        assert long, f"{queue.name} has no line in the table"
        workers = 1 if queue.stem.endswith("-alone") else 2
        said = f"{queue.name}: jobs {long[1]}, workers {workers}, about {long[2].replace(',', '')} s"
        assert expected(queue, workers) == said
        for line in queue.read_text().splitlines():
            job = json.loads(line)
            asked = {cell.key for cell in cells(grid_of(job))}
            assert asked, job
            assert asked <= {cell.key for cell in cells(read_study(job["study"])[1])}, job


def test_the_newest_voices_are_copied_whole_and_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = runpy.run_path(str(BENCHMARKS / "study_queue.py"))
    copy, few, root = module["copy"], module["FEW"], tmp_path / "root"
    (root / "voices").mkdir(parents=True)

    def said(name: str, when: int, size: int = 3) -> None:
        (root / "voices" / name).write_bytes(b"x" * size)
        os.utime(root / "voices" / name, (when, when))

    for when in range(few):
        said(f"aurora-0.{when}.npz", when)
    said("aurora-0.05.part.npz", 99)
    said("large.npz", 99, size=11)
    copy(root, tmp_path / "out", 10)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "rows.tgz",
        *(f"aurora-0.{n}.npz" for n in range(few)),
    }
    said("newer.npz", 50)
    copy(root, tmp_path / "out", 10)
    names = {path.name for path in (tmp_path / "out").glob("*.npz")}
    assert names == {"newer.npz", *(f"aurora-0.{n}.npz" for n in range(1, few))}, "the oldest makes room"


def test_a_queue_is_left_and_found_again(tmp_path: Path) -> None:
    """As on a machine that ends commands after some minutes: the first call starts it, the last one has the rows."""
    change = {"methods": ["fafi"], "fusions": ["experts-calibrated"], "epochs": 1, "model": "mlp"}
    for name in ("alone", "then"):
        job = {"name": name, "study": "summit-choose-digits", "change": {**change, "alphas": [1.0 + len(name)]}}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(job) + "\n")
    words = ["--root", tmp_path / "root", "--data-root", tmp_path, "--device", "cpu", "--workers", 1]
    words += ["--first", tmp_path / "alone.jsonl", "--copy", tmp_path / "copy"]

    def asked(seconds: float) -> str:
        command = [
            sys.executable,
            BENCHMARKS / "study_queue.py",
            tmp_path / "then.jsonl",
            *words,
            "--leave-after",
            seconds,
        ]
        return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=WAIT, check=True).stdout

    assert "it goes on" in asked(0.1)
    assert "all is done" in asked(WAIT / 2)
    with tarfile.open(tmp_path / "copy" / "rows.tgz") as packed:
        names = packed.getnames()
        log = packed.extractfile("queue.log")
        assert log is not None
        said = log.read().decode()
    assert names == ["queue.log", *(f"results/{who}/summit-choose-digits.jsonl" for who in ("first", "w0"))]
    assert said.index("first: alone") < said.index("w0: then"), "who asked for the machine to itself has it first"
    assert {path.stem for path in (tmp_path / "copy").glob("*.npz")} == {"alone", "then"}
