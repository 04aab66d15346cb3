import msgspec
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import steadytorch as steady  # noqa: E402
from steadytorch import transforms  # noqa: E402
from steadytorch.bench.bench_worker import save_payload  # noqa: E402
from steadytorch.compiled import compiler_choices  # noqa: E402
from steadytorch.plan.record import CompilerChoices  # noqa: E402
from steadytorch.process.worker import Worker  # noqa: E402
from steadytorch.results.candidate import TransformSpec  # noqa: E402
from steadytorch.tune.trial import HANDLER  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class Windows(nn.Module):
    """Attention over windows of 49 tokens: products whose sizes are no multiples of 8."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(1024), nn.Linear(1024, 3 * 1024)
        self.out = nn.Linear(1024, 1001)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = torch.softmax(q @ k.transpose(-2, -1) / 32, -1) @ v
        return self.out(torch.nn.functional.gelu(mixed)).mean(1)


def _chosen(directory, cache, frozen):
    """What the compiler chose in a fresh process with a cache of its own."""
    candidate = (
        TransformSpec("cast_weights", (("dtype", "fp16"),)),
        TransformSpec("compile", (("mode", "default"), ("freezing", frozen))),
    )
    worker = Worker(HANDLER, directory, cache.name, {"TORCHINDUCTOR_CACHE_DIR": str(cache)})
    try:
        worker.call("load", 120.0, device="cuda", ambient=transforms.ambient())
        worker.call("set_up", 300.0, candidate=msgspec.to_builtins(candidate))
        return msgspec.convert(worker.call("compiler_choices", 60.0), CompilerChoices)
    finally:
        worker.kill()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_process_repeats_what_another_chose(tmp_path, frozen):
    workload = steady.Workload(Windows().eval().cuda(), torch.randn(256, 49, 1024, device="cuda"))
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
        save_payload(workload, directory)
    made = _chosen(first, tmp_path / "cache-1", frozen)
    assert made.kernels
    assert made.padded
    compiler_choices.put(second, made)
    repeated = _chosen(second, tmp_path / "cache-2", frozen)
    assert repeated.kernels == made.kernels  # the seconds of the first tuning included
    other = {product: not pads for product, pads in made.padded.items()}
    compiler_choices.put(second, CompilerChoices(padded=other))
    assert _chosen(second, tmp_path / "cache-3", frozen).kernels.keys() != made.kernels.keys()
