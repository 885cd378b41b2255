"""paged-backend: large language models in NVIDIA Triton Inference Server, with a paged KV cache.

`LLM` and `SamplingParams` are the offline interface. They are imported on first use, so that the parts that need no
torch (the launcher, the tokenizer models) do not pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_backend.llm import LLM
    from paged_backend.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from paged_backend.llm import LLM

        return LLM
    if name == "SamplingParams":
        from paged_backend.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
