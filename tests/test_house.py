"""Arrows point one way through one complete list of rooms, nothing unpickles or prints, nothing draws from a global
generator, no file name of a run stands outside its class, and the command line starts light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "flyby"
# The house: a room (a folder or a file of src/flyby) imports only from those before it, and from itself.
ROOMS = (
    *("__init__", "errors", "files", "rng", "names", "settings", "machine", "registry", "drawing"),
    *("data", "models", "parcels", "statistics", "objectives", "training", "fusion", "meeting", "contacts", "engines"),
    *("runs", "report", "bench", "study", "api", "deploy", "commands", "cli", "__main__"),
)
APART = {"deploy": {"study", "report", "bench", "api"}}  # it may not, although they come before it
LONGEST, MOST = 60, 8  # lines of a function, and its parameters; a command has as many as it has options


def sources() -> list[Path]:
    found = sorted(SRC.rglob("*.py"))
    assert len(found) > 30
    return found


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


every = pytest.mark.parametrize("path", sources(), ids=name_of)


def room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that they can be read"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def rooms_of(path: Path) -> set[str]:
    names = (name.split(".") for name in imported(ast.parse(path.read_text())))
    return {name[1] for name in names if name[0] == "flyby" and len(name) > 1} - {room(path), "__version__"}


def test_a_forbidden_import_would_be_seen() -> None:
    text = "import flyby.runs.pipeline\ndef f():\n    from flyby import rng\n    from flyby.data.site import Site\n"
    assert set(imported(ast.parse(text))) == {"flyby.runs.pipeline", "flyby.rng", "flyby.data.site.Site"}


def test_every_room_is_in_the_list_and_every_name_in_it_is_a_room() -> None:
    assert {room(path) for path in sources()} == set(ROOMS)


@every
def test_arrows_point_one_way(path: Path) -> None:
    before = set(ROOMS[: ROOMS.index(room(path))])
    assert rooms_of(path) <= before - APART.get(room(path), set())


def test_no_modules_import_each_other() -> None:
    """Not even lazily, or for types alone."""
    modules = {
        ".".join(("flyby", *p.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__"): p for p in sources()
    }
    uses: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set(imported(ast.parse(path.read_text())))
        found |= {one.rpartition(".")[0] for one in found}
        uses[name] = {one for one in found if one in modules and one not in (name, "flyby")}
    while free := [name for name, needs in uses.items() if not needs]:
        for name in free:
            del uses[name]
        for needs in uses.values():
            needs.difference_update(free)
    assert not uses, f"these are in cycles: {sorted(uses)}"


@every
def test_functions_can_be_read_in_one_sitting(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or room(path) == "commands":
            continue
        given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        assert (node.end_lineno or 0) - node.lineno < LONGEST, node.name
        assert len([name for name in given if name not in ("self", "cls")]) <= MOST, node.name


@every
def test_nothing_unpickles_and_nothing_draws_from_a_global_generator(path: Path) -> None:
    tree = ast.parse(path.read_text())
    tops = {name.split(".")[0] for name in imported(tree)}
    pickles = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    assert not tops & {*pickles, "random", "torchvision"}
    seeds = ("torch.manual_seed", "torch.seed", "np.random.seed", "numpy.random.seed")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("torch.load", "eval", "exec", *seeds)
            assert not any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords)
            if called in ("np.load", "numpy.load"):
                assert any(k.arg == "allow_pickle" for k in node.keywords), "say allow_pickle=False"


@every
def test_the_library_logs_and_only_commands_print(path: Path) -> None:
    if room(path) in ("commands", "cli", "deploy"):  # Flower's apps speak through what Flower shows of their output
        return
    calls = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
    assert not [call.lineno for call in calls if ast.unparse(call.func) == "print"]


FILES = ("result.json", "right.json", "metrics.jsonl", "report.html", "schedule.json", "split.json", "extra.json")


@every
def test_a_run_s_files_have_their_names_in_one_place(path: Path) -> None:
    if name_of(path) == "runs/folder.py":
        return
    texts = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant))
    assert not [text.lineno for text in texts if text.value in FILES]


def test_the_command_line_starts_without_heavy_modules() -> None:
    heavy = (
        "torch",
        "sklearn",
        "matplotlib",
        "pyarrow",
        "numpy",
        "scipy",
        "PIL",
        "cryptography",
        "ray",
        "flwr",
        "opacus",
        "sgp4",
    )
    code = f"import sys, flyby.cli; print([m for m in {heavy!r} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


def test_a_command_ends_without_looking_for_garbage() -> None:
    code = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 10_000)); import flyby.cli"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "True"
