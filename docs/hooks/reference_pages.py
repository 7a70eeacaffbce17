"""The reference of ``import flyby``, made from signatures and docstrings when the site is built."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from docstrings import first, markdown

import flyby

WIDTH = 88
GROUPS = {
    "steps": ("Steps", ("load", "train", "train_all", "fuse", "orient", "run", "recipe_for", "backbone")),
    "files": ("Files", ("load_model", "read_parcel", "write_parcel")),
    "data": ("Data and sites", ("Data", "Sites", "Site", "Split", "Dataset")),
    "parcels": ("What travels", ("Parcel", "Ledger", "Recipe", "ModelSpec")),
    "models": ("Models and what they are worth", ("Model", "Judged")),
    "runs": ("Runs", ("Run", "Result", "Options")),
    "own": ("Your own method", ("Objective", "Fusion")),
    "errors": ("Errors", ("FlybyError", "BadInput", "Diverged")),
}


def pages() -> dict[str, str]:
    """The Markdown of every page, by where it goes."""
    named = {name for _, names in GROUPS.values() for name in names} | {"__version__"}
    left = [name for name in flyby.__all__ if name not in named]
    groups = {**GROUPS, **({"more": ("More", tuple(left))} if left else {})}
    index = ["# Reference", "", "What `import flyby` offers; [flyby in Python](../python.md) shows it at work.", ""]
    made = {}
    for file, (title, names) in groups.items():
        index += [f"## {title}", "", "| name | what it is |", "|---|---|"]
        index += [f"| [`{n}`]({file}.md#{n.lower()}) | {first(_doc(getattr(flyby, n)))} |" for n in names] + [""]
        made[f"reference/{file}.md"] = "\n".join([f"# {title}", "", *(t for name in names for t in _entry(name))])
    return {"reference/index.md": "\n".join(index), **made}


def _entry(name: str) -> Iterator[str]:
    thing = getattr(flyby, name)
    yield f"## {name} {{ #{name.lower()} }}\n"
    if inspect.isclass(thing):
        yield f"```python\n{_signature(f'class {name}', thing)}\n```\n"
        yield f"{markdown(_doc(thing))}\n"
        for member, kind, value in sorted(_members(thing), key=lambda one: one[1] != "property"):
            head = _signature(member, value) if kind == "method" else f"{member}{_returned(value)}"
            yield f"### {name}.{member} {{ #{name.lower()}-{member.lower()} }}\n"
            yield f"```python\n{head}\n```\n\n{markdown(_doc(value))}\n"
    else:
        yield f"```python\n{_signature(f'flyby.{name}', thing)}\n```\n\n{markdown(_doc(thing))}\n"


def _members(kind: type) -> Iterator[tuple[str, str, Any]]:
    """What a class offers itself or from flyby's own bases, where it has a sentence to say about it."""
    seen: set[str] = set()
    for owner in kind.__mro__:
        if not owner.__module__.startswith("flyby"):
            continue
        for name, value in vars(owner).items():
            inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if name.startswith("_") or name in seen or not _doc(inner):
                continue
            if inspect.isfunction(inner) or isinstance(inner, property):
                seen.add(name)
                yield name, "method" if inspect.isfunction(inner) else "property", inner


def _doc(thing: Any) -> str:
    held = thing.fget if isinstance(thing, property) else thing
    return inspect.cleandoc(held.__doc__ or "") if held is not None else ""


def _returned(value: property) -> str:
    found = getattr(value.fget, "__annotations__", {}).get("return")
    return f": {_plain(found)}" if found else ""


def _signature(head: str, thing: Any) -> str:
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return head
    shown = [_plain(p) for p in found.parameters.values() if p.name not in ("self", "cls")]
    kinds = {p.kind for p in found.parameters.values()}
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        at = [p.kind for p in found.parameters.values() if p.name not in ("self", "cls")]
        shown.insert(at.index(inspect.Parameter.KEYWORD_ONLY), "*")
    end = f" -> {_plain(found.return_annotation)}" if found.return_annotation is not found.empty else ""
    end = "" if inspect.isclass(thing) else end
    line = f"{head}({', '.join(shown)}){end}"
    return line if len(line) <= WIDTH else f"{head}(\n" + "".join(f"    {one},\n" for one in shown) + f"){end}"


def _plain(value: Any) -> str:
    """An annotation or a parameter without the quotes and module names that Python shows it with."""
    text = value if isinstance(value, str) else inspect.formatannotation(value) if isinstance(value, type) else str(value)
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)
    return re.sub(r"<factory>|<.*? object at 0x[0-9a-f]+>", "...", text).replace("'", '"')
