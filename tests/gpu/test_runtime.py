from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from steadytorch import transforms
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime import settings
from steadytorch.runtime.dispatch import Resolution
from steadytorch.runtime.entries import ServingOptions
from steadytorch.runtime.module import TunedModule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

GRAPH = (TransformSpec("cuda_graph"),)
FOLDED = (TransformSpec("fold_batch_norm"), TransformSpec("cuda_graph"))


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    return model.eval().cuda()


def images(batch=2, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(batch, 3, 16, 16, device="cuda", generator=generator)


def tuned_by(model, candidate=GRAPH, **options):
    return TunedModule(
        model, lambda context: Resolution(candidate), options=ServingOptions(**options)
    )


def check(tuned, model, x):
    with torch.no_grad():
        torch.testing.assert_close(tuned(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.fixture
def model():
    return network()


def test_written_to_directly_the_static_inputs_are_what_is_computed(model):
    tuned, x = tuned_by(model), images()
    tuned(x)
    (buffer,), kwargs = tuned.static_inputs(x)
    assert kwargs == {}
    assert buffer.data_ptr() != x.data_ptr()
    for seed in (2, 3):
        buffer.copy_(images(seed=seed))
        check(tuned, model, buffer)
    check(tuned, model, x)
    assert tuned.report().calls == {"tuned": 4}


def test_static_inputs_of_a_plan_without_a_graph_are_the_callers_own(model):
    tuned, x = tuned_by(model, (TransformSpec("inference_mode"),)), images()
    assert tuned.static_inputs(x) == ((x,), {})


def test_static_inputs_of_several_tensors_are_not_copied_onto_themselves():
    class Two(nn.Module):
        def forward(self, a, *, b):
            return a - b

    tuned = tuned_by(Two().eval())
    a, b = images(), images(seed=5)
    tuned(a, b=b)
    (first,), named = tuned.static_inputs(a, b=b)
    first.copy_(b)
    named["b"].copy_(a)
    assert torch.equal(tuned(first, **named), b - a)
    assert torch.equal(tuned(a, b=named["b"]), torch.zeros_like(a))


@pytest.mark.parametrize("alias", [False, True])
def test_outputs_alias_a_buffer_only_where_that_was_asked_for(model, alias):
    tuned = tuned_by(model, alias_outputs=alias)
    first = tuned(images())
    kept = first.clone()
    second = tuned(images(seed=7))
    assert (first.data_ptr() == second.data_ptr()) == alias
    assert torch.equal(first, kept) != alias


ORDINARY = {
    "inference_mode": (TransformSpec("inference_mode"),),
    "graph": GRAPH,
    "graph of inference_mode": (TransformSpec("inference_mode"), *GRAPH),
    "cudnn_engines": (TransformSpec("cudnn_engines"),),
    "fused_kernels": (TransformSpec("fused_kernels"),),
}


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize("canary", [False, True])
@pytest.mark.parametrize("name", ORDINARY)
def test_outputs_can_be_written_to_and_trained_on(model, name, canary, alias, first):
    if name == "cudnn_engines":
        pytest.importorskip("cudnn")
    tuned = tuned_by(model, ORDINARY[name], canary=canary, alias_outputs=alias)
    x = images()
    with first():
        tuned(x)
    for _ in range(8):
        with torch.no_grad():
            y, expected = tuned(x).mul_(2).relu_(), model(x).mul_(2).relu_()
            y[0] = expected[0] = 0
        torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
        head = nn.Linear(y.shape[1], 1).cuda()
        head(tuned(x)).sum().backward()
        assert head.weight.grad is not None
    assert tuned.report().hits > 8


@pytest.mark.parametrize("candidate", [GRAPH, FOLDED], ids=["graph", "folded"])
def test_threads_on_streams_of_their_own_get_their_own_answers(model, candidate):
    tuned, faults = tuned_by(model, candidate), []
    inputs = [images(seed=seed) for seed in range(4)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    tuned(inputs[0])
    torch.cuda.synchronize()

    def work(index):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(100):
                    found = tuned(inputs[index])
                    torch.testing.assert_close(found, expected[index], rtol=1e-4, atol=1e-4)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert tuned.report().calls == {"tuned": 401}


HELD, LET_GO = threading.Event(), threading.Event()


class Held(nn.Module):
    """Waits for its inputs of three rows, before they are recorded."""

    def forward(self, x):
        if len(x) == 3 and not torch.cuda.is_current_stream_capturing():
            HELD.set()
            assert LET_GO.wait(60)
        return x + 1


def test_graphs_are_replayed_while_another_of_their_model_is_made():
    tuned, faults = tuned_by(Held().eval()), []
    tuned(images())

    def work():
        try:
            torch.testing.assert_close(tuned(images(3)), images(3) + 1)
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert HELD.wait(60)
    for _ in range(3):
        torch.testing.assert_close(tuned(images()), images() + 1)
    torch.testing.assert_close(tuned(images(4)), images(4) + 1)
    assert tuned.report().hits == 4
    LET_GO.set()
    thread.join()
    assert faults == []
    assert tuned.report().hits == 5


def test_several_models_and_signatures_share_the_device(model):
    others = [tuned_by(model), tuned_by(network()), tuned_by(model, FOLDED)]
    for batch in (1, 2, 3, 1, 2):
        for tuned in others:
            check(tuned, model, images(batch))
    for tuned in others:
        assert tuned.report().calls == {"tuned": 5}
        tuned.close()
        check(tuned, model, images())


def test_within_the_recording_of_another_graph_it_becomes_a_part_of_that(model):
    inner = tuned_by(model)
    x = images()
    inner(x)
    outer = nn.Sequential()
    outer.forward = lambda x: inner(x) + 1
    outer = tuned_by(outer.eval())
    for seed in (1, 4):
        x = images(seed=seed)
        with torch.no_grad():
            torch.testing.assert_close(outer(x), model(x) + 1, rtol=1e-4, atol=1e-4)
    assert outer.report().calls == {"tuned": 2}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_mode_does_not_matter(model, mode):
    tuned, x = tuned_by(model), images()
    for _ in range(2):
        with mode():
            check(tuned, model, x)
    assert tuned.report().calls == {"tuned": 2}


def test_under_autocast_the_model_runs(model):
    tuned, x = tuned_by(model), images()
    with torch.autocast("cuda", dtype=torch.float16):
        assert tuned(x).dtype == model(x).dtype
    assert tuned.report().calls == {"untouched: called under autocast": 1}


@pytest.mark.parametrize("name", ["fold_batch_norm", "channels_last", "cast_weights", "cuda_graph"])
def test_changed_weights_are_never_served_stale(model, name):
    parameters = (("dtype", "bf16"),) if name == "cast_weights" else ()
    tuned, x = tuned_by(model, (TransformSpec(name, parameters),)), images()
    tuned(x)

    @torch.no_grad()
    def edit():
        for parameter in model.parameters():
            parameter.mul_(1.5)

    changes = [
        edit,
        lambda: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
        lambda: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach() * 2)),
        lambda: model.cpu().cuda(),
    ]
    tolerance = {"rtol": 0.05, "atol": 0.05} if name == "cast_weights" else {}
    for change in changes:
        change()
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(tuned(x), model(x), **tolerance)
        tuned.refresh()
        tuned(x)
    assert tuned.report().hits >= 1 + len(changes)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros((), device="cuda"))

    def forward(self, x):
        self.total += 1
        return x * 0 + self.total


def test_recording_does_not_advance_a_model_that_counts_its_calls():
    tuned, x = tuned_by(Counting().eval()), images()
    assert [int(tuned(x).max()) for _ in range(3)] == [1, 2, 3]
    assert tuned.report().calls == {"untouched: the model keeps state between its calls": 3}


def test_a_recorded_graph_needs_no_turns(model):
    before = transforms.ambient()
    tuned = tuned_by(model, (TransformSpec("tf32"), TransformSpec("cuda_graph")))
    tuned(images())
    assert settings.needed.alive == 0
    flagged = tuned_by(model, (TransformSpec("tf32"),))
    flagged(images())
    assert settings.needed.alive == 1
    flagged.close()
    assert settings.needed.alive == 0
    assert transforms.ambient() == before


def test_the_canary_keeps_a_graph(model):
    tuned, x = tuned_by(model, canary=True), images()
    for _ in range(300):
        tuned(x)
    (served,) = tuned.report().signatures
    assert served.reason is None, str(tuned.report())
    assert served.finding
