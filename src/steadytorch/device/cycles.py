"""The clock of a GPU's multiprocessors over milliseconds, by their own counter of cycles.

NVML tells the clock of a moment, and asking takes long: once in some 45 ms. A power limit moves it
in steps of some 10 ms. The counter ticks with the clock itself, so that cycles between two readings
over the time between them are the mean clock meanwhile.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from steadytorch.errors import UnsupportedError

MOST = 1024
"""Readings kept at once."""
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
"""Each block is one thread, which writes a row: the GPU's time in ns, the cycles of its own
multiprocessor and the number of that. The driver translates it for whatever GPU there is. Source:
"Special Registers", PTX ISA."""


class CycleCounter:
    """Readings of the counters, each a kernel between others on their stream.

    A kernel has as many blocks as there are multiprocessors, wherever these come to run.

    Args:
        driver: of CUDA; None where there is none.
        device: a CUDA device, the current one.
        blocks: multiprocessors of it.

    Raises:
        UnsupportedError: there is no driver, or it refuses the program.
    """

    def __init__(self, driver: Any, device: torch.device, blocks: int) -> None:
        if driver is None:
            raise UnsupportedError("the clock is not counted: there is no driver of CUDA")
        self._driver, module, self._function = driver, ctypes.c_void_p(), ctypes.c_void_p()
        self._table = torch.zeros((MOST, blocks, 3), dtype=torch.int64, device=device)
        refused = driver.cuModuleLoadData(
            ctypes.byref(module), PROGRAM
        ) or driver.cuModuleGetFunction(ctypes.byref(self._function), module, b"read_cycles")
        if refused:
            raise UnsupportedError(f"the clock is not counted: the driver answers {refused}")
        self._row = ctypes.c_uint64()
        self._values = (ctypes.c_void_p * 1)(ctypes.addressof(self._row))

    def read(self, place: int, stream: int) -> bool:
        """Enqueues a reading; False where the driver refuses, or none is kept at this place.

        Args:
            place: of the reading, below `MOST`.
            stream: handle of the current device's.
        """
        if place >= MOST:
            return False
        self._row.value = self._table.data_ptr() + place * self._table.stride(0) * 8
        shape, shared = (self._table.shape[1], 1, 1, 1, 1, 1), 0
        on = ctypes.c_void_p(stream)
        asked = (self._function, *shape, shared, on, self._values, None)
        return self._driver.cuLaunchKernel(*asked) == 0

    def clocks_mhz(self, count: int) -> np.ndarray:
        """The clock between the first readings, which were enqueued on the current stream.

        Args:
            count: how many readings.

        Returns:
            MHz between each and the next, float64, shape (count - 1,); see `clocks_mhz`.
        """
        return clocks_mhz(self._table[:count].cpu().numpy())


def clocks_mhz(rows: np.ndarray) -> np.ndarray:
    """The clock between neighbouring readings: the median over the multiprocessors seen in both.

    Args:
        rows: time in ns, cycles and number of the multiprocessor of each block, int64, shape
            (readings, blocks, 3).

    Returns:
        MHz, float64, shape (readings - 1,); NaN where no multiprocessor was seen twice.
    """
    times, cycles, numbers = np.moveaxis(rows, 2, 0)
    reading = np.arange(len(rows))[:, None]
    # Where two blocks ran on one, the last counts: it is a reading as good as the other.
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
