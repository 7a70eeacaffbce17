"""Optimisers that say nothing to torch's compiler: torch's own numbers, and a process that never imports it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from factories import WAIT
from flyby.models import ModelSpec
from flyby.models.memory import allocate
from flyby.models.optimisers import LBFGS, SGD, Adam, AdamW, eagerly

KINDS: list[tuple[Any, Any, dict[str, Any]]] = [
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "fused": True}),
    (Adam, torch.optim.Adam, {"lr": 0.01, "fused": True}),
    (AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    (LBFGS, torch.optim.LBFGS, {"max_iter": 3}),
]


def stepped(kind: Any, settings: dict[str, Any], steps: int, state: dict[str, Any] | None = None) -> tuple[Any, ...]:
    """The parameters and the optimiser after some steps of a small regression."""
    rng = torch.Generator().manual_seed(0)
    weight, bias = (nn.Parameter(torch.randn(shape, generator=rng)) for shape in ((3, 4), (3,)))
    x, y = torch.randn(8, 4, generator=rng), torch.randn(8, 3, generator=rng)
    optimiser = kind([weight, bias], **settings)
    if state is not None:
        optimiser.load_state_dict(state)

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = (x @ weight.T + bias - y).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(steps):
        optimiser.step(closure)
    assert torch.is_grad_enabled()
    assert not weight.is_leaf or weight.grad is not None
    return weight.detach(), bias.detach(), optimiser


@pytest.mark.parametrize(("ours", "theirs", "settings"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_number_is_torch_s_own(ours: Any, theirs: Any, settings: dict[str, Any]) -> None:
    left, right = stepped(ours, settings, 3), stepped(theirs, settings, 3)
    assert torch.equal(left[0], right[0])
    assert torch.equal(left[1], right[1])
    assert left[2].state_dict()["param_groups"] == right[2].state_dict()["param_groups"]
    # What one of them remembers, the other goes on with.
    left, right = stepped(ours, settings, 2, right[2].state_dict()), stepped(theirs, settings, 2, left[2].state_dict())
    assert torch.equal(left[0], right[0])
    assert not torch.equal(left[0], stepped(theirs, settings, 2)[0]), "what it remembered counts"


def test_memory_keeps_names_shapes_and_strides() -> None:
    spec = ModelSpec(name="cnn-small", classes=3, channels=1, size=(8, 8))
    bare = spec.skeleton().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wanted = {name: (t.shape, t.stride(), t.dtype) for name, t in bare.state_dict().items()}
    assert any(stride != torch.empty(shape).stride() for shape, stride, _ in wanted.values())
    made = allocate(bare, "cpu")
    assert {name: (t.shape, t.stride(), t.dtype) for name, t in made.state_dict().items()} == wanted
    assert {t.device.type for t in made.state_dict().values()} == {"cpu"}


def test_a_training_imports_no_compiler() -> None:
    """The compiler and the algebra under it are two seconds of a process; every optimiser would bring them."""
    code = """
import sys, torch, flyby
from flyby.meeting.ensemble import fit_weights
images, labels = torch.zeros(40, 8, 8, 1, dtype=torch.uint8).numpy(), torch.arange(40).numpy() % 2
sites = flyby.load(images, labels, class_names=["a", "b"]).split(clients=1, name="iid", val=0.2)
for kind in ("sgd", "adam", "adamw", "muon"):
    made = flyby.train(sites[0], "fedavg", model="mlp", epochs=1, settings={"train.optimizer": kind})
flyby.fuse([made]).predict(images)
fit_weights(torch.randn(2, 6, 3), torch.arange(6) % 3)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, check=False)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stdout + ended.stderr


def test_where_the_compiler_is_there_it_is_told_to_stand_aside() -> None:
    import torch._dynamo

    calls: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(inputs)
        return graph.forward

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    model = Doubled()
    model.compile(backend=backend, dynamic=False)
    with eagerly():
        model(torch.zeros(1, 2))
    assert calls == []
    model(torch.zeros(1, 3))
    assert len(calls) == 1
