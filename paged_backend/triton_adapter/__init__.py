"""Between Triton Server's Python backend and the engine: tensors to requests, deltas to responses, lifecycle.

Importing this package imports no torch; the engine is imported when an engine model is initialized.
"""
