"""Steps replayed as CUDA graphs: a small network's step is some hundred launches of kernels shorter than a launch, and
one replay does them all."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)
WARM_UP = 3
_one_at_a_time = (
    threading.Lock()
)  # two threads may train at once, but the allocator takes part in one capture at a time


@contextmanager
def one_shape() -> Iterator[None]:
    """In here cuDNN searches for the fastest kernels, once a shape. Training batches are all alike, so it pays there
    and only there: on the parts of many small sites, each of its own length, the search takes longer than all the
    training."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class Captured:
    """Calls a function of tensors that gives nothing back and changes tensors in place: the first calls as it is, which
    warms the allocator and lets cuDNN choose its kernels, later ones as one recorded graph. The function must not wait
    for the device, and must find all that it reads but its inputs in the same memory every time. ``rngs`` are the
    generators it draws from. A function that cannot be recorded goes on as it is; ``refused`` then says why."""

    def __init__(self, rngs: Iterable[torch.Generator] = ()) -> None:
        self.rngs = tuple(rngs)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.calls = 0
        self.refused = ""

    def __call__(self, function: Callable[..., None], *inputs: Tensor) -> None:
        if self.graph is not None and any(
            mine.shape != new.shape for mine, new in zip(self.inputs, inputs, strict=True)
        ):
            self.graph, self.calls = None, 0  # other shapes need another recording
        if self.graph is None and self.calls >= WARM_UP and not self.refused:
            self._record(function, inputs)
        if self.graph is None:
            self.calls += 1
            self._aside(function, inputs)
            return
        for mine, new in zip(self.inputs, inputs, strict=True):
            mine.copy_(new)
        self.graph.replay()

    def _aside(self, function: Callable[..., None], inputs: tuple[Tensor, ...]) -> None:
        """On the stream that will be recorded: autograd goes on using the stream on which it saw a parameter first."""
        here, aside = torch.cuda.current_stream(), _stream(torch.cuda.current_device())
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            function(*inputs)
        here.wait_stream(aside)

    def _record(self, function: Callable[..., None], inputs: tuple[Tensor, ...]) -> None:
        graph = torch.cuda.CUDAGraph()
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        for rng in self.rngs:
            graph.register_generator_state(rng)
        torch.cuda.synchronize()
        if torch.cuda.mem_get_info()[0] < torch.cuda.memory_reserved():
            torch.cuda.empty_cache()  # a recording takes fresh memory, and cannot ask for what lies unused

        def recording(*tensors: Tensor) -> None:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                function(*tensors)
            finally:
                graph.capture_end()

        try:
            with _one_at_a_time:
                self._aside(recording, self.inputs)
        except RuntimeError as error:
            self.refused = str(error).splitlines()[0]
            log.warning("a step cannot be recorded, so it runs kernel by kernel, far slower: %s", self.refused)
            _stream.cache_clear()  # what broke off on the old one is nobody's business
            for rng in (*self.rngs, torch.cuda.default_generators[torch.cuda.current_device()]):
                _released(rng)
        else:
            self.graph = graph


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """An optimiser's learning rate; where it is a tensor, in the memory from which a recorded step reads it."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """One for all recordings: the allocator keeps memory apart for every stream it ever saw."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _released(rng: torch.Generator) -> None:
    """A recording that broke off leaves its generators waiting for its end; a fresh state with the same seed and place
    goes on."""
    fresh = torch.Generator(device=rng.device).manual_seed(rng.initial_seed())
    fresh.set_offset(rng.get_offset())
    rng.graphsafe_set_state(fresh.graphsafe_get_state())
