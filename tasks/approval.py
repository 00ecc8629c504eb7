"""Above a sum of money a person says yes first: the run pauses in the Prefect UI, with plan and bill beside it."""

import hashlib
import json
from datetime import UTC, datetime

from prefect import pause_flow_run
from prefect.exceptions import FlowPauseTimeout
from prefect.input import RunInput

import planner
from clusters.base import Refused
from recipes import Recipe
from recipes.cluster import LocalCluster
from store import open_store
from tasks import plan as planning
from tasks import report
from tasks.machines import plan_of

PATIENCE_S = 24 * 3600


class Approval(RunInput):
    """What the person who resumes the run answers."""

    approve: bool = True
    approved_by: str = ""


def ask(recipe: Recipe) -> None:
    """Wait until somebody approves the recipe's plan, where it costs more than `budget.approve_above_usd`.

    An approval is kept in the store for this very plan, so a run that is started again does not ask again. Raises
    `Refused` if the answer is no, or nobody answers within a day.
    """
    limit, cost = recipe.budget.approve_above_usd, plan_of(recipe).best.usd
    if limit is None or cost is None or cost <= limit or isinstance(recipe.cluster, LocalCluster):
        return
    store, key = open_store(recipe.store), f"approvals/{recipe.name}-{_digest(recipe)}.json"
    if store.get(key) is not None:
        report.say("approval: this plan was approved before")
        return
    answer = _answer(recipe, cost, limit)
    if not answer.approve:
        raise Refused(f"the plan of {recipe.name} (${cost:,.0f}) was not approved: nothing that costs was created")
    told = {"usd": cost, "by": answer.approved_by, "at": datetime.now(UTC).isoformat(timespec="seconds")}
    store.put(key, json.dumps(told).encode())
    report.say(f"approval: ${cost:,.0f} approved{' by ' * bool(answer.approved_by)}{answer.approved_by}")


def _answer(recipe: Recipe, cost: float, limit: float) -> Approval:
    report.say(f"approval: the plan costs ${cost:,.0f}, above ${limit:,.0f}: resume or cancel this run in the UI")
    page = (
        f"**{recipe.name}** would cost about **${cost:,.0f}** on {recipe.cluster.nodes} nodes; plans above "
        f"${limit:,.0f} need approval."
    )
    report.page("approval", f"{page}\n\n{planning.markdown(recipe)}", "Waiting for approval")
    try:
        return pause_flow_run(wait_for_input=Approval.with_initial_data(description=page), timeout=PATIENCE_S)
    except FlowPauseTimeout:
        told = f"nobody approved the plan of {recipe.name} within a day: nothing that costs was created"
        raise Refused(told) from None


def _digest(recipe: Recipe) -> str:
    best: planner.Estimate = plan_of(recipe).best
    told = json.dumps([recipe.model_dump(mode="json", exclude={"keep"}), str(best.layout), best.usd], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:12]
