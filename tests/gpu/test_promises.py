"""Promises to the caller on a GPU: fresh weights, strides, containers, exceptions, moves."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime import device_samples
from steadytorch.runtime.device_samples import INTERVAL_NS
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.entries import STALE, ServingOptions
from steadytorch.runtime.module import TunedModule
from steadytorch.runtime.trained import TrainedModule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own, not ours
]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Tests beside this one share the GPU, which makes comparisons wait for their turn."""
    monkeypatch.setattr(device_samples, "WAIT_NS", 10**9)


def spec(name, **parameters):
    return TransformSpec(name, tuple(parameters.items()))


FROZEN = spec("compile", mode="default", freezing=True)
COMPILED = spec("compile", mode="default", freezing=False)
PLANS = {
    "graph": (spec("cuda_graph"),),
    "channels_last": (spec("channels_last"),),
    "fused": (spec("fold_batch_norm"), spec("fused_kernels"), spec("channels_last")),
    "engines": (spec("fold_batch_norm"), spec("cudnn_engines")),
    "half": (spec("cast_weights", dtype="fp16"), spec("channels_last"), spec("cuda_graph")),
    "frozen": (FROZEN,),
    "frozen graph": (spec("channels_last"), FROZEN, spec("cuda_graph")),
    "inference_mode": (spec("inference_mode"),),
}
every_plan = pytest.mark.parametrize("name", PLANS)
LOOSE = {"rtol": 0.05, "atol": 0.05}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.pool, self.second = nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.rate = torch.ones(1, device="cuda")

    def forward(self, x):
        x = self.pool(torch.relu(self.norm(self.convolution(x))))
        return torch.relu(self.second(x)) * self.rate


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Network().cuda().eval()


@pytest.fixture
def x():
    return torch.randn(4, 3, 64, 64, device="cuda")


def serve(model, name, **options):
    return TunedModule(
        model, lambda context: Resolution(PLANS[name]), options=ServingOptions(**options)
    )


def fused_step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def averaged(model):
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 1.5)


WRITES = {
    "fused step": fused_step,
    "average": averaged,
    "data": lambda model: model.second.weight.data.mul_(2),
    "foreach on data": lambda m: torch._foreach_mul_([p.data for p in m.parameters()], 1.5),
    "statistics": lambda m: m.norm.running_mean.data.add_(0.5),
    "plain attribute": lambda m: m.rate.mul_(3),
    "plain attribute's data": lambda m: m.rate.data.mul_(3),
    "DLPack": lambda m: torch.from_dlpack(m.second.weight.detach()).mul_(2),
}


@every_plan
@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_no_result_is_of_the_weights_of_before(model, x, name, write):
    tuned = serve(model, name)
    for _ in range(3):
        torch.testing.assert_close(tuned(x), model(x), **LOOSE)
    assert tuned.report().hits == 3, str(tuned.report())
    torch.cuda.synchronize()
    time.sleep(2e-9 * INTERVAL_NS)  # values are compared no more often than this
    WRITES[write](model)
    for _ in range(3):
        torch.testing.assert_close(tuned(x), model(x), **LOOSE)
    if name != "inference_mode":
        assert tuned.report().fallbacks == {STALE: 3}
    tuned.close()


@torch.no_grad()
def test_a_write_behind_a_full_queue_is_found_though_late(model, x, monkeypatch):
    monkeypatch.setattr(device_samples, "WAIT_NS", 0)
    tuned = serve(model, "graph")
    for _ in range(3):
        tuned(x)
    time.sleep(2e-9 * INTERVAL_NS)
    torch.cuda._sleep(50_000_000)
    averaged(model)
    tuned(x)
    torch.cuda.synchronize()
    time.sleep(2e-9 * INTERVAL_NS)
    tuned(x)
    torch.testing.assert_close(tuned(x), model(x), **LOOSE)
    assert STALE in tuned.report().fallbacks
    tuned.close()


@torch.no_grad()
def test_weights_that_stay_are_never_reported(model, x):
    tuned = serve(model, "graph")
    for _ in range(300):
        tuned(x)
        time.sleep(1e-3)
    assert tuned.report().calls == {"tuned": 300}
    tuned.close()


