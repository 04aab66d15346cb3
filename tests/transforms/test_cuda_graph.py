from __future__ import annotations

import ctypes
from threading import Lock
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.graphs.copy_nodes import CopyNode
from steadytorch.graphs.graph_io_patching import Linked
from steadytorch.graphs.recording import collector_paused, first_cause
from steadytorch.graphs.static_buffers import StaticInputs
from steadytorch.transforms.base import Applicable
from steadytorch.transforms.cuda_graph import (
    CudaGraph,
    PoolMemory,
    Recorded,
    replayer,
)
from steadytorch.workload.workload import Workload

from ..graphs.driver import Driver


def test_an_inference_workload_on_a_gpu_will_do(gpu, on_gpu):
    assert CudaGraph().applies_to(on_gpu(nn.Linear(2, 2)), gpu) == Applicable()


def test_training_is_refused(gpu, on_gpu):
    made = on_gpu(nn.Linear(2, 2))
    training = Workload.training(made.model, made.inputs, torch.sum, torch.optim.SGD)
    assert "no gradients" in CudaGraph().applies_to(training, gpu).reason


def test_a_cpu_is_refused(cpu, conv_workload):
    assert CudaGraph().applies_to(conv_workload, cpu).reason == "no CUDA device"


HOOKS = {
    "of the model": lambda model, hook: model.register_forward_hook(hook),
    "of a layer": lambda model, hook: model[0].register_forward_hook(hook),
    "before a layer": lambda model, hook: model[0].register_forward_pre_hook(hook),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks_are_refused_as_a_replay_would_not_call_them(gpu, on_gpu, register):
    made, seen = on_gpu(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())), []
    handle = register(made.model, lambda *given: seen.append(given))
    assert "hooks" in CudaGraph().applies_to(made, gpu).reason
    handle.remove()
    assert CudaGraph().applies_to(made, gpu) == Applicable()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the norm is deprecated, and in use
def test_norms_of_weights_are_hooks_that_may_be_recorded(gpu, on_gpu):
    made = on_gpu(nn.utils.weight_norm(nn.Conv2d(3, 4, 3)))
    assert made.model._forward_pre_hooks
    assert CudaGraph().applies_to(made, gpu) == Applicable()


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
@pytest.mark.parametrize("place", ["argument", "keyword", "nested"])
def test_inputs_on_the_host_are_refused_as_their_values_would_be_frozen(gpu, on_gpu, shape, place):
    made, beside = on_gpu(nn.Conv2d(3, 4, 3)), torch.ones(shape)
    inputs = (*made.inputs, *({"argument": [beside], "nested": [{"a": [beside]}]}.get(place, [])))
    kwargs = {"scale": beside} if place == "keyword" else {}
    answer = CudaGraph().applies_to(Workload(made.model, inputs, kwargs), gpu)
    assert answer.reason == "an input is on cpu: replays would keep its recorded value"


def test_a_workload_that_is_yet_to_be_moved_is_on_one_device(gpu, conv_workload):
    assert CudaGraph().applies_to(conv_workload, gpu) == Applicable()


def test_the_reason_is_the_error_that_came_first():
    def capture():
        try:
            raise RuntimeError("operation not permitted when stream is capturing\ndetails")
        finally:
            raise RuntimeError("capture ended in a bad state")

    with pytest.raises(RuntimeError) as caught:
        capture()
    assert first_cause(caught.value) == "operation not permitted when stream is capturing"


def test_the_first_cause_is_of_the_recording_and_not_of_the_caller():
    around, error = KeyError("the caller's"), ValueError("of the recording")
    error.__context__ = around
    assert first_cause(error, around) == "of the recording"
    assert first_cause(error) == '"the caller\'s"'


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_before_after_recording(enabled):
    import gc

    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()


def test_memory_of_a_pool_is_told_from_that_of_others_and_grows(monkeypatch):
    def segments(*found):
        names = ("segment_pool_id", "address", "total_size")
        made = [dict(zip(names, each, strict=True)) for each in found]
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: made)

    memory = PoolMemory((0, 3))
    assert memory.around(150) is None
    segments(((0, 3), 300, 100), ((0, 0), 200, 100), ((0, 3), 100, 100))
    memory.look()
    found = {at: memory.around(at) for at in (99, 100, 199, 200, 299, 300, 399, 400)}
    low, high = range(100, 200), range(300, 400)
    assert found == dict(zip(found, (None, low, low, None, None, high, high, None), strict=True))
    segments(((0, 3), 400, 100))
    memory.look()
    assert memory.around(450) == range(400, 500)


# -- replayed calls, on the host instead of a device ---------------------------------------------


