"""Ahead-of-time compilation of every shipped Triton-lang variant, without a GPU.

Run as a script in a process of its own (TRITON_INTERPRET must be unset): compiles with the very settings the
launchers use, prints one line per variant and exits 1 when one spills or needs more shared memory than the
GPU generation has. Argument specialisation follows what a launch would find: 16-byte aligned tensors, strides
divisible by 16 where head_dim is.
"""

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paged_kernels import decode_attention, kv_write, prefill_attention

SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {
    "tables": "*i32", "lens": "*i32", "starts": "*i32", "slots": "*i64", "part_out": "*fp32", "part_lse": "*fp32",
}  # fmt: skip
TENSORS = {"query", "key", "value", "k_cache", "v_cache", "out"}


def variants():
    """(label, kernel, constexprs, options, capability, element type) of every variant.

    Every head size with every page size; groups, splits and row counts alternate over them.
    """
    for capability in SHARED_LIMIT:
        for index, (dim, page) in enumerate((d, page) for d in (64, 80, 128) for page in (16, 32, 64)):
            yield from _attention(dim, page, index, capability, "bf16")
        where = f"sm_{capability} bf16 d80 page16"
        yield f"write   {where}", kv_write.kv_write_kernel, *kv_write.settings(8, 80, 16), capability, "bf16"
        yield (
            f"combine {where}",
            decode_attention.combine_kernel,
            *decode_attention.combine_settings(80),
            capability,
            "bf16",
        )
        yield from _attention(128, 16, 1, capability, "bf16", window=4096)
    yield from _attention(64, 16, 1, 80, "fp16")
    yield from _attention(80, 16, 2, 80, "bf16", window=1000)


def _attention(dim, page, index, capability, dtype, window=0):
    common = {"head_dim": dim, "page": page, "element_size": 2, "capability": capability, "window": window}
    where = f"sm_{capability} {dtype} d{dim} page{page}" + f" w{window}" * (window > 0)
    # Groups up to 8 pad to the same 16 rows in decode; in prefill they set how rows map to tokens.
    group = (1, 3, 7, 8)[index % 4]
    split = index % 2 == 1
    settings = decode_attention.settings(group=group, split=split, **common)
    yield f"decode  {where} g{group} split={split:d}", decode_attention.decode_kernel, *settings, capability, dtype
    short = {0: 1, 4: 8, 8: 60}.get(index)  # also 16 and 64 rows, for chunks that have no more
    for tokens in (4096, short) if short else (4096,):
        settings = prefill_attention.settings(group=group, max_query_len=tokens, **common)
        label = f"prefill {where} g{group} m{settings[0]['BLOCK_M']}"
        yield label, prefill_attention.prefill_kernel, *settings, capability, dtype


def compile_numbered(index):
    return compile_variant(list(variants())[index])


def compile_variant(variant):
    """(label, registers, stack bytes, shared bytes of the launch, compile options) of one variant."""
    label, kernel, constants, options, capability, dtype = variant
    signature, attrs = {}, {}
    for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "scale":
            signature[name] = "fp32"
        elif name in POINTERS or name in TENSORS:
            signature[name] = POINTERS.get(name, f"*{dtype}")
        else:
            signature[name] = "i32"
        specialised = name not in constants and name != "scale"
        if specialised and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    return label, registers, stack, compiled.metadata.shared, options


def main() -> int:
    failures = 0
    count = len(list(variants()))
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for label, registers, stack, shared, options in pool.map(compile_numbered, range(count)):
            limit = SHARED_LIMIT[int(re.search(r"sm_(\d+)", label)[1])]
            bad = stack > 0 or shared > limit
            failures += bad
            how = f"warps {options['num_warps']} stages {options.get('num_stages', '-')}"
            print(
                f"{label:44} {registers:4} registers {stack:4} stack {shared:7} shared {how}{'  FAIL' * bad}",
                flush=True,
            )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
