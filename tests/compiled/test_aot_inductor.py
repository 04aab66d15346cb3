from __future__ import annotations

import os
import subprocess
import warnings
import zipfile

import pytest
import torch
from torch import nn

from steadytorch.compiled.aot_inductor import Package, brings_its_library, make
from steadytorch.conv.operator import conv_engine
from steadytorch.errors import UnsupportedError
from steadytorch.workload.signature import signature

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


@pytest.mark.parametrize(("flags", "expected"), [((), False), (("-static-libstdc++",), True)])
def test_code_that_brings_its_own_library_is_seen(tmp_path, flags, expected):
    source, code, file = (tmp_path / name for name in ("s.cpp", "s.so", "p.pt2"))
    source.write_text(
        "#include <sstream>\nint f() { std::ostringstream o; return o.str().size(); }"
    )
    made = ["-shared", "-fPIC", *flags, "-o", str(code), str(source)]
    subprocess.run([os.environ.get("CXX", "g++"), *made], check=True)
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(code, "data/aotinductor/model/s.so")
        archive.writestr("version", "1")
    assert brings_its_library(file) is expected


@pytest.mark.filterwarnings("ignore")
def test_a_package_that_would_crash_is_not_made(kept, tmp_path, monkeypatch):
    def compiled(program, package_path, inductor_configs):
        with zipfile.ZipFile(package_path, "w") as archive:
            archive.writestr("s.so", b"\x7fELF\0libc.so.6\0")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiled)
    with pytest.raises(UnsupportedError, match="set CXX to another"):
        make(kept.model, (kept.x,), {}, {}, tmp_path / "p.pt2")


class Compiled:
    """Replaces `torch.compile` and counts its calls."""

    def __init__(self, model):
        self.model, self.made, self.calls = model, 0, 0

    def __call__(self):
        self.made += 1

        def call(*args, **kwargs):
            self.calls += 1
            return self.model(*args, **kwargs)

        return call


@pytest.fixture
def compiled(kept):
    return Compiled(kept.model)


@pytest.fixture
def package(kept, compiled):
    return Package(os.fspath(kept.file), signature((kept.x,)), CPU, compiled)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def test_arguments_of_its_signature_are_run_and_nothing_is_compiled(kept, package, compiled):
    torch.testing.assert_close(package(kept.x), kept.model(kept.x))
    assert not compiled.made


OTHERS = {
    "shape": torch.ones(2, 3, 8, 8),
    "layout": torch.ones(1, 3, 8, 8).to(memory_format=torch.channels_last),
    "holes": torch.randn(1, 3, 16, 16)[..., ::2, ::2],
    "negated": torch._neg_view(torch.randn(1, 3, 8, 8)),
    "imaginary part": torch.randn(1, 3, 8, 8, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_tensors_are_left_to_what_compiles(kept, package, compiled, name):
    x = OTHERS[name]
    for _ in range(2):
        torch.testing.assert_close(package(x), kept.model(x))
    assert (compiled.made, compiled.calls) == (1, 2)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1,), {}), (([OTHERS["shape"]],), {}), ((), {"input": torch.ones(1, 3, 8, 8)})],
)
def test_other_arguments_are_left_to_what_compiles(kept, args, kwargs):
    package = Package(
        os.fspath(kept.file), signature((kept.x,)), CPU, lambda: lambda *a, **k: "compiled"
    )
    assert package(*args, **kwargs) == "compiled"


def test_a_tensor_of_another_type_is_left_to_what_compiles(kept):
    package = Package(os.fspath(kept.file), signature((kept.x,)), CPU, lambda: lambda x: x.dtype)
    assert package(kept.x.double()) is torch.float64
    assert package(kept.x.to("meta")) is torch.float32


def test_a_tensor_at_an_odd_address_is_copied(kept, package, compiled):
    odd = torch.empty(kept.x.numel() + 1)[1:].view(kept.x.shape).copy_(kept.x)
    assert odd.data_ptr() % 16
    torch.testing.assert_close(package(odd), kept.model(kept.x))
    assert not compiled.made


def test_a_package_that_fails_is_not_called_again(kept, package, compiled, monkeypatch, caplog):
    calls = []

    def fail(inputs):
        calls.append(inputs)
        raise RuntimeError("of the code")

    monkeypatch.setattr(package, "_run", fail)
    for _ in range(2):
        torch.testing.assert_close(package(kept.x), kept.model(kept.x))
    assert (len(calls), compiled.made, compiled.calls) == (1, 1, 2)
    assert [r.getMessage() for r in caplog.records] == [
        "a compiled package failed, recompiling: RuntimeError: of the code"
    ]


def test_arguments_nested_otherwise_than_it_takes_them_are_an_error(kept, compiled):
    with pytest.raises(UnsupportedError, match="nested as"):
        Package(os.fspath(kept.file), signature(([kept.x],)), CPU, compiled)


class Nested(nn.Module):
    """Nested arguments and results, a constant, and an operator that is registered in Python."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x, pair, *, scale, twice=False):
        geometry = ([1, 1], [0, 0], [1, 1], 1)
        y = conv_engine(
            *(x, self.conv.weight, self.conv.bias, None, *geometry, True),
            *("aten", "aten", "aten"),
        )
        y = y * scale["by"] + pair[0] - pair[1]
        return {"y": y * 2 if twice else y, "rest": (y.sum(), [y.mean(1)])}


def nested_arguments():
    torch.manual_seed(0)
    pair = (torch.randn(1, 4, 6, 6), torch.randn(1))
    scale = {"by": torch.randn(4, 1, 1), "unused": torch.randn(2)}
    return (torch.randn(1, 3, 8, 8), pair), {"twice": True, "scale": scale}


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    torch.manual_seed(0)
    model, (args, kwargs) = Nested().eval(), nested_arguments()
    path = tmp_path_factory.mktemp("nested") / "nested.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(model, args, kwargs, {"freezing": True}, path)
    compiled = Compiled(model)
    return Package(os.fspath(path), signature(args, kwargs), CPU, compiled), model, compiled


def test_nested_arguments_constants_and_operators_in_python_work(nested):
    package, model, compiled = nested
    args, kwargs = nested_arguments()
    torch.testing.assert_close(package(*args, **kwargs), model(*args, **kwargs))
    turned = dict(reversed(kwargs.items()))
    torch.testing.assert_close(package(*args, **turned), model(*args, **kwargs))
    assert not compiled.made


def test_another_constant_is_another_call(nested):
    package, model, compiled = nested
    args, kwargs = nested_arguments()
    kwargs["twice"] = False
    torch.testing.assert_close(package(*args, **kwargs), model(*args, **kwargs))
    assert compiled.made == 1


class Depends(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x * self.calls


class WritesToInputs(nn.Module):
    def forward(self, x):
        return x.add_(1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Depends(), "the model cannot be exported"),
        (Counts(), "the model writes to its buffers or inputs"),
        (WritesToInputs(), "the model writes to its buffers or inputs"),
        (lambda x: object(), "the model cannot be exported"),
    ],
)
def test_what_cannot_be_packaged_is_a_reason(model, reason, tmp_path):
    with pytest.raises(UnsupportedError, match=reason):
        make(model, (torch.ones(3),), {}, {}, tmp_path / "p.pt2")
    assert not (tmp_path / "p.pt2").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_compiler_that_fails_is_a_reason(tmp_path, monkeypatch):
    import torch._inductor

    def fail(*args, **kwargs):
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(UnsupportedError, match=r"compiled ahead of time: no compiler$"):
        make(nn.ReLU(), (torch.ones(3),), {}, {}, tmp_path / "p.pt2")
