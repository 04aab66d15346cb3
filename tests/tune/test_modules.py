from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusing import STEPS, VAE, Pipeline
from stored import evidence
from torch import nn

from steadytorch.errors import UsageError
from steadytorch.measure.race import Judgement
from steadytorch.plan.record import CompilerChoices
from steadytorch.results.candidate import TransformSpec
from steadytorch.runtime.module import TunedModule
from steadytorch.tune import whole_call
from steadytorch.tune.module_calls import Observer
from steadytorch.tune.modules import tune_modules
from steadytorch.tune.session import Session

CANDIDATE = (TransformSpec("inference_mode"),)
PARTS = ("text_encoder", "unet", "vae.decoder")


@pytest.fixture
def pipe():
    return Pipeline()


@pytest.fixture
def searches(monkeypatch):
    """Names that were searched; searches end at once and choose `chosen[name]`, or raise it."""
    made = SimpleNamespace(names=[], chosen={})

    def search(self, watcher=None):
        made.names.append(self.workload.name)
        chosen = made.chosen.get(self.workload.name, CANDIDATE)
        if isinstance(chosen, Exception):
            raise chosen
        return SimpleNamespace(
            interrupted=False, chosen=chosen, evidence=evidence, compiler=CompilerChoices()
        )

    monkeypatch.setattr(Session, "search", search)
    return made


@pytest.fixture
def timed(monkeypatch):
    """Replaces the timing of the whole call by a verdict."""

    def say(verdict):
        effect = Judgement(-0.2, -0.3, -0.1, verdict, 12, 0.01)
        monkeypatch.setattr(whole_call, "race_pairs", lambda *arms, **options: (effect, []))

    say("faster")
    return say


def tuned(pipe, store, call=None, **options):
    run = call or (lambda: pipe("a cat").images)
    return tune_modules(pipe, run, store=store, least_share=0.0, **options)


def state(pipe):
    return (
        *(vars(pipe)[name] for name in ("text_encoder", "unet", "vae")),
        pipe.vae.decoder,
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in pipe.unet.modules()],
    )


def test_the_outermost_modules_are_watched_with_their_inputs(pipe):
    observer = Observer(pipe)
    with observer.watching():
        pipe("a cat")
    found = {each.places[0].path: each for each in observer.calls}
    assert sorted(found) == sorted(PARTS)
    assert found["unet"].calls == STEPS
    assert found["unet"].args[0].shape == (1, 4, 16, 16)
    assert list(found["unet"].kwargs) == ["encoder_hidden_states"]
    assert 0 < sum(each.seconds for each in observer.calls) <= observer.seconds
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in pipe.unet.modules())


def test_hooks_are_removed_when_the_call_raises(pipe, tmp_path, searches):
    before, calls = state(pipe), []

    def fails():
        calls.append(pipe("a cat"))
        if len(calls) == 2:
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        tuned(pipe, tmp_path, fails)
    assert state(pipe) == before
    assert not searches.names


def test_plans_take_the_places_of_the_modules(pipe, tmp_path, searches, timed):
    unet = pipe.unet
    torch.manual_seed(3)
    expected = pipe("a cat").images
    result = tuned(pipe, tmp_path)
    assert sorted(searches.names) == sorted(PARTS)
    assert sorted(result.modules) == sorted(PARTS)
    assert isinstance(pipe.unet, TunedModule)
    assert isinstance(pipe.vae.decoder, TunedModule)
    assert type(pipe.vae) is VAE
    torch.manual_seed(3)
    torch.testing.assert_close(pipe("a cat").images, expected)
    assert all(module.report().hits for module in result.modules.values())
    assert pipe.config.unet == ("library", "UNet")
    shown = str(result).splitlines()
    assert shown[0] == "the whole call: -20.0% time (-30.0% to -10.0%) in 12 pairs, faster"
    assert any("unet: 4 calls, " in line and "2.00x (1.90 to 2.10)" in line for line in shown)
    result.restore()
    assert pipe.unet is unet
    assert not isinstance(pipe.vae.decoder, TunedModule)


@pytest.mark.parametrize(
    ("pixels", "latents", "agree"), [(1, 0.0, True), (0, 2e-3, False), (50, 0.0, False)]
)
def test_images_do_not_loosen_the_bound_of_other_outputs(pixels, latents, agree):
    def outputs(pixels, latents):
        image = np.full((4, 4, 3), 200, np.uint8)
        image[0, 0, 0] += pixels
        return whole_call.WholeCall(lambda: (image, (1 + latents) * torch.ones(8)), 0).outputs()

    found = whole_call.difference(outputs(pixels, latents), outputs(0, 0.0), 1e-4)
    assert (found is None) == agree


def test_the_caller_keeps_its_random_numbers(pipe, tmp_path, searches, timed):
    def drawn():
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    def seeded():
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)

    seeded()
    expected = drawn()
    seeded()
    tuned(pipe, tmp_path)
    assert drawn() == expected


def test_modules_without_a_faster_plan_stay(pipe, tmp_path, searches, timed):
    searches.chosen = {"unet": (), "text_encoder": UsageError("it fails")}
    unet, encoder = pipe.unet, pipe.text_encoder
    result = tuned(pipe, tmp_path)
    assert pipe.unet is unet
    assert pipe.text_encoder is encoder
    assert list(result.modules) == ["vae.decoder"]
    reasons = {part.path: part.reason for part in result.parts}
    assert reasons["vae.decoder"] is None
    assert reasons["text_encoder"] == "it fails"
    assert "untouched: nothing was faster" in str(result)


