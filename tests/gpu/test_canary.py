import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def _later(cycles, x):
    """Returns at once; the result takes so many cycles of the GPU."""
    torch.cuda._sleep(cycles)
    return x * 2


@pytest.mark.parametrize("own_stream", [False, True])
def test_work_that_is_slow_after_its_call_returned_is_demoted(own_stream):
    from steadytorch.runtime.canary import Canary

    x = torch.ones(8, device="cuda")
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    canary, verdict = Canary(1e-4), None
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        while verdict is None:
            result, verdict = canary.step(
                lambda: _later(20_000_000, x), lambda: _later(1_000_000, x), x.device, (x,)
            )
    assert result.tolist() == [2] * 8
    assert not verdict.kept
    assert verdict.judgement.low > 0


def test_a_bucket_on_the_gpu_leaves_its_random_numbers_alone():
    from torch import nn

    from steadytorch.runtime.buckets import Buckets, Fitted

    model, x = nn.Conv2d(3, 4, 3).cuda().eval(), torch.randn(3, 3, 8, 8, device="cuda")
    state = torch.cuda.get_rng_state()
    fitted = Buckets({"batch": [8]}, model).fit((x,), {})
    assert isinstance(fitted, Fitted), fitted
    assert torch.equal(torch.cuda.get_rng_state(), state)
    with torch.no_grad():
        found, expected = fitted.slice_outputs(model(*fitted.args)), model(x)
    assert float((found - expected).norm() / expected.norm()) < 5e-3
