from __future__ import annotations

import importlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from steadytorch import load_workload
from steadytorch.errors import UnsupportedError, UsageError
from steadytorch.workload.sources import PREFIXES, did_you_mean, load
from steadytorch.workload.workload import Workload

TINY_BERT = {
    "model_type": "bert",
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
}
TINY_VIT = {
    "model_type": "vit",
    "image_size": [32, 48],
    "num_channels": 1,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "dtype": "bfloat16",
}
TINY_T5 = {
    "model_type": "t5",
    "vocab_size": 11,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 8,
    "num_layers": 1,
    "num_heads": 2,
}
_TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
TINY_WAV2VEC2 = {
    "model_type": "wav2vec2",
    **_TINY,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 8],
    "conv_stride": [5, 8],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
TINY_AST = {
    "model_type": "audio-spectrogram-transformer",
    **_TINY,
    "max_length": 48,
    "num_mel_bins": 32,
}
TINY_WHISPER = {
    "model_type": "whisper",
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "vocab_size": 11,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def output_of(workload: Workload) -> Any:
    with torch.no_grad():
        return workload.step_function()()


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_library_that_is_not_installed_says_what_to_install(
    prefix: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, prefix, None)
    with pytest.raises(UnsupportedError, match=f"^{prefix} is not installed: pip install {prefix}"):
        load(prefix, "resnet50", 1, seeded())


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('no operator\\nnms')", "RuntimeError: no operator"),
        (
            "import steady_test_nowhere",
            "ModuleNotFoundError: No module named 'steady_test_nowhere'",
        ),
    ],
)
def test_a_library_that_is_broken_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
):
    (tmp_path / "timm.py").write_text(code)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match=f"^timm cannot be imported: {reason}$"):
        load("timm", "resnet50", 1, seeded())


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_alone_is_refused(prefix: str):
    with pytest.raises(UsageError, match=f"{prefix}: lacks a model name: use {prefix}:NAME"):
        load(prefix, "", 1, seeded())


def test_near_matches_follow_the_word():
    assert did_you_mean("brt", ["bert", "bart"]) in (
        " (did you mean bert or bart?)",
        " (did you mean bart or bert?)",
    )
    assert did_you_mean("zzz", ["bert"]) == ""


