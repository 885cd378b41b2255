"""How the CPU kernels are compiled and run.

A kernel is a native function `void (arguments *)`, compiled by numba's `cfunc` from a closure over its sizes.
Its arguments are one record of addresses, strides and counts; `launch` runs it on one thread, or on all of
them at once, where each takes work items from a shared counter until none is left. So one numba parallel loop,
compiled once, serves every kernel: compiling the kernels themselves as parallel loops took three times as long,
and the shared counter balances ragged batches. Knows nothing of attention.
"""

import ctypes
import struct
import threading

import numba
import numpy as np
import torch
from numba import njit, prange, types

from paged_kernels.cpu.micro import call_kernel

_LOCK = threading.Lock()
"""Held while kernels run in parallel. Numba's fallback thread layer (workqueue) aborts the process when two
threads enter it at once; the kernels use every core anyway, so queueing callers costs nothing."""

UNBOUNDED = 1 << 60
"""Length given to arrays made from bare addresses, since kernels compute their own bounds; window of those without."""


def _with_disk_cache(decorator, function):
    """decorator(function, cache=True), without the cache where numba finds no directory it can write to."""
    try:
        return decorator(function, cache=True)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return decorator(function, cache=False)


def _fan_out(address, record, workers):
    for _worker in prange(workers):
        call_kernel(address, record)


# Compiled when this module is imported, which is before the first request.
_fan_out = _with_disk_cache(
    lambda f, cache: njit(types.void(*[types.int64] * 3), parallel=True, nogil=True, cache=cache)(f), _fan_out
)


class Arguments:
    """The argument record of a kernel: named 64-bit addresses and integers, then 32-bit floats.

    Packing one takes microseconds, which matters at every layer of every step: numpy's structured arrays
    need ten times as long.
    """

    def __init__(self, addresses: str, integers: str, floats: str = ""):
        self.addresses, self.numbers = addresses.split(), integers.split() + floats.split()
        wide = len(self.addresses) + len(integers.split())
        self._format = struct.Struct(f"={wide}q{len(floats.split())}f")
        names = self.addresses + self.numbers
        kinds = [np.int64] * wide + [np.float32] * (len(names) - wide)
        self.dtype = np.dtype(list(zip(names, kinds, strict=True)), align=True)

    def pack(self, **values) -> ctypes.Array:
        """The record in memory. Addresses are given as tensors or arrays, which the caller keeps alive."""
        pointers = [address_of(values[name]) for name in self.addresses]
        return ctypes.create_string_buffer(self._format.pack(*pointers, *[values[name] for name in self.numbers]))


def address_of(memory: torch.Tensor | np.ndarray) -> int:
    """Where a tensor's or an array's first element is."""
    if isinstance(memory, torch.Tensor):
        return memory.data_ptr()
    return memory.__array_interface__["data"][0]


def compile_kernel(function, arguments: Arguments):
    """Compile `function(pointer to an arguments record)`; the machine code is kept in numba's disk cache."""
    signature = types.void(types.CPointer(numba.from_dtype(arguments.dtype)))
    return _with_disk_cache(lambda f, cache: numba.cfunc(signature, nopython=True, cache=cache)(f), function)


def element_type(dtype: torch.dtype) -> type:
    """How kernels see a tensor's elements: float32, or the 16 bits of a bfloat16."""
    return np.uint16 if dtype == torch.bfloat16 else np.float32


def thread_count() -> int:
    """Threads a kernel may use: torch's setting, as far as numba has them."""
    return max(1, min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


def launch(kernel, record: ctypes.Array, threads: int) -> None:
    """Run a compiled kernel on `threads` threads sharing one record; returns when all are done."""
    address = ctypes.addressof(record)
    if threads == 1:
        kernel.ctypes(address)
        return
    with _LOCK:
        numba.set_num_threads(threads)
        _fan_out(kernel.address, address, threads)
