import msgspec
from hypothesis import given
from hypothesis import strategies as st

from steadytorch.device.recording import (
    COUNTERS,
    LEVELS,
    REASON_BITS,
    Recording,
    mask_of,
    reasons,
)


@given(st.integers(min_value=0, max_value=2**40))
def test_reasons_and_their_mask_are_one(mask):
    assert mask_of(reasons(mask)) == mask


def test_a_bit_without_a_name_is_shown_by_its_number():
    assert reasons(REASON_BITS["power_cap"] | 0x1000) == ("power_cap", "bit_0x1000")


def test_every_channel_is_a_column_of_the_recording():
    assert set(COUNTERS) | set(LEVELS) <= set(Recording.__struct_fields__)


def _recording():
    return Recording(
        device="cuda",
        interval_ns=15_000_000,
        at_ns=(5, 10),
        gc_start_ns=(7,),
        gc_duration_ns=(2,),
        gc_generation=(1,),
        wait_ns=(0, 2**62),
        cpu_share=0.002,
        unknown={"steal_ns": "not here"},
    )


def test_a_recording_survives_msgpack_and_plain_types():
    packed = msgspec.msgpack.encode(msgspec.to_builtins(_recording()))
    assert msgspec.convert(msgspec.msgpack.decode(packed), Recording) == _recording()
