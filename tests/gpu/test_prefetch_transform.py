"""The transform `prefetch` on a GPU: the same steps, fed ahead, and everything undone."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from steadytorch import transforms
from steadytorch.bench import bench_worker as trial_worker
from steadytorch.bench.bench_worker import save_payload
from steadytorch.bench.compare import compare_live
from steadytorch.bench.measure import measure
from steadytorch.device.facts import load_facts
from steadytorch.measure import sampler
from steadytorch.serve.plan import Plan
from steadytorch.transforms import ambient
from steadytorch.transforms.base import Applicable, NotApplicable, applied_in_order
from steadytorch.transforms.cuda_graph import CudaGraph
from steadytorch.transforms.prefetch import Prefetch, Prefetched
from steadytorch.tune.select import SearchOptions
from steadytorch.tune.session import Session, tune
from steadytorch.tune.tuning_worker import Explained, TuningHandler
from steadytorch.workload.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SIZE = 1 << 18
AHEAD = Prefetch().spec


@pytest.fixture(autouse=True, scope="module")
def by_value() -> Iterator[None]:
    """What is defined here can be sent to processes that cannot import this file."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Batches:
    """A loader out of pageable memory; says how often it was begun and ended."""

    def __init__(self, count: int, short_last: bool = False) -> None:
        self.count, self.short_last = count, short_last
        self.begun = self.ended = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.begun += 1
        try:
            for i in range(self.count):
                yield torch.full((4, SIZE), float(i))
            if self.short_last:
                yield torch.full((3, SIZE), -1.0)
        finally:
            self.ended += 1


class Sum(nn.Module):
    """Sums after some 5 ms of other work, so that batches arrive long before they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(10_000_000)
        return self.scale * x.mean()


def fed(count: int = 5, short_last: bool = False) -> Workload:
    return Workload.from_loader(Sum().cuda(), Batches(count, short_last))


def settled() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_it_applies_to_a_loader_on_the_host_and_to_no_other():
    facts = load_facts("cuda")
    assert Prefetch().applies_to(fed(), facts) == Applicable()
    there = Workload.from_loader(Sum().cuda(), [torch.ones(2, device="cuda")])
    for given in (there, Workload(Sum().cuda(), torch.ones(2, device="cuda"))):
        assert isinstance(Prefetch().applies_to(given, facts), NotApplicable)


def test_steps_give_the_same_results_epoch_after_epoch():
    given = fed(short_last=True)
    expected = list(itertools.islice(itertools.cycle(range(5)), 13))
    with Prefetch().applied(given) as changed:
        step = changed.step_function()
        assert [out.item() for out in [step() for _ in range(13)]] == expected


def test_steps_on_a_stream_of_the_callers_are_right_as_well():
    side = torch.cuda.Stream()
    with Prefetch().applied(fed()) as changed, torch.cuda.stream(side):
        step = changed.step_function()
        found = [step() for _ in range(12)]
    side.synchronize()
    assert [f.item() for f in found] == list(itertools.islice(itertools.cycle(range(5)), 12))


def test_a_recorded_graph_is_fed_ahead():
    class Mean(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input.mean() + 0 * self.weight.sum()

    given = Workload.from_loader(Mean(1, 1).cuda().eval(), Batches(5))
    with applied_in_order([CudaGraph(), Prefetch()], given) as changed:
        step = changed.step_function()
        found = [step().clone() for _ in range(12)]
        assert [f.item() for f in found] == list(itertools.islice(itertools.cycle(range(5)), 12))


def test_training_steps_are_those_of_the_untouched_loop():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(22, 64), torch.randn(22, 8))
    losses, weights = [], []
    for parts in ([], [Prefetch()]):
        torch.manual_seed(1)
        model = nn.Linear(64, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data, batch_size=4, pin_memory=True)
        given = Workload.from_loader(model, loader, nn.functional.mse_loss, optimizer)
        with applied_in_order(parts, given) as changed:
            step = changed.step_function()
            losses.append([step() for _ in range(12)])
            weights.append(model.weight.detach().clone())
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    assert torch.equal(*weights)


def test_leaving_drops_the_batch_under_way_and_the_loader():
    loader = Batches(5)
    given = Workload.from_loader(Sum().cuda(), loader)
    before = settled()
    with Prefetch().applied(given) as changed:
        step = changed.step_function()
        for _ in range(2):
            step()
        assert (loader.begun, loader.ended) == (2, 1)
    assert loader.ended == loader.begun
    assert settled() == before
    del step


def test_nothing_of_the_process_is_changed():
    before, stream = ambient(), torch.cuda.current_stream()
    with Prefetch().applied(fed()) as changed:
        changed.step_function()()
        assert (ambient(), torch.cuda.current_stream()) == (before, stream)
    assert (ambient(), torch.cuda.current_stream()) == (before, stream)


def test_a_loader_that_fails_fails_the_step_in_which_its_batch_is_due():
    class Broken(Batches):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from super().__iter__()
            raise ValueError("broken file")

    given = Workload.from_loader(Sum().cuda(), Broken(2))
    with Prefetch().applied(given) as changed:
        step = changed.step_function()
        assert [step().item(), step().item()] == [0, 1]
        with pytest.raises(ValueError, match="broken file"):
            step()


def test_explaining_it_names_the_transform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        trial_worker, "warm_up", lambda step, timer: sampler.warm_up(step, timer, min_ns=1_000_000)
    )
    save_payload(Workload.from_loader(Quick(), Batches(8)), tmp_path)
    handler = TuningHandler(tmp_path)
    handler.load("cuda", transforms.ambient())
    found = msgspec.convert(handler.explained(2.0), Explained)
    handler.close()
    named = {f.id for f in found.findings if "prefetch" in f.transforms}
    assert named & {"pageable-copy", "input-pipeline"}


class Quick(nn.Module):
    """So little work that each step waits for its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x.mean()


def test_it_is_measured_and_compared_in_processes_of_its_own():
    given = Workload.from_loader(Quick(), Batches(8))
    found = measure(given, budget="1s", device="cuda", candidate=(AHEAD,))
    assert found.failed is None
    compared = compare_live((given, (), "a"), (given, (AHEAD,), "b"), device="cuda")
    assert compared.failed is None
    assert compared.effect.pairs >= 12


def test_tuning_tries_it(tmp_path: Path):
    given = Workload.from_loader(Sum(), Batches(8))
    plan = tune(given, budget="60s", device="cuda", store=tmp_path)
    tried = [trial for trial in plan.evidence.trials if AHEAD in trial.transforms]
    assert any(trial.status == "ok" and trial.median_ns for trial in tried)


def test_a_plan_hands_it_on(tmp_path: Path, keep_unmeasured: Callable[..., Plan]):
    model = Sum()
    session = Session(Workload.from_loader(model, Batches(8)), SearchOptions(), "cuda", tmp_path)
    plan = keep_unmeasured(session, (AHEAD,))
    assert plan.key.loader
    batches = plan.batches(Batches(3))
    assert isinstance(batches, Prefetched)
    fast = plan.apply(model.cuda())
    assert [fast(batch).item() for batch in batches] == [0.0, 1.0, 2.0]
    assert set(fast.report().calls) == {"tuned"}
