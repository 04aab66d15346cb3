from __future__ import annotations

import contextlib
import logging
import weakref
from threading import Barrier, Thread

import pytest
import torch
from faked import GONE, HERE, fake_cudnn  # noqa: F401 - a fixture

from steadytorch.conv import executables
from steadytorch.conv.engines import BIAS, INPUT, OTHER, OUTPUT, WEIGHT
from steadytorch.conv.executables import EngineExecutable, check_operands, note_miss, planned
from steadytorch.conv.frontend import Target
from steadytorch.conv.problem import parse
from steadytorch.errors import UnsupportedError

FAULTY = "known to be faulty"
KEY = "fprop/add_bias_relu/fp32/last/i2x8x9x9/w6x8x3x3/s1x1/p1x1/d1x1/g1"
PROBLEM = parse(KEY)


def operands(seed=0, layout=torch.channels_last):
    torch.manual_seed(seed)
    made = [torch.randn(s) for s in (PROBLEM.input, PROBLEM.weight, (6,), PROBLEM.output)]
    return [t.contiguous(memory_format=layout) if t.dim() == 4 else t for t in made]


def by_pytorch(x, w, b, z):
    return torch.relu(torch.conv2d(x, w, b, padding=1) + z)


def refused(*given):
    raise AssertionError("PyTorch was called")


@pytest.fixture
def plan(cudnn):
    return EngineExecutable(PROBLEM, "eng1", HERE)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_a_plan_runs_on_the_addresses_of_tensors_in_its_layout(plan, cudnn, layout):
    given = operands(layout=layout)
    y = plan.run(refused, *given)
    torch.testing.assert_close(y, by_pytorch(*given))
    assert y.is_contiguous(memory_format=torch.channels_last)
    ((pointers, workspace, _),) = cudnn.runs
    assert set(pointers) == {INPUT, WEIGHT, BIAS, OTHER, OUTPUT}
    assert workspace != 0
    assert (pointers[INPUT] == given[0].data_ptr()) is (layout is torch.channels_last)


