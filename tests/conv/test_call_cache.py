from __future__ import annotations

import copy
import io
import pickle
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from faked import fake_cudnn  # noqa: F401 - a fixture
from torch.utils._python_dispatch import TorchDispatchMode

from steadytorch.conv import call_cache, executables
from steadytorch.conv.choices import Choice
from steadytorch.conv.module import EngineConv

LAST = torch.channels_last


def posed(batch=2, dtype=torch.float32, side=9, seed=0):
    torch.manual_seed(seed)
    made = [torch.randn(batch, channels, side, side, dtype=dtype) for channels in (8, 6)]
    return [t.contiguous(memory_format=LAST) for t in made]


def layer(dtype=torch.float32):
    torch.manual_seed(1)
    weight = torch.randn(6, 8, 3, 3, dtype=dtype).contiguous(memory_format=LAST)
    bias = torch.randn(6, dtype=dtype)
    made = EngineConv(weight, bias, ((1, 1), (1, 1), (1, 1), 1), True, "conv", None)
    made.choose(Choice("eng1"))
    return made


def right(made, x, z):
    return torch.relu(torch.conv2d(x, made.weight, made.bias, padding=1) + z)


@pytest.fixture
def keys(monkeypatch) -> list[Any]:
    """Records each look-up by key."""
    found, look_up = [], call_cache.runner_of

    def noted(*given: Any) -> Any:
        found.append(given)
        return look_up(*given)

    monkeypatch.setattr(call_cache, "runner_of", noted)
    return found


@pytest.mark.parametrize("dtype", executables.NUMBERS)
def test_a_hundred_calls_alike_build_one_key_and_one_table_of_addresses(
    cudnn, keys, monkeypatch, dtype
):
    made, (x, z) = layer(dtype), posed(dtype=dtype)
    tables, execute = [], cudnn.execute

    def seen(graph, index, pointers, workspace, handle):
        tables.append(pointers)
        execute(graph, index, pointers, workspace, handle)

    monkeypatch.setattr(cudnn, "execute", seen)
    with torch.no_grad():
        results = [made(x, z) for _ in range(100)]
    torch.testing.assert_close(results[-1], right(made, x, z))
    assert len(keys) == 1
    assert len(tables) == 100
    assert all(table is tables[0] for table in tables)


def a_weight_of_another_shape(made, x, z):
    made.weight.data = torch.randn(6, 8, 1, 1)
    made.bias.data = torch.randn(6)
    return x, z[:, :, :1, :1].expand(-1, -1, 11, 11).contiguous(memory_format=LAST)


@pytest.mark.parametrize(
    ("change", "engines"),
    [
        (lambda made, x, z: posed(batch=3), 1),
        (lambda made, x, z: posed(side=7), 1),
        (lambda made, x, z: (x.contiguous(), z), 1),
        (lambda made, x, z: (made.half() and x, z), 1),
        (lambda made, x, z: (x, z[:1]), 0),
        (lambda made, x, z: (x, z.double()), 0),
        (lambda made, x, z: (setattr(made, "bias", None) or x, None), 1),
        (a_weight_of_another_shape, 1),
        (lambda made, x, z: (setattr(made.weight, "data", made.weight.contiguous()) or x, z), 1),
    ],
    ids=[
        *("batch", "size", "layout", "module's type", "a residual that broadcasts"),
        *("residual's type", "no bias", "weight's shape", "weight's layout"),
    ],
)
def test_a_call_that_differs_is_looked_up_and_right(cudnn, keys, change, engines):
    made, (x, z) = layer(), posed()
    made.relu = False
    made.choose(Choice("eng1"))
    with torch.no_grad():
        made(x, z)
        x, z = change(made, x, z)
        found = made(x, z)
        weight, bias = made.weight.float(), None if made.bias is None else made.bias.float()
        expected = torch.conv2d(x, weight, bias, padding=1) + (0 if z is None else z)
    bound = 1e-5 if made.weight.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound, check_dtype=False)
    assert len(keys) == 2
    assert len(cudnn.runs) == 1 + engines


def fewer_weights(made, x):
    made.weight.data = made.weight[:4]
    return x


def no_bias(made, x):
    made.bias = None
    return x


@pytest.mark.parametrize(
    ("biased", "change"),
    [(True, lambda made, x: posed(batch=3)[0]), (True, no_bias), (False, fewer_weights)],
    ids=["batch", "no bias", "weights"],
)
def test_one_difference_is_enough_where_all_strides_are_equal(cudnn, keys, biased, change):
    made, (x, _) = layer(), posed()
    made.relu, made.bias = False, made.bias if biased else None
    made.choose(Choice("eng1"))
    with torch.no_grad():
        made(x)
        strides = x.stride(), made.weight.stride()
        x = change(made, x)
        assert (x.stride(), made.weight.stride()) == strides
        found, expected = made(x), torch.conv2d(x, made.weight, made.bias, padding=1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (len(keys), len(cudnn.runs)) == (2, 2)


@pytest.mark.parametrize("which", ["x", "weight", "bias", "other"])
def test_a_tensor_on_another_device_is_looked_up(cudnn, keys, monkeypatch, which):
    made, (x, z) = layer(), posed()
    given = {"x": x, "weight": made.weight, "bias": made.bias, "other": z}
    with torch.no_grad():
        made(x, z)
        moved = given[which]
        monkeypatch.setattr(torch.Tensor, "get_device", lambda t: 1 if t is moved else -1)
        made(x, z)
    assert len(keys) == 2


def test_another_precision_is_looked_up(cudnn, keys, monkeypatch):
    made, (x, z) = layer(), posed()
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = conv.fp32_precision
    with torch.no_grad():
        try:
            for precision in ("ieee", "tf32", "tf32"):
                conv.fp32_precision = precision
                made(x, z)
        finally:
            conv.fp32_precision = before
    assert [key.split("/")[2] for key, _ in cudnn.ran] == ["fp32", "tf32", "tf32"]
    assert len(keys) == 2


def test_another_choice_is_what_runs(cudnn):
    made, (x, z) = layer(), posed()
    with torch.no_grad():
        made(x, z)
        made.choose(Choice("eng2"))
        made(x, z)
    assert [name for _, name in cudnn.ran] == ["eng1", "eng2"]


def test_each_thread_has_plans_of_its_own(cudnn):
    made, barrier, wrong = layer(), Barrier(4), []
    given = [posed(seed=seed) for seed in range(4)]
    expected = [right(made, *each) for each in given]

    def run(which):
        barrier.wait()
        with torch.no_grad():
            for _ in range(30):
                if not torch.allclose(made(*given[which]), expected[which], atol=1e-4):
                    wrong.append(which)

    threads = [Thread(target=run, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(cudnn.runs) == 4 * 30
    assert executables.MISSES == {}


def saved(made):
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made)), saved]
)
def test_a_copy_of_what_has_run_runs(cudnn, copied):
    made, (x, z) = layer(), posed()
    with torch.no_grad():
        expected = made(x, z)
        torch.testing.assert_close(copied(made)(x, z), expected)
    assert [name for _, name in cudnn.ran] == ["eng1", "eng1"]


def test_a_mode_sees_the_operator_of_a_call_that_is_alike(cudnn):
    class Seen(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    made, (x, z) = layer(), posed()
    with torch.no_grad():
        made(x, z)
        with Seen() as seen:
            made(x, z)
    assert seen.names[0].startswith("steadytorch.conv_engine")
