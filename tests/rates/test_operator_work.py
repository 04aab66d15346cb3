from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from steadytorch.rates.operator_work import FORMULAS, MATRIX, WRAPPERS, work_of

MATRICES = {"dims": [[4, 8], [8, 2]], "types": ["c10::Half", "c10::Half"]}


def test_a_known_operator_has_operations_bytes_and_a_type():
    assert work_of("aten::mm", MATRICES) == (2 * 4 * 8 * 2, 2 * (32 + 16 + 8), "float16")


def test_an_unknown_operator_has_no_known_work():
    assert work_of("custom::op", MATRICES) is None


def test_without_recorded_shapes_nothing_is_known():
    assert work_of("aten::mm", None) is None


def test_work_in_integers_has_no_type():
    inputs = {"dims": [[4]], "types": ["long int"]}
    assert work_of("aten::neg", inputs).dtype is None


def test_wrappers_and_products_are_known_operators():
    assert FORMULAS.keys() >= WRAPPERS
    assert FORMULAS.keys() >= MATRIX


dims = st.lists(st.integers(-2, 2**40) | st.none() | st.text(max_size=2), max_size=5)
texts = st.sampled_from(["", "[1, 1]", "[0, 0]", "[]", "[2]", "True", "1", "-1", "[-3, 2]", "nan"])
kinds = st.sampled_from(["float", "c10::Half", "long int", "Scalar", "ScalarList", "", "odd"])


@given(
    st.sampled_from([*sorted(FORMULAS), "triton_poi_fused_0"]),
    st.lists(st.tuples(dims, kinds, dims, texts), max_size=12),
)
def test_whatever_a_trace_says_there_is_an_answer(name, rows):
    columns = zip(*rows, strict=True)
    keys = ("dims", "types", "strides", "concrete")
    inputs = {key: list(column) for key, column in zip(keys, columns, strict=False)}
    work = work_of(name, inputs)
    assert work is None or (work.flops >= 0 and work.bytes > 0)
