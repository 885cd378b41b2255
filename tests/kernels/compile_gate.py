"""Ahead-of-time compilation of every shipped Triton-lang variant, without a GPU.

Run as a script in a process of its own (TRITON_INTERPRET must be unset): compiles with the very settings the
launchers use, prints a table and exits 1 when a variant spills registers or needs more shared memory than the
GPU generation has. Argument specialisation follows what a launch would find: 16-byte aligned tensors, strides
divisible by 16 where head_dim is. A word as argument compiles only the variants whose label contains it.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import triton
from gate_variants import TYPES, Variant, variants
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paged_kernels.launch_table import shared_memory

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_numbered(index: int) -> tuple[str, int, int, int, int, str]:
    return compile_variant(list(variants())[index])


def compile_variant(variant: Variant) -> tuple[str, int, int, int, int, str]:
    """(label, capability, registers, stack bytes, shared bytes of the launch, compile options) of one variant."""
    kernel, (constants, options) = variant.kernel, variant.settings
    types = TYPES | variant.types
    signature, attrs = {}, {}
    for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        specialised = name not in constants and signature[name] != "fp32"
        if specialised and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", variant.capability, 32), options=options)
    except Exception as error:
        raise RuntimeError(f"sm_{variant.capability} {variant.label} does not compile: {error}") from error
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    how = f"{options['num_warps']:5} {options.get('num_stages', '-'):>6}"
    return variant.label, variant.capability, registers, stack, compiled.metadata.shared, how


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [i for i, v in enumerate(variants()) if word in f"sm_{v.capability} {v.label}"]
    failures, began = 0, time.monotonic()
    print(f"triton {triton.__version__}\n{'variant':66} registers  stack  shared  warps stages")
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for label, capability, registers, stack, shared, how in pool.map(compile_numbered, chosen):
            bad = stack > 0 or shared > shared_memory(capability)
            failures += bad
            name = f"sm_{capability} {label}"
            print(f"{name:66} {registers:9} {stack:6} {shared:7}  {how}{'  FAIL' * bad}", flush=True)
    print(f"{len(chosen)} variants, {failures} failures, {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
