"""The engine model; all of it lives in the installed package."""

from paged_backend.triton_adapter.backend import LLMModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
