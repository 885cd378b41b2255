"""The contracts of `paged_kernels.ops`: what each operation takes, promises and refuses, one file per family."""
