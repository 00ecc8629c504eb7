"""What Slurm of several versions says about a job, in Castra's words."""

import pytest

from clusters.base import State
from clusters.slurm_states import read

# Recorded from Slurm 22.05.8 (Debian 12).
OLD = (
    "JobId=2 JobName={name} UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901758 Nice=0 Account=(null) "
    "QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 "
    "ExitCode={code} RunTime=00:00:01 TimeLimit=365-00:00:00 TimeMin=N/A SubmitTime=2026-11-20T09:43:09 "
    "EligibleTime=2026-11-20T09:43:09 AccrueTime=2026-11-20T09:43:09 StartTime=2026-11-20T09:43:10 "
    "EndTime=2026-11-20T09:43:11 Deadline=N/A SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-20T09:43:10 "
    "Scheduler=Backfill Partition=train AllocNode:Sid=head:0 ReqNodeList=(null) ExcNodeList=(null) "
    "NodeList=node-[1-2] BatchHost=node-1 NumNodes=2 NumCPUs=4 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* "
    "TRES=cpu=4,mem=24104M,node=2,billing=4 Socks/Node=* NtasksPerN:B:S:C=1:0:*:* CoreSpec=* MinCPUsNode=1 "
    "MinMemoryNode=0 MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 OverSubscribe=NO Contiguous=0 "
    "Licenses=(null) Network=(null) Command=/fsx/jobs/x/script WorkDir=/fsx/jobs/x Comment=castra:x JobState=FAILED "
    "StdErr=/fsx/jobs/x/batch.log StdIn=/dev/null StdOut=/fsx/jobs/x/batch.log Power="
)
# In the form of Slurm 25.05, as Slinky's documentation of slurm-bridge shows it.
NEW = (
    "JobId=2 JobName={name} UserId=slurm(401) GroupId=slurm(401) MCS_label=N/A Priority=1 Nice=0 Account=(null) "
    "QOS=normal JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 "
    "ExitCode={code} RunTime=00:00:08 TimeLimit=UNLIMITED TimeMin=N/A SubmitTime=2025-07-10T15:52:53 "
    "EligibleTime=2025-07-10T15:52:53 AccrueTime=2025-07-10T15:52:53 StartTime=2025-07-10T15:52:53 "
    "EndTime=2025-07-10T15:53:01 Deadline=N/A SuspendTime=None SecsPreSuspend=0 LastSchedEval=2025-07-10T15:52:53 "
    "Scheduler=Main Partition=train AllocNode:Sid=10.244.5.5:1 ReqNodeList=(null) ExcNodeList=(null) "
    "NodeList=train-st-nodes-[1-2] BatchHost=train-st-nodes-1 StepMgrEnabled=Yes NumNodes=2 NumCPUs=4 NumTasks=1 "
    "CPUs/Task=1 ReqB:S:C:T=0:0:*:* ReqTRES=cpu=1,mem=96046M,node=1,billing=1 "
    "AllocTRES=cpu=4,mem=96046M,node=1,billing=4 Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* MinCPUsNode=1 "
    "MinMemoryNode=0 MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 OverSubscribe=NO Contiguous=0 "
    'Licenses=(null) LicensesAlloc=(null) Network=(null) Command=(null) WorkDir=/tmp AdminComment={{"a": "b"}} '
    "OOMKillStep=0"
)


