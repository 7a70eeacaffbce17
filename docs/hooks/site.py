"""What mkdocs cannot do by itself: pages made from the code, and links from docs/ into the rest of the repository.

A page of docs/ is read on the site and in the repository. Its links are written for the repository
(``../results/x.md``); here they are led to copies that the site holds: of Markdown a page, of other files the file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import method_pages
import reference_pages
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files, InclusionLevel

log = get_plugin_logger("flyby")
ROOT = Path(__file__).parents[2]
PROJECT = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/RESULTS.md")
ALONE = ("index.md", "tutorial.md", "faq.md")  # pages without others beside them in the navigation
LINK = re.compile(r"(\]\()([^()\s]+)(\))")
FENCE = re.compile(r"(^ *```.*?^ *```$)", flags=re.S | re.M)
CODE = re.compile(r"(`[^`\n]+`)")
GAP = re.compile(r"^((?![-*|#>\s]|\d+\.).+)\n(?=(?:[-*]|\d+\.) )", flags=re.M)
_made: dict[str, str] = {}  # site address -> Markdown
_origin: dict[str, str] = {}  # site address -> place in the repository


def on_config(config: Any) -> Any:
    """Every method, rule and part of the reference has its line in the navigation."""
    _made.clear()
    _origin.clear()
    _made.update(method_pages.pages(ROOT) | reference_pages.pages() | {"results/index.md": _results()})
    for title, entries in ((title, value) for item in config.nav for title, value in item.items()):
        if title == "Methods":
            entries.append({"Each method": [a for a in _made if a.startswith("methods/")]})
            entries.append({"Other server rules": [a for a in _made if a.startswith("rules/")]})
        if title == "Reference":
            entries[:0] = [address for address in _made if address.startswith("reference/")]
        if title == "Project":
            tables = [{path.stem: f"results/{path.name}"} for path in sorted((ROOT / "results").glob("*.md"))]
            entries.append({"Results": ["results/index.md", *tables]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """All pages that are made, all that stand in the repository, and whatever else a page links to."""
    for address, text in _made.items():
        files.append(File.generated(config, address, content=text))
    wanted = [*PROJECT, *(f"results/{path.name}" for path in sorted((ROOT / "results").glob("*.md")))]
    wanted += [place for page in (ROOT / "docs").glob("*.md") for place in _linked(page)]
    wanted += [place for name in PROJECT for place in _linked(ROOT / name)]
    for place in dict.fromkeys(wanted):
        address = _address(place)
        _origin[address] = place
        level = InclusionLevel.NOT_IN_NAV if place.startswith("results/") else InclusionLevel.INCLUDED
        if files.get_file_from_path(address) is None:
            files.append(File.generated(config, address, abs_src_path=str(ROOT / place), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them; a blank line before a list, which GitHub does not ask for."""
    here = page.file.src_uri
    if here in ALONE:
        page.meta["hide"] = ["navigation"]
    if here.startswith("results/"):
        page.meta["search"] = {"exclude": True}  # rows of numbers: their studies are found by the pages about them
    if here in _made:
        return markdown
    base = _origin.get(here, f"docs/{here}")

    def led(found: re.Match[str]) -> str:
        path, mark, anchor = found[2].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return found[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(base), path))
        return f"{found[1]}{posixpath.relpath(_address(place), posixpath.dirname(here) or '.')}{mark}{anchor}{found[3]}"

    text = _outside_code(markdown, lambda part: LINK.sub(led, part))
    text = "".join(part if FENCE.fullmatch(part) else GAP.sub(r"\1\n\n", part) for part in FENCE.split(text))
    return _named(text) if here == "methods.md" else text


def _named(text: str) -> str:
    """The names in the table of methods lead to their pages."""

    def link(found: re.Match[str]) -> str:
        address = method_pages.rule_page(found[1])
        return f"[`{found[1]}`]({address})" if address in _made else found[0]

    rows = (re.sub(r"`([^`]+)`", link, row) for row in re.findall(r"^\| `[^|]*\|", text, flags=re.M))
    for before, after in zip(re.findall(r"^\| `[^|]*\|", text, flags=re.M), list(rows), strict=True):
        text = text.replace(before, after, 1)
    return text


def _linked(page: Path) -> list[str]:
    """The files of the repository outside docs/ that a page links to."""
    found: list[str] = []

    def note(part: str) -> str:
        for _, target, _ in LINK.findall(part):
            path = target.partition("#")[0]
            if path and not re.match(r"[a-z]+:", path):
                place = Path(posixpath.normpath(posixpath.join(page.parent.relative_to(ROOT).as_posix(), path)))
                if place.parts[0] not in ("docs", "..") and (ROOT / place).is_file():
                    found.append(place.as_posix())
        return part

    _outside_code(page.read_text(), note)
    return found


def _outside_code(text: str, change: Any) -> str:
    """``change`` on all that is not a block of code or code in a sentence."""
    parts = FENCE.split(text)
    return "".join(
        part if FENCE.fullmatch(part) else "".join(p if CODE.fullmatch(p) else change(p) for p in CODE.split(part))
        for part in parts
    )


def _address(place: str) -> str:
    """Where the site has a file of the repository. A README.md would be taken for a folder's index."""
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    if (ROOT / place).is_dir():
        return f"{place}/index.md"
    return "readme.md" if place == "README.md" else place


def _results() -> str:
    lines = ["# Results", "", "Tables of `flyby study`, as they stand in the repository with all their rows.", ""]
    for path in sorted((ROOT / "results").glob("*.md")):
        title = next((line[2:] for line in path.read_text().splitlines() if line.startswith("# ")), path.stem)
        lines.append(f"- [{path.stem}]({path.name}): {title}")
    return "\n".join(lines)
