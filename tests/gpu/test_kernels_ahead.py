from __future__ import annotations

import threading
import warnings

import pytest
import torch

from steadytorch.kernels import ahead
from steadytorch.kernels import depthwise_conv as depthwise_room
from steadytorch.kernels import pointwise_conv as pointwise_room
from steadytorch.kernels.depthwise_conv import channels_innermost, depthwise_conv2d
from steadytorch.kernels.launch import is_installed
from steadytorch.kernels.pointwise_conv import pointwise_conv2d

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not is_installed(), reason="needs Triton"),
    pytest.mark.filterwarnings("ignore"),
]

OWN = {"depthwise_conv", "pointwise_conv"}
DISTINCT = 2
"""Programs of `network`: the pointwise convolutions share one, which has sizes as variables."""


@pytest.fixture
def made(monkeypatch, tmp_path):
    """What Triton compiled of ours, anew: the name, and the thread."""
    from triton import knobs

    from steadytorch.kernels import separable_programs

    found = []

    def listener(metadata, **rest):
        if metadata["name"] in OWN:
            found.append((metadata["name"], threading.current_thread().name))

    def clear():
        for room in (depthwise_room, pointwise_room):
            room.prepared.cache_clear()
        for name in OWN:
            getattr(separable_programs, name).device_caches.clear()
        torch.compiler.reset()

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", listener)
    monkeypatch.setattr(ahead, "COMPILATIONS", {})
    clear()
    yield found
    settle()
    clear()


def settle():
    """Waits for all threads that compile."""
    for thread in threading.enumerate():
        if thread.name == "steadytorch-compile":
            thread.join()


def random(*shape):
    generator = torch.Generator("cuda").manual_seed(len(shape))
    return torch.randn(shape, device="cuda", generator=generator).half() / 4


def operands():
    x = random(4, 64, 14, 14).contiguous(memory_format=torch.channels_last)
    return x, channels_innermost(random(64, 1, 5, 5)), random(64, 64, 1, 1), random(64)


def network(x, taps, weight, bias):
    x = depthwise_conv2d(x, taps, bias, 1, 2, 1, "relu") + 1
    x = pointwise_conv2d(x, weight, bias, "relu") + 1
    return pointwise_conv2d(x, weight, bias, "relu") * 2


@pytest.mark.parametrize("is_settled", [True, False])
def test_what_is_traced_is_compiled_once_and_in_threads(is_settled, made, monkeypatch):
    tensors = operands()
    if is_settled:  # else the first call comes when it may, most likely meanwhile
        join = ahead.call
        monkeypatch.setattr(ahead, "call", lambda *given: settle() or join(*given))
    before = list(warnings.filters)
    with torch.no_grad():
        compiled = torch.compile(network, fullgraph=True)
        found = compiled(*tensors)
        again = compiled(*tensors)
    assert warnings.filters == before
    assert len(made) == len({name for name, _ in made}) == DISTINCT
    if is_settled:
        assert {thread for _, thread in made} == {"steadytorch-compile"}
    assert torch.equal(found, again)
    torch.testing.assert_close(found, network(*tensors), rtol=2e-3, atol=2e-3)
    assert len(made) == DISTINCT


def test_another_thread_leaves_the_callers_device_and_stream(made):
    tensors, stream = operands(), torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        device = torch.cuda.current_device()
        torch.compile(network, fullgraph=True)(*tensors)
        assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_device() == device


def test_one_call_without_a_tracer_compiles_where_it_is(made):
    with torch.no_grad():
        network(*operands())
    assert [thread for _, thread in made] == [threading.current_thread().name] * DISTINCT
    assert ahead.COMPILATIONS == {}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_its_own(made):
    tensors = operands()
    with torch.no_grad():
        first = torch.compile(network, fullgraph=True)(*tensors)
        others = [t.to("cuda:1") for t in tensors]
        second = torch.compile(network, fullgraph=True)(*others)
    assert torch.equal(first, second.to(first.device))
