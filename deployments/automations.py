"""Two automations that heal a run whose process and worker both died: Prefect alone shows it as running for ever.

    a run that sends heartbeats and stops    →  Crashed
    a Crashed run tagged `auto-resume`       →  scheduled again; it finds its results and goes on

A resumed run cannot run beside its older self: the lease on its recipe refuses the second (`flows._house.alone`).
"""

from datetime import timedelta

from prefect.automations import Automation, AutomationCore, ChangeFlowRunState, EventTrigger, Posture
from prefect.client.schemas.objects import StateType

HEARTBEAT_S = 30
"""How often a run says that it lives; workers get it as PREFECT_FLOWS_HEARTBEAT_FREQUENCY."""
SILENCE = timedelta(seconds=4 * HEARTBEAT_S)
"""Shorter than three beats, and a busy machine's healthy runs are declared dead."""

ENDS = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
BEAT = "prefect.flow-run.heartbeat"

AUTOMATIONS = (
    AutomationCore(
        name="castra: silent runs are crashed",
        description="A run whose heartbeat stopped has lost its process: say so, instead of showing it as running.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after={BEAT},
            expect={BEAT, *ENDS},
            for_each={"prefect.resource.id"},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            within=SILENCE,
            threshold=1,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="its heartbeat stopped: the process is gone")],
    ),
    AutomationCore(
        name="castra: crashed runs go on",
        description="A crashed run tagged auto-resume is scheduled again; finished steps are not repeated.",
        trigger=EventTrigger(
            posture=Posture.Reactive,
            expect={"prefect.flow-run.Crashed"},
            for_each={"prefect.resource.id"},
            match_related={
                "prefect.resource.role": "tag",
                "prefect.resource.id": "prefect.tag.auto-resume",
            },
            threshold=1,
        ),
        actions=[ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", message="resumed after a crash")],
    ),
)


async def ensure() -> None:
    """Create the automations on the server, or bring them up to date."""
    for wanted in AUTOMATIONS:
        try:
            there = await Automation.aread(name=wanted.name)
        except ValueError:
            await Automation(**wanted.model_dump()).acreate()
        else:
            await Automation(**wanted.model_dump() | {"id": there.id}).aupdate()
