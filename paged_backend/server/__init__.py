"""The launcher behind `paged-backend serve`: finds a Triton Server, prepares its environment, runs it.

Knows processes, ports, files and the server's log; knows nothing about models, tensors or torch, and imports none of
them. `launcher.serve` is the entry point, called by `paged_backend.cli`.
"""
