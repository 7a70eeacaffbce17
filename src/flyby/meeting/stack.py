"""Several networks of one architecture as one: their tensors stacked as ``[M, ...]``, one forward pass for all.

A GPU that takes one small batch at a time mostly waits for the next kernel to be launched; M models in one step cost
nearly the launches of one. Each model sees the same batches and its own gradient only, so the numbers are those of
training one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from flyby.meeting.settings import Backend
from flyby.models import ModelSpec

Tensors = dict[str, Tensor]
STREAMS = 8


class Stack:
    """M networks of one spec. ``parameters`` and ``buffers`` map names to stacked tensors; parameters are leaves that
    want gradients."""

    def __init__(self, spec: ModelSpec, parameters: Tensors, buffers: Tensors, backend: Backend = "auto") -> None:
        self.spec, self.parameters, self.buffers = spec, parameters, buffers
        self.template = spec.skeleton()
        self.backend = pick_backend(backend, self.template)

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        states: Sequence[Mapping[str, Tensor]],
        device: torch.device | str,
        backend: Backend = "auto",
    ) -> Stack:
        """The stack of some state dicts, copied to a device."""
        skeleton = spec.skeleton()
        stacked = {name: torch.stack([state[name] for state in states]).to(device) for name in skeleton.state_dict()}
        parameters = {name: stacked[name].requires_grad_() for name, _ in skeleton.named_parameters()}
        return cls(spec, parameters, {name: stacked[name] for name, _ in skeleton.named_buffers()}, backend)

    def __len__(self) -> int:
        return len(next(iter(self.parameters.values())))

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def logits(self, x: Tensor, parameters: Tensors | None = None, *, training: bool = False) -> Tensor:
        """``[M, B, classes]`` on one batch; in training, BatchNorm uses the batch and updates each model's own
        buffers."""
        self.template.train(training)
        tensors = self.parameters if parameters is None else parameters
        if len(self) == 1 or self.backend == "loop":
            return self._loop(x, tensors)
        with _ConvolutionAsProduct() if self.backend == "matmul" else _Nothing():
            out: Tensor = vmap(self._one, in_dims=(0, 0, None))(tensors, self.buffers, x)
        return out

    def _one(self, parameters: Tensors, buffers: Tensors, x: Tensor) -> Tensor:
        out: Tensor = functional_call(self.template, {**parameters, **buffers}, (x,))
        return out

    def _loop(self, x: Tensor, tensors: Tensors) -> Tensor:
        """One model after another; on a GPU on several streams, which pays once the step is a graph."""
        # unbind, not indexing: the gradient of one is a single stack, that of M indexed rows is M tensors of the whole
        # stack's size.
        apart = [{n: t.unbind() for n, t in every.items()} for every in (tensors, self.buffers)]
        rows = [tuple({n: t[m] for n, t in every.items()} for every in apart) for m in range(len(self))]
        if len(self) == 1 or not x.is_cuda:
            return torch.stack([self._one(p, b, x) for p, b in rows])
        here, streams = torch.cuda.current_stream(), _streams(x.device)[: len(self)]
        outputs: list[Tensor] = []
        for m, (p, b) in enumerate(rows):
            stream = streams[m % len(streams)]
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                outputs.append(self._one(p, b, x))
        for stream in streams:
            here.wait_stream(stream)
        return torch.stack(outputs)

    def take(self, rows: Tensor) -> Stack:
        """The stack of some of its models, copied."""
        parameters = {n: t.detach()[rows].requires_grad_(t.requires_grad) for n, t in self.parameters.items()}
        return Stack(self.spec, parameters, {n: t[rows] for n, t in self.buffers.items()}, self.backend)

    def tensors(self) -> Tensors:
        """Parameters and buffers by name, without gradients; not copied."""
        return {n: t.detach() for n, t in {**self.parameters, **self.buffers}.items()}

    def states(self) -> list[Tensors]:
        """One state dict a model, in the order of the network's own, copied."""
        stacked = self.tensors()
        return [{name: stacked[name][m].clone() for name in self.template.state_dict()} for m in range(len(self))]


@functools.cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Always the same ones: the allocator keeps memory apart for every stream it ever saw."""
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def full(x: Tensor) -> Tensor:
    """At least float32: losses are never taken in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def pick_backend(backend: Backend, network: nn.Module) -> Backend:
    """``auto``: one batched product for all where a network is made of matrices only; where it has convolutions one
    after another, whose grouped form is slow everywhere: on a GPU side by side on several streams, in one graph."""
    if backend != "auto":
        return backend
    return "loop" if any(isinstance(m, nn.Conv2d) for m in network.modules()) else "vmap"


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class _ConvolutionAsProduct(TorchFunctionMode):
    """Dense convolutions as unfold and matrix product, which vmap turns into one batched product instead of a grouped
    convolution."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.conv2d or args[6] != 1:
            return func(*args, **(kwargs or {}))
        x, weight, bias, stride, padding, dilation, _ = args
        out, _, tall, wide = weight.shape
        height = (x.shape[2] + 2 * padding[0] - dilation[0] * (tall - 1) - 1) // stride[0] + 1
        columns = F.unfold(x, (tall, wide), dilation=dilation, padding=padding, stride=stride)
        y = (weight.reshape(out, -1) @ columns).reshape(x.shape[0], out, height, -1)
        return y if bias is None else y + bias[:, None, None]
