"""Pages of docs/ whose commands are run one after another, in a folder that is as the page has it, and compared with
what the page says they print: the tutorial, the questions after it, and others that take seconds. The Python of pages
too. That all other commands exist, with their options and settings, is for ``test_documented``."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import flyby
from factories import call, done, make_images, make_stripes, make_tree, stripes
from flyby.models.lite import lite_file

DOCS = Path(__file__).parents[2] / "docs"
# No processes; no model.pt2, which others test.
QUICKER = {"run": ("--engine", "inline"), "fuse": ("--no-export",)}
LONG = ("serve", "export")  # what never ends, and what tests/deploy does with every rule
needs_backbone = pytest.mark.skipif(lite_file("efficientnet-lite0") is None, reason="needs the extra backbones")
needs_orbits = pytest.mark.skipif(importlib.util.find_spec("sgp4") is None, reason="needs the extra space")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def steps(page: str) -> list[tuple[list[str], list[str]]]:
    """The words of every command, with the lines that the page shows under it."""
    found: list[tuple[list[str], list[str]]] = []
    answered = True
    for block in re.findall(r"^```\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), flags=re.S | re.M):
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        if lines[0].startswith(("$ ", "flyby ")):
            answered = False
        elif answered:  # a block without commands is what the last one printed, if there is none between
            continue
        else:
            answered = True
        for line in lines:
            if line.startswith(("$ ", "flyby ")):
                found.append((shlex.split(line.removeprefix("$ ").partition("; echo")[0], comments=True), []))
            else:
                found[-1][1].append(line)
    return found


def alike(line: str) -> re.Pattern[str]:
    """A line of the page as a pattern: blanks, measured numbers (with a point, bytes, seconds) and keys may differ,
    three dots are anything."""
    words = re.sub(r"[A-Za-z0-9+/]{43}=|[0-9a-f]{4}(:[0-9a-f]{4}){7}", "...", " ".join(line.split()))
    words = re.escape(words).replace(r"\.\.\.", ".*")
    words = re.sub(r"\d+\\\.\d+|\d+(,\d{3})+(?=\\ bytes)|\d+(?=\\ second)", r"[\\d.,]+", words)
    return re.compile(re.sub(r"\\ seconds?\b", r" (seconds?|minutes?)", words))  # 1 second here, 2 on a busy machine


def follow(
    page: str, leave: tuple[str, ...] = LONG, quicker: Mapping[str, tuple[Any, ...]] = QUICKER, most: int | None = None
) -> list[str]:
    """Run the (first) commands of a page but for those to leave, hold what they print against the page, and return what
    each began with."""
    ran = []
    for (program, *words), shown in steps(page)[:most]:
        if program != "flyby" or words[0] in leave:
            continue
        answer = call(*words, *quicker.get(words[0], ()))
        code = next((int(line) for line in shown if re.fullmatch(r"\d", line)), None)
        expected = code if code is not None else 2 if any(line.startswith("flyby: ") for line in shown) else 0
        assert answer.code == expected, (words, answer.err)
        said = [" ".join(line.split()) for line in (answer.out + answer.err).splitlines()]
        for line in shown:
            if line.strip() and line != str(code):
                assert any(alike(line).fullmatch(one) for one in said), (words, line, said)
        ran.append(words[0])
    return ran


def python(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), flags=re.S | re.M)


# -- the tutorial, and pages for one kind of reader


@needs_backbone
def test_the_tutorial_and_the_questions_after_it() -> None:
    (code,) = python("tutorial")
    exec(compile(code, "tutorial.md", "exec"), {})
    assert follow("tutorial") == ["data", "train", "inspect", "train", "fuse", "evaluate", "predict", "predict"]
    assert len(Path("answers.csv").read_text().splitlines()) == 41
    assert follow("faq") == ["train", "fuse", "train", "fuse", "fuse"]


def test_the_tutorial_ends_with_the_steps_that_a_test_leaves_out() -> None:
    assert [words[:2] for words, _ in steps("tutorial")][-3:] == [
        *(["flyby", "serve"], ["flyby", "export"], ["python", "onnx/run.py"])
    ]


@pytest.mark.usefixtures("undrawn")
def test_the_commands_for_researchers() -> None:
    quick = {"run": (*QUICKER["run"], "--epochs", "1")}
    assert follow("for-researchers", quicker=quick) == ["run", "run", "report", "methods", "explain"]


@needs_orbits
def test_the_commands_for_satellites() -> None:
    assert follow("for-satellites", leave=("run",)) == ["contacts"] * 2  # tests/runs/test_encounters.py runs on plans


# -- other pages


def test_classes_by_name() -> None:
    for place, names in (("hospital-a", ("cat", "dog", "horse")), ("hospital-b", ("dog", "fox"))):
        count = 10 * len(names)
        make_tree(Path(place), make_images(count), np.arange(count) % len(names), names)
    assert follow("classes", quicker={**QUICKER, "train": ("--holdout", "0")}, most=3) == ["train", "train", "fuse"]


@needs_orbits
def test_contacts() -> None:
    assert follow("contacts", most=2) == ["contacts", "contacts"]


def test_exit_codes() -> None:
    assert follow("run-folder") == ["run", "evaluate"]


def test_signing() -> None:
    quick = {**QUICKER, "train": ("--epochs", "1", "--model", "mlp", "-q")}
    ran = ["keys", "keys", "keys", "keys", "keys", "train", "train", "sign", "inspect", "fuse"]
    assert follow("signing", quicker=quick, most=10) == ran


def test_transport() -> None:
    data = make_stripes(Path("stripes.npz"), 60, 15)
    for name in ("north", "south"):
        done("train", "--data", data, "--model", "mlp", "--epochs", 1, "--out", f"inbox/{name}.parcel", "-q")
    Path("inbox/notes.parcel").write_text("not a parcel")
    (words, shown) = next(step for step in steps("transport") if "north,south,east" in step[0])
    answer = call(*words[1:])
    said = [" ".join(line.split()) for line in (answer.out + answer.err).splitlines()]
    assert answer.code == 2
    for line in shown[:3]:  # the rest tells of seconds left
        assert line in said


# -- Python


def test_the_python_of_the_backbones_page() -> None:
    (code,) = python("backbones")
    names: dict[str, Any] = {}
    exec(compile(code, "backbones.md", "exec"), names)
    assert names["parcel"].manifest.spec.backbone is not None


def test_the_python_of_the_python_page() -> None:
    images, labels = stripes(60)
    make_tree(Path("scans"), images, labels, ("rows", "columns", "checks"))
    data = flyby.load(images, labels)
    sites = data.split(clients=3, alpha=10.0, val=0.2)
    parcels = [flyby.train(site, "fedavg", model="mlp", epochs=1) for site in sites]
    names: dict[str, Any] = {
        **{"flyby": flyby, "site": sites[0], "node": sites[0], "parcels": parcels, "own": parcels[0]},
        **{"received": parcels[1:], "images": images, "labels": labels % 2, "test_images": images},
        **{"test_labels": labels % 2, "dataset": TensorDataset(torch.tensor(images[..., 0]), torch.tensor(labels))},
    }
    names["test_dataset"] = names["dataset"]
    less = {"epochs=20": "epochs=1, model='mlp'", "clients=10": "clients=2, epochs=1", '"epochs": 10': '"epochs": 1'}
    less |= {'"top": 4': '"top": 2, "distill_steps": 0', "flyby.train(site)": "flyby.train(site, epochs=1)"}
    for number, code in enumerate(python("python")):
        for long, short in less.items():
            code = code.replace(long, short)
        if "site-b.parcel" in code:
            flyby.write_parcel(flyby.train(sites[1], epochs=1), "site-b.parcel")
        exec(compile(code, f"python.md, block {number}", "exec"), names)
    assert Path("runs/fafi/report.html").exists()
