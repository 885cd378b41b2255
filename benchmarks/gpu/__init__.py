"""The parts of `benchmarks/gpu_report.py`: one file per table, none of which knows how results are kept."""
