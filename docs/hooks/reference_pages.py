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
    asked = [one for one in found.parameters.values() if one.name not in ("self", "cls")]
    shown = [_parameter(one) for one in asked]
    kinds = [one.kind for one in asked]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    told = found.return_annotation is not found.empty and not inspect.isclass(thing)
    end = f" -> {_plain(found.return_annotation)}" if told else ""
    line = f"{head}({', '.join(shown)}){end}"
    return line if len(line) <= WIDTH else f"{head}(\n" + "".join(f"    {one},\n" for one in shown) + f"){end}"


def _parameter(one: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = "" if one.annotation is one.empty else f": {_plain(one.annotation)}"
    default = "" if one.default is one.empty else f"{' = ' if kind else '='}{_value(one.default)}"
    return f"{stars}{one.name}{kind}{default}"


def _plain(annotation: Any) -> str:
    """An annotation without the names of modules."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])", "", text)


def _value(value: Any) -> str:
    """A default as one would write it; what has no such form is three dots."""
    text = repr(value)
    return "..." if text.startswith("<") or " object at 0x" in text or len(text) > 60 else text.replace("'", '"')
