import pytest

from steadytorch.errors import UsageError
from steadytorch.measure.clock import FakeClock
from steadytorch.measure.overhead import probe_overhead
from steadytorch.measure.sampler import HostSampler


class Costly(FakeClock):
    """A clock whose reading takes 40 ns, and occasionally 9,000 ns."""

    def now_ns(self) -> int:
        self.advance(9000 if self._now_ns % 400 == 0 else 40)
        return super().now_ns()


def test_the_overhead_is_what_an_empty_step_takes():
    assert probe_overhead(HostSampler(Costly()), 100) == 40.0


@pytest.mark.parametrize("count", [0, -3])
def test_no_iterations_are_misuse(count):
    with pytest.raises(UsageError, match="at least 1 iteration"):
        probe_overhead(HostSampler(), count)
