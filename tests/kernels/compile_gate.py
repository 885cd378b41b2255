"""Ahead-of-time compilation of every shipped Triton-lang variant, without a GPU.

Run as a script in a process of its own (TRITON_INTERPRET must be unset): compiles with the very settings the
launchers use, prints one line per variant and exits 1 when one spills or needs more shared memory than the
GPU generation has. Argument specialisation follows what a launch would find: 16-byte aligned tensors, strides
divisible by 16 where head_dim is.
"""

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
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
COUNTS = {"split_tokens", "splits", "num_seqs", "first_row", "total_q"}
TENSORS = {"query", "key", "value", "k_cache", "v_cache", "out"}


def variants():
    """(label, kernel, constexprs, options, capability, element type) of every variant."""
    for capability in SHARED_LIMIT:
        for dtype in ("bf16", "fp16"):
            sizes = [(d, page) for d in (64, 80, 128) for page in (16, 32, 64)] if dtype == "bf16" else [(64, 16)]
            for index, (dim, page) in enumerate(sizes):
                yield from _of_size(dim, page, index, capability, dtype)


def _of_size(dim, page, index, capability, dtype):
    common = {"head_dim": dim, "page": page, "element_size": 2, "capability": capability}
    where = f"sm_{capability} {dtype} d{dim} page{page}"
    # Groups up to 8 pad to the same 16 rows in decode; in prefill they set how rows map to tokens.
    group = (1, 3, 7, 8)[index % 4]
    for split in (False, True):
        settings = decode_attention.settings(group=group, split=split, **common)
        yield f"decode  {where} g{group} split={split:d}", decode_attention.decode_kernel, *settings, capability, dtype
    for tokens in (1, 4096) if index % 2 else (8, 4096):
        settings = prefill_attention.settings(group=group, max_query_len=tokens, **common)
        label = f"prefill {where} g{group} m{settings[0]['BLOCK_M']}"
        yield label, prefill_attention.prefill_kernel, *settings, capability, dtype
    if page == 16:
        settings = kv_write.settings(8, dim, page)
        yield f"write   {where}", kv_write.kv_write_kernel, *settings, capability, dtype
        settings = decode_attention.combine_settings(dim)
        yield f"combine {where}", decode_attention.combine_kernel, *settings, capability, dtype


def compile_variant(variant):
    """(label, registers, stack bytes, shared bytes of the launch) of one variant."""
    label, kernel, constants, options, capability, dtype = variant
    signature, attrs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "scale":
            signature[name] = "fp32"
        elif name in POINTERS or name in TENSORS:
            signature[name] = POINTERS.get(name, f"*{dtype}")
            attrs[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if name not in COUNTS and name != "table_row":
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
    with ThreadPoolExecutor(2) as pool:
        for label, registers, stack, shared, options in pool.map(compile_variant, variants()):
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
