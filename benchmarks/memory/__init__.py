"""The memory experiments of the PagedAttention paper (Kwon et al., SOSP 2023) on this project's scheduler.

Real: the scheduler, the block manager, the prefix cache, the beam search. Modelled: the time of a step (`cost`), the
lengths of requests (`workload`), which continuations a beam search finds likely (`beams`), and the baselines' memory
(`reservation`). No tensors, no torch. `paged-backend bench memory` runs everything.
"""
