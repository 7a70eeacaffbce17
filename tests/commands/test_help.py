"""The text of every command's help: whole, without backslashes, and every word of it a person's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import typer.main

from factories import call, done, one_line
from flyby.cli import app


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


ALL = dict(commands(typer.main.get_command(app)))


def plain(text: str) -> str:
    """The words alone: no frames, no line ends, and no marks for code."""
    return re.sub(r"[\s│╭╮╰╯─`]+", "", text)


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_the_help_of_a_command_is_whole(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # one line per option: sentences that are wrapped stand beside one another
    text = done(*path, "--help").out
    assert "\\" not in text
    shown = plain(text)
    for one in ALL[path].params:
        assert one.help, f"{' '.join(path)}: {one.name} has no sentence"
        assert plain(one.help) in shown, f"the sentence of {one.name} is lost"
        assert one.opts[0] in text if one.opts[0].startswith("-") else True
        if one.required:
            assert "[required]" in text
    assert plain(ALL[path].help.split("\n\n")[0]) in shown


def test_defaults_are_shown_and_limits_too() -> None:
    text = done("run", "--help").out
    assert "[default: 0.1]" in text
    assert "[default: aurora]" in text
    assert "[x>=1]" in plain(done("fuse", "--help").out)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (("runn",), "run"),
        (("explian",), "explain"),
        (("keys", "trsut"), "trust"),
        (("run", "--methd", "x"), "--method"),
    ],
)
def test_a_wrong_word_gets_one_suggestion(words: tuple[str, ...], near: str) -> None:
    line = one_line(call(*words))
    assert line.count("Did you mean") + line.count("Possible options") + line.count("Did you mean one of") == 1
    assert near in line


def test_the_pair_of_versions_is_one_that_works() -> None:
    """click from 8.4 on says suggestions twice under typer 0.20, and from 8.5 on loses the sentences of arguments."""
    assert tuple(map(int, version("click").split(".")[:2])) < (8, 4)
