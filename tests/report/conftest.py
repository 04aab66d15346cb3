from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from steadytorch.device.facts import DeviceFacts
from steadytorch.measure.measurement import summarize
from steadytorch.plan.fingerprint import Key
from steadytorch.plan.record import Evidence, Speedup, Timing, Trial
from steadytorch.results.candidate import TransformSpec
from steadytorch.results.signature import Leaf, Signature
from steadytorch.serve.plan import Plan
from steadytorch.tune.result import TuneResult

HOSTILE = "[red]boo[/red] \x1b[2J\x1b]0;title\x07 two\nlines\r[/]"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
HEAD = {"schema", "kind", "workload", "environment", "created"}
"""What every document has."""
WINNER = (TransformSpec("channels_last"), TransformSpec("inference_mode"))
LONG = (
    TransformSpec("fold_batch_norm"),
    TransformSpec("channels_last"),
    TransformSpec("compile", (("mode", "max-autotune"), ("freezing", True))),
    TransformSpec("attention_backend", (("backend", "mem_efficient"),)),
    TransformSpec("inference_mode"),
    TransformSpec("threads", (("count", 64),)),
)


def spec(name):
    return (TransformSpec(name),)


def trial(candidate=(), **fields):
    defaults = {
        "median_ns": 28.7e6,
        "median_ci_ns": (28.1e6, 29.3e6),
        "p90_ns": 31.0e6,
        "peak_memory_bytes": 1_234_567_890,
        "setup_s": 24.2,
        "samples": 60,
    }
    return Trial(transforms=candidate, **{**defaults, **fields})


def timing(median_ns):
    return Timing(
        "latency", median_ns, (0.98 * median_ns, 1.02 * median_ns), 1.1 * median_ns, None, 150
    )


TRIALS = (
    trial(),
    trial(WINNER, median_ns=14.2e6, error=1.2e-7),
    trial(LONG, median_ns=15e6, median_ci_ns=None, p99_ns=40e6, error=3.4e-6),
    trial(spec("autocast"), median_ns=9e6, precision="bf16", allowed=False, reason="allow with X"),
    trial(
        spec("cudnn_deterministic"),
        median_ns=None,
        status="failed",
        reason="set-up: RuntimeError: no",
    ),
)


def evidence(**fields):
    defaults = {
        "baseline": timing(28.7e6),
        "winner": timing(14.2e6),
        "speedup": Speedup(2.02, 1.9, 2.1, "process", "faster", 20),
        "break_even_calls": 1234,
        "regime": "memory-bound",
        "reference": "float64",
        "trials": TRIALS,
        "not_applicable": {"cuda_graph": "no CUDA device", "tf32": "no CUDA device"},
        "not_tried": {"compile(max-autotune)": "budget exhausted"},
        "search_s": 61.5,
    }
    return Evidence(**{**defaults, **fields})


def key(**fields):
    defaults = dict.fromkeys(
        ["compute_capability", "sm_count", "mig_profile", "cuda", "cudnn", "triton", "driver"]
    )
    return Key(
        **{
            **defaults,
            "workload": "0" * 64,
            "signature": "8x3x224x224:float32",
            "inputs": {"[0]": "..."},
            "objective": "latency",
            "precision": "same",
            "tolerance": None,
            "max_memory_bytes": None,
            "ambient": {},
            "device": "cpu",
            "device_name": "AMD EPYC",
            "cores_logical": 2,
            "isa": "AVX512",
            "torch": "2.13.0",
            "rules": 1,
            **fields,
        }
    )


def plan(**fields):
    leaf = Leaf("[0]", (8, 3, 224, 224), "float32", (150528, 50176, 224, 1), "cpu")
    defaults = {
        "name": "resnet50",
        "signature": Signature((leaf,), "*"),
        "candidate": WINNER,
        "evidence": evidence(),
        "key": key(),
        "created": "2026-01-01T00:00:00+00:00",
        "version": "0.1.0",
        "path": "/home/user/.cache/steadytorch/plans/0123/4567.json",
    }
    return Plan(**{**defaults, **fields})


def result(**fields):
    defaults = {
        "baseline": summarize([28_700_000 + i for i in range(12)], "latency"),
        "winner": summarize([14_200_000 + i for i in range(12)], "latency"),
        "chosen": WINNER,
        "regime": "memory-bound",
        "candidates": TRIALS,
        "not_applicable": {},
        "not_tried": {},
        "speedup": evidence().speedup,
        "break_even_calls": 1234,
        "reference": "float64",
        "seconds": 61.5,
    }
    return TuneResult(**{**defaults, **fields})


FACTS = DeviceFacts(device="cpu", name="AMD EPYC", unknown={"driver": "no NVIDIA driver"})


def read_document(document):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert document.endswith(b"}\n")
    return json.loads(document, parse_constant=refuse)


class Screen:
    """A console that keeps what is printed on it."""

    def __init__(self, width=80, **options):
        self.out = io.StringIO()
        self.console = Console(file=self.out, width=width, highlight=False, _environ={}, **options)

    @property
    def text(self):
        return self.out.getvalue()

    @property
    def flat(self):
        """The text with the breaks and the padding of a table taken out."""
        return re.sub(r"\s+", " ", self.text)

    def check_width(self):
        long = [line for line in self.text.splitlines() if len(line) > self.console.width]
        assert long == []


@pytest.fixture
def screen():
    made = Screen()
    yield made
    made.check_width()
    assert not CONTROL.search(made.text)