@pytest.mark.parametrize("form", [OLD, NEW], ids=["22.05", "25.05"])
@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("PENDING Resources 0:0", (State.QUEUED, "for nodes to become free", None)),
        ("PENDING ReqNodeNotAvail,_UnavailableNodes:train-st-nodes-1 0:0", (State.QUEUED, "down or reserved", None)),
        ("PENDING launch_failed_requeued_held 0:0", (State.QUEUED, "could not be started", None)),
        ("CONFIGURING None 0:0", (State.QUEUED, "nodes are being started", None)),
        ("REQUEUED None 0:0", (State.QUEUED, "", None)),
        ("RUNNING None 0:0", (State.RUNNING, "", None)),
        ("COMPLETING None 0:0", (State.RUNNING, "", None)),
        ("COMPLETED None 0:0", (State.SUCCEEDED, "", 0)),
        ("FAILED NonZeroExitCode 3:0", (State.FAILED, "exited with code 3", 3)),
        ("FAILED NonZeroExitCode 124:0", (State.TIMED_OUT, "past its time limit", 124)),
        ("FAILED NonZeroExitCode 143:0", (State.FAILED, "asked to stop, not by us", 143)),
        ("FAILED RaisedSignal:9(Killed) 0:9", (State.FAILED, "killed by signal 9", 137)),
        ("FAILED BadConstraints 0:1", (State.FAILED, "could not be run (BadConstraints)", None)),
        ("CANCELLED None 0:0", (State.CANCELLED, "", None)),
        ("TIMEOUT TimeLimit 0:0", (State.TIMED_OUT, "time limit", None)),
        ("NODE_FAIL NodeDown 0:15", (State.LOST, "a node failed (it ran on ", None)),
        ("PREEMPTED None 0:0", (State.LOST, "another job took its nodes", None)),
        ("BOOT_FAIL None 0:0", (State.LOST, "did not start", None)),
        ("OUT_OF_MEMORY OutOfMemory 0:125", (State.FAILED, "out of memory", None)),
    ],
)
def test_every_state_is_understood(form: str, told: str, expected: tuple[State, str, int | None]) -> None:
    state, reason, code = told.split()
    line = form.format(name="x", state=state, reason=reason, code=code, restarts=0)
    status = read(f"# controller\n{line}\n# accounting\n# folder\n").status("2", "x")
    assert (status.state, status.exit_code) == (expected[0], expected[2])
    assert expected[1] in status.reason
    assert bool(expected[1]) == bool(status.reason)


def test_a_job_that_was_started_again_says_so() -> None:
    line = NEW.format(name="x", state="RUNNING", reason="None", code="0:0", restarts=2)
    assert read(f"# controller\n{line}").status("2", "x").reason == "started again 2 times"


def test_a_number_of_another_name_is_another_job() -> None:
    line = NEW.format(name="another", state="RUNNING", reason="None", code="0:0", restarts=0)
    status = read(f"# controller\n{line}\n# accounting\n2|another|COMPLETED|0:0").status("2", "x")
    assert status.state is State.LOST


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("2|x|COMPLETED|0:0", State.SUCCEEDED),
        ("2|x|CANCELLED by 1000|0:0", State.CANCELLED),
        ("2|x|CANCELLED+|0:0", State.CANCELLED),
        ("2|x|NODE_FAIL|1:0", State.LOST),
        ("2|x|TIMEOUT|0:0", State.TIMED_OUT),
    ],
)
def test_what_the_controller_has_forgotten_the_accounting_knows(row: str, expected: State) -> None:
    assert read(f"# controller\n# accounting\n{row}\n# folder\n").status("2", "x").state is expected


@pytest.mark.parametrize(
    ("folder", "expected", "words"),
    [
        ("x 0 60", State.SUCCEEDED, ""),
        ("x 3 60", State.FAILED, "exited with code 3"),
        ("x 124 60", State.TIMED_OUT, "time limit of 60 s"),
        ("x 1 60 lost", State.LOST, "a node was lost"),
        ("x cancelled", State.CANCELLED, ""),
        ("x cancelled\nx 143 60", State.CANCELLED, ""),
        ("x cancelled\nx 0 60", State.SUCCEEDED, ""),
        ("y 0 60", State.LOST, "knows no job x"),
    ],
)
def test_what_nobody_remembers_the_folder_tells(folder: str, expected: State, words: str) -> None:
    status = read(f"# controller\n# accounting\n# folder\n{folder}\n").status("2", "x")
    assert status.state is expected
    assert words in status.reason


def test_a_cancelled_job_whose_time_was_up_says_what_slurm_says() -> None:
    line = OLD.format(name="x", state="FAILED", reason="NonZeroExitCode", code="124:0", restarts=0)
    status = read(f"# controller\n{line}\n# folder\nx 124 1").status("2", "x")
    assert status.reason == "it ran past its time limit of 1 s"
