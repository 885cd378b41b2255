"""What the CPU kernels share: compilation options, thread count, the lock, flat views of tensors.

Knows numba and torch tensors; knows nothing of attention.
"""

import threading

import numba
import numpy as np
import torch

COMPILE_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}

PARALLEL_LOCK = threading.Lock()
"""Held while a parallel kernel runs. Numba's fallback thread layer (workqueue) aborts the process when two
threads enter it at once; the kernels use every core anyway, so queueing callers costs nothing."""


def use_threads() -> int:
    """Set numba's thread count for the calling thread to torch's; returns it."""
    count = max(1, min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    numba.set_num_threads(count)
    return count


def flat(tensor: torch.Tensor) -> np.ndarray:
    """The memory a strided tensor spans, as a flat numpy array: float32, or uint16 for bfloat16.

    Element [i, j, ...] of the tensor is at i * stride(0) + j * stride(1) + ... of the result. Shares memory.
    """
    if tensor.numel() == 0:
        span = 0
    else:
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    view = tensor.detach().as_strided((span,), (1,))
    if tensor.dtype == torch.bfloat16:
        return view.view(torch.int16).numpy().view(np.uint16)
    return view.numpy()
