from __future__ import annotations

import pytest
import torch

from steadytorch.errors import UsageError

pytest.importorskip("transformers", reason="transformers is not installed here")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from transformers import Trainer, TrainingArguments

from steadytorch.integrations.hugging_face import SteadyCallback

pytestmark = pytest.mark.slow
STEPS = 12


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer(folder, *callbacks, data=None):
    torch.manual_seed(1)
    samples = data or [{"x": torch.randn(8), "labels": torch.tensor(i % 2)} for i in range(48)]
    chosen = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    return Trainer(model=Model(), args=chosen, train_dataset=samples, callbacks=list(callbacks))


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_a_run_is_watched_and_its_losses_are_the_same(tmp_path, capsys):
    plain = trainer(tmp_path)
    plain.train()
    seen = SteadyCallback()
    watched = trainer(tmp_path, seen)
    watched.train()
    assert losses(watched) == losses(plain)
    assert seen.result.unit == "optimizer steps"
    assert len(seen.result.measured.samples_ns) == STEPS - 1
    means = seen.result.mean_slices_ns()
    assert min(means[name] for name in ("forward", "backward", "optimizer", "input_wait")) > 0
    assert "11 optimizer steps" in capsys.readouterr().err


def test_a_failed_run_keeps_its_steps(tmp_path):
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 48

        def __getitem__(self, index):
            if torch.rand(()) < 0.05:
                raise OSError("gone")
            return {"x": torch.randn(8), "labels": torch.tensor(index % 2)}

    seen = SteadyCallback(quiet=True)
    run = trainer(tmp_path, seen, data=Broken())
    with pytest.raises(OSError, match="gone"):
        run.train()
    seen.stop(OSError("gone"))
    assert seen.result.failed == "OSError: gone"


def test_a_callback_that_is_never_called_says_so():
    with pytest.raises(UsageError, match="has not called this callback"):
        _ = SteadyCallback().result
