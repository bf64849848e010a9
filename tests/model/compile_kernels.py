"""Compiles every kernel variant for a GPU that need not be there: python compile_kernels.py 90.

Prints a JSON line for each: its name, which matrix instructions it uses, and what it spills.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deployments.execution.attention.triton_kernels import attend_kernel, merge_kernel
from deployments.execution.attention.triton_tiles import (
    Tiles,
    chunk_tiles,
    decode_tiles,
    num_lanes,
)

INSTRUCTIONS = ("wgmma.mma_async", "mma.sync")
WHOLE = {"scaling": "fp32", "softcap": "fp32"}
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# dtype, group, key_dim, value_dim, block_size, window, features
LAYERS = {
    "llama 8B": ("bf16", 4, 128, 128, 16, 0, ()),
    "llama 8B fp16": ("fp16", 4, 128, 128, 16, 0, ()),
    "smollm2": ("bf16", 3, 64, 64, 16, 0, ()),
    "gemma2": ("bf16", 2, 256, 256, 16, 4096, ("HAS_SOFTCAP",)),
    "gpt_oss": ("bf16", 8, 64, 64, 16, 128, ("HAS_SINKS",)),
    "deepseek": ("bf16", 1, 192, 128, 16, 0, ()),
    "head of 80, pages of 256": ("bf16", 1, 80, 80, 256, 0, ()),
    "fp32": ("fp32", 4, 64, 64, 16, 0, ()),
}


def compile_attend(layer: tuple[Any, ...], tiles: Tiles, is_split: bool, target: GPUTarget) -> Any:
    dtype, group, key_dim, value_dim, block_size, window, features = layer
    pointers = {f"{name}_ptr": f"*{dtype}" for name in ("query", "keys", "values", "sinks")}
    pointers |= {"out_ptr": "*fp32" if is_split else f"*{dtype}", "lse_ptr": "*fp32"}
    pointers |= {"tiles_ptr": "*i32", "tables_ptr": "*i32"}
    constants = {
        "GROUP": group,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_LANES": num_lanes(key_dim),
        "VALUE_LANES": num_lanes(value_dim),
        "BLOCK_SIZE": block_size,
        "WINDOW": window,
        "HAS_SOFTCAP": "HAS_SOFTCAP" in features,
        "HAS_SINKS": "HAS_SINKS" in features,
        "IS_SPLIT": is_split,
        "TILE_ROWS": tiles.num_rows,
        "TILE_KEYS": tiles.num_keys,
        "WIDENS": False,
    }
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return compile_kernel(attend_kernel, {**pointers, **WHOLE}, constants, target, options)


def compile_kernel(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    target: GPUTarget,
    options: dict[str, int],
) -> Any:
    """As a launch would: pointers and strides are multiples of 16."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    aligned = [name for name in names if name.endswith(("_ptr", "_stride"))]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attrs
    )
    return triton.compile(source, target=target, options=options)


def num_spilled_bytes(ptx: str, capability: int) -> int:
    """What the assembler says it stores and loads for want of registers."""
    arch = "sm_90a" if capability == 90 else f"sm_{capability}"
    assembler = triton.knobs.nvidia.ptxas_blackwell.path  # the newest: it takes every PTX
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        done = subprocess.run(
            [
                assembler,
                "-v",
                f"-arch={arch}",
                str(source),
                "-o",
                str(Path(folder, "kernel.cubin")),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill", done.stderr))


def report(name: str, compiled: Any, capability: int) -> None:
    ptx = compiled.asm["ptx"]
    print(
        json.dumps(
            {
                "name": name,
                "instructions": [i for i in INSTRUCTIONS if i in ptx],
                "num_spilled_bytes": num_spilled_bytes(ptx, capability),
                "shared_bytes": compiled.metadata.shared,
            }
        ),
        flush=True,
    )


def main(capability: int) -> None:
    target = GPUTarget("cuda", capability, 32)
    for name, layer in LAYERS.items():
        shape = (layer[1], max(layer[2:4]), ELEMENT_BYTES[layer[0]])
        variants = {
            "decode": (decode_tiles(*shape), False),
            "split decode": (decode_tiles(*shape), True),
            "chunk": (chunk_tiles(*shape), False),
        }
        for kind, (tiles, is_split) in variants.items():
            compiled = compile_attend(layer, tiles, is_split, target)
            report(f"attend {kind}: {name}", compiled, capability)
    for dtype in ("bf16", "fp16", "fp32"):
        types = {"out_ptr": f"*{dtype}", "partial_ptr": "*fp32", "lse_ptr": "*fp32"}
        constants = {"VALUE_DIM": 128, "VALUE_LANES": 128, "SPLIT_LANES": 16}
        compiled = compile_kernel(merge_kernel, types, constants, target, {"num_warps": 4})
        report(f"merge: {dtype}", compiled, capability)


if __name__ == "__main__":
    main(int(sys.argv[1]))
