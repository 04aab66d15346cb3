from __future__ import annotations

from steadytorch.device.observe import NotObservable, Readings, reason_of


def test_a_reading_that_works_is_its_value_and_leaves_no_reason():
    readings = Readings()
    assert readings.read("answer", lambda: 42) == 42
    assert readings.unknown == {}


def test_a_reading_that_fails_is_none_and_leaves_its_reason():
    def refused():
        raise NotObservable("no permission")

    readings = Readings()
    assert readings.read("clock", refused) is None
    assert readings.unknown == {"clock": "no permission"}


def test_an_unforeseen_fault_names_its_type():
    readings = Readings()
    assert readings.read("clock", lambda: {}["missing"]) is None
    assert readings.unknown == {"clock": "KeyError: 'missing'"}


def test_an_earlier_reason_outlives_a_later_one():
    readings = Readings()
    readings.refuse(("power",), "first")
    readings.refuse(("power", "clock"), "second")
    assert readings.unknown == {"power": "first", "clock": "second"}


def test_a_reason_is_one_short_line():
    reason = reason_of(RuntimeError("a\nb " + "x" * 1000))
    assert "\n" not in reason
    assert len(reason) <= 300
