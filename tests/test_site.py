"""The documentation as a site: every page is in its navigation, no link is dead (in the repository and on the site),
methods and names have pages made from the code, and nothing on it is fetched from elsewhere."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import flyby
from flyby.fusion import FUSIONS
from flyby.runs.methods import METHODS

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "RESULTS.md"]
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", flags=re.S | re.M)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text).strip())


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.S | re.M)
    return {slug(title) for title in re.findall(r"^#+ (.*)$", text, flags=re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_link_is_dead_in_the_repository(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^()\s]+)\)", CODE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / path) if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert not dead


def test_the_navigation_lists_every_page_once() -> None:
    def listed(item: object) -> list[str]:
        inside = list(item.values()) if isinstance(item, dict) else item if isinstance(item, list) else []
        return [item] if isinstance(item, str) else [one for part in inside for one in listed(part)]

    found = listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert len(found) == len(set(found))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(found)


# -- the site as it is built


class Reader(HTMLParser):
    """What a page links to, what it loads, and where in it a link can lead."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        loaded = found.get("src") or (found.get("href") if tag == "link" else None)
        if loaded and tag != "a":
            self.loads.append(loaded)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built without one warning."""
    pytest.importorskip("material", reason="needs the extra docs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    place = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(place), strict=True)
        logging.getLogger("mkdocs").setLevel(logging.WARNING)
        build(config)  # strict: a warning ends it
    return place.resolve()


@pytest.fixture(scope="module")
def site(place: Path) -> dict[str, Reader]:
    """Every page of the site by its address, but for the one that is shown where there is none."""
    found = {path.relative_to(place).as_posix(): Reader(path) for path in sorted(place.rglob("*.html"))}
    return {address: page for address, page in found.items() if address != "404.html"}


def test_no_link_of_the_site_is_dead(place: Path, site: dict[str, Reader]) -> None:
    dead = []
    for address, page in site.items():
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            file = (place / address).parent / unquote(parts.path) if parts.path else place / address
            if not file.resolve().is_file():
                dead.append(f"{address}: {link}")
            elif parts.fragment and file.suffix == ".html":
                target = site[file.resolve().relative_to(place).as_posix()]
                if unquote(parts.fragment) not in target.ids:
                    dead.append(f"{address}: {link}")
    assert not dead


def test_a_reader_needs_no_network(place: Path, site: dict[str, Reader]) -> None:
    elsewhere = {load for page in site.values() for load in page.loads if urlsplit(load).scheme}
    assert {load for load in elsewhere if not load.startswith("data:")} == set()
    styles = "\n".join(path.read_text() for path in place.rglob("*.css"))
    assert not re.search(r"(?:url\(|@import)\s*['\"]?https?:", styles)


def test_every_method_rule_and_name_has_its_page(place: Path, site: dict[str, Reader]) -> None:
    for name in METHODS.built_in:
        assert "how-it-works" in site[f"methods/{name}.html"].ids, name
    assert all(f"methods/{name}.html" in site or f"rules/{name}.html" in site for name in FUSIONS.built_in)
    told = {one for address, page in site.items() if address.startswith("reference/") for one in page.ids}
    assert {name.lower() for name in flyby.__all__ if name != "__version__"} <= told
    text = (place / "methods" / "aurora.html").read_text()
    for part in (
        "objective.lambda_max",
        "learning rate of the two uncertainties",
        "95.91",
        "L_align",
        "rules/iffi.html",
    ):
        assert part in text, part


# -- the hooks


def hook(name: str) -> ModuleType:
    folder = ROOT / "docs" / "hooks"
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        spec.loader.exec_module(module)
    return module


def test_a_docstring_becomes_markdown() -> None:
    text = """First <M, A> and ``a < b``.

        x = <y>

    See :class:`Site`:
    >>> 1 + 1
    2
    """
    assert hook("docstrings").markdown(text) == (
        "First &lt;M, A> and ``a < b``.\n\n    x = <y>\n\nSee `Site`:\n\n```pycon\n>>> 1 + 1\n2\n```"
    )


def test_a_signature_is_shown_as_one_writes_it() -> None:
    def thing(a: str, *rest: int, b: float | None = None, **words: object) -> list[str]:
        """Nothing."""

    shown = hook("reference_pages")._signature("f", thing)
    assert shown == "f(a: str, *rest: int, b: float | None = None, **words: object) -> list[str]"
