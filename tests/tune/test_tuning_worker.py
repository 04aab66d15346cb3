import msgspec
import pytest
import torch
import trained
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from steadytorch import transforms
from steadytorch.bench import bench_worker as base
from steadytorch.bench.bench_worker import SetUp, save_payload
from steadytorch.bench.ramp import RAMP_NS
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.explain import explain_worker
from steadytorch.explain.explain_worker import TRACE_FILE
from steadytorch.measure import sampler
from steadytorch.process.messages import encode
from steadytorch.tune import tuning_worker as module
from steadytorch.tune.tuning_worker import Character, Explained, TuningHandler
from steadytorch.verification.verdict import Reference, Verification, decide
from steadytorch.verification.verify import kept_tf32
from steadytorch.workload.workload import Workload

EAGER = [{"name": "inference_mode", "parameters": []}]


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch):
    """Skips warm-up, which would take half a second per test."""
    monkeypatch.setattr(
        base, "warm_up", lambda step, timer: sampler.warm_up(step, timer, min_ns=1_000_000)
    )


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


@pytest.fixture
def loaded(model, tmp_path):
    """A handler in this process, with the workload in its directory."""
    save_payload(Workload(model, torch.randn(2, 8)), tmp_path)
    handler = TuningHandler(tmp_path)
    handler.load("cpu", transforms.ambient())
    yield handler
    handler.close()


def test_an_unknown_setting_of_the_caller_is_refused(tmp_path):
    with pytest.raises(UsageError, match="unknown process setting 'colour'"):
        TuningHandler(tmp_path).load("cpu", {"colour": "blue"})


def test_set_up_reports_time_warm_up_and_memory(loaded):
    found = msgspec.convert(loaded.set_up([]), SetUp)
    assert found.setup_s > 0
    assert found.warm_up.calls >= 3
    assert found.peak_memory_bytes > 10 << 20


def test_an_unknown_transform_is_refused(loaded):
    with pytest.raises(UsageError, match="unknown transform 'overclock'"):
        loaded.set_up([{"name": "overclock", "parameters": []}])


def test_a_candidate_is_applied_and_undone(loaded):
    loaded.set_up(EAGER)
    inputs = loaded.workload.inputs
    assert not loaded.model(*inputs).requires_grad
    assert loaded.workload.model(*inputs).requires_grad


@pytest.mark.parametrize("ask", ["set_up", "block", "characterise"])
def test_what_the_model_raises_is_what_the_handler_raises(loaded, ask):
    def broken(*inputs):
        raise MemoryError("no room")

    if ask == "set_up":
        loaded.workload = loaded.workload.with_model(broken)
        ask_for = {"candidate": []}
    else:
        loaded.set_up([])
        _stepping(loaded, broken, 1, 1e6)
        given = {"block": {"metric": "latency", "count": 3}, "characterise": {"product_flops": 1}}
        ask_for = given[ask]
    with pytest.raises(MemoryError, match="no room"):
        getattr(loaded, ask)(**ask_for)


@pytest.mark.parametrize("metric", ["latency", "period"])
def test_a_block_holds_as_many_times_as_were_asked_for(loaded, metric):
    loaded.set_up([])
    times = loaded.block(metric, 7)
    assert len(times) == 7
    assert all(type(time) is int and time > 0 for time in times)


def _stepping(handler, step, group, iteration_ns):
    """Has the handler time another step than the one it has set up."""
    handler.step, handler.group, handler.iteration_ns = step, group, iteration_ns


def test_iterations_too_short_for_the_clock_are_timed_together(loaded):
    loaded.set_up([])
    calls = 0

    def counted():
        nonlocal calls
        calls += 1

    _stepping(loaded, counted, 5, RAMP_NS / 20)
    loaded.block("latency", 4)
    assert calls == 5 * (4 + 4)


@pytest.mark.parametrize(("iteration_ns", "most"), [(1e5, 40), (3e5, 14), (4e8, 2), (1e9, 0)])
def test_what_follows_a_switch_is_not_kept_for_a_time(loaded, iteration_ns, most):
    loaded.set_up([])
    calls = 0

    def counted():
        nonlocal calls
        calls += 1

    _stepping(loaded, counted, 1, iteration_ns)
    assert len(loaded.block("period", 4)) == 4
    assert calls == most + 4
    loaded.block("period", 4)  # as the block before has shown: far below a microsecond each
    assert calls > most + 4 + 1000


def test_the_untouched_candidate_agrees_with_the_reference(loaded):
    reference = msgspec.convert(loaded.reference(3), Reference)
    loaded.set_up(EAGER)
    found = msgspec.convert(loaded.verify(), Verification)
    assert decide(found, reference, "same", None) is None


@pytest.mark.parametrize("handler", ["loaded", "training"])
def test_a_reference_leaves_the_callers_tf32_for_the_profile(request, handler):
    with kept_tf32():
        loaded = request.getfixturevalue(handler)
        operators = torch.backends.cuda.matmul, torch.backends.cudnn.conv
        for operator in operators:
            operator.fp32_precision = "tf32"
        loaded.reference(seed=0)
        assert [operator.fp32_precision for operator in operators] == ["tf32", "tf32"]


