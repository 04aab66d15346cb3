"""Time and peak memory of reading a large trace: a real one, repeated with shifted times.

    python benchmarks/trace_reader.py TRACE.json.gz --megabytes 650 --folder /tmp/trace_reader

Each reading runs in its own process, which gives its own peak resident memory.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import platform
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from steadytorch import __version__

RESULTS = Path(__file__).parent / "results"
MOVED = re.compile(rb'("ts": |"correlation": |"External id": )(\d+)')
MOVE = 10_000_000
"""Offset between copies: microseconds of time stamps, and of correlation IDs."""

READ = """
import json, resource, sys, time
from steadytorch.traces.reader import read_trace
start = time.perf_counter()
trace = read_trace(sys.argv[1])
seconds, cpu = time.perf_counter() - start, time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
columns = sum(column.nbytes for column in vars(trace.events).values())
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_memory_bytes": peak,
                  "rows": len(trace.events), "column_bytes": columns}))
"""


def copies(text: bytes, size: int) -> Iterator[bytes]:
    """Yield the trace's text, with events repeated until it has `size` bytes."""
    start = text.index(b"[", text.index(b'"traceEvents"')) + 1
    # Latin-1 maps every byte to one character.
    end = json.JSONDecoder().raw_decode(text.decode("latin-1"), start - 1)[1] - 1
    yield text[:start]
    for number in range(max(1, round(size / (end - start)))):
        if number:
            yield b","
        yield MOVED.sub(
            lambda match: match[1] + b"%d" % (int(match[2]) + number * MOVE),  # noqa: B023
            text[start:end],
        )
    yield text[end:]


def make(source: Path, folder: Path, size: int) -> tuple[Path, Path]:
    """Write the large trace, plain and gzipped."""
    folder.mkdir(parents=True, exist_ok=True)
    plain, gzipped = folder / "large.json", folder / "large.json.gz"
    text = source.read_bytes()
    text = gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text
    deflate = zlib.compressobj(wbits=31)
    with plain.open("wb") as whole, gzipped.open("wb") as small:
        for part in copies(text, size):
            whole.write(part)
            small.write(deflate.compress(part))
        small.write(deflate.flush())
    return plain, gzipped


def read(path: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout) | {"file_bytes": path.stat().st_size}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of reading a large trace.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--megabytes", type=int, default=650)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the large files")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    created = datetime.datetime.now(datetime.UTC)
    result: dict[str, object] = {
        "schema": 1,
        "kind": "trace_reader",
        "created": f"{created:%Y-%m-%d}",
        "versions": {
            "steadytorch": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "msgspec": msgspec.__version__,
        },
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "made_from": options.trace.name,
    }
    for path in make(options.trace, options.folder, options.megabytes * 1_000_000):
        runs = [read(path) for _ in range(options.repeats)]
        result[path.name] = runs
        for run in runs:
            print(
                f"{path.name}: {run['seconds']:.2f} s, {run['peak_memory_bytes'] / 1e6:.0f} MB peak"
            )
    stem = options.trace.name.partition(".")[0]
    name = f"trace-reader-{stem}_{created:%Y-%m-%d}.json"
    (options.results / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
