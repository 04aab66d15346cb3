"""`steady plans`: the plan store."""

from __future__ import annotations

from pathlib import Path

import click

from steadytorch.cli import options
from steadytorch.errors import PlanError


@click.group()
def plans() -> None:
    """Lists and shows stored plans."""


@plans.command("list")
@options.store
def list_plans(store: Path | None) -> None:
    """Lists every stored plan, and every file in the store that is not one."""
    from steadytorch.plan.plan import Plan
    from steadytorch.plan.store import Store
    from steadytorch.report.plans import render_list

    opened = Store(store)
    render_list(options.console(False), list(opened.entries(Plan)), opened.root)


@plans.command("show")
@click.argument("plan_id", metavar="ID")
@options.store
def show(plan_id: str, store: Path | None) -> None:
    """Shows one plan: what it does, its evidence, and what it is valid for.

    ID is a plan's id as `steady plans list` shows it, or the first digits of it.
    """
    from steadytorch.plan.plan import Plan
    from steadytorch.plan.store import Store
    from steadytorch.report.plans import render_show

    opened = Store(store)
    found = [e for e in opened.entries(Plan) if e.key and e.key.digest.startswith(plan_id.lower())]
    if len(found) != 1:
        known = "no plan" if not found else f"{len(found)} plans"
        raise PlanError(f"{known} with id {plan_id!r} in {opened.root}: see steady plans list")
    render_show(options.console(False), found[0].payload, found[0].path)
