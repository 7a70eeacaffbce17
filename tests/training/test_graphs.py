"""Recorded steps and several sites at once. What needs a GPU says so; the logic around it is tested without one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from factories import quick, random_parcel, small_spec, striped_site, train_site, training
from flyby.data.site import Part, Site
from flyby.data.views import STANDARD
from flyby.engines import inline
from flyby.engines.inline import GAIN, MOST, ROUNDS, Crew
from flyby.meeting import tuning
from flyby.meeting.stack import Stack
from flyby.meeting.tuning import Problem, tune
from flyby.models import ModelSpec
from flyby.objectives import OBJECTIVES
from flyby.rng import generator
from flyby.training.graphs import Captured, one_shape, set_learning_rate
from flyby.training.loop import at_once
from flyby.training.settings import TrainSettings
from flyby.training.steps import WORTH_COMPILING, expecting, fully_compiled

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs, and there is no GPU here")


# How many sites at once


def judged(crew: Crew, rate: float, room: bool = True) -> None:
    for _ in range(ROUNDS):
        crew.note(int(1000 * rate), 1000.0, full=True, room=room)


def test_a_crew_grows_while_it_pays_and_then_stays_at_its_best() -> None:
    crew = Crew()
    for size, rate in ((1, 10.0), (2, 19.0), (4, 30.0), (8, 31.0)):
        assert crew.size == size
        judged(crew, rate)
    assert (crew.size, crew.settled) == (4, True), "eight did not do a tenth more than four"
    judged(crew, 1000.0)
    assert crew.size == 4


def test_a_crew_of_one_stays_alone_where_two_are_no_faster() -> None:
    crew = Crew()
    judged(crew, 10.0)
    judged(crew, GAIN * 10.0)
    assert (crew.size, crew.settled) == (1, True), "exactly the asked gain is not more than it"


def test_a_crew_never_outgrows_its_limit_or_the_memory() -> None:
    crew = Crew()
    rate = 1.0
    while not crew.settled:
        judged(crew, rate)
        rate *= 2
    assert crew.size == MOST
    alone = Crew()
    judged(alone, 1.0, room=False)
    assert (alone.size, alone.settled) == (1, True)


def test_rounds_with_new_sites_are_not_measured() -> None:
    crew = Crew()
    for _ in range(10):
        crew.note(1000, 1.0, full=False)
    assert (crew.size, crew.rounds) == (1, 0)


class NoStream:
    made = 0

    def __init__(self, *_: Any) -> None:
        NoStream.made += not _

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def test_sites_take_turns_and_an_error_closes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of the engine without a GPU: every site does all its epochs, more are let in over time, and nobody is
    left open at an error."""
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", NoStream)
    monkeypatch.setattr(inline, "_room", lambda going: True)
    monkeypatch.setattr(NoStream, "made", 0)
    monkeypatch.setattr(inline, "MOST", 4)
    open_now: set[int] = set()
    most = 0

    def performing(job: int, on_epoch: Callable[[Any], None]) -> Generator[int, None, float]:
        nonlocal most
        open_now.add(job)
        try:
            for epoch in range(8):
                if (job, epoch) == (97, 3):
                    raise ValueError("no")
                most = max(most, len(open_now))
                yield 10
                on_epoch((job, epoch))
            return 0.0
        finally:
            open_now.discard(job)

    monkeypatch.setattr(inline, "performing", performing)
    seen: list[Any] = []
    inline.run_side_by_side(list(range(12)), seen.append)  # type: ignore[arg-type]
    assert sorted(seen) == [(job, epoch) for job in range(12) for epoch in range(8)]
    assert most > 1
    assert NoStream.made <= 4, "a stream is used again by the next site"
    with pytest.raises(ValueError, match="no"):
        inline.run_side_by_side([95, 96, 97, 98], seen.append)  # type: ignore[arg-type, list-item]
    assert not open_now


# Training in pauses


