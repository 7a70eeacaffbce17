"""Adapting received models to the node's own data: fine-tune (eq. 4), prune (eq. 5), post-fine-tune (eq. 6).

Candidates of one architecture are adapted together, several models in one step, or one by one with ``together: false``:
the numbers are the same. While they post-tune, pruned channels are silenced by masks instead of cut, so that neighbours
of different widths stay in one stack; a silenced channel gives 0 through its BatchNorm too and gets no gradient, which
is what training the smaller network does. They are cut at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from flyby.data.site import Site
from flyby.meeting.candidate import Candidate, by_spec
from flyby.meeting.measure import flops, latency_ms
from flyby.meeting.prune import Gated, Masked, folded, keep_masks, removed
from flyby.meeting.settings import OrientSettings
from flyby.meeting.stack import Stack
from flyby.meeting.tuning import Problem, Tuned, tune

Key = tuple[object, ...]


def finetune(candidates: Sequence[Candidate], site: Site, settings: OrientSettings, key: Key) -> None:
    """Eq. 4: each candidate on the node's own training data."""
    for group, stack in stacks(candidates, site, settings):
        tuned = tune(
            stack, Problem(), site, settings, settings.stage_epochs("finetune"), (*key, "finetune"), "finetune"
        )
        _take_over(group, tuned, tuned.stack, "finetune")


def prune(candidates: Sequence[Candidate], own: Candidate, site: Site, settings: OrientSettings, key: Key) -> None:
    """Eq. 5: learn gates, multiply them into the weights, and mark the channels that go."""
    for group, stack in stacks([c for c in candidates if c.spec.head == "linear"], site, settings):
        problem = Gated(stack.spec, len(stack), own.spec, own.state, settings, stack.device)
        tuned = tune(stack, problem, site, settings, settings.stage_epochs("prune"), (*key, "prune"), "prune")
        whole = folded(tuned.stack, tuned.extra)
        masks = keep_masks(whole, settings.threshold)
        whole = folded(whole, masks)
        for m, candidate in enumerate(group):
            candidate.stays = {name: mask[m] for name, mask in masks.items()}
        _take_over(group, tuned, whole, "prune")


def posttune(candidates: Sequence[Candidate], site: Site, settings: OrientSettings, key: Key) -> None:
    """Eq. 6: what was lost by pruning is won back, with the marked channels silent."""
    for group, stack in stacks(candidates, site, settings):
        pruned = group[0].stays is not None
        masks = {
            name: torch.stack([c.stays[name] for c in group if c.stays is not None]) for name in group[0].stays or {}
        }
        problem = Masked(stack.spec, masks) if pruned else Problem()
        tuned = tune(stack, problem, site, settings, settings.stage_epochs("post"), (*key, "post"), "post")
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


def stacks(
    candidates: Sequence[Candidate], site: Site, settings: OrientSettings
) -> Iterator[tuple[list[Candidate], Stack]]:
    """Candidates of one spec with their stack, at most ``settings.stack`` at a time (one, if not together)."""
    most = (settings.stack or len(candidates) or 1) if settings.together else 1
    for same in by_spec(candidates):
        marked = [c for c in same if c.stays is not None]
        plain = [c for c in same if c.stays is None]
        for part in (marked, plain):
            for first in range(0, len(part), most):
                group = part[first : first + most]
                yield (
                    group,
                    Stack.of(group[0].spec, [c.state for c in group], site.train.images.device, settings.backend),
                )


def _take_over(group: Sequence[Candidate], tuned: Tuned, stack: Stack, stage: str) -> None:
    for m, (candidate, state) in enumerate(zip(group, stack.states(), strict=True)):
        candidate.become(state)
        candidate.facts |= {f"{stage}_epochs": tuned.epochs[m], f"{stage}_best": tuned.best_epochs[m]}
