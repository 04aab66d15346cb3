from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from steadytorch.errors import UsageError

pytest.importorskip("lightning.pytorch", reason="lightning is not installed here")

import lightning.pytorch as lightning

from steadytorch.integrations.lightning import SteadyCallback, SteadyStepMixin
from steadytorch.workload.workload import Workload

from .plans import plan_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # its own


class Model(lightning.LightningModule):
    def __init__(self, fails_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 2)
        self.fails_at, self.losses = fails_at, []

    def training_step(self, batch, index):
        if index == self.fails_at:
            raise OSError("gone")
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.layer(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(folder, *callbacks, **model):
    chosen = Model(**model)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(48, 8), torch.randint(0, 2, (48,)))
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=list(callbacks), default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(chosen, DataLoader(data, 4, shuffle=True))
    return chosen


def test_a_run_is_watched_and_its_losses_are_the_same(tmp_path, capsys):
    plain = fit(tmp_path)
    seen = SteadyCallback()
    watched = fit(tmp_path, seen)
    assert watched.losses == plain.losses
    assert seen.result.unit == "optimizer steps"
    assert len(seen.result.measured.samples_ns) == 11
    means = seen.result.mean_slices_ns()
    assert min(means[name] for name in ("forward", "backward", "optimizer", "input_wait")) > 0
    assert "11 optimizer steps" in capsys.readouterr().err


def test_a_failed_run_keeps_its_steps(tmp_path):
    seen = SteadyCallback(quiet=True)
    with pytest.raises(OSError, match="gone"):
        fit(tmp_path, seen, fails_at=8)
    assert seen.result.failed == "OSError: gone"
    assert len(seen.result.measured.samples_ns) == 7


def test_a_callback_that_is_never_called_says_so():
    with pytest.raises(UsageError, match="has not called this callback"):
        _ = SteadyCallback().result


# -- plans --------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x)).mean((2, 3)))


class Images(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.losses, self.outputs = Net(), [], []

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.losses.append(loss.item())
        return loss

    def predict_step(self, batch, index):
        self.outputs.append(self.model(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Whole(SteadyStepMixin, Images):
    def __init__(self, plan):
        super().__init__()
        self.use_plan(plan, self.model, torch.nn.functional.cross_entropy)

    def training_step(self, batch, index):
        loss = self.whole_step(*batch)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss


def images():
    torch.manual_seed(1)
    return DataLoader(
        TensorDataset(torch.randn(48, 3, 8, 8), torch.randint(0, 2, (48,))), 4, shuffle=True
    )


def trained_by(folder, module, *callbacks, **options):
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(module, images())
    trainer.save_checkpoint(folder / "end.ckpt")
    return trainer, torch.load(folder / "end.ckpt", weights_only=True)


@pytest.fixture
def plan():
    x, y = torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)
    loss = torch.nn.functional.cross_entropy
    optimizer = torch.optim.SGD
    return plan_of(Workload.training(Net().train(), x, loss, optimizer, targets=y))


@pytest.fixture
def plain(tmp_path):
    module = Images()
    _, saved = trained_by(tmp_path, module)
    return module, saved


def same(saved, others):
    assert list(saved["state_dict"]) == list(others["state_dict"])
    for name, tensor in saved["state_dict"].items():
        torch.testing.assert_close(tensor, others["state_dict"][name])
    assert saved["global_step"] == others["global_step"] == 12


def test_a_plan_serves_fit_with_equal_losses_and_checkpoints(tmp_path, plan, plain):
    module, callback = Images(), SteadyCallback(quiet=True, plan=plan)
    net = module.model
    _, saved = trained_by(tmp_path, module, callback)
    assert module.losses == pytest.approx(plain[0].losses, rel=1e-4)
    same(saved, plain[1])
    assert callback.report().hits == 12
    assert module.model is net
    assert callback.result.unit == "optimizer steps"
    Images().load_state_dict(saved["state_dict"])


def test_an_inference_plan_serves_predict_and_leaves_fit_alone(tmp_path):
    x = torch.randn(4, 3, 8, 8)
    module = Images()
    callback = SteadyCallback(quiet=True, plan=plan_of(Workload(Net().eval(), x)))
    trainer, _ = trained_by(tmp_path, module, callback)
    with pytest.raises(UsageError, match="no plan was applied"):
        callback.report()
    trainer.predict(module, images())
    assert callback.report().hits == 12
    assert module.outputs[0].shape == (4, 2)
    assert module.model.training


def test_the_untouched_module_is_put_back_when_training_fails(tmp_path, plan):
    class Fails(Images):
        def on_train_batch_end(self, *args):
            raise OSError("gone")

    module = Fails()
    net = module.model
    with pytest.raises(OSError, match="gone"):
        trained_by(tmp_path, module, SteadyCallback(quiet=True, plan=plan))
    assert module.model is net


def test_a_wrong_name_is_refused_with_those_there_are(tmp_path, plan):
    with pytest.raises(UsageError, match="no module 'net': pass"):
        trained_by(tmp_path, Images(), SteadyCallback(quiet=True, plan=plan, module="net"))


def test_whole_steps_have_equal_losses_and_checkpoints(tmp_path, plan, plain):
    module = Whole(plan)
    trainer, saved = trained_by(tmp_path, module, gradient_clip_val=None)
    assert module.losses == pytest.approx(plain[0].losses, rel=1e-4)
    same(saved, plain[1])
    assert module.step_report().micro_batches == 12
    assert "12 of 12 calls tuned" in module.step_report().model
    assert trainer.logged_metrics["loss"] == pytest.approx(module.losses[-1])


def test_whole_steps_clip_as_lightning_does(tmp_path, plan):
    clipped = Images()
    trained_by(tmp_path, clipped, gradient_clip_val=0.01)
    module = Whole(plan)
    trained_by(tmp_path, module, gradient_clip_val=0.01)
    assert module.losses == pytest.approx(clipped.losses, rel=1e-4)
    unclipped = Whole(plan)
    trained_by(tmp_path, unclipped)
    assert module.losses[-1] != pytest.approx(unclipped.losses[-1])


def test_a_later_fit_has_its_own_optimizer_and_clipping(tmp_path, plan):
    found = []
    for module in (Images(), Whole(plan)):
        trained_by(tmp_path, module)
        trainer, _ = trained_by(tmp_path, module, gradient_clip_val=0.01)
        assert len(trainer.optimizers[0].state) == 4
        found.append(module.losses)
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}])
def test_lightning_takes_steps_that_a_plan_cannot(tmp_path, plan, caplog, options):
    plain, module = Images(), Whole(plan)
    trained_by(tmp_path, plain, **options)
    trained_by(tmp_path, module, **options)
    assert module.losses == plain.losses
    assert module.step_report() is None
    assert caplog.text.count("Lightning takes the training steps") == 1


