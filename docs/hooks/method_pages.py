"""A page for every method and server rule, made from the registries when the site is built, so that
nothing is written twice."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docstrings import cell, first, markdown

from flyby.fusion import FUSIONS
from flyby.meeting.pipeline import STAGES
from flyby.meeting.settings import VARIANTS
from flyby.objectives import OBJECTIVES
from flyby.runs.explain import explain
from flyby.runs.methods import METHODS, PRINTED

Table = tuple[str, list[str], list[list[str]]]  # the heading it stands under, its head and rule, its rows as cells


def pages(root: Path) -> dict[str, str]:
    """The Markdown of every page, by where it goes: ``methods/NAME.md``, ``rules/NAME.md``."""
    families, results = _families(root), {path.stem: list(_tables(path)) for path in _results(root)}
    rules = [name for name in FUSIONS.built_in if name not in METHODS]
    return {
        **{f"methods/{name}.md": _method(name, families.get(name, ""), results) for name in METHODS.built_in},
        **{f"rules/{name}.md": _rule(name, families.get(name, ""), results) for name in rules},
    }


def rule_page(name: str) -> str:
    """Where a server rule is described: with the method of its name, or by itself."""
    return f"methods/{name}.md" if name in METHODS else f"rules/{name}.md"


def _method(name: str, family: str, results: dict[str, list[Table]]) -> str:
    (card,) = (one for one in explain(name) if one["kind"] == "method")
    method = METHODS[name]
    lines = [*_head(name, card, family), *_facts(card, name), "## How it works", ""]
    lines += [f"### At the sites: `{method.objective}`", "", *_texts(OBJECTIVES[method.objective], "flyby.objectives")]
    if method.fusion:
        lines += [f"### At the server: `{method.fusion}`", ""]
        rule = FUSIONS[method.fusion]
        lines += _texts(rule, "flyby.fusion") if method.fusion == name else _elsewhere(method.fusion, rule.about)
    if method.orient:
        lines += ["### At a node: the stages of a round", "", *_stages(method.orient)]
    lines += [*_settings(card["keys"]), *_fitting(card["fits"]), *_found(results, name, _names(name))]
    return "\n".join(lines)


def _rule(name: str, family: str, results: dict[str, list[Table]]) -> str:
    (card,) = (one for one in explain(name) if one["kind"] == "server rule")
    lines = [
        *_head(name, card, family),
        "| | |",
        "|---|---|",
        "| what it is | a server rule, for uploads of any fitting method |",
    ]
    lines += [f"| it needs | {_listed(card['needs'])} |", f"| clients that send it | {_listed(card['objectives'])} |"]
    if "ask" in card:
        lines += [f"| and when asked with `{card['ask']}` | {_listed(card['when_asked'])} |"]
    lines += [f"| different architectures together | {'yes' if card['mixed_architectures'] else 'no'} |"]
    lines += [f"| unlabelled images at the server | {'not needed' if card['data_free'] else 'needed'} |"]
    lines += ["", "## How it works", "", *_texts(FUSIONS[name], "flyby.fusion"), *_settings(card["keys"])]
    return "\n".join([*lines, *_found(results, name, set())])


def _head(name: str, card: dict[str, Any], family: str) -> list[str]:
    more = f" What was decided and measured: {family}." if family else ""
    paper = f"**Paper:** {card['paper']}." if card["paper"] else "No paper of its own: flyby's, or common knowledge."
    return [f"# {name}", "", f"{card['about'][0].upper()}{card['about'][1:]}.", "", f"{paper}{more}", ""]


def _facts(card: dict[str, Any], name: str) -> list[str]:
    weights, extras = card["weight_bytes"], card["extra_bytes"]
    size = (
        f"{weights:,} bytes of weights and {extras:,} of other things, for the network of the demo"
        if weights
        else "nothing"
    )
    rows = {
        "run it": f"`flyby run --method {name} --data digits --out runs/{name}`",
        "what crosses": card["exchanges"],
        "how much": size,
        "clients minimise": f"`{card['objective']}`",
        "the server uses": f"[`{card['fusion']}`](../{rule_page(card['fusion'])})"
        if card["fusion"]
        else "there is none",
        "clients send": _listed(card["provides"]) if weights else "nothing",
        **({"training by default": _pairs(card["train"])} if card["train"] else {}),
    }
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items()), ""]


def _texts(kind: type, room: str) -> list[str]:
    """What the modules of a class and of its settings say, each once, and the class itself; bases of the room aside."""
    classes = [kind, *kind.__mro__, *getattr(kind, "settings_type", kind).__mro__]
    modules = dict.fromkeys(one.__module__ for one in classes if one.__module__.startswith(f"{room}."))
    own = kind.__module__
    told = [own, *(m for m in modules if m != own and room == "flyby.objectives")]
    lines: list[str] = []
    for module in (m for m in told if not m.endswith(".base")):
        text = markdown(sys.modules[module].__doc__ or "")
        lines += [text, ""] if module == own else [f"**{module.rpartition('.')[2]}.** {text}", ""]
        lines += [markdown(kind.__doc__), ""] if module == own and vars(kind).get("__doc__") else []
    return lines


def _elsewhere(rule: str, about: str) -> list[str]:
    return [f"[`{rule}`](../{rule_page(rule)}): {cell(about)}.", ""]


def _stages(variant: str) -> list[str]:
    rows = [f"| `{name}` | {first(STAGES[name].__doc__ or '')} |" for name in VARIANTS[variant].stages]
    return ["| stage | what it does |", "|---|---|", *rows, ""]


def _settings(keys: list[dict[str, Any]]) -> list[str]:
    if not keys:
        return []
    rows = (f"| `{k['key']}` | {_value(k['default'])} | {cell(k['takes'])} | {cell(k['about'])} |" for k in keys)
    shared = "Every key is given as `--set KEY=VALUE`; those of training, views, data and network are the same for all"
    return [
        *("## Settings", "", f"{shared}: `flyby explain train`.", ""),
        *("| key | default | takes | what it does |", "|---|---|---|---|", *rows, ""),
    ]


def _fitting(rules: list[str]) -> list[str]:
    if not rules:
        return []
    links = ", ".join(f"[`{name}`](../{rule_page(name)})" for name in rules)
    return ["## Server rules that fit", "", f"On the same uploads, with `--fusion NAME`: {links}.", ""]


def _found(results: dict[str, list[Table]], name: str, names: set[str]) -> list[str]:
    """The lines of all tables in results/ that are of this method, or of this server rule."""
    lines: list[str] = []
    for study, tables in results.items():
        for heading, head, rows in tables:
            mine = [row for row in rows if _is_of(row, name, names)]
            if mine:
                lines += [f"[{study}](../results/{study}.md), {heading}:", "", *head]
                lines += ["| " + " | ".join(row) + " |" for row in mine] + [""]
    told = "Lines of the tables in [results](../results/index.md) that name it; each table says what it measures."
    return ["## Results", "", told, "", *lines] if lines else []


def _is_of(row: list[str], name: str, names: set[str]) -> bool:
    clients = re.sub(r" \(E=.*\)$", "", row[0]).partition(",")[0]
    return clients in names or re.split(r"[:,]", row[1])[0] == name


def _names(method: str) -> set[str]:
    """How tables call the clients of a method; of nodes, the student and the teacher."""
    both = PRINTED.get(method, ())
    if METHODS[method].orient and both:
        return {method, both[1] if VARIANTS[method].teacher else both[0]}
    return {method, method.capitalize()} if method == "local" else {method}


def _families(root: Path) -> dict[str, str]:
    """The page that tells more about each method or rule, as the table in docs/methods.md links it."""
    found: dict[str, str] = {}
    text = (root / "docs" / "methods.md").read_text()
    for row in re.findall(r"^\| `.*\|$", text, flags=re.M):
        cells = [part.strip() for part in row.strip("|").split("|")]
        target = re.search(r"\]\(([^)]+)\)", cells[-1])
        if target:
            where = target[1] if not target[1].startswith("#") else f"methods.md{target[1]}"
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), _page(root, where))
    rules = {"experts": ("iffi", "experts"), "best": ("standardised", "best"), "distil": ("compact",)}
    for page, starts in rules.items():
        for name in FUSIONS.built_in:
            if name.startswith(starts):
                found.setdefault(name, _page(root, f"{page}.md"))
    return found


def _page(root: Path, where: str) -> str:
    """A link to a page of docs/, called as its first heading calls it."""
    title = (root / "docs" / where.partition("#")[0]).read_text().partition("\n")[0].lstrip("# ")
    return f"[{title}](../{where})"


def _results(root: Path) -> Iterable[Path]:
    """The tables of studies; those of attacks are about rules and not about methods."""
    return (path for path in sorted((root / "results").glob("*.md")) if not path.stem.startswith("attacks"))


def _tables(path: Path) -> Iterator[Table]:
    heading, lines = "", path.read_text().splitlines()
    at = 0
    while at < len(lines):
        heading = lines[at].lstrip("# ") if lines[at].startswith("##") else heading
        if lines[at].startswith("|"):
            end = next((i for i in range(at, len(lines)) if not lines[i].startswith("|")), len(lines))
            rows = [[part.strip() for part in re.split(r"(?<!\\)\|", row)[1:-1]] for row in lines[at + 2 : end]]
            yield heading or path.stem, lines[at : at + 2], [row for row in rows if len(row) > 1]
            at = end
        at += 1


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words) or "nothing"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"`{key}` {cell(value)}" for key, value in values.items())


def _value(value: Any) -> str:
    return "" if value is None or value == [] else f"`{cell(value)}`"
