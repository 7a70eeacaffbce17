"""``flyby bench``: its arithmetic, its loops, the ordinary script, and growth; all in miniature."""

from __future__ import annotations

import json
import shlex
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from factories import WAIT, call, done, one_line, stripes
from flyby.bench import growth as bench_growth
from flyby.bench.loops import Case, Loop, Turn, end
from flyby.bench.measure import COLUMNS, Rates, Wanted, markdown, measure, table
from flyby.bench.script import Images, Script, contrast, contrastive_view, crop_and_mirror, resized_crop
from flyby.errors import BadInput, FlybyError
from flyby.models import ModelSpec
from flyby.rng import generator

TINY = ("--model", "mlp", "--size", 8, "--batch", 16, "--steps", 2, "--seconds", 0.1, "--rounds", 2, "--workers", 1)


def turn(samples_per_second: float, seconds: float = 2.0, batch: int = 10) -> Turn:
    samples = round(samples_per_second * seconds)
    return Turn(samples // batch, samples, seconds, 1.0)


def test_ratios_are_medians_of_each_round_s_own() -> None:
    """Rounds of a machine that slows down to a tenth: rates scatter, the ratios of one round do not."""
    turns: Rates = {
        ("salt", "limit"): [turn(1000), turn(100), turn(500)],
        ("salt", "flyby"): [turn(900), turn(90), turn(400)],
        ("salt", "script"): [turn(100), turn(10), turn(80)],
        ("aurora", "flyby"): [turn(800), turn(80), turn(250)],
    }
    rows = {(row["work"], row["way"]): row for row in table(turns)}
    assert list(rows) == list(turns)
    assert rows["salt", "flyby"]["samples_per_second"] == 400
    assert rows["salt", "flyby"]["ms_per_step"] == 1000 * 10 / 400
    assert rows["salt", "flyby"]["of_limit"] == pytest.approx(statistics.median([0.9, 0.9, 0.8]))
    assert rows["salt", "flyby"]["of_script"] == pytest.approx(9)
    assert rows["salt", "limit"]["of_limit"] == rows["salt", "script"]["of_script"] == 1
    assert rows["aurora", "flyby"]["of_limit"] == pytest.approx(0.8), "aurora has salt's limit and script"
    assert rows["aurora", "flyby"]["of_script"] == pytest.approx(8)
    lines = markdown(list(rows.values()), COLUMNS).splitlines()
    assert len(lines) == 2 + 4
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == ["salt", "flyby", "400", "25.00", "0.90", "9.00"]


def test_every_work_has_its_yardsticks() -> None:
    assert [(w.work, w.way) for w in Wanted("cpu").cases()] == [
        ("plain", "limit"),
        ("plain", "flyby"),
        ("plain", "script"),
        ("salt", "limit"),
        ("salt", "flyby"),
        ("salt", "script"),
        ("aurora", "flyby"),
    ]
    alone = Wanted("cpu", batch=32).cases(["aurora"])
    assert [w.way for w in alone] == ["limit", "flyby", "script"]
    assert {(w.work, w.batch, w.views.views, w.spec().head) for w in alone} == {("aurora", 32, 2, "prototype")}
    with pytest.raises(BadInput, match="did you mean 'salt'"):
        Wanted("cpu").cases(["slat"])
    with pytest.raises(BadInput, match="cannot take images of 8x8"):
        Wanted("cpu", model="cnn-fol", size=8).cases()


def test_the_command_measures_all_three_ways(tmp_path: Path) -> None:
    found = done("bench", *TINY, "--only", "plain", "--device", "cpu", "--out", tmp_path, "--json", "--quiet").json
    rows = {row["way"]: row for row in found["rows"]}
    assert list(rows) == ["limit", "flyby", "script"]
    for row in rows.values():
        assert row["samples_per_second"] > 0
        assert row["of_limit"] > 0
        assert row["of_script"] > 0
    assert rows["limit"]["of_limit"] == rows["script"]["of_script"] == 1
    assert (found["model"], found["batch"], found["views"], found["rounds"]) == ("mlp", 16, {"plain": 1}, 2)
    assert found["aurora_over_salt"] is None
    assert json.loads((tmp_path / "bench.json").read_text()) == found
    assert "| plain    | flyby  |" in (tmp_path / "bench.md").read_text()
    assert "of the limit" in (tmp_path / "bench.svg").read_text()
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_two_views_count_once_and_losses_are_losses() -> None:
    todo = [
        w.model_copy(update={"steps": 2, "script_steps": 3})
        for w in Wanted("cpu", model="mlp", size=8, batch=16, workers=0).cases(["salt"])
    ]
    turns = measure(todo, 0.02, rounds=1)
    for (_, way), (one,) in turns.items():
        assert one.samples == 16 * one.steps, "samples are images, not views"
        assert one.steps % (3 if way == "script" else 2) == 0, "a turn is whole epochs"
        assert 0 < one.loss < 100


def test_a_loop_that_fails_says_which_and_why() -> None:
    loop = Loop(Case(work="plain", way="flyby", model="cnn-fol", size=8, batch=16, device="cpu"))
    try:
        with pytest.raises(
            FlybyError, match="the flyby loop of plain failed: BadInput: cnn-fol cannot take images of 8x8"
        ):
            loop.ready()
    finally:
        end([loop])
    assert not loop.process.is_alive()


class Stubborn:
    """A process that leaves only by the last way, and a pipe to it."""

    def __init__(self, way: str) -> None:
        self.way, self.asked, self.exitcode = way, [], None  # type: ignore[var-annotated]

    def join(self, seconds: float) -> None: ...

    def __getattr__(self, word: str) -> Any:
        def ask() -> None:
            self.asked.append(word)
            if word == self.way:
                self.exitcode = 0

        return ask


@pytest.mark.parametrize(("way", "asked"), [("is_alive", 1), ("terminate", 2), ("kill", 3)])
def test_no_loop_outlives_the_bench(way: str, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flyby.bench.loops.PATIENCE", 0.01)
    loop = object.__new__(Loop)
    process = Stubborn(way)
    loop.process, loop.pipe = process, Stubborn("close")  # type: ignore[assignment]
    end([loop])
    assert loop.pipe.asked == ["close"]  # type: ignore[attr-defined]
    assert process.asked == ["is_alive", "terminate", "kill"][:asked]


def test_an_interrupted_bench_ends_quietly() -> None:
    words = [sys.executable, *shlex.split("-m flyby bench --device cpu --model mlp --size 8 --seconds 60 --workers 2")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(4)]
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=WAIT)
    assert said[0] == "bench: starting plain, limit\n"
    assert rest.splitlines()[-1] == "flyby: interrupted"
    assert "Traceback" not in rest
    assert (process.returncode, out) == (130, "")


def test_bad_words_are_one_line() -> None:
    assert "--batch 1 is too small" in one_line(call("bench", "--batch", 1, "--device", "cpu"))
    assert "--seconds must be above 0" in one_line(call("bench", "--seconds", 0, "--device", "cpu"))
    assert "should be whole numbers" in one_line(
        call("bench", "--growth", "clients", "--points", "1.5", "--device", "cpu")
    )
    assert "should be numbers above 0" in one_line(call("bench", "--growth", "bytes", "--points", "1,x"))
    assert "engine" in one_line(
        call("bench", "--growth", "clients", "--engines", "inlin", "--points", "1", "--device", "cpu")
    )


@pytest.mark.parametrize(("transform", "views", "head"), [(None, 1, "linear"), (contrastive_view, 2, "prototype")])
def test_the_ordinary_script_trains(transform: object, views: int, head: str) -> None:
    images, labels = stripes(96)
    spec = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8), width=0.5, head=head)
    script = Script(spec.build(generator("script")), Images(images, labels, transform, views), 32, "cpu", workers=0)  # type: ignore[arg-type]
    losses = [script.epoch() for _ in range(6)]
    assert losses[-1] < losses[0] - 0.3, losses