class TestTransformers:
    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("transformers")

    def directory(self, path: Path, config: dict[str, Any]) -> str:
        (path / "tiny").mkdir()
        (path / "tiny" / "config.json").write_text(json.dumps(config))
        return str(path / "tiny")

    def test_a_model_type_is_built_with_random_weights(self):
        workload = load("transformers", "bert", 1, seeded())
        assert (workload.name, str(workload.signature())) == ("transformers:bert", "1x128:int64")
        assert not workload.model.training
        assert output_of(workload).last_hidden_state.shape == (1, 128, 768)

    def test_text_is_within_vocabulary_and_positions(self, tmp_path: Path):
        workload = load("transformers", self.directory(tmp_path, TINY_BERT), 4, seeded())
        ids = workload.inputs[0]
        assert (workload.name, ids.shape, ids.max()) == ("transformers:tiny", (4, 16), 10)

    def test_images_are_as_the_configuration_says(self, tmp_path: Path):
        workload = load("transformers", self.directory(tmp_path, TINY_VIT), 3, seeded())
        assert workload.inputs[0].shape == (3, 1, 32, 48)
        assert workload.inputs[0].dtype == workload.dtype
        output_of(workload)

    def test_an_encoder_decoder_gets_both_texts_and_keeps_no_cache(self, tmp_path: Path):
        workload = load("transformers", self.directory(tmp_path, TINY_T5), 2, seeded())
        assert workload.kwargs["decoder_input_ids"].shape == (2, 128)
        assert output_of(workload).past_key_values is None

    def test_the_decoder_takes_the_shape_that_the_encoder_is_given(self, tmp_path: Path):
        spec = f"transformers:{self.directory(tmp_path, TINY_T5)}"
        workload = load_workload(spec, inputs=["3x7"])
        assert workload.kwargs["decoder_input_ids"].shape == workload.inputs[0].shape == (3, 7)
        output_of(workload)

    @pytest.mark.parametrize(
        ("config", "shape"),
        [(TINY_WAV2VEC2, (2, 16_000)), (TINY_AST, (2, 48, 32))],
        ids=["samples", "spectrogram"],
    )
    def test_sound_is_as_the_configuration_says(
        self, tmp_path: Path, config: dict[str, Any], shape: tuple[int, ...]
    ):
        workload = load("transformers", self.directory(tmp_path, config), 2, seeded())
        assert workload.inputs[0].shape == shape
        output_of(workload)

    @pytest.mark.parametrize(("inputs", "batch"), [([], 1), (["3x16x64"], 3)])
    def test_speech_is_decoded_to_text(self, tmp_path: Path, inputs: list[str], batch: int):
        spec = f"transformers:{self.directory(tmp_path, TINY_WHISPER)}"
        workload = load_workload(spec, inputs=inputs)
        assert workload.inputs[0].shape == (batch, 16, 64)
        assert workload.kwargs["decoder_input_ids"].shape == (batch, 32)
        output_of(workload)

    @pytest.mark.parametrize("name", ["google-bert/bert-base-uncased", "bert-base-uncased"])
    def test_a_name_on_the_hub_is_not_looked_up(self, name: str):
        with pytest.raises(UsageError, match=f"'{name}'.*steady never downloads.*write a factory"):
            load("transformers", name, 1, seeded())

    def test_a_part_to_be_found_on_the_hub_is_not_looked_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        constants = importlib.import_module("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        asked = []
        monkeypatch.setattr(socket, "getaddrinfo", lambda *host, **_: asked.append(host) or [])
        config = {
            "model_type": "dpt",
            "backbone": "nobody/nothing",
            "use_pretrained_backbone": True,
        }
        with pytest.raises(UsageError, match="transformers:tiny cannot be built: "):
            load("transformers", self.directory(tmp_path, config), 1, seeded())
        assert asked == []
        assert constants.HF_HUB_OFFLINE is False

    def test_a_model_of_several_inputs_is_refused(self):
        with pytest.raises(UsageError, match="transformers:clip needs more than one input"):
            load("transformers", "clip", 1, seeded())

    def test_a_model_larger_than_memory_is_refused_before_it_is_built(self):
        with pytest.raises(UnsupportedError, match=r"deepseek_v3 has \d{4} GiB of weights"):
            load("transformers", "deepseek_v3", 1, seeded())

    def test_a_directory_without_a_configuration_is_refused(self, tmp_path: Path):
        with pytest.raises(UsageError, match=r"has no config\.json"):
            load("transformers", str(tmp_path), 1, seeded())

    def test_a_broken_configuration_is_refused(self, tmp_path: Path):
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(UsageError, match=r"cannot be built: .*factory") as caught:
            load("transformers", str(tmp_path), 1, seeded())
        assert "\n" not in str(caught.value)


class TestTorchvision:
    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("torchvision")

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("mobilenet_v3_small", (2, 3, 224, 224)),
            ("inception_v3", (2, 3, 299, 299)),
            ("lraspp_mobilenet_v3_large", (2, 3, 520, 520)),
            ("r3d_18", (2, 3, 16, 112, 112)),
        ],
    )
    def test_inputs_are_those_of_the_task(self, name: str, shape: tuple[int, ...]):
        workload = load("torchvision", name, 2, seeded())
        assert (workload.name, workload.inputs[0].shape) == (f"torchvision:{name}", shape)
        assert not workload.model.training

    def test_detection_needs_a_factory(self):
        with pytest.raises(UsageError, match=r"is for detection .*: write a factory"):
            load("torchvision", "fasterrcnn_resnet50_fpn", 1, seeded())

    def test_an_unknown_model_is_answered_with_near_ones(self):
        with pytest.raises(UsageError, match=r"no model 'resnt50' \(did you mean resnet50 or"):
            load("torchvision", "resnt50", 1, seeded())


class TestTimm:
    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("timm")

    def test_inputs_are_those_of_the_models_configuration(self):
        workload = load("timm", "test_vit", 2, seeded())
        assert workload.inputs[0].shape == (2, 3, 160, 160)
        assert output_of(workload).shape == (2, 1000)

    def test_a_name_on_the_hub_is_not_looked_up(self):
        with pytest.raises(UsageError, match="is on a hub, but steady never downloads"):
            load("timm", "hf-hub:nobody/nothing", 1, seeded())

    def test_an_unknown_model_is_answered_with_near_ones(self):
        with pytest.raises(UsageError, match=r"no model 'resnt50' \(did you mean resnet50"):
            load("timm", "resnt50", 1, seeded())