def test_a_reference_is_read_by_another_worker(loaded, tmp_path):
    loaded.reference(3)
    other = TuningHandler(tmp_path)
    other.load("cpu", {})
    other.set_up([])
    assert msgspec.convert(other.verify(), Verification).fault is None


def test_weights_that_changed_on_the_way_are_noticed(loaded):
    reference = msgspec.convert(loaded.reference(3), Reference)
    loaded.set_up([])
    with torch.no_grad():
        loaded.workload.model[2].bias += 0.5
    found = msgspec.convert(loaded.verify(), Verification)
    assert "relative error" in decide(found, reference, "same", None)


@pytest.mark.parametrize(("rate", "regime"), [(1e3, "compute-bound"), (1e18, "unclassified")])
def test_the_regime_follows_from_the_share_of_the_matrix_rate(loaded, monkeypatch, rate, regime):
    monkeypatch.setattr(module, "matrix_rate", lambda device, dtype: rate)
    loaded.set_up([])
    found = msgspec.convert(loaded.characterise(1000), Character)
    assert found.regime == regime
    assert found.host_share == 0.0
    assert (found.matrix_share >= 0.3) == (regime == "compute-bound")


def test_operations_of_a_step_are_those_that_pytorch_counts(loaded):
    _assert_counted(loaded)


def _assert_counted(handler):
    explained = msgspec.convert(handler.explained(), Explained)
    with FlopCounterMode(display=False) as counter:
        handler.step()
    assert explained.product_flops == counter.get_total_flops() > 0


@pytest.mark.parametrize(("long_ns", "profiles"), [(0, 1), (1e12, 2)])
def test_a_long_step_is_profiled_once(loaded, monkeypatch, long_ns, profiles):
    made, profile = [], explain_worker.profile_of
    monkeypatch.setattr(module, "LONG_NS", long_ns)
    monkeypatch.setattr(explain_worker, "profile_of", lambda d: made.append(d) or profile(d))
    _assert_counted(loaded)
    assert len(made) == profiles


@pytest.mark.parametrize("flops", [None, 1000])
def test_a_regime_needs_operations_and_a_rate(loaded, monkeypatch, flops):
    def refused(device, dtype):
        raise UnsupportedError("no product")

    if flops is not None:
        monkeypatch.setattr(module, "matrix_rate", refused)
    loaded.set_up([])
    found = msgspec.convert(loaded.characterise(flops), Character)
    assert (found.regime, found.matrix_share) == ("unclassified", None)


def test_findings_of_profiled_steps_name_transforms_that_exist(loaded):
    found = msgspec.convert(loaded.explained(), Explained).findings
    assert (loaded.directory / TRACE_FILE).stat().st_size > 1000
    for finding in found:
        assert set(finding.transforms) <= set(transforms.names())
        assert not finding.information


def test_every_answer_fits_into_a_message(loaded):
    for answer in (loaded.reference(0), loaded.set_up([]), loaded.verify(), loaded.characterise(1)):
        encode(answer)
    encode(loaded.explained())
    encode(loaded.block("latency", 3))


def test_what_bounds_a_workload_with_a_loader_is_asked_of_the_computation(model, tmp_path):
    class Watched(list):
        begun = 0

        def __iter__(self):
            Watched.begun += 1
            return super().__iter__()

    handler = TuningHandler(tmp_path)
    handler.workload = Workload.from_loader(model, Watched([torch.randn(2, 8)]))
    handler.sampler = sampler.sampler_for("cpu")
    handler.set_up([])
    before = Watched.begun
    found = msgspec.convert(handler.characterise(None), Character)
    assert (Watched.begun, found.host_share) == (before, 0.0)
    handler.step()
    handler.step()
    assert Watched.begun > before
    handler.close()


# -- training ---------------------------------------------------------------------------------


@pytest.fixture
def training(tmp_path):
    """A handler of a training workload."""
    made, _ = trained.workload(optimizer=trained.momentum)
    save_payload(made, tmp_path)
    handler = TuningHandler(tmp_path)
    handler.load("cpu", transforms.ambient())
    yield handler
    handler.close()


def test_a_training_candidate_agrees_with_the_reference_after_its_warm_up(training):
    reference = msgspec.convert(training.reference(3), Reference)
    assert reference.explained["same"]["gradients"].relative_l2 > 0
    training.set_up([])
    found = msgspec.convert(training.verify(), Verification)
    assert set(found.parts) == {"outputs", "loss", "gradients", "buffers"}
    assert decide(found, reference, "same", None) is None


def test_a_training_reference_is_read_by_another_worker(training, tmp_path):
    reference = msgspec.convert(training.reference(3), Reference)
    other = TuningHandler(tmp_path)
    other.load("cpu", {})
    other.set_up([])
    found = msgspec.convert(other.verify(), Verification)
    assert decide(found, reference, "same", None) is None


def test_operations_of_a_training_step_are_those_that_pytorch_counts(training):
    _assert_counted(training)


def test_training_steps_are_characterised_and_explained(training):
    explained = msgspec.convert(training.explained(), Explained)
    found = msgspec.convert(training.characterise(explained.product_flops), Character)
    assert found.regime in ("compute-bound", "unclassified")
    for finding in explained.findings:
        assert set(finding.transforms) <= set(transforms.names())


def test_every_answer_about_training_fits_into_a_message(training):
    for answer in (training.reference(0), training.set_up([]), training.verify()):
        encode(answer)
