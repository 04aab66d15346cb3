"""Whether training scripts of other projects give the same results under `steady run`.

Each script runs once as it is and several times under `steady run`, unchanged, on small data made
here. Exit codes and everything the script computed must be equal. The benchmark notes the overhead
that each run states, and its findings. What must not be among them: memory that grows, as none of
the scripts leaks.

    git clone https://github.com/huggingface/pytorch-image-models SOURCES/pytorch-image-models
    git clone https://github.com/Lightning-AI/pytorch-lightning SOURCES/pytorch-lightning
    git clone https://github.com/huggingface/peft SOURCES/peft
    git clone https://github.com/pytorch/examples SOURCES/examples
    pip install timm lightning peft datasets accelerate pandas
    python benchmarks/scripts SOURCES [--only NAME ...] [--runs 3] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import platform
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from steadytorch.device.facts import load_facts

ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_DATASETS_CACHE": "cache",
}


@dataclass(frozen=True)
class Script:
    """A script of another project.

    Attributes:
        path: the script, below the folder of sources.
        packages: those whose versions are noted; the first is the project's.
        what: what it trains, for the table.
        arguments: of the script, which runs in the folder of its data.
        prepare: makes the data in a folder.
        results: all that the script computed, from the folder and from what it printed.
    """

    path: str
    packages: tuple[str, ...]
    what: str
    arguments: tuple[str, ...]
    prepare: Callable[[Path], None]
    results: Callable[[Path, str], Any]


def _images(folder: Path) -> None:
    """Random JPEG files of four classes, 24 and 4 a class."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for split, number in (("train", 24), ("validation", 4)):
        for label in range(4):
            place = folder / "images" / split / f"class{label}"
            place.mkdir(parents=True)
            for index in range(number):
                pixels = draw.integers(0, 255, (160, 160, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{index}.jpg")


def _lines(path: Path, number: int, words: int, seed: int) -> None:
    draw = random.Random(seed)
    vocabulary = [f"w{index}" for index in range(words)]
    text = "\n".join(" ".join(draw.choices(vocabulary, k=34)) for _ in range(number))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _wikitext(folder: Path) -> None:
    _lines(folder / "data/wikitext-2.txt", 4200, 300, 0)


def _corpus(folder: Path) -> None:
    for seed, (split, number) in enumerate((("train", 2000), ("valid", 60), ("test", 60))):
        _lines(folder / f"data/{split}.txt", number, 2000, seed)


def _sentences(folder: Path) -> None:
    """A small BERT with its tokenizer, and sentences of random words in two classes."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    model = folder / "model"
    model.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(500))]
    (model / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab_file=str(model / "vocab.txt")).save_pretrained(model)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = BertConfig(vocab_size=len(words), intermediate_size=512, **sizes)
    BertForSequenceClassification(config).save_pretrained(model)
    draw = random.Random(0)
    data = folder / "sentences"
    data.mkdir()
    for split, number in (("train", 1920), ("validation", 64)):
        rows = [
            {"sentence": " ".join(draw.choices(words[5:], k=draw.randint(20, 60))),
             "label": draw.randint(0, 1)}
            for _ in range(number)
        ]  # fmt: skip
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(
        f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "validation")
    )
    (data / "README.md").write_text(
        f"---\nconfigs:\n- config_name: sst2\n  data_files:\n{files}---\n"
    )


def _summary(folder: Path, _printed: str) -> list[dict[str, str]]:
    (table,) = folder.glob("output/*/summary.csv")
    with table.open() as file:
        return list(csv.DictReader(file))


def _checkpoint(folder: Path, _printed: str) -> dict[str, bytes]:
    """Every tensor of the last checkpoint, bit by bit."""
    (path,) = folder.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    found: dict[str, bytes] = {}

    def gather(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value.contiguous().numpy().tobytes()
        elif isinstance(value, dict):
            for key, each in value.items():
                gather(each, f"{name}.{key}")

    gather(torch.load(path, weights_only=True), "")
    return found


def _history(folder: Path, _printed: str) -> list[dict[str, float]]:
    (path,) = folder.glob("output/checkpoint-*/trainer_state.json")
    logged = json.loads(path.read_text())["log_history"]
    timed = re.compile("runtime|per_second")
    return [{key: row[key] for key in row if not timed.search(key)} for row in logged]


def _losses(_folder: Path, printed: str) -> list[str]:
    return re.findall(r"loss +[\d.]+ \| (?:valid |test )?ppl +[\d.]+", printed)


SCRIPTS = {
    "timm": Script(
        "pytorch-image-models/train.py",
        ("timm",),
        "resnet18, 6 epochs of 12 steps",
        (
            *("--data-dir", "images", "--model", "resnet18", "--num-classes", "4"),
            *("--device", "cpu", "--img-size", "96", "--epochs", "6", "--warmup-epochs", "0"),
            *("-b", "8", "-j", "1", "--seed", "1", "--log-interval", "5", "--output", "output"),
        ),
        _images,
        _summary,
    ),
    "lightning": Script(
        "pytorch-lightning/examples/pytorch/basics/transformer.py",
        ("lightning",),
        "transformer, 20 epochs of 10 steps",
        (),
        _wikitext,
        _checkpoint,
    ),
    "peft": Script(
        "peft/examples/frod_finetuning/frod_text_classification.py",
        ("peft", "transformers"),
        "BERT of four layers, by the Trainer of transformers, 60 steps",
        (
            *("--model_name_or_path", "model", "--dataset_name", "./sentences"),
            *("--use_cpu", "true", "--logging_steps", "5", "--logging_nan_inf_filter", "false"),
            *("--seed", "3", "--output_dir", "output"),
        ),
        _sentences,
        _history,
    ),
    "language model": Script(
        "examples/word_language_model/main.py",
        ("torch",),
        "LSTM, updated without an optimizer, 2 epochs of 100 steps",
        ("--data", "data", "--epochs", "2", "--log-interval", "10", "--save", "model.pt"),
        _corpus,
        _losses,
    ),
}


def run(script: Script, sources: Path, watched: bool) -> dict[str, Any]:
    """Results of one run, and what `steady run` found.

    Raises:
        RuntimeError: the script did not end with 0.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        script.prepare(folder)
        start = [sys.executable]
        if watched:
            steady = Path(sys.executable).with_name("steady")
            start = [str(steady), "run", "--json", str(folder / "run.json")]
        done = subprocess.run(
            [*start, str((sources / script.path).resolve()), *script.arguments],
            cwd=folder,
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}")
        result: dict[str, Any] = {"results": script.results(folder, done.stdout)}
        if watched:
            seen = json.loads((folder / "run.json").read_bytes())
            result["steps"] = len(seen["measured"]["samples_ns"])
            result["median_ns"] = seen["measured"]["median_ns"]
            result["overhead_share"] = seen["overhead_share"]
            result["findings"] = [[each["id"], each["title"]] for each in seen["findings"]]
        return result


def judged(script: Script, sources: Path, runs: int) -> dict[str, Any]:
    """One run as it is, and `runs` under `steady run`."""
    plain = run(script, sources, watched=False)
    again = run(script, sources, watched=False)
    if not plain["results"] or plain["results"] != again["results"]:
        raise RuntimeError("the script's results are not the same from run to run without us")
    watched = [run(script, sources, watched=True) for _ in range(runs)]
    return {
        "script": script.path,
        "what": script.what,
        "versions": {each: importlib.metadata.version(each) for each in script.packages},
        "results": len(plain["results"]),
        "equal": all(each.pop("results") == plain["results"] for each in watched),
        "leaks": sum(found[0] == "memory-growth" for each in watched for found in each["findings"]),
        "watched": watched,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sources", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = {}
    for name in asked.only:
        rows[name] = row = judged(SCRIPTS[name], asked.sources, asked.runs)
        equal = "equal" if row["equal"] else "DIFFERENT"
        print(f"{name}: {row['results']} results {equal}, {row['leaks']} leaks", flush=True)
        for each in row["watched"]:
            found = ", ".join(f"{finding}: {title}" for finding, title in each["findings"])
            print(f"    {each['median_ns'] / 1e6:.1f} ms, {each['overhead_share']:.2%}; {found}")
    if asked.out:
        device = load_facts("cpu").name
        summary = {"device": device, "cores": os.cpu_count(), "python": platform.python_version(),
                   "torch": torch.__version__, "date": str(date.today()),
                   "scripts": rows}  # fmt: skip
        name = f"scripts_{'-'.join(device.lower().split()[:2])}_{date.today()}.json"
        (asked.out / name).write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
