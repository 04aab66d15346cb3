"""`steady tune --list FILE --submit N`: start a sweep's workers as SLURM jobs with submitit."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from steadytorch.cli import options
from steadytorch.errors import UnsupportedError, UsageError, one_line

if TYPE_CHECKING:
    from steadytorch.sweeps.worker import SweepFolder

_HERE_ONLY = ("submit", "partition", "slurm", "retry", "quiet")
_SPARE_MIN = 30


def submit(ctx: click.Context, shared: SweepFolder) -> None:
    """Submits a sweep's workers as one SLURM job array, and prints the job ids.

    Without SLURM, submitit starts the workers as processes on this machine.

    Args:
        ctx: context of `steady tune`, with `--submit`.
        shared: the folder of the sweep; logs of the jobs go to its folder `jobs`.

    Raises:
        UsageError: a parameter is unknown to submitit.
        UnsupportedError: submitit is not installed, or the submission failed.
    """
    try:
        import submitit
    except ImportError as error:
        raise UnsupportedError(
            f"--submit needs submitit ({one_line(error)}): pip install 'steadytorch[slurm]'"
        ) from None
    count: int = ctx.params["submit"]
    settings = {"name": "steady-tune", "timeout_min": _minutes(shared, count), **_settings(ctx)}
    executor = submitit.AutoExecutor(folder=shared.path / "jobs")
    try:
        executor.update_parameters(**settings)
    except (NameError, TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"--slurm: submitit refused a parameter: {one_line(error)}") from error
    work = submitit.helpers.CommandFunction(worker_command(ctx))
    try:
        with executor.batch():
            jobs = [executor.submit(work) for _ in range(count)]
        ids = [job.job_id for job in jobs]
    except (RuntimeError, OSError) as error:
        raise UnsupportedError(f"the jobs were not submitted: {one_line(error)}") from error
    console = options.console(ctx.params["quiet"])
    where = "to SLURM" if executor.cluster == "slurm" else "on this machine, which has no SLURM"
    for line in (
        f"submitted {where}: {', '.join(ids)}",
        f"logs: {shared.path / 'jobs'}",
        "progress: the same command with --status in place of --submit",
    ):
        console.print(line, markup=False, soft_wrap=True)


def worker_command(ctx: click.Context) -> list[str]:
    """Returns the command of one worker: the user's command without the submission options."""
    words = [sys.executable, "-m", "steadytorch", "tune"]
    for each in ctx.command.params:
        name = each.name or ""
        given = ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE
        if not given or name in _HERE_ONLY:
            continue
        value = ctx.params[name]
        if isinstance(each, click.Option) and each.is_flag:
            words.append(each.opts[0])
            continue
        for one in value if each.multiple else (value,):
            words += [each.opts[0], str(one)]
    return words


def _minutes(shared: SweepFolder, count: int) -> int:
    """Returns a job's time limit in minutes, including `_SPARE_MIN` for starting.

    The rest is twice the job's share of all budgets, or twice the longest budget if that is more.
    """
    from steadytorch.quantities import parse_duration

    total_s = sum(parse_duration(item.options["budget"]) for item in shared.items)
    longest_s = max(parse_duration(item.options["budget"]) for item in shared.items)
    return math.ceil(2 * max(total_s / count, longest_s) / 60) + _SPARE_MIN


def _settings(ctx: click.Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in ctx.params["slurm"]:
        key, equals, value = text.partition("=")
        if not key.isidentifier() or not equals:
            raise UsageError(f"--slurm {text!r} is not KEY=VALUE, such as gpus_per_node=1")
        found[key] = int(value) if value.isdecimal() else value
    if ctx.params["partition"] is not None:
        found["slurm_partition"] = ctx.params["partition"]
    return found
