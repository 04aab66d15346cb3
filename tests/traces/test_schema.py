import pytest

from steadytorch.traces.events import Category
from steadytorch.traces.schema import RawEvent, category_of, integer, number_in


@pytest.mark.parametrize(
    ("cat", "category"),
    [
        ("Operator", Category.CPU_OP),
        ("cpu_op", Category.CPU_OP),
        ("Runtime", Category.RUNTIME),
        ("cuda_runtime", Category.RUNTIME),
        ("cuda_driver", Category.DRIVER),
        ("Kernel", Category.KERNEL),
        ("kernel", Category.KERNEL),
        ("Memcpy", Category.MEMCPY),
        ("gpu_memset", Category.MEMSET),
        ("cuda_sync", Category.SYNC),
        ("python_function", Category.PYTHON),
        ("gpu_user_annotation", Category.GPU_ANNOTATION),
        ("something_new", Category.OTHER),
        ("", Category.OTHER),
    ],
)
def test_categories_of_every_year(cat, category):
    assert category_of(RawEvent(ph="X", cat=cat, name="x")) == category


@pytest.mark.parametrize(
    "name",
    ["ProfilerStep#5", "enumerate(DataLoader)#_SingleProcess", "Optimizer.step#SGD.step"],
)
def test_annotations_were_operators_once(name):
    assert category_of(RawEvent(ph="X", cat="Operator", name=name)) == Category.ANNOTATION
    assert category_of(RawEvent(ph="X", cat="cpu_op", name=name)) == Category.CPU_OP


def test_events_without_category_are_told_by_their_process():
    assert category_of(RawEvent(ph="X", name="mm", pid="CPU functions")) == Category.CPU_OP
    assert category_of(RawEvent(ph="X", name="mm", pid="CUDA functions")) == Category.KERNEL


@pytest.mark.parametrize("cat", ["", "cpu_instant_event"])
def test_memory_events_are_instants_of_that_name(cat):
    assert category_of(RawEvent(ph="i", cat=cat, name="[memory]")) == Category.MEMORY


@pytest.mark.parametrize(
    "event",
    [
        RawEvent(ph="M", name="process_name"),
        RawEvent(ph="s", cat="ac2g"),
        RawEvent(ph="f", cat="async"),
        RawEvent(ph="i", name="Record Window End"),
        RawEvent(ph="X", cat="Trace", name="PyTorch Profiler (0)"),
        RawEvent(ph="B", cat="cpu_op"),
        RawEvent(),
    ],
)
def test_what_is_no_event_of_the_program_is_none(event):
    assert category_of(event) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [(7, 7), ("7", 7), ("stream 7", 7), ("stream", -1), ("thread 7", -1), (None, -1), (1.5, -1)],
)
def test_streams_are_numbers_whatever_the_year(text, number):
    assert number_in(text) == number


@pytest.mark.parametrize("value", [True, "7", 2**63, -(2**64), 1.0, None, [1]])
def test_what_is_no_integer_of_that_size_is_none(value):
    assert integer(value) == -1


def test_the_largest_of_32_bits_stands_for_no_stream():
    assert integer(2**32 - 1, 31) == -1
