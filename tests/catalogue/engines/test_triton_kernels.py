"""The Triton kernels through Triton's compiler and ptxas, which need no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

AHEAD = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnbench.catalogue.engines.linear import fused

TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "uint8": "*u8", "int32": "*i32"}
compiled = []


class Ahead:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, num_warps, num_stages, **constants):
        types, known, multiples = {}, {}, {}
        for at, name in enumerate(self.kernel.arg_names):
            value = constants[name] if name in constants else arguments[at]
            if isinstance(value, torch.Tensor):
                types[name], multiples[at,] = TYPES[str(value.dtype)[6:]], [["tt.divisibility", 16]]
            elif name in constants or value is None or value == 1:  # as a launch would have it
                types[name], known[name] = "constexpr", value
            else:
                types[name] = "i32"
                if value % 16 == 0:
                    multiples[at,] = [["tt.divisibility", 16]]
        code = triton.compile(
            ASTSource(self.kernel, types, known, multiples),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
        assert code.asm["cubin"]
        assert code.metadata.shared <= 227 * 1024, (self.kernel, code.metadata.shared)
        compiled.append(self.kernel)


launched = fused._kernel
fused._kernel = lambda name: Ahead(launched(name))
fused._interpreted = lambda: True  # tensors of a CPU will do: nothing reads them
dtype, D = getattr(torch, sys.argv[1]), int(sys.argv[2])
if sys.argv[3:]:  # ready features
    q, k = (torch.empty(2, 8, 256, int(sys.argv[3])).requires_grad_() for _ in range(2))
    v, mask = torch.empty(2, 8, 256, D, dtype=dtype).requires_grad_(), torch.ones(2, 256, dtype=torch.bool)
    fused.sums(q, k, v, fused.CountedKeys(True, mask, torch.empty(2, 8, 256), lenient=True)).sum().backward()
    assert len(compiled) == 6, compiled
    sys.exit()
for causal in (False, True):
    q, k, v = (torch.empty(2, 8, 256, D, dtype=dtype).requires_grad_() for _ in range(3))
    mask = torch.ones(2, 256, dtype=torch.bool) if causal else None
    fused.attend(q, k, v, causal=causal, key_mask=mask).backward(q)
assert len(compiled) == 12, compiled
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: make .venv/installed-all")
@pytest.mark.parametrize(
    ("dtype", "widths"),
    [
        ("bfloat16", [64]),
        pytest.param("float16", [20], marks=pytest.mark.slow),
        pytest.param("float32", [16], marks=pytest.mark.slow),
        pytest.param("bfloat16", [128, 256], marks=pytest.mark.slow),
        pytest.param("float32", [40, 50], marks=pytest.mark.slow),
    ],
)
def test_every_kernel_is_compiled_for_an_h200_without_one(dtype: str, widths: list[int]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", AHEAD, dtype, *map(str, widths)], check=True, env=environment)
