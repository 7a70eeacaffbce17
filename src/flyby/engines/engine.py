"""Where work runs: the sites of a run, the server's rule, the cells of a study. Every engine gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from flyby.data.settings import DataSettings
from flyby.engines.cluster import kept
from flyby.engines.inline import run_inline
from flyby.engines.jobs import Job
from flyby.engines.processes import run_processes, spread
from flyby.engines.ray import each_ray, fuse_ray, run_ray
from flyby.errors import BadInput, unknown
from flyby.fusion.base import Fusion, Server
from flyby.fusion.predictor import Predictor
from flyby.parcels.inbox import Inbox
from flyby.training.loop import Row


def fuse_here(fusion: Fusion, inbox: Inbox, server: Server) -> Predictor:
    """The server rule in this process."""
    return fusion.fuse(inbox, server)


def each_here(
    function: Callable[[Any], Any], items: Iterable[Any], data: Callable[[Any], DataSettings]
) -> Iterator[tuple[Any, Any]]:
    """Items one after another, in this process; each is taken only when the one before it is done."""
    for item in items:
        yield item, function(item)


def spread_here(function: Callable[[Any], Any], items: Sequence[Any], device: str) -> Iterator[tuple[Any, Any]]:
    """Pieces of one run, one after another."""
    return ((item, function(item)) for item in items)


@dataclass(frozen=True)
class Engine:
    """Called with jobs, it trains them. ``fuse`` applies a server rule, ``each`` gives ``(item, function(item))`` for
    independent items (``data`` says which images an item works on), ``spread`` the same for pieces of one run that can
    be pickled, ``kept`` is for ``held``, and ``needs`` names a package that is an extra."""

    train: Callable[[Sequence[Job], Callable[[Row], None]], None]
    fuse: Callable[[Fusion, Inbox, Server], Predictor] = fuse_here
    each: Callable[[Callable[[Any], Any], Iterable[Any], Callable[[Any], DataSettings]], Iterator[tuple[Any, Any]]] = (
        each_here
    )
    spread: Callable[[Callable[[Any], Any], Sequence[Any], str], Iterator[tuple[Any, Any]]] = spread_here
    kept: Callable[[], AbstractContextManager[None]] = nullcontext
    needs: str | None = None

    def __call__(self, jobs: Sequence[Job], on_epoch: Callable[[Row], None]) -> None:
        self.train(jobs, on_epoch)


ENGINES = {
    "inline": Engine(run_inline),
    "processes": Engine(run_processes, spread=spread),
    "ray": Engine(run_ray, fuse_ray, each_ray, kept=kept, needs="ray"),
}


def engine_named(name: str) -> Engine:
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    needs = ENGINES[name].needs
    if needs and find_spec(needs) is None:
        raise BadInput(
            f"--engine {name} needs {needs}, which is not installed; pip install 'flyby[{needs}]', or use --engine"
            " processes"
        )
    return ENGINES[name]


def held(name: str | None) -> AbstractContextManager[None]:
    """Inside this block what the named engine has to start (a Ray cluster) is started at most once, and ended with the
    block."""
    return engine_named(name).kept() if name else nullcontext()