def a_site(name: str = "a", samples: int = 96, size: int = 8, device: str = "cpu") -> Site:
    rng = generator("graphs", name)
    images = torch.randint(0, 256, (samples, size, size, 3), dtype=torch.uint8, generator=rng)
    part = Part(images, torch.randint(0, 10, (samples,), generator=rng)).to(device)
    empty = Part(part.images[:0], part.labels[:0])
    return Site(name, part, empty, empty, tuple("0123456789"))


def words(device: str = "cpu", objective: str = "supervised", **train: Any) -> tuple[Any, ...]:
    kind = OBJECTIVES[objective]
    chosen = kind.settings_type(calibrate=False)
    spec = kind.adapt_spec(ModelSpec(name="cnn-small", classes=10, size=(8, 8), width=0.25), chosen)
    settings = TrainSettings(**{"epochs": 4, "batch": 32, **train})
    return spec, kind(chosen), settings, kind.views((8, 8), True) if objective != "supervised" else STANDARD, 0


def test_training_pauses_once_an_epoch_and_others_in_between_change_nothing() -> None:
    whole = {name: train_site(a_site(name), *words()) for name in "ab"}
    going = {name: training(a_site(name), *words()) for name in "ab"}
    done: dict[str, Any] = {}
    pauses = []
    while going:
        for name, work in list(going.items()):
            try:
                pauses.append(next(work))
            except StopIteration as end:
                done[name] = end.value
                del going[name]
    assert pauses == [96] * 8
    for name in "ab":
        assert done[name].parcel.digest == whole[name].parcel.digest


def test_at_once_gives_what_the_work_returns_and_keeps_its_name() -> None:
    def work(n: int) -> Generator[int, None, str]:
        """Counts."""
        yield from range(n)
        return f"{n} done"

    assert at_once(work)(3) == "3 done"
    assert at_once(work).__doc__ == "Counts."


@pytest.mark.parametrize(
    ("compile_as", "name", "views", "device", "expected"),
    [
        ("auto", "resnet18", WORTH_COMPILING, "cuda", True),
        ("auto", "resnet18", WORTH_COMPILING - 1, "cuda", False),
        ("auto", "cnn-small", 1e12, "cuda", False),
        ("full", "cnn-small", 1, "cuda", True),
        ("graph", "resnet18", 1e12, "cuda", False),
        ("off", "resnet18", 1e12, "cuda", False),
        ("full", "resnet18", 1e12, "cpu", False),
    ],
)
def test_what_is_compiled(compile_as: Any, name: str, views: float, device: str, expected: bool) -> None:
    spec = ModelSpec(name=name, classes=10, size=(32, 32))
    assert fully_compiled(TrainSettings(compile=compile_as), spec, torch.device(device), views) is expected


def test_larger_images_are_worth_compiling_sooner() -> None:
    spec = ModelSpec(name="resnet18", classes=10, size=(64, 64))
    assert fully_compiled(TrainSettings(), spec, torch.device("cuda"), WORTH_COMPILING / 4)


def test_sites_that_share_their_batches_are_worth_compiling_together() -> None:
    spec, cuda = ModelSpec(name="resnet18", classes=10, size=(32, 32)), torch.device("cuda")
    with expecting({512: WORTH_COMPILING, 64: 10}):
        assert fully_compiled(TrainSettings(), spec, cuda, 1000, 512)
        assert not fully_compiled(TrainSettings(), spec, cuda, 1000, 64), "a compiled network takes batches of one size"
        assert fully_compiled(TrainSettings(), spec, cuda, WORTH_COMPILING, 64)
    assert not fully_compiled(TrainSettings(), spec, cuda, 1000, 512)


def test_a_learning_rate_is_set_where_it_lies() -> None:
    place = torch.tensor(0.1)
    group: dict[str, Any] = {"lr": place}
    set_learning_rate(group, 0.5)
    assert group["lr"] is place
    assert float(place) == 0.5
    set_learning_rate(plain := {"lr": 0.1}, 0.5)
    assert plain == {"lr": 0.5}


