"""A matrix product in four steps: naive, coalesced, tiled, pipelined; see docs/kernels.md.

The kernels take float16 matrices whose sizes are multiples of the blocks, and sum in float32.
"""

# ruff: noqa: N803 - by Triton's convention, compile-time constants are in capitals

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

ELEMENTS = 256
TILE_M, TILE_N, TILE_K = 128, 256, 64


@triton.jit
def by_element(a, b, c, n, k, DOWN: tl.constexpr, BLOCK: tl.constexpr):
    """Each thread computes one element; neighbours share a column if DOWN, else a row."""
    if DOWN:
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        column = tl.program_id(1)
    else:
        row = tl.program_id(0)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(k):
        left = tl.load(a + row * k + i).to(tl.float32)
        right = tl.load(b + i * n + column).to(tl.float32)
        total += left * right
    tl.store(c + row * n + column, total.to(tl.float16))


@triton.jit
def by_tile(a, b, c, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Each program computes a tile from strips of A and B in shared memory."""
    row = tl.program_id(0) * M + tl.arange(0, M)[:, None]
    column = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    inner = tl.arange(0, K)
    left = a + row * k + inner[None, :]
    right = b + inner[:, None] * n + column
    total = tl.zeros((M, N), tl.float32)
    for _ in range(0, k, K):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += K
        right += K * n
    tl.store(c + row * n + column, total.to(tl.float16))


def steps(a: torch.Tensor, b: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """The steps by name, each a function that computes `a @ b`; a is (m, k), b is (k, n)."""
    (m, k), n = a.shape, b.shape[1]

    def elements(down: bool) -> torch.Tensor:
        c = a.new_empty(m, n)
        grid = (m // ELEMENTS, n) if down else (m, n // ELEMENTS)
        by_element[grid](a, b, c, n, k, down, ELEMENTS, num_warps=ELEMENTS // 32)
        return c

    def tiles(stages: int) -> torch.Tensor:
        c = a.new_empty(m, n)
        grid = (m // TILE_M, n // TILE_N)
        by_tile[grid](a, b, c, n, k, TILE_M, TILE_N, TILE_K, num_warps=8, num_stages=stages)
        return c

    return {
        "naive": lambda: elements(True),
        "coalesced": lambda: elements(False),
        "tiled": lambda: tiles(1),
        "pipelined": lambda: tiles(4),
        "cuBLAS": lambda: a @ b,
    }
