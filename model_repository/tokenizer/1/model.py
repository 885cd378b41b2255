"""The tokenizer of the ensemble; all of it lives in the installed package."""

from paged_backend.triton_adapter.text_models import TokenizerModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