def test_the_search_for_kernels_ends_with_its_block() -> None:
    before = torch.backends.cudnn.benchmark
    inside = None

    @one_shape()
    def broken() -> None:
        nonlocal inside
        inside = torch.backends.cudnn.benchmark
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        broken()
    assert inside is True
    assert torch.backends.cudnn.benchmark is before


# Neighbours


class Direct:
    """Stands for a recording where there is no GPU: it calls the function."""

    def __init__(self, rngs: Any = ()) -> None:
        self.calls = 0

    def __call__(self, function: Callable[..., None], *inputs: Tensor) -> None:
        self.calls += 1
        function(*inputs)


def test_models_that_stopped_may_be_carried_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded step keeps stopped models until half have stopped; what each model becomes is the same."""
    spec, site = small_spec("mlp", width=0.1), striped_site("a")
    settings = quick(lr=0.3, patience=2, weight_decay=0.0)
    states = [random_parcel("a", spec, seed).weights for seed in range(5)]
    apart = tune(Stack.of(spec, states, "cpu", "loop"), Problem(), site, settings, 12, (3,))
    sizes: list[int] = []
    real = tuning.Stepper.__init__

    def stepper(self: tuning.Stepper, stack: Stack, problem: Problem, settings: Any) -> None:
        real(self, stack, problem, settings)
        self.captured, self.captured_look = Direct(), Direct()  # type: ignore[assignment]
        sizes.append(len(stack))

    monkeypatch.setattr(tuning.Stepper, "__init__", stepper)
    carried = tune(Stack.of(spec, states, "cpu", "loop"), Problem(), site, settings, 12, (3,))
    assert len(set(apart.epochs)) > 1, "this test needs models that stop at different times"
    assert (carried.epochs, carried.best_epochs) == (apart.epochs, apart.best_epochs)
    assert carried.val_losses == pytest.approx(apart.val_losses, rel=1e-5)
    for name, tensor in apart.stack.parameters.items():
        torch.testing.assert_close(carried.stack.parameters[name], tensor)
    assert all(2 * small <= large for large, small in pairwise(sizes))
    assert [row["models"] for row in carried.history] == [row["models"] for row in apart.history]


# On a GPU


@gpu
@pytest.mark.parametrize("objective", ["supervised", "salt", "aurora", "etf"])
def test_a_recorded_step_is_the_step(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.backends.cudnn, "allow_tf32", False
    )  # its ten bits differ by the kernel that the search picks
    runs = {
        how: train_site(a_site(device="cuda"), *words("cuda", objective, compile=how, precision="fp32"), device="cuda")
        for how in ("off", "graph")
    }
    for a, b in zip(runs["off"].rows, runs["graph"].rows, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)


@gpu
def test_what_waits_for_the_device_goes_on_unrecorded() -> None:
    class Waits(OBJECTIVES["supervised"]):  # type: ignore[misc, valid-type]
        def after_step(self, model: Any, terms: Any, progress: Tensor) -> None:
            terms.total.item()

    spec, objective, settings, views, seed = words("cuda")
    waited = train_site(a_site(device="cuda"), spec, Waits(objective.settings), settings, views, seed, device="cuda")
    recorded = train_site(a_site(device="cuda"), spec, objective, settings, views, seed, device="cuda")
    assert waited.rows[-1]["loss"] == pytest.approx(recorded.rows[-1]["loss"], rel=1e-2)


@gpu
def test_other_shapes_are_recorded_anew() -> None:
    captured, total = Captured(), torch.zeros((), device="cuda")

    def add(x: Tensor) -> None:
        total.add_(x.sum())

    for length in (3, 3, 3, 3, 3, 5, 5, 5, 5, 5):
        captured(add, torch.ones(length, device="cuda"))
    assert float(total) == 40
    assert captured.graph is not None