def test_its_transforms_keep_size_and_mode() -> None:
    for mode in ("RGB", "L"):
        pixels = np.random.RandomState(0).randint(0, 256, (12, 12, 3) if mode == "RGB" else (12, 12)).astype(np.uint8)
        image = Image.fromarray(pixels)
        for transform in (crop_and_mirror, resized_crop, contrastive_view):
            changed = [transform(image) for _ in range(8)]
            assert {(c.size, c.mode) for c in changed} == {((12, 12), mode)}
            assert len({c.tobytes() for c in changed}) > 1, "every draw is another"


def test_its_contrast_on_four_points() -> None:
    """Two pairs, orthogonal to one another: each anchor's positive has e^1 among e^1 + 2 e^0 (tau = 1)."""
    features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    expected = -np.log(np.e / (np.e + 2))
    assert float(contrast(features, torch.tensor([0, 0, 1, 1]), tau=1.0)) == pytest.approx(expected, rel=1e-6)


def test_growth_of_bytes(tmp_path: Path) -> None:
    words = (
        "bench",
        "--growth",
        "bytes",
        "--model",
        "mlp",
        "--size",
        8,
        "--points",
        "0.5,1",
        "--out",
        tmp_path,
        "--quiet",
    )
    found = done(*words, "--json").json
    assert [row["line"] for row in found["rows"][:3]] == ["write one", "read and check one", "fedavg of 5"]
    small, large = sorted({row["bytes"] for row in found["rows"]})
    weights = [
        4 * ModelSpec(name="mlp", classes=10, channels=3, size=(8, 8), width=w).parameter_count() for w in (0.5, 1.0)
    ]
    assert 0 < small - weights[0] < 5000, "a parcel is its weights and a small manifest"
    assert 0 < large - weights[1] < 5000
    assert (tmp_path / "bench-bytes.png").stat().st_size > 1000


def test_growth_of_clients_and_neighbours() -> None:
    wanted = Wanted("cpu", model="mlp", size=8)
    found = bench_growth.grow("clients", wanted, "1,2", ["inline"])
    assert [(row["x"], row["line"]) for row in found["rows"]] == [(1, "inline"), (2, "inline")]
    assert all(row["value"] == pytest.approx(row["x"] * 256 * 4 / row["seconds"], rel=0.5) for row in found["rows"])
    assert "| clients |" in bench_growth.describe(found)
    found = bench_growth.grow("neighbours", wanted, "2")
    assert [row["line"] for row in found["rows"]] == ["plain loop", "one by one", "together"]


def test_medians_are_taken_point_by_point() -> None:
    rows = [
        {"x": x, "line": "a", "seconds": s, "value": 1 / s}
        for x, s in ((1, 1.0), (2, 4.0), (1, 2.0), (2, 8.0), (1, 9.0), (2, 5.0))
    ]
    assert bench_growth.medians(rows) == [
        {"x": 1, "line": "a", "seconds": 2.0, "value": 0.5},
        {"x": 2, "line": "a", "seconds": 5.0, "value": 0.2},
    ]
