"""Kernels compiled in threads by real Triton, for a fake GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from steadytorch.kernels import (
    activated_linear,
    ahead,
    bias_add_relu,
    conv_relu_max_pool,
    depthwise_conv,
    pointwise_conv,
    relu_max_pool,
    small_channel_conv,
)
from steadytorch.kernels.launch import Launch, traced

pytest.importorskip("triton", reason="compiling the programs needs Triton: not installed")

pytestmark = pytest.mark.filterwarnings("ignore")
LAST = {"memory_format": torch.channels_last}
MODULES = (
    activated_linear,
    bias_add_relu,
    conv_relu_max_pool,
    depthwise_conv,
    pointwise_conv,
    relu_max_pool,
    small_channel_conv,
)


class Driver:
    """Fake driver of an H200 that loads anything and launches nothing."""

    def __init__(self):
        self.launched = []
        self.device = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda *given: (1, 2, 0, 0, 1024),
        )
        self.launcher_cls = lambda src, metadata: lambda *given: self.launched.append(metadata.name)

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    from triton.runtime import driver as config

    from steadytorch.kernels import programs, separable_programs

    found = Driver()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config, "_active", found)
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(ahead, "COMPILATIONS", {})

    def clear():
        for module in MODULES:
            module.prepared.cache_clear()
        for file in (programs, separable_programs):
            for program in vars(file).values():
                getattr(program, "device_caches", {}).clear()

    clear()
    yield found
    settle()
    clear()


@pytest.fixture
def made(driver, monkeypatch):
    """Records Triton's compilations: name and thread."""
    from triton import knobs

    found = []

    def listener(metadata, **rest):
        found.append((metadata["name"], threading.current_thread()))

    monkeypatch.setattr(knobs.compilation, "listener", listener)
    return found


def settle():
    """Wait for all compile threads."""
    for thread in threading.enumerate():
        if thread.name == "steadytorch-compile":
            thread.join()


def small(block=1024):
    """A launch of a kernel that compiles quickly."""
    from steadytorch.kernels import programs

    device = torch.device("cpu")
    return Launch(programs.bias_add_relu, (1, 1, 1), (48, 3, 1, True, block), device)


def begin(block=1024):
    """Begins to compile the kernel of `small`."""
    from steadytorch.kernels import programs

    arguments = (48, 3, 1, True, block)
    ahead.begin(programs.bias_add_relu, torch.float16, 4, arguments, {"num_warps": 4})


def operands():
    return [torch.zeros(48, dtype=torch.float16) for _ in range(4)]


def empty(*shape, **options):
    return torch.empty(shape, dtype=torch.float16, device="cuda", **options)


def weight_of(channels, *kernel):
    return empty(*kernel, channels).permute(3, 2, 0, 1)


