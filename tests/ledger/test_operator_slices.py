import pytest

from steadytorch.ledger.ledger import build_ledger
from steadytorch.ledger.operator_slices import operator_slice

from ..traces import synthetic as syn

OTHER = syn.PROCESS + 1
MS = 1_000_000


def cut(*events, length=1_000):
    ledger = build_ledger(syn.trace([syn.step(0, 0, length), *events]))
    return {name: ns for name, ns in ledger.steps[0].slices.items() if ns}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::mkldnn_convolution", "cpu_compute"),
        ("aten::convolution_backward", "cpu_compute"),
        ("aten::addmm", "cpu_compute"),
        ("aten::bmm", "cpu_compute"),
        ("aten::linear", "cpu_compute"),
        ("mkldnn::_linear_pointwise", "cpu_compute"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "cpu_compute"),
        ("aten::lstm", "cpu_compute"),
        ("aten::add_", "cpu_elementwise"),
        ("aten::native_batch_norm", "cpu_elementwise"),
        ("aten::max_pool2d_with_indices", "cpu_elementwise"),
        ("aten::sum", "cpu_elementwise"),
        ("aten::_scaled_mm", "cpu_compute"),
        ("aten::comment", "cpu_elementwise"),
        ("aten::_fused_adamw_", "cpu_elementwise"),
        ("cpp_fused_relu_0", "cpu_elementwise"),
        ("aten::copy_", "cpu_copy"),
        ("aten::contiguous", "cpu_copy"),
        ("aten::cat", "cpu_copy"),
        ("aten::index_select", "cpu_copy"),
        ("aten::empty", "cpu_allocation"),
        ("aten::empty_strided", "cpu_allocation"),
        ("aten::view", "cpu_operator"),
        ("aten::transpose", "cpu_operator"),
        ("torchvision::nms", "cpu_operator"),
        ("c10d::allreduce_", "cpu_communication"),
        ("record_param_comms", "cpu_communication"),
    ],
)
def test_what_an_operator_does(name, expected):
    assert operator_slice(name) == expected


def test_an_operator_owns_what_those_it_calls_do_not():
    assert cut(
        syn.op("aten::conv2d", 0, 900),
        syn.op("aten::empty", 100, 200),
        syn.op("aten::relu", 300, 600),
    ) == {"cpu_compute": 500, "cpu_allocation": 100, "cpu_elementwise": 300, "cpu_python": 100}


def test_another_threads_operator_counts_where_the_first_is_in_none():
    assert cut(
        syn.op("aten::mm", 0, 400),
        syn.op("aten::add", 300, 700, thread=OTHER),
    ) == {"cpu_compute": 400, "cpu_elementwise": 300, "cpu_python": 300}


def test_the_input_pipeline_owns_its_operators():
    assert cut(
        syn.annotation("enumerate(DataLoader)#x.__next__", 0, 400), syn.op("aten::stack", 100, 300)
    ) == {"cpu_data_wait": 400, "cpu_python": 600}


def test_garbage_collection_owns_its_time_within_an_operator():
    assert cut(syn.op("aten::mm", 0, 400), syn.annotation("steadytorch.gc", 100, 300)) == {
        "cpu_compute": 200,
        "cpu_gc": 200,
        "cpu_python": 600,
    }


def test_frames_that_wait_are_told_from_those_that_work():
    assert cut(
        syn.python("train.py(1): main", 0, 1_000),
        syn.python("<built-in function sleep>", 100, 400),
        syn.python("threading.py(323): wait", 500, 600),
    ) == {"cpu_waiting": 400, "cpu_python": 600}


def test_a_thread_that_waits_gives_way_to_the_operators_of_others():
    assert cut(
        syn.python("<built-in method acquire of _thread.lock object at 0x1>", 0, 500),
        syn.python("train.py(9): step", 500, 1_000),
        syn.op("aten::mm", 100, 800, thread=OTHER),
    ) == {"cpu_waiting": 100, "cpu_compute": 400, "cpu_python": 500}


def test_a_long_silence_is_unknown_without_stacks_and_python_with_them():
    ops = [syn.op("aten::mm", 0, 100), syn.op("aten::mm", 5 * MS, 5 * MS + 100)]
    silent = cut(*ops, length=5 * MS + 100)
    assert silent == {"cpu_compute": 200, "unknown": 5 * MS - 100}
    frames = syn.python("train.py(3): augment", 0, 5 * MS + 100)
    assert cut(*ops, frames, length=5 * MS + 100)["cpu_python"] == 5 * MS - 100
