from __future__ import annotations

import json

import pytest
import torch

from steadytorch.errors import UsageError

pytest.importorskip("transformers", reason="transformers is not installed here")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerState,
    TrainingArguments,
)

from steadytorch.integrations.hugging_face import SteadyCallback, SteadyTrainerMixin

from .plans import plan_of

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


def test_only_the_main_process_prints(capsys):
    for is_main in (True, False):
        seen = SteadyCallback()
        seen.on_train_begin(None, TrainerState(is_world_process_zero=is_main), None)
        seen.stop(OSError("gone"))
        assert bool(capsys.readouterr().err) == is_main


def test_a_callback_that_is_never_called_says_so():
    with pytest.raises(UsageError, match="has not called this callback"):
        _ = SteadyCallback().result


# -- plans --------------------------------------------------------------------------------------


class Mine(SteadyTrainerMixin, Trainer):
    pass


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=16,
        )
    )  # fmt: skip


def texts():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (48, 8), generator=generator)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": torch.tensor(i % 2)}
        for i, row in enumerate(ids)
    ]


def bert_trainer(folder, kind=Mine, **options):
    chosen = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, report_to=[],
        save_steps=6, use_cpu=True, disable_tqdm=True, logging_steps=1, **options,
    )  # fmt: skip
    return kind(model=bert(), args=chosen, train_dataset=texts(), eval_dataset=texts()[:8])


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_plan_serves_with_equal_losses_and_checkpoints(tmp_path):
    plain = bert_trainer(tmp_path / "plain", Trainer)
    plain.train()
    run = bert_trainer(tmp_path / "mine")
    model = run.model
    run.plan = plan_of(run.steady_workload())
    run.train()
    assert losses(run) == pytest.approx(losses(plain), rel=1e-5)
    report = run.steady_report()
    assert report.hits == STEPS
    assert run.model is run.model_wrapped is model
    assert files(tmp_path / "mine") == files(tmp_path / "plain")
    assert {"checkpoint-12/config.json", "checkpoint-6/model.safetensors"} < set(
        files(tmp_path / "mine")
    )
    configs = [
        json.loads((tmp_path / each / "checkpoint-12" / "config.json").read_text())
        for each in ("plain", "mine")
    ]
    assert configs[0] == configs[1]
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "mine" / "checkpoint-12")
    torch.testing.assert_close(loaded.state_dict(), plain.model.state_dict())
    assert run.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


def halved(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()) / 2


@pytest.mark.parametrize(
    ("options", "given"),
    [({"label_smoothing_factor": 0.1}, {}), ({}, {"compute_loss_func": halved}), ({}, {})],
    ids=["label smoothing", "a loss of one's own", "the model's loss"],
)
def test_a_language_model_trains_with_the_loss_that_the_trainer_computes(tmp_path, options, given):
    def made(kind):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        chosen = TrainingArguments(
            output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, logging_steps=1, **options,
        )  # fmt: skip
        data = [{**row, "labels": row["input_ids"]} for row in texts()]
        return kind(model=GPT2LMHeadModel(config), args=chosen, train_dataset=data, **given)

    plain, run = made(Trainer), made(Mine)
    plain.train()
    workload = run.steady_workload()
    step = workload.step_function()
    assert float(step()) == pytest.approx(losses(plain)[0], rel=1e-3)
    run = made(Mine)
    run.plan = plan_of(run.steady_workload())
    run.train()
    assert losses(run) == pytest.approx(losses(plain), rel=1e-5)
    assert run.steady_report().hits == STEPS


def test_training_resumes_from_a_checkpoint_with_a_plan(tmp_path):
    plain = bert_trainer(tmp_path, Trainer)
    plain.train()
    run = bert_trainer(tmp_path)
    run.plan = plan_of(run.steady_workload())
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert losses(run)[6:] == pytest.approx(losses(plain)[6:], rel=1e-5)
    assert run.steady_report().hits == 6


def test_evaluation_during_training_runs_untouched(tmp_path):
    run = bert_trainer(tmp_path, eval_strategy="steps", eval_steps=6)
    run.plan = plan_of(run.steady_workload())
    run.train()
    assert run.steady_report().hits == STEPS
    assert sum("eval_loss" in entry for entry in run.state.log_history) == 2


def test_mixed_precision_trains_untouched(tmp_path, caplog):
    plain = bert_trainer(tmp_path, Trainer, bf16=True)
    plain.train()
    run = bert_trainer(tmp_path, bf16=True)
    run.plan = plan_of(run.steady_workload())
    run.train()
    assert losses(run) == losses(plain)
    assert "training untouched: mixed precision is bf16" in caplog.text
    with pytest.raises(UsageError, match="no plan was applied"):
        run.steady_report()


def test_the_model_is_put_back_when_training_fails(tmp_path):
    class Fails(Mine):
        def training_step(self, *args, **kwargs):
            raise OSError("gone")

    run = bert_trainer(tmp_path, Fails)
    model, run.plan = run.model, plan_of(run.steady_workload())
    with pytest.raises(OSError, match="gone"):
        run.train()
    assert run.model is run.model_wrapped is model
