"""How the CPU kernels are compiled and run.

A kernel is a native function `void (arguments *)`, compiled by numba's `cfunc` from a closure over its sizes.
Its arguments are one record of addresses, strides and counts; `launch` runs it on one thread, or on all of
them at once, where each takes work items from a shared counter until none is left. So one numba parallel loop,
compiled once, serves every kernel: compiling the kernels themselves as parallel loops took three times as long,
and the shared counter balances ragged batches. Knows nothing of attention.
"""

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
"""Length given to arrays made from bare addresses; kernels compute their own bounds."""


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


_fan_out = _with_disk_cache(lambda f, cache: njit(parallel=True, nogil=True, cache=cache)(f), _fan_out)


def record_type(addresses: str, integers: str = "", floats: str = "") -> np.dtype:
    """The argument record of a kernel, from space-separated field names."""
    names = [(name, np.int64) for name in (addresses + " " + integers).split()]
    return np.dtype(names + [(name, np.float32) for name in floats.split()], align=True)


def compile_kernel(function, arguments: np.dtype):
    """Compile `function(pointer to an arguments record)`; the machine code is kept in numba's disk cache."""
    signature = types.void(types.CPointer(numba.from_dtype(arguments)))
    return _with_disk_cache(lambda f, cache: numba.cfunc(signature, nopython=True, cache=cache)(f), function)


def element_type(dtype: torch.dtype) -> type:
    """How kernels see a tensor's elements: float32, or the 16 bits of a bfloat16."""
    return np.uint16 if dtype == torch.bfloat16 else np.float32


def fill(arguments: np.dtype, **values) -> np.ndarray:
    """An argument record; tensors and arrays are passed by address (the caller keeps them alive)."""
    record = np.zeros(1, dtype=arguments)
    row = record[0]
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            value = value.data_ptr()
        elif isinstance(value, np.ndarray):
            value = value.ctypes.data
        row[name] = value
    return record


def thread_count() -> int:
    """Threads a kernel may use: torch's setting, as far as numba has them."""
    return max(1, min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


def launch(kernel, record: np.ndarray, threads: int) -> None:
    """Run a compiled kernel on `threads` threads sharing one record; returns when all are done."""
    if threads == 1:
        kernel.ctypes(record.ctypes.data)
        return
    with _LOCK:
        numba.set_num_threads(threads)
        _fan_out(kernel.address, record.ctypes.data, threads)
