"""Numba kernels with the contracts of `paged_kernels.ops`, for float32 and bfloat16 on CPUs.

`micro.py` holds the vector building blocks, `runtime.py` threads and views, the other files one kernel each.
Importing this package imports numba; `ops.py` does so only when the "cpu" backend is used.
"""
