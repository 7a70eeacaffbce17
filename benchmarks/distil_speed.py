"""Where the time of data-free distillation goes: milliseconds and TFLOP/s of each part of a server epoch.

    python benchmarks/distil_speed.py --device cuda --model resnet18 --clients 5 --batch 256 --compile
    python benchmarks/distil_speed.py --device cpu --width 0.25 --batch 32 --steps 2 --clients 3

The same parts for the teachers as they came (``plain``), with BatchNorm folded away and their weights in bfloat16
(``frozen``), and compiled (``compiled``, with --compile; a GPU only). Each part runs in all forms, one after the other,
and that some rounds long; a figure is the median over rounds, a ratio the median of the rounds' ratios to ``plain``.
"recorded" says whether a GPU replays the step as one graph; where it does not, the reason is there, and the step is
bound by launches. At the end what the published budgets would take with these figures. Weights are random: time does
not depend on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flyby.fusion.base import FUSIONS
from flyby.fusion.distilled.coboosting import Scales
from flyby.fusion.distilled.dense import Dense, DenseSettings
from flyby.fusion.distilled.distill import Distillation, Learner, Lesson
from flyby.fusion.distilled.frozen import frozen
from flyby.fusion.distilled.synthesis import Pool, Synthesis, as_unit
from flyby.fusion.distilled.teachers import Teachers
from flyby.machine import hardware, pick_device
from flyby.models import ModelSpec
from flyby.models.cost import cost_of
from flyby.models.generator import Generator
from flyby.parcels import parcel
from flyby.parcels.inbox import Inbox
from flyby.rng import generator
from flyby.training.graphs import Captured, one_shape
from flyby.training.settings import Compile
from flyby.training.steps import halved

EPOCHS, STEPS, SYNTHESIS = 200, 20_100, 30  # server epochs, student steps, generator steps an epoch, as published
MANY = 1e12  # views, so that compiling pays


@dataclass
class Part:
    """One kind of step: ``run`` takes so many of them; ``flop`` are those of one."""

    name: str
    flop: float
    run: Callable[[int], None]
    captured: Captured | None = None
    rounds: list[float] = field(default_factory=list)  # seconds of a step

    def recorded(self) -> str:
        if self.captured is None:
            return "-"
        return self.captured.refused or ("yes" if self.captured.graph is not None else "not yet")


def parts(form: str, asked: argparse.Namespace, inbox: Inbox, device: torch.device) -> Iterator[Part]:
    """Every part with its own teachers and students in one form."""
    spec, n, clients = inbox.manifests[0].spec, asked.batch, len(inbox)
    flop = 2.0 * cost_of(spec).multiply_adds * n
    how: Compile = "full" if form == "compiled" else "graph"
    teachers = Teachers(inbox, device, "all", n, compile=how)
    plain = list(teachers.networks())
    teachers._frozen = [] if form == "plain" else [frozen(net, device, halved("auto", device)) for net in plain]
    if form == "compiled":
        teachers.quicken(MANY, {n})
    images = torch.randint(0, 256, (4 * n, *spec.size, spec.channels), generator=generator("images"), dtype=torch.uint8)
    labels = torch.randint(0, spec.classes, (4 * n,), generator=generator("labels"))
    said = torch.randn((clients, 4 * n, spec.classes), generator=generator("said"))
    pool = Pool(spec, clients, device)
    pool.add(images.to(device), labels.to(device), said.to(device))
    x, w = as_unit(pool.images[:n]), pool.weights

    def repeated(step: Callable[[], object], captured: Captured | None) -> Callable[[int], None]:
        def once() -> None:
            step()

        def run(count: int) -> None:
            with one_shape():
                for _ in range(count):
                    once() if captured is None else captured(once)

        return run

    def towards(_: Tensor, said: Tensor) -> Tensor:
        return teachers.answer(w, said).square().mean()

    for name, times, step in (
        ("teachers answer", 1.0, lambda: teachers.say(x)),
        ("teachers pull", 2.0, lambda: teachers.pull(x, towards)),
    ):
        captured = teachers.recorder()
        yield Part(name, times * clients * flop, repeated(step, captured), captured)

    for name, called, words, times in (
        ("student step alone", "dense", {"augment": False}, 3.0),
        ("dense: student step", "dense", {}, 3.0 + clients),
        ("coboosting: student step", "coboosting", {}, 3.0 + 3 * clients),
        ("intactofl: gate step", "intactofl", {}, 3.0 * clients),
    ):
        lesson = taught(called, words | {"batch": n, "compile": how}, inbox, teachers, w)
        yield Part(name, times * flop, over(lesson, pool, n), lesson.captured)

    maker = Generator.build(spec.size, spec.channels, 256, 64, generator("maker"))
    with FlopCounterMode(display=False) as counted:
        maker(torch.zeros(2, 256))
    made = 3 * counted.get_total_flops() / 2 * n
    for name, bn in (("synthesis step", 0.0), ("synthesis step with L_BN", 1.0)):
        rule = Dense(DenseSettings(images=n, steps=1, bn=bn))
        learner = rule.learner(inbox, 0).to(device).eval()
        work = Synthesis(teachers, spec.classes, rule._objective(pool, teachers, learner), rule.settings, True)
        work.make("first")
        yield Part(name, (2 * clients + 2) * flop + made, repeated(work._step, work.captured), work.captured)
    scales = Scales(teachers, w.clone())
    yield Part("coboosting: weights' step", 0.0, lambda c: moved(scales, pool, n, c), scales.captured)


def taught(rule: str, words: dict[str, object], inbox: Inbox, teachers: Teachers, weights: Tensor) -> Lesson:
    kind = FUSIONS[rule]
    made = kind(kind.settings_type.model_validate(words))
    assert isinstance(made, Distillation)
    learner: Learner = made.learner(inbox, 0).to(teachers.device).train()
    learner.quicken(made.settings.compile, MANY, made.settings.batch)
    return Lesson(made, learner, made._optimizer(learner), weights, teachers)


def over(lesson: Lesson, pool: Pool, n: int) -> Callable[[int], None]:
    rows = torch.arange(n, device=pool.images.device)
    return lambda count: void(lesson.over(pool, (rows for _ in range(count)), 0))


def moved(scales: Scales, pool: Pool, n: int, count: int) -> None:
    for _ in range(count):
        scales.move(pool.said[:n], pool.labels[:n])


def void(_: object) -> None:
    return None


def seconds(part: Part, steps: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    part.run(steps)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--device", default="auto")
    words.add_argument("--model", default="resnet18")
    words.add_argument("--width", type=float, default=1.0)
    words.add_argument("--size", type=int, default=32)
    words.add_argument("--clients", type=int, default=5)
    words.add_argument("--batch", type=int, default=256)
    words.add_argument("--steps", type=int, default=20, help="in a round")
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--only", default="", help="parts whose name holds this")
    words.add_argument("--compile", action="store_true", help="the compiled form too (a minute or two more)")
    words.add_argument("--json", action="store_true", help="one line of JSON for each part and form, as they come")
    asked = words.parse_args()
    device = torch.device(pick_device(asked.device))
    if device.type == "cpu":
        torch.set_num_threads(1)
    inbox = uploads(ModelSpec(name=asked.model, classes=10, size=(asked.size, asked.size), width=asked.width), asked)
    forms = ["plain", "frozen", *(["compiled"] if asked.compile and device.type == "cuda" else [])]
    where = f"{hardware(str(device))}, torch {torch.__version__}"
    print(f"{asked.model}, {asked.clients} teachers, batch {asked.batch}; {where}")
    print("| part | form | ms a step | TFLOP/s | of plain | recorded |\n|---|---|---:|---:|---:|---|", flush=True)
    found: dict[tuple[str, str], float] = {}
    for group in zip(*(parts(form, asked, inbox, device) for form in forms), strict=True):
        if asked.only not in group[0].name:
            continue
        for part in group:
            part.run(5)  # kernels are chosen, graphs recorded
        for _ in range(asked.rounds):
            for part in group:
                part.rounds.append(seconds(part, asked.steps, device))
        for form, part in zip(forms, group, strict=True):
            took = statistics.median(part.rounds)
            ratio = statistics.median(a / b for a, b in zip(part.rounds, group[0].rounds, strict=True))
            found[part.name, form] = took
            speed = part.flop / took / 1e12
            print(
                f"| {part.name} | {form} | {1e3 * took:.2f} | {speed:.3g} | {ratio:.2f} | {part.recorded()} |",
                flush=True,
            )
            if asked.json:
                facts = {"part": part.name, "form": form, "ms": 1e3 * took, "tflops": speed, "ratio": ratio}
                print(json.dumps(facts | {"recorded": part.recorded()}), flush=True)
    budgets(found, forms, asked.batch)


def budgets(found: dict[tuple[str, str], float], forms: list[str], batch: int) -> None:
    """What the published budgets would take: steps of learner and generator, and nothing else. Co-Boosting's batch is
    128, so ask for --batch 128 to see its figure."""
    for form in forms:
        make = found.get(("synthesis step", form))
        for rule, step in (
            ("dense:bn=0", "dense: student step"),
            ("coboosting", "coboosting: student step"),
            ("intactofl:bn=0", "intactofl: gate step"),
        ):
            if make is None or (step, form) not in found:
                continue
            more = found.get(("coboosting: weights' step", form), 0.0) if rule == "coboosting" else 0.0
            total = STEPS * (found[step, form] + more) + EPOCHS * SYNTHESIS * make
            what = f"{STEPS:,} steps and {EPOCHS * SYNTHESIS:,} of synthesis in batches of {batch}"
            print(f"{rule}, {form}: {what}: {total:.0f} s")


def uploads(spec: ModelSpec, asked: argparse.Namespace) -> Inbox:
    return Inbox(
        [
            parcel.make(
                sender=f"site-{k}",
                method="supervised",
                spec=spec,
                class_names=tuple("0123456789"),
                weights=spec.build(generator("teacher", k)).state_dict(),
                samples=10,
                provenance={"views": {"crop": "pad", "flip": 0.5}},
            )
            for k in range(asked.clients)
        ]
    )


if __name__ == "__main__":
    main()
