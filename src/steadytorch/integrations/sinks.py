"""Logs the figures and findings of a result to TensorBoard, W&B or MLflow.

Importing this module does not import TensorBoard, W&B or MLflow.
"""

from __future__ import annotations

from typing import Any

from steadytorch.errors import UsageError
from steadytorch.results.explain import Finding
from steadytorch.results.measure import Measurement
from steadytorch.results.watched import Watched

PREFIX = "steady/"
NO_FINDINGS = "no findings"


def to_tensorboard(result: Watched | Measurement, writer: Any, step: int | None = None) -> None:
    """Write the figures of a result as scalars, and its findings as text.

    Args:
        result: of `steady.watch`, of a callback, or of `steady.measure`.
        writer: a `torch.utils.tensorboard.SummaryWriter`.
        step: global step; None for none.

    Raises:
        UsageError: the result has no steps, or is of another kind.
    """
    for name, value in figures(result).items():
        writer.add_scalar(name, value, step)
    # A list of Markdown, whose lines would otherwise run together.
    lines = findings_text(result).splitlines()
    writer.add_text(f"{PREFIX}findings", "\n".join(f"- {line}" for line in lines), step)


def to_wandb(result: Watched | Measurement, run: Any, step: int | None = None) -> None:
    """Log the figures of a result as metrics of a W&B run, and its findings in the run's summary.

    Args:
        result: as for `to_tensorboard`.
        run: as returned by `wandb.init`; offline runs work too.
        step: step of the run; None for the next one.

    Raises:
        UsageError: the result has no steps, or is of another kind.
    """
    run.log(figures(result), step=step)
    run.summary[f"{PREFIX}findings"] = findings_text(result)


def to_mlflow(
    result: Watched | Measurement, client: Any, run_id: str, step: int | None = None
) -> None:
    """Log the figures of a result as metrics, and its findings as artifact `steady/findings.txt`.

    Args:
        result: as for `to_tensorboard`.
        client: an `mlflow.MlflowClient`, of any store.
        run_id: the run.
        step: step of the metrics; None for 0.

    Raises:
        UsageError: the result has no steps, or is of another kind.
    """
    for name, value in figures(result).items():
        client.log_metric(run_id, name, value, step=step)
    client.log_text(run_id, findings_text(result), f"{PREFIX}findings.txt")


def figures(result: Watched | Measurement) -> dict[str, float]:
    """The figures of a result by name: times in ms, shares from 0 to 1.

    Figures that the samples do not support, such as p99 of a few steps, are left out.

    Raises:
        UsageError: the result has no steps, or is of another kind.
    """
    measured = result.measured if isinstance(result, Watched) else result
    if measured is None:
        raise UsageError("the watch saw no steps, so it has no figures")
    if not isinstance(measured, Measurement):
        raise UsageError(
            f"a sink takes a result of steady.watch or steady.measure, got {type(result).__name__}"
        )
    low, high = measured.median_ci_ns or (None, None)
    found = {
        "median_ms": _ms(measured.median_ns),
        "median_low_ms": _ms(low),
        "median_high_ms": _ms(high),
        "p90_ms": _ms(measured.p90_ns),
        "p99_ms": _ms(measured.p99_ns),
        "p99_over_median": measured.p99_over_median,
        "cv": measured.cv,
        "outliers_per_1000": measured.variability.outliers_per_1000,
        "samples": float(len(measured.samples_ns)),
    }
    found |= _shares(result) if isinstance(result, Watched) else {}
    return {f"{PREFIX}{name}": value for name, value in found.items() if value is not None}


def _shares(result: Watched) -> dict[str, float]:
    means = result.mean_slices_ns()
    total = sum(means.values())
    found = {f"time_share/{name}": mean / total for name, mean in means.items() if total}
    varies = result.variance_shares or {}
    found |= {f"variance_share/{name}": share for name, share in varies.items()}
    return found | {"overhead_share": result.overhead_share}


def findings_text(result: Watched | Measurement) -> str:
    """The findings of a result, one line each with its fix; a `Measurement` has no findings."""
    findings = result.findings if isinstance(result, Watched) else ()
    return "\n".join(map(_line, findings)) or NO_FINDINGS


def _line(finding: Finding) -> str:
    return f"{finding.id}: {finding.title}. Fix: {finding.fix}".replace("\n", " ")


def _ms(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else 1e-6 * nanoseconds