@torch.no_grad()
def test_watched_weights_are_not_kept_alive(model, x):
    tuned = serve(model, "channels_last")
    tuned(x)
    before = torch.cuda.memory_allocated()
    size = model.second.weight.nbytes
    model.second.weight.data = torch.ones_like(model.second.weight)[:1].expand(16, -1, -1, -1)
    tuned(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < before + size
    tuned.close()


@torch.no_grad()
def test_strides_are_those_of_the_untouched_model(model, x):
    class Views(nn.Module):
        def forward(self, x):
            y = inner(x)
            return y, y.flatten(1)[:, :5], y.flatten(1)[:, :1].expand(-1, 3)

    inner = model
    for name in ("graph", "channels_last", "half", "frozen graph"):
        for layer in (model, Views().eval()):
            tuned = serve(layer, name, canary=True)
            for given in (x, x.contiguous(memory_format=torch.channels_last)):
                found, expected = tuned(given), layer(given)
                for one, other in zip(
                    *(t if isinstance(t, tuple) else (t,) for t in (found, expected)), strict=True
                ):
                    assert one.stride() == other.stride(), name
            tuned.close()


class Storing(Network):
    def forward(self, batch, cache):
        batch["feature"] = super().forward(batch["image"])
        cache.append(batch["feature"].mean((2, 3)))
        return torch.stack(cache).sum(0)


@every_plan
@torch.no_grad()
def test_containers_are_written_once(x, name):
    torch.manual_seed(0)
    model = Storing().cuda().eval()
    tuned = serve(model, name, canary=True)
    for _ in range(6):
        batch, expected = {"image": x}, {"image": x}
        cache, due = ([torch.ones(4, 16, device="cuda")] for _ in range(2))
        torch.testing.assert_close(tuned(batch, cache), model(expected, due), **LOOSE)
        assert list(batch) == list(expected)
        assert len(cache) == len(due) == 2
        torch.testing.assert_close(batch["feature"], expected["feature"], **LOOSE)
        assert batch["feature"].stride() == expected["feature"].stride()
    tuned.close()


class Trainable(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.relu(self.convolution(x)).mean((2, 3)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("candidate", [(spec("channels_last"),), (COMPILED,)])
def test_checkpointed_steps_train_as_without_a_plan(x, candidate, reentrant):
    torch.manual_seed(0)
    model = Trainable().cuda().train()
    tuned = TrainedModule(
        model, lambda a: Resolution(candidate), options=ServingOptions(trains=True)
    )
    gradients = []
    for called in (model, tuned):
        for _ in range(2):
            model.zero_grad()
            given = x.clone().requires_grad_(reentrant)
            checkpoint(called, given, use_reentrant=reentrant).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    tuned.close()


@contextlib.contextmanager
def deadline(seconds):
    def expired(number, frame):
        raise TimeoutError("time is up")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@torch.no_grad()
def test_deadlines_and_hooks_that_raise_are_heard(model, x):
    class Slow(nn.Module):
        def forward(self, x, times):
            for _ in range(times):
                x = torch.tanh(x)
            return x

    tuned = TunedModule(Slow().eval(), lambda a: Resolution((spec("inference_mode"),)))
    with pytest.raises(TimeoutError, match="time is up"), deadline(0.3):
        tuned(x, 10**9)
    tuned = serve(model, "channels_last")
    tuned(x)

    def stop(*given):
        raise LookupError("enough")

    model.second.register_forward_hook(stop)
    tuned.refresh()
    with pytest.raises(LookupError, match="enough"):
        tuned(x)


@torch.no_grad()
def test_hooks_are_heard_under_every_plan(model, x):
    rate, seen = [1.0], []

    def hook(module, args, output):
        seen.append(1)
        return output * rate[0]

    model.second.register_forward_hook(hook)
    for name in PLANS:
        tuned = serve(model, name)
        for factor in (1.0, 1.0, 3.0, 0.0):
            rate[0] = factor
            before = len(seen)
            found = tuned(x)
            assert len(seen) > before, name
            torch.testing.assert_close(found, model(x), **LOOSE)
        tuned.close()


@every_plan
@torch.no_grad()
def test_moves_to_where_it_is_leave_the_plan_in_use(model, x, name):
    tuned = serve(model, name)
    tuned(x)
    for move in (
        lambda: tuned.to("cuda"),
        lambda: tuned.float(),
        lambda: tuned.cuda(),
        lambda: nn.Sequential(tuned).to("cuda"),
        lambda: tuned.eval(),
    ):
        move()
        tuned(x)
    assert tuned.report().calls == {"tuned": 6}
    tuned.close()


@every_plan
def test_a_load_noticed_in_inference_mode_leaves_later_calls_sound(name):
    torch.manual_seed(0)
    model, x = Network().cuda().eval(), torch.randn(2, 3, 32, 32, device="cuda")
    tuned = TunedModule(model, lambda context: Resolution(PLANS[name]))
    with torch.no_grad():
        tuned(x)
    tuned.load_state_dict({name: t.clone() for name, t in tuned.state_dict().items()})
    for mode in (torch.inference_mode, torch.no_grad):
        for _ in range(3):
            time.sleep(2e-9 * INTERVAL_NS)
            with mode():
                torch.testing.assert_close(tuned(x), model(x), **LOOSE)
    assert tuned.report().hits >= 5
