"""Networks that stay on disk until they are asked for: an ensemble of a thousand is judged, saved and loaded with one
of them in memory.

A server rule gets one from ``Inbox.networks`` where the parcels together are larger than ``IN_MEMORY``;
``flyby.fusion.evaluation`` then has the members speak one after another over all images, which gives the same numbers
as all of them at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flyby.files import atomic_open
from flyby.models import ModelSpec, Network
from flyby.models.spec import Shapes

IN_MEMORY = 1_000_000_000  # bytes of networks that are held at once; more stay on the shelf
MAX_HEADER = 32 << 20
OBJECT = 4096  # bytes that a tensor of a network takes beside its numbers
_DTYPES = {
    torch.bool: "BOOL",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}


class Shelf:
    """``len`` networks, each read anew by ``read(place)`` every time it is asked for; nothing is kept."""

    def __init__(self, count: int, read: Callable[[int], Network]) -> None:
        self.count, self.read = count, read

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Network]:
        for place in range(self.count):
            yield self.read(place).eval()


def bytes_of(spec: ModelSpec) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in spec.shapes().values())


def shapes_of(specs: Sequence[ModelSpec]) -> Shapes:
    """The tensors of all networks, as a predictor names them."""
    return {f"networks.{k}.{name}": what for k, spec in enumerate(specs) for name, what in spec.shapes().items()}


def write_shelf(path: Path, specs: Sequence[ModelSpec], shelf: Shelf, own: Mapping[str, Tensor]) -> None:
    """The safetensors file that ``save(predictor.state_dict())`` would write, one network after another: sizes are
    known before any is read."""
    wanted = shapes_of(specs)
    wanted |= {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    header: dict[str, object] = {}
    places, end = {}, 0
    for name, (shape, dtype) in sorted(
        wanted.items(), key=lambda item: (-item[1][1].itemsize, item[0])
    ):  # aligned, as the format wants
        places[name], start = end, end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with atomic_open(path) as file:
        file.write(len(head).to_bytes(8, "little") + head)

        def put(name: str, tensor: Tensor) -> None:
            file.seek(8 + len(head) + places[name])
            file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

        for name, tensor in own.items():
            put(name, tensor)
        for k, network in enumerate(shelf):
            for name, tensor in network.state_dict().items():
                put(f"networks.{k}.{name}", tensor)


def outline(path: Path) -> Shapes:
    """Shape and dtype of every tensor of a safetensors file, as its header says; no more of it is read."""
    kinds = {name: dtype for dtype, name in _DTYPES.items()}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER, path.stat().st_size):
            raise ValueError(f"{path.name} claims a header of {length} bytes")
        table = dict(json.loads(file.read(length)))
    table.pop("__metadata__", None)
    return {name: (tuple(one["shape"]), kinds[one["dtype"]]) for name, one in table.items()}


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Some tensors of a safetensors file, in memory of their own: what becomes of the file then does not matter."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in names}


def read_shelf(path: Path, specs: Sequence[ModelSpec]) -> Shelf:
    """The networks of such a file, still on disk."""
    from safetensors import safe_open

    def read(place: int) -> Network:
        network = specs[place].skeleton()
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(f"networks.{place}.{name}") for name in network.state_dict()}
        network.load_state_dict(weights, strict=True, assign=True)
        return network

    return Shelf(len(specs), read)
