"""Readings of the cycle counter, by a driver that answers at once."""

# ruff: noqa: N802 - the functions of a driver have their own names

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from steadytorch.device.cycles import MOST, CycleCounter, clocks_mhz
from steadytorch.errors import UnsupportedError

CPU = torch.device("cpu")


class Driver:
    """Does at once what a GPU would do later: its clock is 1,500 MHz, a reading comes each 2 ms."""

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
        assert (shape, shared, extra) == ([1] * 6, 0, None)
        if refused := self._refused.get("launch", 0):
            return refused
        self.streams.append(stream.value)
        row = ctypes.cast(values[0], ctypes.POINTER(ctypes.c_uint64))[0]
        self._ns += 2_000_000
        given = (self._ns, self._ns * 3 // 2, 5)
        ctypes.memmove(row, (ctypes.c_int64 * 3)(*given), 24)
        return 0


def test_the_clock_between_readings_is_cycles_over_time():
    driver = Driver()
    counter = CycleCounter(driver, CPU)
    assert all(counter.read(place, 9) for place in range(4))
    assert counter.clocks_mhz(4).tolist() == [1500.0] * 3
    assert driver.streams == [9] * 4
    # Begun anew, rows are written over.
    assert all(counter.read(place, 9) for place in range(2))
    assert counter.clocks_mhz(2).tolist() == [1500.0]


def test_no_reading_is_kept_beyond_the_table():
    counter = CycleCounter(Driver(), CPU)
    assert counter.read(MOST - 1, 0)
    assert not counter.read(MOST, 0)


def test_a_reading_that_the_driver_refuses_is_none():
    assert not CycleCounter(Driver(launch=700), CPU).read(0, 0)


@pytest.mark.parametrize("driver", [None, Driver(load=218), Driver(find=500)])
def test_without_a_driver_that_takes_the_program_there_is_no_counter(driver):
    with pytest.raises(UnsupportedError, match=r"the clock is not counted"):
        CycleCounter(driver, CPU)


def test_readings_of_two_multiprocessors_or_at_one_time_tell_nothing():
    rows = np.asarray(
        [[0, 0, 1], [1_000, 1_980, 1], [2_000, 3_000, 2], [2_000, 3_100, 2], [3_000, 3_050, 2]]
    )
    found = clocks_mhz(rows)
    assert found[0] == 1980.0
    assert np.isnan(found[1:]).all()
