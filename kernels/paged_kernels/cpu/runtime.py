"""How the CPU kernels are compiled and run.

A kernel is a native function `int64 (arguments *, counter *, items)`, compiled by numba's `cfunc` from a closure over
its sizes. Its arguments are one record of addresses, strides and counts. Every thread calls it; it takes work items
from the shared counter until all `items` are taken, and returns how many it did.

A `Program` is a series of such calls that all threads run through together, without returning to Python between them.
What separates one kernel from the next is that all its items are done, not that all threads have come by: a thread that
the system keeps away holds nobody up unless it has an item in hand. The threads are torch's own OpenMP team, found
through the library torch is linked with, so that torch's and our threads do not compete for the cores. Knows nothing of
attention or models.
"""

import ctypes
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numba
import numpy as np
import torch
from numba import carray, types

from paged_kernels.cpu.primitives import BUILD_TAG, add_done, call_kernel, pointer, read_done, relax, yield_core

_LOCK = threading.Lock()
"""Held while kernels run: they use every core anyway, so queueing callers costs nothing."""

UNBOUNDED = 1 << 60
"""Length given to arrays made from bare addresses, since kernels compute their own bounds; window of those without."""

_LINE = 8  # int64 per cache line
_SPINS = 2000  # looks at a counter before the core is offered to others


def _with_disk_cache(decorator, function):
    """decorator(function, cache=True), without the cache where numba finds no directory it can write to."""
    try:
        return decorator(function, cache=True)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return decorator(function, cache=False)


class Arguments:
    """The argument record of a kernel: named 64-bit addresses and integers, then 32-bit floats.

    Packing one takes microseconds, which matters at every layer of every step: numpy's structured arrays need ten times
    as long. Programs, which change some fields of many records at once, use `records`.
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

    def records(self, count: int, **values) -> np.ndarray:
        """`count` records as a structured array, with `values` in all of them."""
        made = np.zeros(count, dtype=self.dtype)
        self.fill(made, **values)
        return made

    def fill(self, records: np.ndarray, **values) -> None:
        """Set fields of all `records`; addresses are given as tensors or arrays, which the caller keeps alive."""
        for name, value in values.items():
            records[name] = address_of(value) if name in self.addresses else value


def address_of(memory: torch.Tensor | np.ndarray) -> int:
    """Where a tensor's or an array's first element is."""
    if isinstance(memory, torch.Tensor):
        return memory.data_ptr()
    return memory.__array_interface__["data"][0]


def compile_kernel(function, arguments: Arguments):
    """Compile `function(arguments *, counter *, items)`; the machine code is kept in numba's disk cache."""
    record = types.CPointer(numba.from_dtype(arguments.dtype))
    signature = types.int64(record, types.CPointer(types.int64), types.int64)
    return _with_disk_cache(lambda f, cache: numba.cfunc(signature, nopython=True, cache=cache)(f), function)


def element_type(dtype: torch.dtype) -> type:
    """How kernels see a tensor's elements: float32, or the 16 bits of a bfloat16."""
    return np.uint16 if dtype == torch.bfloat16 else np.float32


def thread_count() -> int:
    """Threads that a program may use: torch's setting, as far as there are cores for them to wait on each other."""
    return max(1, min(torch.get_num_threads(), _cores()))


_PROGRAM = Arguments("table counters", "count")
_TAG = zlib.crc32(Path(__file__).read_bytes(), BUILD_TAG)


def _runner():
    """The function that every thread runs."""
    tag, line, spins = _TAG, _LINE, _SPINS

    def run(program):
        _ = tag
        args = carray(program, 1)[0]
        table = carray(pointer(args.table), 3 * args.count, np.int64)
        done = carray(pointer(args.counters), 2 * line * args.count, np.int64)
        for index in range(args.count):
            items = table[3 * index + 2]
            if items == 0:
                continue
            counter = args.counters + index * 2 * line * 8
            taken = call_kernel(table[3 * index], table[3 * index + 1], counter, items)
            where = index * 2 * line + line
            if taken:
                add_done(done, where, taken)
            looks = 0
            while read_done(done, where) < items:
                looks += 1
                if looks % spins == 0:
                    yield_core()
                else:
                    relax()

    signature = types.void(types.CPointer(numba.from_dtype(_PROGRAM.dtype)))
    return _with_disk_cache(lambda f, cache: numba.cfunc(signature, nopython=True, cache=cache)(f), run)


# Compiled when this module is imported, which is before the first request.
_RUN = _runner()


@cache
def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _openmp():
    """`GOMP_parallel` of the OpenMP library that torch uses (GNU's, or one compatible with it); None without one."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="paged-kernels")


class Program:
    """A series of kernel calls.

    Args:
        calls: a compiled kernel and the address of its argument record each, which the caller keeps alive.

    Attributes:
        items: int64 [calls], work items of each; a call with none is skipped. Set before `run`.
    """

    def __init__(self, calls: Sequence[tuple]) -> None:
        self._table = np.zeros((len(calls), 3), dtype=np.int64)
        for row, (kernel, record) in zip(self._table, calls, strict=True):
            row[:2] = kernel.address, record
        self.items = self._table[:, 2]
        # Two cache lines per call: items taken, and items done.
        self._counters = np.zeros((len(calls), 2 * _LINE), dtype=np.int64)
        self._record = _PROGRAM.pack(table=self._table, counters=self._counters, count=len(calls))
        self._address = ctypes.addressof(self._record)

    def run(self, threads: int) -> None:
        """Run all calls, on `threads` threads; returns when the last is done."""
        with _LOCK:
            self._counters.fill(0)
            if threads == 1:
                _RUN.ctypes(self._address)
            elif parallel := _openmp():
                parallel(_RUN.address, self._address, threads, 0)
            else:
                others = [_pool().submit(_RUN.ctypes, self._address) for _ in range(threads - 1)]
                _RUN.ctypes(self._address)
                for other in others:
                    other.result()


def launch(kernel, record: ctypes.Array, items: int, threads: int) -> None:
    """Run one kernel; returns when all its items are done."""
    program = Program([(kernel, ctypes.addressof(record))])
    program.items[0] = items
    program.run(threads)