def test_without_a_plan_lightning_takes_the_steps(tmp_path, plain):
    module = Whole(None)
    _, saved = trained_by(tmp_path, module)
    assert module.losses == plain[0].losses
    same(saved, plain[1])


def test_a_training_step_without_a_whole_step_is_lightnings(tmp_path, plan, plain):
    class Own(Whole):
        training_step = Images.training_step

    module = Own(plan)
    _, saved = trained_by(tmp_path, module)
    assert module.losses == plain[0].losses
    same(saved, plain[1])


def test_a_module_with_whole_steps_can_be_copied(tmp_path, plan):
    module = Whole(plan)
    trained_by(tmp_path, module)
    assert copy.deepcopy(module).step_report() is None


def halved(self, batch, index):
    return self.whole_step(*batch) / 2


def regularised(self, batch, index):
    return {"loss": self.whole_step(*batch) + self.model.head.weight.square().sum()}


def skipped(self, batch, index):
    self.whole_step(*batch)


def twice(self, batch, index):
    return self.whole_step(*batch) + self.whole_step(*batch)


@pytest.mark.parametrize("step", [halved, regularised, skipped, twice], ids=lambda s: s.__name__)
def test_a_step_that_was_taken_with_another_loss_is_refused(tmp_path, plan, step):
    kind = type("Mine", (Whole,), {"training_step": step})
    reason = "calls whole_step twice" if step is twice else "returns another loss than whole_step"
    with pytest.raises(UsageError, match=rf"Mine.training_step {reason}"):
        trained_by(tmp_path, kind(plan))


def test_a_dictionary_may_hold_the_loss_of_the_whole_step(tmp_path, plan, plain):
    def returning(self, batch, index):
        return {"loss": Whole.training_step(self, batch, index), "other": 1}

    module = type("Mine", (Whole,), {"training_step": returning})(plan)
    _, saved = trained_by(tmp_path, module)
    same(saved, plain[1])
    assert module.step_report().micro_batches == 12


def scaled(self):
    for parameter in self.model.parameters():
        parameter.grad.mul_(0.5)


def own_step(self, epoch, index, optimizer, closure):
    optimizer.step(closure=closure)
    optimizer.param_groups[0]["lr"] *= 0.9


def own_clipping(self, optimizer, **given):
    torch.nn.utils.clip_grad_norm_(self.model.head.parameters(), 0.01)


def manual(self, batch, index):
    self.automatic_optimization = False
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(self.whole_step(*batch))
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "method", "reason"),
    [
        ("on_after_backward", scaled, "Mine overrides on_after_backward"),
        ("optimizer_step", own_step, "Mine overrides optimizer_step"),
        ("configure_gradient_clipping", own_clipping, "Mine overrides configure_gradient_clipping"),
        ("training_step", manual, "optimization is manual"),
    ],
)
def test_lightning_takes_steps_whose_parts_are_overridden(
    tmp_path, plan, caplog, name, method, reason
):
    def trained(plan):
        module = type("Mine", (Whole,), {name: method})(plan)
        module.automatic_optimization = method is not manual
        return module, trained_by(tmp_path, module)[1]["state_dict"]

    (_, expected), (module, found) = trained(None), trained(plan)
    for each in expected:
        torch.testing.assert_close(found[each], expected[each])
    assert module.step_report() is None
    assert reason in caplog.text


@pytest.mark.parametrize("made", ["class", "lambda"])
def test_lightning_takes_steps_within_which_a_callback_acts(tmp_path, plan, caplog, made):
    def zeroed(trainer, module, optimizer):
        module.model.head.weight.grad.zero_()

    if made == "class":
        acts = type("Acts", (lightning.Callback,), {})()
        type(acts).on_before_optimizer_step = lambda self, *given: zeroed(*given)
    else:
        acts = lightning.callbacks.LambdaCallback(on_before_optimizer_step=zeroed)
    module = Whole(plan)
    before = module.model.head.weight.clone()
    trained_by(tmp_path, module, acts)
    torch.testing.assert_close(module.model.head.weight, before)
    assert "overrides on_before_optimizer_step" in caplog.text