CALLS = {
    "depthwise": (
        depthwise_conv,
        lambda: (empty(32, 40, 9, 9, **LAST), weight_of(40, 3, 3, 1), empty(40)),
        ([1, 1], [1, 1], [1, 1], "relu"),
        4,
    ),
    "one image": (
        depthwise_conv,
        lambda: (empty(1, 40, 9, 9, **LAST), weight_of(40, 3, 3, 1), None),
        ([1, 1], [1, 1], [1, 1], ""),
        4,
    ),
    "pointwise": (
        pointwise_conv,
        lambda: (empty(2, 24, 4, 4, **LAST), empty(40, 24, 1, 1), empty(40)),
        ("silu", None, None),
        6,
    ),
    "pixels in sixteens": (
        pointwise_conv,
        lambda: (empty(16, 128, 4, 4, **LAST), empty(8, 128, 1, 1), None),
        ("", None, None),
        6,
    ),
    "thin": (
        small_channel_conv,
        lambda: (empty(2, 3, 16, 16, **LAST), empty(16, 3, 3, 3), empty(16)),
        ([2, 2], [1, 1], [1, 1], "relu"),
        4,
    ),
    "linear": (
        activated_linear,
        lambda: (empty(3, 7, 48), empty(80, 48), empty(80)),
        ("relu",),
        6,
    ),
    "residual": (
        bias_add_relu,
        lambda: (empty(2, 3, 8, 8), empty(2, 3, 8, 8), empty(3)),
        (),
        4,
    ),
    "pooling": (
        relu_max_pool,
        lambda: (empty(2, 32, 16, 16),),
        ([2, 2], [2, 2], [0, 0], [1, 1], False),
        2,
    ),
    "stem": (
        conv_relu_max_pool,
        lambda: (empty(16, 3, 32, 32), empty(32, 3, 3, 3), None),
        ([1, 1], [1, 1], [3, 3], [2, 2], [1, 1], False, ""),
        4,
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_traced_is_compiled_once_for_the_very_call(call, driver, made):
    module, tensors, rest, count = call
    with FakeTensorMode():
        given = (*tensors(), *rest)
        assert module.OPERATOR.overload(*given).device.type == "cuda"
        module.OPERATOR.overload(*given)
        fused = module.program_for(*given)
    settle()
    assert [thread is threading.main_thread() for _, thread in made] == [False]
    fused._launch(*(torch.zeros(64, dtype=torch.float16) for _ in range(count)))
    assert len(made) == 1
    assert driver.launched == [made[0][0]]


def test_a_call_waits_for_the_thread_that_compiles_its_program(driver, made, monkeypatch):
    from triton import knobs

    is_compiling, may_end = threading.Event(), threading.Event()

    def slow(**given):
        made.append(given["metadata"]["name"])
        is_compiling.set()
        may_end.wait()

    monkeypatch.setattr(knobs.compilation, "listener", slow)
    launch, other = small(), small()
    begin()
    begin()
    is_compiling.wait()
    calls = [threading.Thread(target=each, args=operands()) for each in (launch, other)]
    for call in calls:
        call.start()
    may_end.set()
    for call in calls:
        call.join()
    assert (len(made), len(driver.launched)) == (1, 2)


def test_what_no_thread_has_begun_is_compiled_by_the_call(driver, made, monkeypatch):
    turns = threading.Semaphore(0)
    monkeypatch.setattr(ahead, "compile_slots", lambda: turns)
    launch = small()
    begin()
    launch(*operands())
    turns.release()
    settle()
    assert [thread is threading.main_thread() for _, thread in made] == [True]
    assert len(driver.launched) == 1


def test_other_programs_are_compiled_by_their_calls(driver, made):
    begin()
    settle()
    small(block=512)(*operands())
    assert [thread is threading.main_thread() for _, thread in made] == [False, True]


def test_what_was_made_is_for_one_device(driver, made):
    launch = small()
    begin()
    settle()
    driver.device = 1
    launch(*operands())
    assert len(made) == 2


def test_addresses_that_are_not_aligned_have_a_program_of_their_own(driver, made):
    launch = small()
    begin()
    launch(*(torch.zeros(49, dtype=torch.float16)[1:] for _ in range(4)))
    launch(*operands())
    assert (len(made), len(driver.launched)) == (2, 2)


def test_what_fails_ahead_is_tried_again_by_the_call(driver, made, monkeypatch):
    from triton import knobs

    def failing(**given):
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no space left on the device")

    monkeypatch.setattr(knobs.compilation, "listener", failing)
    launch = small()
    begin()
    launch(*operands())
    assert len(driver.launched) == 1


def test_what_fails_for_good_is_said_by_the_call(driver, monkeypatch, capfd):
    from triton import CompilationError

    launch = small(block=1000)  # no power of two
    begin(block=1000)
    settle()
    assert capfd.readouterr().err == ""
    with pytest.raises(CompilationError):
        launch(*operands())


def test_the_callers_own_mode_stays_in_force(driver, made):
    from concurrent.futures import ThreadPoolExecutor

    from triton import AsyncCompileMode

    launch = small()
    begin()
    with ThreadPoolExecutor(1) as pool, AsyncCompileMode(pool):
        launch(*operands())
        with pytest.raises(RuntimeError, match="already active"):
            begin()
    assert len(driver.launched) == 1


def test_filters_of_warnings_are_changed_in_no_thread(driver, made, monkeypatch):
    changed = []
    original = warnings.catch_warnings

    def watched(*given, **named):
        changed.append(threading.current_thread())
        return original(*given, **named)

    monkeypatch.setattr(warnings, "catch_warnings", watched)
    before = warnings.filters
    begin()
    while any(thread.name == "steadytorch-compile" for thread in threading.enumerate()):
        with original():
            warnings.simplefilter("error")
            time.sleep(0)
    assert warnings.filters is before
    assert [thread.name for thread in changed if thread is not threading.main_thread()] == []
    small(block=512)(*operands())
    # In the callers' threads Triton's own still holds; from 3.7 on it changes none.
    assert bool(changed) is (version("triton") < "3.7")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_elsewhere_nothing_is_compiled(device, driver):
    found = []
    fake = traced(lambda *given: found.append(given), torch.relu)
    fake(torch.zeros(2, 2, device=device))
    assert found == []


def test_without_a_context_of_cuda_nothing_is_compiled(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    found = []
    with FakeTensorMode():
        traced(lambda *given: found.append(given), torch.relu)(empty(2, 2))
    assert found == []


def test_sizes_that_are_symbols_stay_so(driver):
    found = []
    fake = traced(lambda *given: found.append(given), torch.relu)
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        size = environment.create_unbacked_symint()
        fake(empty(4, 2))
        assert len(found) == 1
        fake(torch.empty((4, size), device="cuda"))
    assert len(found) == 1


def test_what_an_operator_is_made_of_is_compiled_where_its_program_does_not_run(driver):
    found = []
    inner = traced(lambda *given: found.append(given), torch.relu)
    with FakeTensorMode():
        traced(lambda x: None, inner)(empty(2, 2))
        assert len(found) == 1
        traced(lambda x: "its program", inner)(empty(2, 2))
    assert len(found) == 1


def test_a_failure_to_find_is_left_to_the_call(driver):
    with FakeTensorMode():
        assert traced(lambda x: 1 / 0, torch.relu)(empty(2, 2)).shape == (2, 2)


END = """
import sys, threading
sys.path.insert(0, {here!r})
import torch
from test_ahead import Driver, ahead, begin
from triton import knobs
from triton.runtime import driver
turns = threading.Semaphore(1)
ahead.compile_slots = lambda: turns
driver.set_active(Driver())
knobs.compilation.listener = lambda **given: print("compiled", flush=True)
for block in (256, 512, 1024, 2048):
    begin(block)
print("ends", flush=True)
"""


@pytest.mark.slow
def test_a_process_may_end_meanwhile(tmp_path):
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", END.format(here=str(Path(__file__).parent))],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert (found.returncode, found.stderr) == (0, "")
    after = found.stdout.partition("ends")[2]
    assert after.count("compiled") <= 1
