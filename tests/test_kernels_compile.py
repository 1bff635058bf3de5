"""Triton's kernels compile for the GPUs they run on (sm_90: H100, H200), without one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACK = """
from services.target.pack_kernel import _pack as kernel
import triton.language as tl
signatures = [
    {"tap": f"*{tap}", "token_index": "*i32", "packed": f"*{packed}", "checksum": "*i64", "num_tokens": "i32"}
    | {"HIDDEN": 5120, "STRIDE": 5 * 5120, "INTEGER": integer, "TOKENS": 4, "BLOCK": 1024}
    for tap, packed, integer in [("bf16", "bf16", tl.int16), ("bf16", "fp32", tl.int32), ("fp32", "bf16", tl.int16)]
]
"""
CROSS_ENTROPY = """
from services.drafter.kernels.cross_entropy_kernel import _cross_entropy as kernel
signatures = [
    {"logits": "*bf16", "labels": "*i64", "losses": "*fp32", "predictions": "*i64", "num_columns": "i32"}
    | {"CAP": cap, "GRADIENT": gradient, "BLOCK": 2048}
    for cap, gradient in ((0.0, False), (0.0, True), (30.0, True))
]
"""
CONVOLUTION = """
from services.drafter.kernels.convolution_kernel import _convolution_backward as kernel
tensors = {name: "*bf16" for name in kernel.arg_names[:8]} | {"is_first": "*i1", "of_base": "*fp32"}
integers = {"num_rows": "i32", "hidden": "i32", "dynamic_stride": "i32"}
signatures = [tensors | integers | {"GROUP": 16, "STRIP": 64, "ROWS": 4, "GROUPS": 8, "LANES": 16}]
"""
ATTENTION = """
from services.drafter.kernels.attention_kernel import {name}_kernel as kernel
from services.drafter.kernels.swept_attention import Tilings
tiling = Tilings().{name}
constants = dict(HEADS=32, GROUP=4, SPLITS=4, D=128, ROWS=tiling.rows, KEYS=tiling.keys)
integers = {{"runs", "sweeps", "starts", "ends"}}
floats = {{"lse", "delta"}}

def type_of(name):
    if name == "strides":
        return ("i32",) * (3 if "starts" in kernel.arg_names else 5)
    if name.startswith("scale"):
        return "fp32"
    if name.startswith("num_"):
        return "i32"
    return "*i32" if name in integers else "*fp32" if name in floats else "*bf16"

signatures = [{{name: constants.get(name) or type_of(name) for name in kernel.arg_names}}]
"""
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
for signature in signatures:
    is_type = lambda value: isinstance(value, (str, tuple))
    constants = {(index,): value for index, value in enumerate(signature.values()) if not is_type(value)}
    types = {name: value if is_type(value) else "constexpr" for name, value in signature.items()}
    source = ASTSource(kernel, types, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert ".target sm_90" in compiled.asm["ptx"] and compiled.asm["cubin"]
    print(compiled.metadata.name)
"""


KERNELS: dict[tuple[str, ...], str] = {  # names of what is compiled -> the program that compiles it
    ("_pack",) * 3: PACK,
    ("_cross_entropy",) * 3: CROSS_ENTROPY,
    ("_convolution_backward",): CONVOLUTION,
    **{(f"{name}_kernel",): ATTENTION.format(name=name) for name in ("forward", "dq", "dkdv")},
}


def test_kernels_compile(tmp_path: Path) -> None:
    """In one process of their own, with an empty cache and without the interpreter that the other tests use."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", "".join(program + COMPILE for program in KERNELS.values())]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [name for names in KERNELS for name in names]), done.stderr
