"""What people install: a wheel that works in an empty folder, and a source archive that can test itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

from factories import WAIT
from flyby import __version__

ROOT = Path(__file__).parents[1]
FOLDERS = (".ci", "benchmarks", "docs", "examples", "results", "src", "tests")
FILES = ("Makefile", "constraints.txt", "pyproject.toml", "LICENSE", "README.md", "CITATION.cff", "MANIFEST.in")
FILES += ("mkdocs.yml",)
LITTER = ("__pycache__", "*.egg-info", "build")


def execute(*words: object, cwd: Path, **env: str) -> str:
    """What a command prints; it sees nothing of how these tests were started."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("COV", "PYTEST", "PYTHON"))}
    ended = subprocess.run(
        list(map(str, words)), cwd=cwd, env=kept | env, capture_output=True, text=True, timeout=WAIT, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive; made from a copy, for a build leaves things lying about."""
    place = tmp_path_factory.mktemp("sdist")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, place / "tree" / name, ignore=shutil.ignore_patterns(*LITTER))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, place / "tree")
    code = "from setuptools import build_meta; print(build_meta.build_sdist('..'))"
    return place / execute(sys.executable, "-c", code, cwd=place / "tree").split()[-1]


@pytest.fixture(scope="module")
def unpacked(archive: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(archive.parent, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive, without a network."""
    place = tmp_path_factory.mktemp("wheel")
    copy = shutil.copytree(unpacked, place / "tree")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    execute(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", place, copy, cwd=place)
    (made,) = place.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh virtual environment with the wheel; other packages are those of the tests."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(home, symlinks=True)
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check")
    execute(sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", *offline, wheel, cwd=home)
    here, there = (Path(sysconfig.get_path("purelib", vars=base)) for base in ({}, {"base": str(home)}))
    (there / "borrowed.pth").write_text(f"{here}\n")  # their own .pth files are not read, so no editable flyby comes in
    return home / "bin"


def test_the_archive_holds_all_that_its_tests_read(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        held = {Path(*Path(name).parts[1:]) for name in tar.getnames()}
    tree = archive.parent / "tree"
    wanted = {path.relative_to(tree) for name in FOLDERS for path in (tree / name).rglob("*") if path.is_file()}
    wanted = {path for path in wanted if not any(part.endswith(".egg-info") for part in path.parts)}
    assert wanted | set(map(Path, FILES)) <= held


def test_the_archive_can_test_itself(unpacked: Path) -> None:
    words = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_files.py")
    assert " passed" in execute(*words, cwd=unpacked, PYTHONPATH=str(unpacked / "src"))


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
        facts = Parser().parsestr(held.read(f"flyby-{__version__}.dist-info/METADATA").decode())
    assert facts["Version"] == __version__
    assert (facts["License-Expression"], facts["License-File"]) == ("Apache-2.0", "LICENSE")
    assert {name.split("/")[0] for name in names} == {"flyby", f"flyby-{__version__}.dist-info"}
    assert {"flyby/py.typed", "flyby/study/published.yaml", "flyby/study/grids/aurora-digits.yaml"} <= set(names)


def test_what_is_imported_is_declared() -> None:
    """Of the scientific stack, where one package brings another and a missing line goes unnoticed."""
    imports = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    declared = (ROOT / "pyproject.toml").read_text()
    for module, package in (("numpy", "numpy"), ("scipy", "scipy"), ("sklearn", "scikit-learn"), ("PIL", "pillow")):
        assert re.search(rf"^\s*(import|from) {module}\b", imports, flags=re.M), f"{package} is not used any more"
        assert f'"{package}>=' in declared


def test_the_first_command_of_the_readme(installed: Path, tmp_path: Path) -> None:
    """``make demo`` as the Makefile has it, but for the number of epochs."""
    assert re.search(r"^make demo$", (ROOT / "README.md").read_text(), flags=re.M)
    line = re.search(r"\$\(BIN\)/flyby (run .*)", (ROOT / "Makefile").read_text())
    assert line is not None
    words = re.sub(r"--epochs \d+", "--epochs 1", line[1]).replace("$(DEMO)", "demo").split()
    where = execute(installed / "python", "-c", "import flyby; print(flyby.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    answer = execute(installed / "flyby", *words, cwd=tmp_path)
    assert [row.split()[0] for row in answer.splitlines()] == [
        *words[words.index("--method") + 1].split(","),
        "report:",
    ]
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000


def test_studies_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    flyby = installed / "flyby"
    assert "aurora-digits " in execute(flyby, "study", "--list", cwd=tmp_path)
    (tmp_path / "one.yaml").write_text("title: One\nmethods: [fedavg]\nclients: [2]\nepochs: 1\nmodel: mlp\n")
    answer = execute(flyby, "study", "one.yaml", "--engine", "inline", cwd=tmp_path)
    assert answer == "1 cell, all done now; table written to results/one.md\n"
    for name in ("aurora-digits", "rules-cifar10"):  # its rows give the repository's tables, published figures too
        shutil.copy(ROOT / "results" / f"{name}.jsonl", tmp_path / "results")
        execute(flyby, "study", name, "--render", cwd=tmp_path)
        table = f"results/{name}.md"
        assert (tmp_path / table).read_text() == (ROOT / table).read_text()


def test_how_to_cite_it() -> None:
    card = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license"} <= set(card)
