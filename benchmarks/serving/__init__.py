"""Side-by-side benchmarks of this engine and of what one would pick instead, on one workload definition.

Each system runs in a process and an environment of its own and speaks JSON lines (`protocol`). What runs in a peer's
environment (`workload`, `stats`, `drive`, `protocol`, `run_*`) uses the standard library and that peer alone.
`python -m benchmarks.serving` runs everything; README.md in `benchmarks/` says how.
"""
