from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from steadytorch.errors import UsageError

pytest.importorskip("lightning.pytorch", reason="lightning is not installed here")

import lightning.pytorch as lightning

from steadytorch.integrations.lightning import SteadyCallback

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