def test_without_a_faster_plan_nothing_is_timed(pipe, tmp_path, searches):
    searches.chosen = dict.fromkeys(PARTS, ())
    before = state(pipe)
    result = tuned(pipe, tmp_path)
    assert (result.effect, result.reason) == (None, "no module has a faster plan")
    assert state(pipe) == before
    assert pipe.runs == 2


def test_small_shares_are_left(pipe, tmp_path, searches, timed):
    result = tune_modules(pipe, lambda: pipe("a cat").images, store=tmp_path, least_share=1.0)
    assert not searches.names
    assert len(result.parts) == 3
    assert all(part.reason == "takes less than 100%" for part in result.parts)


def test_outputs_that_differ_put_everything_back(pipe, tmp_path, searches, timed, monkeypatch):
    before, call = state(pipe), TunedModule.__call__

    def wrong(self, *args, **kwargs):
        output = call(self, *args, **kwargs)
        return output * 1.001 if isinstance(output, torch.Tensor) else output

    monkeypatch.setattr(TunedModule, "__call__", wrong)
    result = tuned(pipe, tmp_path)
    assert "the outputs of the call with plans differ: output 0 is off by" in result.reason
    assert state(pipe) == before
    assert not result.modules
    assert all(part.reason == "put back" for part in result.parts)
    assert tuned(pipe, tmp_path, precision="bf16").reason is None


def test_a_slower_call_puts_everything_back(pipe, tmp_path, searches, timed):
    timed("slower")
    before = state(pipe)
    result = tuned(pipe, tmp_path)
    assert result.reason == "the call is slower with plans"
    assert result.effect.verdict == "slower"
    assert state(pipe) == before


def test_a_call_that_raises_with_plans_leaves_the_pipeline_as_it_was(pipe, tmp_path, searches):
    before = state(pipe)

    def call():
        if isinstance(pipe.unet, TunedModule):
            raise OSError("gone")
        return pipe("a cat").images

    with pytest.raises(OSError, match="gone"):
        tuned(pipe, tmp_path, call)
    assert state(pipe) == before


def test_a_call_that_does_not_repeat_is_not_tuned(pipe, tmp_path, searches):
    generator = torch.Generator().manual_seed(0)

    def call():
        return pipe("a cat").images + torch.rand((), generator=generator)

    result = tuned(pipe, tmp_path, call)
    assert "does not repeat under one seed" in result.reason
    assert not searches.names


def test_a_plan_that_serves_no_call_is_taken_out(tmp_path, searches, timed):
    pipe = {name: nn.Linear(4, 4).eval() for name in "ab"}
    untouched, x = dict(pipe), torch.ones(2, 4)

    @torch.no_grad()
    def call():
        with torch.autocast("cpu", torch.bfloat16):  # in which plans do not serve
            hidden = pipe["a"](x)
        return pipe["b"](hidden.float())

    result = tuned(pipe, tmp_path, call)
    assert pipe["a"] is untouched["a"]
    assert pipe["b"] is result.modules["b"]
    reasons = {part.path: part.reason for part in result.parts}
    assert reasons == {"a": "called under autocast", "b": None}


def test_images_of_8_bits_are_compared(pipe, tmp_path, searches, timed):
    result = tuned(pipe, tmp_path, lambda: pipe("a cat", output_type="np"))
    assert result.reason is None
    assert len(result.modules) == 3


def test_the_whole_call_is_timed_in_pairs(pipe, tmp_path, searches):
    result = tuned(pipe, tmp_path)
    assert result.effect.pairs >= 12
    assert result.effect.verdict in ("faster", "slower", "tie", "undecided")
    assert bool(result.modules) is (result.effect.verdict != "slower")


def test_a_module_in_two_places_is_replaced_in_both(pipe, tmp_path, searches, timed):
    vars(pipe)["other"] = pipe.unet
    result = tuned(pipe, tmp_path)
    assert pipe.other is pipe.unet is result.modules["unet"]
    result.restore()
    assert pipe.other is pipe.unet
    assert not isinstance(pipe.unet, TunedModule)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda pipe: pipe.unet, "use tune"),
        (lambda pipe: SimpleNamespace(a=1), "hold no nn.Module"),
        (lambda pipe: 3, "hold no nn.Module"),
    ],
)
def test_what_is_no_pipeline_is_refused(pipe, make, said):
    with pytest.raises(UsageError, match=said):
        tune_modules(make(pipe), lambda: None)


@pytest.mark.parametrize("wrong", [{"mode": "off"}, {"precision": "fp8"}, {"budget": "soon"}])
def test_wrong_arguments_are_refused_before_the_call(pipe, wrong):
    with pytest.raises(UsageError):
        tune_modules(pipe, lambda: pipe("a cat"), **wrong)
    assert pipe.runs == 0


def test_a_tuned_pipeline_is_refused(pipe, tmp_path, searches, timed):
    tuned(pipe, tmp_path)
    with pytest.raises(UsageError, match="already tuned"):
        tuned(pipe, tmp_path)


def test_a_dictionary_of_modules_is_a_pipeline(tmp_path, searches, timed):
    modules = {"net": nn.Linear(4, 4).eval()}
    result = tuned(modules, tmp_path, lambda: modules["net"](torch.ones(2, 4)).detach())
    assert modules["net"] is result.modules["net"]


@pytest.mark.slow
def test_a_pipeline_is_tuned_for_real(pipe, tmp_path):
    pipe.size = 48
    torch.manual_seed(1)
    expected = pipe("a cat").images
    result = tune_modules(pipe, lambda: pipe("a cat").images, store=tmp_path, budget="60s")
    assert result.parts[0].path == "unet"
    assert result.parts[0].plan is not None
    torch.manual_seed(1)
    torch.testing.assert_close(pipe("a cat").images, expected, rtol=1e-3, atol=1e-3)