class Playing:
    """A recording of `2 * x`, replayed on the host, called on `stream` or while `recording`."""

    def __init__(self, static, by_node=True):
        self.driver, self.stream, self.recording, self.follows = Driver(), 7, False, 0
        self.static, self.output = static, 2 * static
        node = CopyNode(self.driver, static, ctypes.c_void_p())
        assert node.open(1)
        pool = SimpleNamespace(
            lock=Lock(),
            index=0,
            last_address=None,
            address=lambda index: self.stream,
            is_recording=lambda: self.recording,
            follow=self.follow,
        )
        linked, inputs = Linked([node] * by_node, [None]), StaticInputs((static,), {})
        self.pool = pool
        recorded = Recorded(self.replay, linked, inputs, self.output, pool, self.model)
        self.call = replayer(recorded)

    def model(self, x):
        return "the model", torch.is_grad_enabled()

    def follow(self):
        self.follows += 1
        self.pool.last_address = self.stream

    def replay(self):
        self.driver.replay()
        torch.mul(self.static, 2, out=self.output)


@pytest.mark.parametrize("by_node", [True, False], ids=["node", "launched"])
@pytest.mark.parametrize("way", ["call", "exact"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_results_are_of_their_inputs_and_stay_as_they_are(by_node, way, mode):
    playing = Playing(torch.zeros(3), by_node)
    call = playing.call if way == "call" else playing.call.exact
    static, x, y = playing.static, torch.randn(3), torch.randn(3, requires_grad=True)
    found, expected = [], []
    for each in (x, y, x, x, torch._neg_view(x), static, static[:], y):
        if each.data_ptr() == static.data_ptr():
            static.fill_(5)
        expected.append(2 * each.detach())
        with mode():
            found.append(call(each))
    for result, wanted in zip(found, expected, strict=True):
        assert torch.equal(result, wanted)
        assert not result.requires_grad
    assert playing.follows == 1


def test_aliased_outputs_are_the_recorded_ones_and_results_given_out_stay():
    playing, x = Playing(torch.zeros(3)), torch.ones(3)
    kept = playing.call.exact(x)
    assert playing.call.aliasing(3 * x) is playing.output
    assert playing.call.exact(4 * x).tolist() == [8, 8, 8]
    assert kept.tolist() == [2, 2, 2]


@pytest.mark.parametrize("by_node", [True, False], ids=["node", "launched"])
def test_tensors_of_another_type_are_converted_and_of_another_shape_refused(by_node):
    playing = Playing(torch.zeros(3), by_node)
    assert playing.call(torch.ones(3, dtype=torch.float64)).tolist() == [2, 2, 2]
    with pytest.raises(UsageError, match="the inputs differ from the recorded ones"):
        playing.call(torch.ones(1))
    assert playing.call(torch.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "change",
    [torch.Tensor.double, lambda x: x.T.contiguous().T, lambda x: x[:1].expand(4, 4)],
    ids=["type", "layout", "expanded"],
)
def test_inputs_that_a_transform_before_converted_are_never_read_as_they_lie(change):
    playing = Playing(torch.zeros(4, 4))
    for x in (torch.randn(4, 4), torch.randn(4, 4)):
        for _ in range(2):
            assert torch.equal(playing.call.exact(change(x)), 2 * change(x).float())


def test_every_change_of_the_stream_is_followed():
    playing, x = Playing(torch.zeros(3)), torch.ones(3)
    for playing.stream in (7, 7, 8, 7):
        assert playing.call.exact(x).tolist() == [2, 2, 2]
    assert playing.follows == 3


def test_after_a_call_that_the_driver_failed_the_next_is_right():
    playing, x = Playing(torch.zeros(3)), torch.ones(3)
    playing.call.exact(x)
    playing.driver.refuses = ("point", "turn")
    with pytest.raises(RuntimeError, match="refused to restore the input"):
        playing.call.exact(2 * x)
    playing.driver.refuses = ()
    assert playing.call.exact(x).tolist() == [2, 2, 2]


def test_within_another_recording_the_model_runs_without_gradients():
    playing = Playing(torch.zeros(3))
    playing.recording = True
    for call in (playing.call, playing.call.exact, playing.call.aliasing):
        assert call(torch.ones(3)) == ("the model", False)
        assert torch.is_grad_enabled()
    assert playing.follows == 0


def test_a_model_that_was_hooked_after_its_plan_was_made_is_not_recorded():
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *given: None)
    with (
        pytest.raises(UnsupportedError, match="hook"),
        CudaGraph().applied(Workload(model, torch.ones(1, 2))),
    ):
        pass
