"""This machine: its device, its memory, its threads, and the versions that run on it."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from flyby import __version__
from flyby.errors import BadInput, unknown

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of glibc's mallopt


def pick_device(name: str = "auto") -> str:
    """``cuda`` where there is one, else ``cpu``."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BadInput("there is no CUDA device here; use --device cpu")
    if not (name == "cpu" or name.startswith("cuda")):
        raise unknown("device", name, ("auto", "cpu", "cuda"))
    return name


def halves_well() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX), and is allowed to."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA") or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False  # told to do as an older one
    able = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in able)


def one_thread() -> None:
    """One thread per site on a CPU: sums are then taken in one order, so that every engine gives the same bytes."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    keep_memory()


def keep_memory(kept: bool = True) -> None:
    """What one step frees stays here for the next. By itself glibc gives large blocks back at once, and has the system
    find and clear new pages for each layer of each step: up to half the time of a wide one. Under another C library
    nothing changes."""
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return
    libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
    libc.mallopt(M_MMAP_MAX, 0 if kept else 65536)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1 if kept else 64 << 20)
    if not kept:
        libc.malloc_trim(0)


@contextmanager
def as_a_site(device: str) -> Iterator[None]:
    """In here a CPU computes as it does for a site that trains."""
    if device != "cpu":
        yield
        return
    threads = torch.get_num_threads()
    one_thread()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        keep_memory(False)


def versions() -> dict[str, str]:
    return {
        "flyby": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def hardware(device: str) -> str:
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name()} ({os.cpu_count()} CPU cores)"
    return f"{os.cpu_count()} CPU cores ({platform.machine()})"


def peak_memory_mb() -> float:
    """The largest resident size of this process, or of a child that has ended."""
    both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(who).ru_maxrss for who in both) / 1024
