"""Engine ``inline``: one site after another, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flyby.engines.jobs import Job, one_thread, perform
from flyby.training import Row


def run_inline(jobs: Sequence[Job], on_epoch: Callable[[Row], None]) -> None:
    threads = torch.get_num_threads()
    if jobs and jobs[0].device == "cpu":
        one_thread()
    try:
        for job in jobs:
            perform(job, on_epoch)
    finally:
        torch.set_num_threads(threads)