@pytest.mark.parametrize(
    "key",
    [
        KEY,
        "fprop/none/fp16/first/i1x1x5x5/w1x1x1x1/s1x1/p0x0/d1x1/g1",
        "fprop/none/fp16/last/i1x1x5x1/w4x1x1x1/s1x1/p0x0/d1x1/g1",
        "fprop/bias/fp16/last/i4x16x100/w32x16x5/s1/p2/d1/g1",
        "fprop/none/fp16/last/i2x3x8x8x8/w4x3x3x3x3/s1x1x1/p1x1x1/d1x1x1/g1",
        "dgrad/none/fp16/last/i2x3x8x8/w4x3x3x3/s1x1/p1x1/d1x1/g1",
        "wgrad/none/fp16/last/i2x3x8x8/w4x3x3x3/s1x1/p1x1/d1x1/g1",
    ],
)
def test_results_have_the_strides_that_pytorch_gives_them(cudnn, monkeypatch, key):
    problem = parse(key)
    monkeypatch.setattr(cudnn, "execute", lambda *given: None)
    made = EngineExecutable(problem, "eng1", HERE)
    shapes = {"fprop": problem.output, "dgrad": problem.input, "wgrad": problem.weight}
    expected = executables.empty(
        shapes[problem.operation], executables.DTYPES[problem.number], HERE, problem.layout
    )
    y = made.run(refused, torch.randn(problem.input), torch.randn(problem.weight), None, None)
    assert (y.shape, y.stride(), y.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_a_call_amid_another_of_the_same_plan_leaves_its_addresses_alone(plan, cudnn):
    """A nested call, as from a finalizer."""
    within = []

    def interrupt():
        if not within:
            within.append(None)
            within[0] = plan.run(refused, *operands(1))

    cudnn.on_execute = staticmethod(interrupt)
    y = plan.run(refused, *operands(0))
    torch.testing.assert_close(within, [by_pytorch(*operands(1))])
    torch.testing.assert_close(y, by_pytorch(*operands(0)))
    (_, inner_scratch, _), (_, outer_scratch, _) = cudnn.runs
    assert inner_scratch != outer_scratch


def test_an_engine_that_raises_falls_back_once_per_call_and_is_noted_once(plan, cudnn, caplog):
    def fail():
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED\nat some line")

    cudnn.on_execute = staticmethod(fail)
    for _ in range(3):
        torch.testing.assert_close(plan.run(by_pytorch, *operands()), by_pytorch(*operands()))
    reason = "RuntimeError: CUDNN_STATUS_EXECUTION_FAILED"
    assert list(executables.MISSES.items()) == [(KEY, reason)]
    assert [r.getMessage() for r in caplog.records] == [
        f"PyTorch runs {KEY} in place of eng1: {reason}; {executables.TUNE_AGAIN}"
    ]
    assert caplog.records[0].levelno == logging.WARNING
    assert caplog.records[0].name == "steadytorch"


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_an_address_that_is_not_aligned_is_a_miss(plan, cudnn, which):
    given = operands()
    memory = torch.empty(given[which].numel() + 1)
    shifted = memory[1:].as_strided(given[which].shape, given[which].stride())
    given[which] = shifted.copy_(given[which])
    torch.testing.assert_close(plan.run(by_pytorch, *given), by_pytorch(*given))
    assert cudnn.runs == []
    assert "multiple of 16 bytes" in executables.MISSES[KEY]


def test_trying_an_engine_out_is_no_miss(plan, cudnn, caplog):
    def fail():
        raise RuntimeError("refused")

    cudnn.on_execute = staticmethod(fail)
    assert not plan.enqueue({}, 0)
    assert executables.MISSES == {}
    assert caplog.records == []


@pytest.mark.parametrize(
    ("engine", "reason"),
    [(GONE, "this cuDNN has no plan eng999"), ("eng_none", "cuDNN has no engine")],
)
def test_without_a_plan_pytorch_runs_it_and_the_reason_is_noted(cudnn, engine, reason):
    assert planned(PROBLEM, engine, HERE, by_pytorch) is by_pytorch
    assert reason in executables.MISSES[KEY]


@pytest.mark.parametrize(
    ("engine", "version", "capability", "runs"),
    [
        ("eng23_k2=4", 91500, "9.0", False),
        ("eng23_k2=4", 91600, "9.0", True),
        ("eng58", 91900, "12.0", False),
        ("eng58", 91900, "9.0", True),
    ],
)
def test_an_engine_on_the_denylist_is_not_made_by_its_name(
    cudnn, monkeypatch, engine, version, capability, runs
):
    """Whether named by a stored plan, an imported one, or one written by hand."""
    monkeypatch.setattr(executables, "version", lambda: version)
    monkeypatch.setattr(executables, "target", lambda device: Target(None, None, capability))
    run = planned(PROBLEM, engine, HERE, by_pytorch)
    torch.testing.assert_close(run(*operands()), by_pytorch(*operands()))
    assert [name for _, name in cudnn.ran] == ([engine] if runs else [])
    assert [r.split(":")[0] for r in executables.MISSES.values()] == ([] if runs else [FAULTY])


def test_without_memory_for_its_workspace_a_call_falls_back_and_the_next_one_runs(
    plan, cudnn, monkeypatch
):
    def no_memory(*size, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 bytes.\nmore")

    with monkeypatch.context() as full:
        full.setattr(torch, "empty", no_memory)
        y = plan.run(by_pytorch, *operands())
    torch.testing.assert_close(y, by_pytorch(*operands()))
    assert cudnn.runs == []
    reason = "OutOfMemoryError: CUDA out of memory. Tried to allocate 64 bytes."
    assert {KEY: reason} == executables.MISSES
    torch.testing.assert_close(plan.run(refused, *operands()), by_pytorch(*operands()))
    assert len(cudnn.runs) == 1


def test_a_call_that_falls_back_has_given_up_its_own_output(plan, cudnn, monkeypatch):
    """If memory is short, there is not enough for two outputs."""
    made, empty_strided = [], torch.empty_strided

    def noted(*given, **options):
        y = empty_strided(*given, **options)
        made.append(weakref.ref(y))
        return y

    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def fallback(*given):
        assert [y() for y in made] == [None]
        return by_pytorch(*given)

    cudnn.on_execute = staticmethod(fail)
    monkeypatch.setattr(torch, "empty_strided", noted)
    torch.testing.assert_close(plan.run(fallback, *operands()), by_pytorch(*operands()))


@pytest.mark.parametrize(("current", "switched"), [(0, [1]), (1, [])])
def test_a_plan_runs_with_its_own_device_current(cudnn, monkeypatch, current, switched):
    """cuDNN and its default stream go by the current device, PyTorch's own operators do not."""
    now, entered, seen = [current], [], []

    @contextlib.contextmanager
    def device(index):
        entered.append(index)
        before, now[0] = now[0], index
        yield
        now[0] = before

    made = EngineExecutable(PROBLEM, "eng1", torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    cudnn.on_execute = staticmethod(lambda: seen.append(now[0]))
    x, w, b, z = operands()
    y, scratch = torch.empty_like(z), torch.empty(64, dtype=torch.uint8)
    tensors = {INPUT: x, WEIGHT: w, BIAS: b, OTHER: z, OUTPUT: y}
    assert made.enqueue({uid: t.data_ptr() for uid, t in tensors.items()}, scratch.data_ptr())
    torch.testing.assert_close(y, by_pytorch(x, w, b, z))
    assert (seen, entered, now) == ([1], switched, [current])


def test_where_no_engine_can_run_at_all_one_line_says_so(cudnn, monkeypatch, caplog):
    def missing():
        raise UnsupportedError("choosing cuDNN engines needs it: pip install 'it'")

    monkeypatch.setattr(executables, "version", missing)
    keys = [KEY, KEY.replace("/i2x", "/i3x")]
    for key in keys:
        assert planned(parse(key), "eng1", HERE, refused) is refused
    assert list(executables.MISSES) == keys
    (record,) = caplog.records
    assert record.getMessage() == (
        "PyTorch runs every convolution in place of its engine: choosing cuDNN engines needs it: "
        "pip install 'it'; results are correct, but the speedup is lost"
    )


def test_what_is_noted_and_logged_has_an_end(cudnn, monkeypatch, caplog):
    monkeypatch.setattr(executables, "MOST_MISSES", 2)
    for problem in "aabbc":
        note_miss(problem, "", "why", "what to do")
    assert list(executables.MISSES) == ["a", "b"]
    assert [r.getMessage() for r in caplog.records] == [
        f"PyTorch runs {p} in place of cuDNN's first suggestion: why; what to do" for p in "ab"
    ]


def test_threads_that_miss_at_once_log_once(cudnn, caplog):
    barrier = Barrier(8)

    def note():
        barrier.wait()
        for number in range(50):
            note_miss(f"{number}", "eng1", "why")

    threads = [Thread(target=note) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == len(executables.MISSES) == 50


@pytest.mark.parametrize(
    ("which", "change", "named"),
    [
        (1, torch.Tensor.half, "float16"),
        (2, torch.Tensor.double, "float64"),
        (2, lambda b: b[:1], "(1,)"),
        (3, lambda z: z[:1], "(1, 6, 9, 9)"),
        (3, lambda z: z.to("meta"), "meta"),
    ],
    ids=["weight's type", "bias's type", "short bias", "broadcast", "elsewhere"],
)
def test_operands_that_are_not_what_a_plan_reads_are_refused(which, change, named):
    given = operands()
    check_operands(PROBLEM, *given)
    given[which] = change(given[which])
    with pytest.raises(UnsupportedError) as error:
        check_operands(PROBLEM, *given)
    assert named in str(error.value)
