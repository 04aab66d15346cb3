"""Readings of the cycle counter, with a fake driver."""

# ruff: noqa: N802 - the driver's function names

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from steadytorch.device.cycles import MOST, CycleCounter, clocks_mhz
from steadytorch.errors import UnsupportedError

CPU, BLOCKS = torch.device("cpu"), 3


class Driver:
    """Does at once what a GPU would do later: its clock is 1,500 MHz, a reading comes each 2 ms.

    Blocks take turns on the multiprocessors, of which the counters began apart.
    """

    def __init__(self, **refused: int) -> None:
        self._refused, self.streams, self._ns = refused, [], 0

    def cuModuleLoadData(self, module, program: bytes) -> int:
        assert b".entry read_cycles(.param .u64 place)" in program
        return self._refused.get("load", 0)

    def cuModuleGetFunction(self, function, module, name: bytes) -> int:
        assert name == b"read_cycles"
        return self._refused.get("find", 0)

    def cuLaunchKernel(self, function, *asked) -> int:
        *shape, shared, stream, values, extra = asked
        assert (shape, shared, extra) == ([BLOCKS, 1, 1, 1, 1, 1], 0, None)
        if refused := self._refused.get("launch", 0):
            return refused
        self.streams.append(stream.value)
        row = ctypes.cast(values[0], ctypes.POINTER(ctypes.c_uint64))[0]
        self._ns += 2_000_000
        for block in range(BLOCKS):
            number = (block + len(self.streams)) % BLOCKS
            given = (self._ns, self._ns * 3 // 2 + 10**12 * number, number)
            ctypes.memmove(row + 24 * block, (ctypes.c_int64 * 3)(*given), 24)
        return 0


def test_the_clock_between_readings_is_cycles_over_time():
    driver = Driver()
    counter = CycleCounter(driver, CPU, BLOCKS)
    assert all(counter.read(place, 9) for place in range(4))
    assert counter.clocks_mhz(4).tolist() == [1500.0] * 3
    assert driver.streams == [9] * 4
    # Begun anew, rows are written over.
    assert all(counter.read(place, 9) for place in range(2))
    assert counter.clocks_mhz(2).tolist() == [1500.0]


def test_no_reading_is_kept_beyond_the_table():
    counter = CycleCounter(Driver(), CPU, BLOCKS)
    assert counter.read(MOST - 1, 0)
    assert not counter.read(MOST, 0)


def test_a_reading_that_the_driver_refuses_is_none():
    assert not CycleCounter(Driver(launch=700), CPU, BLOCKS).read(0, 0)


@pytest.mark.parametrize("driver", [None, Driver(load=218), Driver(find=500)])
def test_without_a_driver_that_takes_the_program_there_is_no_counter(driver):
    with pytest.raises(UnsupportedError, match=r"cannot read the cycle counters"):
        CycleCounter(driver, CPU, BLOCKS)


def test_each_multiprocessor_is_compared_with_itself():
    """SM 7 runs at 3,000 MHz, which does not change the median."""
    begun = 2**60

    def reading(us, *numbers):
        mhz = {number: 3000 if number == 7 else 1980 for number in numbers}
        return [[begun + 1000 * us, 10**15 * n + mhz[n] * us, n] for n in numbers]

    rows = [reading(0, 1, 7, 4), reading(1, 4, 1, 7), reading(2, 9, 8, 0), reading(3, 9, 9, 5)]
    found = clocks_mhz(np.asarray(rows))
    assert found[0] == pytest.approx(1980)
    assert np.isnan(found[1])
    assert found[2] == pytest.approx(1980)


def test_readings_at_one_time_or_backwards_tell_nothing():
    rows = np.asarray([[[0, 0, 1]], [[0, 100, 1]], [[1_000, 50, 1]], [[2_000, 2_030, 1]]])
    found = clocks_mhz(rows)
    assert np.isnan(found[:2]).all()
    assert found[2] == 1980.0
