"""Benchmark workloads by device, and those that the user names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from steadytorch import load_workload
from steadytorch.errors import UsageError
from steadytorch.tune.select import SearchOptions
from steadytorch.workload.workload import Workload


class Case(NamedTuple):
    """A benchmark workload.

    Attributes:
        spec: name for `load_workload`.
        size: a batch size, or the shape of its first input, such as `4x256`.
        precision: lowest precision that the search may use.
        budget_s: search budget in seconds; by default that of `steady.tune`.
        options: options by hand to time; all of the device and precision if empty.
        label: end of its name, where another case has the same workload.
    """

    spec: str
    size: str
    precision: str = "same"
    budget_s: float = SearchOptions().budget_s
    options: tuple[str, ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        """Name in results, without the library prefix."""
        return f"{self.spec.rpartition(':')[2]}:{self.size}{self.label}"

    def load(self) -> Workload:
        """Load the workload on the CPU, with random weights."""
        if "x" in self.size:
            return load_workload(self.spec, inputs=[self.size])
        return load_workload(self.spec, batch=int(self.size))


CASES: dict[str, tuple[Case, ...]] = {
    "cuda": (
        Case("resnet50", "1", "fp16"),
        Case("resnet50", "64", "fp16"),
        # With random weights, values shrink from layer to layer below the resolution of fp16.
        Case("mobilenet_v3_large", "1", "bf16"),
        Case("torchvision:densenet121", "1", "fp16"),  # 120 convolutions: long compilation
        Case("torchvision:efficientnet_b0", "64", "bf16"),
        Case("torchvision:convnext_tiny", "32", "fp16"),
        Case("torchvision:vgg16_bn", "64", "fp16"),
        Case("vit_b_16", "1", "fp16"),
        # Limited by power, of which fp16 needs more.
        Case("vit_b_16", "64", "bf16"),
        # The size nearest to 256x256 that fits its four poolings.
        Case("unet", "4x1x252x252", "fp16"),
        Case("transformers:bert", "8x128", "fp16"),  # imports take seconds in each process
        Case("gpt2", "4x256", "fp16"),
        Case("torchvision:swin_t", "32", "fp16"),
        Case("torchvision:maxvit_t", "16", "fp16"),
        Case("timm:mixer_b16_224", "64", "fp16"),
        Case("torchvision:regnet_y_8gf", "32", "fp16"),
        Case("torchvision:shufflenet_v2_x1_0", "128", "fp16"),
        Case("torchvision:inception_v3", "32", "fp16"),
        Case("timm:ese_vovnet39b", "1", "fp16"),
        Case("timm:cspdarknet53", "16", "fp16"),
        Case("torchvision:fcn_resnet50", "8", "fp16"),
        Case("torchvision:deeplabv3_mobilenet_v3_large", "4", "bf16"),
        Case("transformers:distilbert", "64x128", "fp16"),
        Case("transformers:t5", "16", "bf16"),  # encoder and decoder
        Case("transformers:wav2vec2", "8x16000", "fp16"),  # sound: a second each
    ),
    "cpu": (
        Case("resnet50", "1"),
        Case("mobilenet_v3_large", "1"),
        Case("vit_b_16", "1"),
        Case("torchvision:efficientnet_b0", "1"),
        Case("transformers:bert", "1x128"),
        Case("gpt2", "1x64"),
        Case("resnet50", "8"),
        Case("resnet50", "1", "bf16", label=" bf16"),
        Case("mobilenet_v3_large", "1", "bf16", label=" bf16"),
        Case("vit_b_16", "1", "bf16", label=" bf16"),
        Case("transformers:bert", "1x128", "bf16", label=" bf16"),
    ),
}


def chosen(
    cases: Sequence[Case],
    only: Sequence[str],
    precision: str | None = None,
    budget_s: float | None = None,
) -> list[Case]:
    """Select the cases named by `only`, or whose names begin so; others are SPEC:SIZE.

    Raises:
        UsageError: a text matches no case and does not have the form SPEC:SIZE.
    """
    found = [] if only else list(cases)
    for text in only:
        named = [case for case in cases if case.name == text]
        fitting = named or [case for case in cases if case.name.startswith(text)]
        found += [case for case in fitting if case not in found] or (
            [] if fitting else [_own(text)]
        )
    given = {"precision": precision, "budget_s": budget_s}
    return [case._replace(**{k: v for k, v in given.items() if v is not None}) for case in found]


def _own(text: str) -> Case:
    spec, _, size = text.rpartition(":")
    if not spec or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size):
        raise UsageError(f"{text!r} is no workload: write SPEC:BATCH or SPEC:SHAPE")
    return Case(spec, size)
