"""A worker of a sweep whose search is a short sleep. Run: FOLDER COUNT SECONDS TIMEOUT SHARD."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from steadytorch.results.sweep import SweepRow
from steadytorch.sweeps.shard import parse_shard
from steadytorch.sweeps.worker import Item, SweepFolder


def items(count: int) -> list[Item]:
    return [Item(f"{number:08x}", f"workload{number}", {}) for number in range(count)]


def main(folder: str, count: str, seconds: str, timeout: str, shard: str) -> None:
    shared = SweepFolder(Path(folder), items(int(count)), float(timeout))
    shared.check()
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def run(item: Item) -> SweepRow:
        os.write(log, f"{item.text} {shared.worker}\n".encode())
        time.sleep(float(seconds))
        return SweepRow(workload=item.text, status="done", worker=shared.worker)

    shared.work(parse_shard(shard, os.environ).order(shared.items), run)


if __name__ == "__main__":
    main(*sys.argv[1:])
