"""Every ``flyby`` command that README or docs/ print is one that the command line takes: subcommands, options, values,
methods, rules, studies and settings. Whether it does what the page says is for the tests that run the pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

from flyby.cli import app
from flyby.commands import run as run_command
from flyby.errors import FlybyError
from flyby.fusion import FUSIONS
from flyby.objectives import OBJECTIVES
from flyby.runs.config import make_config
from flyby.runs.explain import explain
from flyby.runs.methods import METHODS
from flyby.study.catalogue import packaged

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```[^\n]*\n(.*?)^ *```$", flags=re.S | re.M)
# Of packages that a page shows how to write.
OUTSIDE = {"mine", "middle", "experts-mine"}
COMMAND = typer.main.get_command(app)


def fenced(text: str) -> Iterator[list[str]]:
    """The words of every command in a page's blocks; what is after a comment, a pipe or a semicolon is another one."""
    for _, block in FENCE.findall(text):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            yield from words_of(line.strip().removeprefix("$ "))


def inline(text: str) -> Iterator[list[str]]:
    """The words of every command that stands in a sentence."""
    for code in re.findall(r"`(flyby [^`]+)`", FENCE.sub("", text)):
        if not code.endswith(" block 1"):  # the two words that signatures begin with
            yield from words_of(" ".join(code.split()))


def words_of(line: str) -> Iterator[list[str]]:
    if line.startswith("flyby:") or not re.search(r"\bflyby ", line):
        return
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>()")
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        words = list(lexer)
    except ValueError:  # an apostrophe: a sentence, or what a program printed
        return
    part: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= set(";&|<>()"):
            while part and re.fullmatch(r"\w+=.*", part[0]):  # a variable before the command
                part.pop(0)
            if part[:1] in (["flyby"], [".venv/bin/flyby"]) and part[1:]:
                yield part[1:]
            part = []
        else:
            part.append(word)


def parsed(words: list[str], whole: bool) -> tuple[str, dict[str, Any]]:
    """The command's name and its values; ``whole`` when all that it requires must stand there."""
    context, command, path = click.Context(COMMAND, info_name="flyby"), COMMAND, []
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        path.append(str(name))
        context, command = click.Context(found, parent=context, info_name=name), found
    if whole and not {"...", "…"} & set(words):
        context = command.make_context(path[-1] if path else "flyby", list(words), parent=context.parent)
        return " ".join(path), context.params
    last = {name: one for one in command.params for name in one.opts}.get(words[-1]) if words else None
    if last is not None and not getattr(last, "is_flag", False):  # `flyby orient --node` in a sentence
        words = words[:-1]
    return " ".join(path), command.make_parser(context).parse_args(list(words))[0]


def check(words: list[str], whole: bool, patch: pytest.MonkeyPatch) -> None:
    """Complain, as the command line would, about a command that it would not take."""
    path, values = parsed(words, whole)
    values = {name: value for name, value in values.items() if isinstance(value, str | list | tuple) and value}
    methods = listed(values.get("method"))
    rules = listed(values.get("fusion"))
    if methods - OUTSIDE and path != "orient":
        assert methods - OUTSIDE <= set(METHODS) | set(OBJECTIVES), methods
    assert rules <= set(FUSIONS) | OUTSIDE, rules
    if path == "explain" and (name := values.get("name")) and name.islower():
        explain(name)
    if path == "study" and (name := values.get("name")) and name.islower() and not name.endswith(".yaml"):
        assert name in packaged(), f"there is no study {name}"
    if path == "run" and whole and not (methods | rules) & OUTSIDE and not {"...", "…"} & set(words):
        patch.setattr(run_command, "_run", lambda *_: None)
        patch.setattr(run_command, "_warm", lambda *_: None)
        COMMAND.main(["run", *words[1:]], standalone_mode=False)
    elif path == "train" and len(methods & set(METHODS)) == 1:
        make_config(*methods, assignments=values.get("settings") or ())


def listed(value: str | None) -> set[str]:
    """The names in an option with commas; a single letter or capitals stand for any."""
    return {name for name in (value or "").split(",") if len(name) > 1 and name.islower()}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_command_of_a_page_is_one(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, wrong = page.read_text(), []
    for whole, commands in ((True, fenced(text)), (False, inline(text))):
        for words in commands:
            try:
                check(words, whole, monkeypatch)
            except (click.ClickException, FlybyError, AssertionError) as error:
                said = error.format_message() if isinstance(error, click.ClickException) else str(error)
                wrong.append(f"flyby {shlex.join(words)}: {said}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "flyby trian --data x",
        "flyby run --methd aurora",
        "flyby run --method auror --out x",
        "flyby run --method fedavg --set train.lrr=1 --out x",
        "flyby run --method fedavg --clients many",
        "flyby study aurora-digit",
        "flyby explain aurorra",
        "flyby keys trsut a b",
        "flyby sign x.parcel",
        "flyby contacts walker --height 3",
        "cd x && flyby train --data x --method aurora --set objective.lambda=3 --out y",
    ],
)
def test_a_wrong_command_is_found(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (words,) = fenced(f"```\n{line}\n```")
    with pytest.raises((click.ClickException, FlybyError, AssertionError)):
        check(words, True, monkeypatch)


def test_commands_are_found_where_they_stand() -> None:
    text = "```\n$ flyby a b \\\n   --c # d\nX=1 flyby e; flyby f | head\nflyby: an error\n```\nSay `flyby g`.\n"
    assert list(fenced(text)) == [["a", "b", "--c"], ["e"], ["f"]]
    assert list(inline(text)) == [["g"]]
    assert sum(len(list(fenced(page.read_text()))) for page in PAGES) > 100
