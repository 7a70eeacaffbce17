"""docs/tutorial.md, step by step: its own images, its commands in order, and what it says they print; then what the
FAQ says of the same files. And the blocks of the pages for each kind of reader, whole."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from factories import call
from flyby.models.lite import lite_file

DOCS = Path(__file__).parents[2] / "docs"
QUICKER = {"run": ("--engine", "inline"), "fuse": ("--no-export",)}  # no processes; no model.pt2, which others test
needs_backbone = pytest.mark.skipif(lite_file("efficientnet-lite0") is None, reason="needs the extra backbones")


def steps(page: str) -> list[tuple[str, list[str]]]:
    """Every command with the lines that the page shows under it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), flags=re.S | re.M):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if line.startswith(("$ ", "flyby ")):
                found.append((line.removeprefix("$ "), []))
            elif found:
                found[-1][1].append(line)
    return found


def alike(line: str) -> re.Pattern[str]:
    """A line of the page as a pattern: blanks and measured numbers (with a point, bytes, seconds) may differ."""
    words = re.escape(" ".join(line.split()))
    return re.compile(re.sub(r"\d+\\\.\d+|\d+(,\d{3})+(?=\\ bytes)|\d+(?=\\ second)", r"[\\d.,]+", words))


def follow(page: str, *leave: str) -> list[str]:
    """Run the commands of a page in this folder, but for those that a test leaves to others; the words they begin
    with."""
    ran = []
    for command, shown in steps(page):
        program, *words = shlex.split(command)
        if program != "flyby" or words[0] in ("serve", "export", *leave):
            continue  # what never ends, and what tests/deploy does with every rule
        answer = call(*words, *QUICKER.get(words[0], ()))
        assert answer.code == (2 if any(line.startswith("flyby: ") for line in shown) else 0), (command, answer.err)
        said = [" ".join(line.split()) for line in (answer.out + answer.err).splitlines()]
        for line in shown:
            assert any(alike(line).fullmatch(one) for one in said), (command, line, said)
        ran.append(words[0])
    return ran


@needs_backbone
def test_the_tutorial_and_the_questions_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```$", (DOCS / "tutorial.md").read_text(), flags=re.S | re.M)
    exec(compile(code, "tutorial.md", "exec"), {})
    assert follow("tutorial") == ["data", "train", "inspect", "train", "fuse", "evaluate", "predict", "predict"]
    assert len(Path("answers.csv").read_text().splitlines()) == 41
    assert follow("faq") == ["train", "fuse", "train", "fuse", "fuse"]


def test_the_tutorial_ends_with_the_steps_that_a_test_leaves_out() -> None:
    left = [shlex.split(command)[:2] for command, _ in steps("tutorial")][-3:]
    assert left == [["flyby", "serve"], ["flyby", "export"], ["python", "onnx/run.py"]]


def test_the_commands_for_researchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert follow("for-researchers") == ["run", "run", "report", "methods", "explain"]


def test_the_commands_for_satellites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sgp4")
    monkeypatch.chdir(tmp_path)
    assert follow("for-satellites", "run") == ["contacts", "contacts"]  # tests/runs/test_encounters.py runs on plans
