"""SM clock, averaged over milliseconds, from the SMs' cycle counters.

NVML is too slow to follow the SM clock. One instantaneous NVML reading takes about 45 ms, while a
power limit moves the clock about every 10 ms. A cycle counter advances once per cycle of the SM
clock. Cycles between two readings, divided by the time between them, give the mean clock.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from steadytorch.errors import UnsupportedError

MOST = 1024
"""Maximum number of readings kept."""
PROGRAM = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry read_cycles(.param .u64 place)
{
    .reg .b32 %number, %block;
    .reg .b64 %row, %time, %cycles, %processor, %offset;
    ld.param.u64 %row, [place];
    mov.u32 %block, %ctaid.x;
    mul.wide.u32 %offset, %block, 24;
    add.u64 %row, %row, %offset;
    cvta.to.global.u64 %row, %row;
    mov.u64 %time, %globaltimer;
    mov.u64 %cycles, %clock64;
    mov.u32 %number, %smid;
    cvt.u64.u32 %processor, %number;
    st.global.u64 [%row], %time;
    st.global.u64 [%row+8], %cycles;
    st.global.u64 [%row+16], %processor;
    ret;
}
"""
"""Each block has one thread, which writes a row: GPU time in ns, cycle count of its SM, SM index.

The driver compiles the PTX for the GPU at hand. Source: "Special Registers", PTX ISA."""


class CycleCounter:
    """Reads the SMs' cycle counters with small kernels, launched between a stream's other kernels.

    Each reading kernel has as many blocks as the device has SMs; several blocks may land on one SM.

    Args:
        driver: the CUDA driver library; None if there is none.
        device: the current CUDA device.
        blocks: number of SMs of the device.

    Raises:
        UnsupportedError: the driver is missing or rejects the kernel.
    """

    def __init__(self, driver: Any, device: torch.device, blocks: int) -> None:
        if driver is None:
            raise UnsupportedError("cannot read the cycle counters: no CUDA driver found")
        self._driver, module, self._function = driver, ctypes.c_void_p(), ctypes.c_void_p()
        self._table = torch.zeros((MOST, blocks, 3), dtype=torch.int64, device=device)
        refused = driver.cuModuleLoadData(
            ctypes.byref(module), PROGRAM
        ) or driver.cuModuleGetFunction(ctypes.byref(self._function), module, b"read_cycles")
        if refused:
            raise UnsupportedError(f"cannot read the cycle counters: driver error {refused}")
        self._row = ctypes.c_uint64()
        self._values = (ctypes.c_void_p * 1)(ctypes.addressof(self._row))

    def read(self, place: int, stream: int) -> bool:
        """Enqueue a counter reading; return False if the launch fails or `place` is out of range.

        Args:
            place: index of the reading, below `MOST`.
            stream: handle of a stream of the current device.
        """
        if place >= MOST:
            return False
        self._row.value = self._table.data_ptr() + place * self._table.stride(0) * 8
        shape, shared = (self._table.shape[1], 1, 1, 1, 1, 1), 0
        on = ctypes.c_void_p(stream)
        asked = (self._function, *shape, shared, on, self._values, None)
        return self._driver.cuLaunchKernel(*asked) == 0

    def clocks_mhz(self, count: int) -> np.ndarray:
        """SM clocks between the first `count` readings; waits for the current stream.

        Args:
            count: number of readings.

        Returns:
            MHz from each reading to the next, float64, shape (count - 1,); see `clocks_mhz`.
        """
        return clocks_mhz(self._table[:count].cpu().numpy())


def clocks_mhz(rows: np.ndarray) -> np.ndarray:
    """SM clock between consecutive readings: the median over the SMs seen in both readings.

    Args:
        rows: time in ns, cycle count and SM index of each block, int64, shape
            (readings, blocks, 3).

    Returns:
        MHz, float64, shape (readings - 1,); NaN where no SM was seen in both readings.
    """
    times, cycles, numbers = np.moveaxis(rows, 2, 0)
    reading = np.arange(len(rows))[:, None]
    # If two blocks ran on one SM, either reading will do; the last is kept.
    seen = np.full((2, len(rows), int(numbers.max()) + 1), np.nan)
    base = rows[0, 0]
    seen[0, reading, numbers], seen[1, reading, numbers] = times - base[0], cycles - base[1]
    elapsed, counted = np.diff(seen, axis=1)
    elapsed[~((elapsed > 0) & (counted > 0))] = np.nan
    quotients = counted * 1e3 / elapsed
    known = np.isfinite(quotients).any(axis=1)
    found = np.full(len(quotients), np.nan)
    found[known] = np.nanmedian(quotients[known], axis=1)
    return found
