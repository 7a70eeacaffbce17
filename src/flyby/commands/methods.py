"""``flyby methods`` and ``flyby explain``: what there is by name, and what can be set."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from flyby.commands.common import Json, say

Row = dict[str, Any]
COLUMN = 40  # where sentences begin beside keys
EACH = "One of them in full, with every --set key: flyby explain NAME. As data: --json."


def methods(
    rules: Annotated[bool, typer.Option("--rules", help="Only the server rules.")] = False,
    objectives: Annotated[bool, typer.Option("--objectives", help="Only the objectives: what sites minimise.")] = False,
    models: Annotated[bool, typer.Option("--models", help="Only the models: architectures.")] = False,
    as_json: Json = False,
) -> None:
    """The methods there are, the server rules, objectives and models that they are made of: a sentence each."""
    from flyby.runs import explain as there_is
    from flyby.runs.methods import catalogue

    listed: dict[str, tuple[str, bool, Callable[[], list[Row]]]] = {
        "method": ("Methods (--method): an objective at the sites and a server rule", False, catalogue),
        "rule": ("Server rules (--fusion)", rules, there_is.rules),
        "objective": ("Objectives: what sites minimise", objectives, there_is.objectives),
        "model": ("Models (--model)", models, there_is.models),
        "group": ("Groups of settings (--set GROUP.KEY=VALUE)", False, there_is.groups),
    }
    asked = [one for one in listed.values() if one[1]]
    chosen = asked or list(listed.values())
    if as_json:  # without a word for one of them: the methods, as ever
        found = [row for _, _, rows in asked or [listed["method"]] for row in rows()]
        print(json.dumps(found, indent=1))
        return
    for title, _, rows in chosen:
        print(f"{title}\n" + "\n".join(_lines(rows())) + "\n")
    print(EACH)


def explain(
    name: Annotated[
        str,
        typer.Argument(
            help="A method, server rule, objective or model of `flyby methods`, a group of settings (train), or one"
            " setting (orient.pool)."
        ),
    ],
    as_json: Json = False,
) -> None:
    """What something is: where it comes from, what it needs and sends, what fits it, and every --set key of it."""
    from flyby.runs.explain import explain as explained

    cards = explained(name)
    shown: set[str] = set()
    text = "\n\n".join("\n".join(_card(card, shown)) for card in cards)
    say({"name": name, "found": cards}, as_json, text)


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def _filled(head: str, text: str, column: int) -> str:
    """A head and its sentence beside it, or below where the head is long."""
    lead = f"{head:<{column}}" if len(head) < column else f"{head}\n{' ' * column}"
    lines = textwrap.wrap(text, max(30, _width() - column), break_long_words=False, break_on_hyphens=False)
    return (lead + f"\n{' ' * column}".join(lines)).rstrip()


def _lines(rows: list[Row]) -> Iterator[str]:
    names = [str(next(iter(row.values()))) for row in rows]
    column = min(max(map(len, names)) + 4, 24)
    for name, row in zip(names, rows, strict=True):
        yield _filled(f"  {name}", row["about"], column)


def _card(card: Row, shown: set[str]) -> Iterator[str]:
    """One thing in full; what an earlier card said is not said again."""
    if card["kind"] != "setting":
        yield f"{card['name']}: {card['kind']}" + (f" [{card['paper']}]" if card.get("paper") else "")
        yield textwrap.fill(card["about"], _width(), initial_indent="  ", subsequent_indent="  ")
    for label, text in _facts(card):
        if f"{label} {text}" not in shown:
            yield _filled(f"  {label}", text, 18)
        shown.add(f"{label} {text}")
    asked = card["kind"] == "setting"  # one key of several owners: each is what was asked for
    fresh = [row for row in card["keys"] if asked or f"{row['key']}{row['default']}" not in shown]
    shown |= {f"{row['key']}{row['default']}" for row in fresh}
    if fresh and card["kind"] != "setting":
        yield "  --set KEY=VALUE, here with the defaults:"
    for row in fresh:
        of = f" (of {', '.join(row['of'])})" if row.get("of") else ""
        yield _filled(f"    {row['key']}={_value(row['default'])}", f"{row['about']}{of} ({row['takes']})", COLUMN)


def _facts(card: Row) -> Iterator[tuple[str, str]]:
    """What a card says beside its sentence, in words."""
    if card["kind"] == "method":
        yield "sites", f"objective {card['objective']}"
        yield "server", f"rule {card['fusion']}" if card["fusion"] else "none"
        yield "exchanges", card["exchanges"]
        if card["exchanges"] != "nothing":
            sizes = f"{card['weight_bytes'] / 1e3:,.0f} kB + {card['extra_bytes'] / 1e3:,.1f} kB"
            yield "an upload", f"{sizes} beside the weights (cnn-small, 8x8 images, 10 classes)"
    for label, key in (
        *(
            ("needs", "needs"),
            ("reads if sent", "wants"),
            ("sends", "provides"),
            ("rules that fit", "fits"),
            ("rules", "rules"),
        ),
        *(("objectives", "objectives"), ("when asked", "when_asked"), ("ask with", "ask")),
    ):
        if card.get(key):
            yield label, card[key] if isinstance(card[key], str) else ", ".join(card[key])
    if card.get("train"):
        yield "trains with", ", ".join(f"{name}={_value(value)}" for name, value in card["train"].items())
    if "data_free" in card:
        yield "images", "none" if card["data_free"] else "needs unlabelled proxy images (--set proxy=PATH)"
    if "mixed_architectures" in card:
        yield "architectures", "may differ between sites" if card["mixed_architectures"] else "one for all sites"
    if "parameters" in card:
        yield (
            "size",
            f"{card['parameters']:,} parameters for 10 classes in colour; from {card['smallest']} pixels a side",
        )
    if card["kind"] == "method":
        yield "also", "every key of train, views, data, split, model: flyby explain train"


def _value(value: Any) -> str:
    """As ``--set`` would take it."""
    return value if isinstance(value, str) and value else json.dumps(value)
