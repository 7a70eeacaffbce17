"""Adapting received models to the node's own data: fine-tune (eq. 4), prune (eq. 5), post-fine-tune (eq. 6).

Candidates of one architecture are adapted together, several models in one step, or one by one with ``together: false``:
the numbers are the same. While they post-tune, pruned channels are silenced by masks instead of cut, so that neighbours
of different widths stay in one stack; a silenced channel gives 0 through its BatchNorm too and gets no gradient, which
is what training the smaller network does. They are cut at the end.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from flyby.data.site import Site
from flyby.meeting.admit import part_logits
from flyby.meeting.candidate import Candidate, by_spec
from flyby.meeting.measure import flops, latency_ms
from flyby.meeting.prune import Gated, Masked, folded, keep_masks, masks_to_size, prunable, removed, share_in_time
from flyby.meeting.settings import OrientSettings
from flyby.meeting.stack import Stack
from flyby.meeting.tuning import Budget, Problem, Tuned, tune

Key = tuple[object, ...]


@dataclass(frozen=True)
class Desk:
    """Where candidates are adapted: the node's data, its settings, where chance comes from, and until when (a moment of
    ``time.perf_counter``)."""

    site: Site
    settings: OrientSettings
    key: Key
    until: float = math.inf

    def tune(self, stack: Stack, problem: Problem, stage: Literal["finetune", "prune", "post"]) -> Tuned:
        budget = Budget(self.settings.stage_epochs(stage), until=self.until)
        return tune(stack, problem, self.site, self.settings, budget, (*self.key, stage), stage)

    def stacks(self, candidates: Sequence[Candidate]) -> Iterator[tuple[list[Candidate], Stack]]:
        """Candidates of one spec with their stack, at most ``settings.stack`` at a time (one, if not together). When
        the time is over no further one comes."""
        settings = self.settings
        most = (settings.stack or len(candidates) or 1) if settings.together else 1
        for same in by_spec(candidates):
            for part in ([c for c in same if c.stays is not None], [c for c in same if c.stays is None]):
                for first in range(0, len(part), most):
                    group = part[first : first + most]
                    if time.perf_counter() > self.until:
                        return
                    states = [c.state for c in group]
                    yield group, Stack.of(group[0].spec, states, self.site.train.images.device, settings.backend)


def finetune(candidates: Sequence[Candidate], desk: Desk) -> None:
    """Eq. 4: each candidate on the node's own training data."""
    for group, stack in desk.stacks(candidates):
        tuned = desk.tune(stack, Problem(), "finetune")
        _take_over(group, tuned, tuned.stack, "finetune")


def prune(candidates: Sequence[Candidate], own: Candidate, desk: Desk) -> None:
    """Eq. 5: learn gates, multiply them into the weights, and mark the channels that go."""
    settings = desk.settings
    for group, stack in desk.stacks([c for c in candidates if prunable(c.spec)]):
        problem = Gated(stack.spec, len(stack), own.spec, own.state, settings, stack.device)
        tuned = desk.tune(stack, problem, "prune")
        whole = folded(tuned.stack, tuned.extra)
        if settings.prune_to is not None or settings.prune_to_ms is not None:
            masks = masks_to_size(whole, settings.prune_to or share_in_time(whole, settings.prune_to_ms, desk.site))
        else:
            masks = keep_masks(whole, settings.threshold or 0.0)
        whole = folded(whole, masks)
        for m, candidate in enumerate(group):
            candidate.stays = {name: mask[m] for name, mask in masks.items()}
        _take_over(group, tuned, whole, "prune")


def posttune(candidates: Sequence[Candidate], desk: Desk) -> None:
    """Eq. 6: what was lost by pruning is won back, with the marked channels silent."""
    for group, stack in desk.stacks(candidates):
        pruned = group[0].stays is not None
        masks = {
            name: torch.stack([c.stays[name] for c in group if c.stays is not None]) for name in group[0].stays or {}
        }
        problem = Masked(stack.spec, masks) if pruned else Problem()
        tuned = desk.tune(stack, problem, "post")
        _take_over(group, tuned, folded(tuned.stack, masks) if pruned else tuned.stack, "post")


def shrink(candidates: Sequence[Candidate], site: Site, settings: OrientSettings) -> None:
    """Cut the marked channels; note parameters, operations and time before and after."""
    images = site.train.images[: min(64, len(site.train))]
    for candidate in candidates:
        before = candidate.spec
        facts = {"parameters": before.parameter_count(), "flops": flops(before)}
        candidate.facts |= {f"{name}_before": value for name, value in facts.items()}
        if candidate.stays is not None and any(bool((mask < 0.5).any()) for mask in candidate.stays.values()):
            whole = candidate.network()
            smaller = removed(whole, candidate.stays)
            if settings.diagnostics:
                candidate.facts |= {
                    "latency_ms_before": latency_ms(whole, images),
                    "latency_ms_after": latency_ms(smaller, images),
                }
            candidate.become({n: t.detach() for n, t in smaller.state_dict().items()}, smaller.spec)
        candidate.facts |= {"parameters_after": candidate.spec.parameter_count(), "flops_after": flops(candidate.spec)}
        candidate.stays = None


def accuracy_by_size(
    candidates: Sequence[Candidate], own: Candidate, desk: Desk, shares: Sequence[float]
) -> list[dict[str, float]]:
    """What pruning costs, one line a share of parameters: copies of the (fine-tuned) candidates are pruned to it, tuned
    again, cut, and judged on the validation images; means over the candidates."""
    rows = []
    for share in shares:
        copies = [replace(c, logits={}, facts={}) for c in candidates if prunable(c.spec)]
        if not copies:
            break
        there = replace(desk, settings=desk.settings.model_copy(update={"prune_to": share}))
        prune(copies, own, there)
        posttune(copies, there)
        shrink(copies, desk.site, desk.settings)
        part_logits(copies, desk.site, "val", desk.settings)
        labels = desk.site.val.labels
        rows.append(
            {
                "share": share,
                "parameters": statistics.fmean(c.spec.parameter_count() for c in copies),
                "flops": statistics.fmean(flops(c.spec) for c in copies),
                "accuracy": statistics.fmean(
                    float((c.logits["val"].argmax(1) == labels).float().mean()) for c in copies
                ),
                "log_loss": statistics.fmean(float(F.cross_entropy(c.logits["val"], labels)) for c in copies),
            }
        )
    return rows


def _take_over(group: Sequence[Candidate], tuned: Tuned, stack: Stack, stage: str) -> None:
    for m, (candidate, state) in enumerate(zip(group, stack.states(), strict=True)):
        candidate.become(state)
        candidate.facts |= {f"{stage}_epochs": tuned.epochs[m], f"{stage}_best": tuned.best_epochs[m]}
