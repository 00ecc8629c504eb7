"""Slurm, as ParallelCluster, PCS and HyperPod run it: sbatch, scontrol and scancel on its head, over ssh or the like.

The address says how the cluster is reached:

    reach       JSON list of words, such as ["ssh", "-o", "BatchMode=yes", "ubuntu@10.0.0.5"], that run on the head the
                shell command that comes as the next, last word
    folder      where the jobs' folders lie, on a file system that the head and the nodes share
    python      the Python with torch on the nodes, python3 if it is not told
    partition   the queue, the cluster's default if it is not told
    instance_type, or gpus       how many GPUs of a node a job is given
    container   image for enroot and pyxis; none without it
    grace_s     from the polite request to stop to the kill

A job's folder, `<folder>/<name>/`, outlives the scheduler's memory of it: `script`; `id`, Slurm's; `node<N>.log`, what
each node prints, and `batch.log`; `ended`, how the script saw it end; `cancelled`, if we asked for that. A job's id is
`<Slurm's id>.<name>`.
"""

import json
import math
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, Final

from clusters import catalog, payload, slurm_states
from clusters.base import Address, ClusterError, Job, Refused, Status, Unreachable
from clusters.payload import Payload
from store import Store

CALL_S: Final = 60.0
READ_BYTES: Final = 8 << 20
"""Of one log at a time."""
SSH_FAILED: Final = 255
OVERSLEPT: Final = ("Unable to contact", "timed out", "Zero Bytes", "temporarily unable", "Connection re", "nsenter:")
"""What Slurm, ssh and nsenter say when trying again may help."""
REFUSED: Final = "Batch job submission failed: "

SUBMIT: Final = """\
set -eu
mkdir -p {folder}
cd {folder}
exec 9>>lock
flock -w 30 9 || :
if [ ! -s id ]; then
  cat >script
  listed=$(squeue --noheader --states=all --name={name} --format='%A %Z')
  found=$(printf '%s\\n' "$listed" | awk -v here={folder} '$2 == here {{print $1; exit}}')
  [ -n "$found" ] || found=$(sbatch --parsable script 9>&- </dev/null)
  printf '%s\\n' "${{found%%;*}}" >.id.$$
  ln .id.$$ id 2>/dev/null || :
  rm -f .id.$$
fi
cat id
"""
FIND: Final = """\
set -eu
cd {folder} 2>/dev/null || exit 0
if [ -s id ]; then cat id; exit 0; fi
listed=$(squeue --noheader --states=all --name={name} --format='%A %Z')
printf '%s\\n' "$listed" | awk -v here={folder} '$2 == here {{print $1; exit}}'
"""
STATUSES: Final = """\
told=$(scontrol --oneliner show job 2>&1) || case $told in *'No jobs'*) ;; *) echo "$told" >&2; exit 1 ;; esac
echo '# controller'
shown=$(printf '%s\\n' "$told" | awk -v wanted='{numbers}' '
  BEGIN {{ split(wanted, numbers); for (at in numbers) missing["JobId=" numbers[at]] }}
  $1 in missing {{ print; delete missing[$1] }}
  END {{ for (id in missing) list = list "," substr(id, 7); print "forgotten" list }}')
forgotten=${{shown##*forgotten}}
printf '%s\\n' "$shown"
echo '# accounting'
if [ -n "$forgotten" ]; then
  forgotten=${{forgotten#,}}
  sacct --allocations --noheader --parsable2 --format=JobIDRaw,JobName,State,ExitCode --jobs="$forgotten" 2>/dev/null ||
    sacct --completion --noheader --parsable2 --format=JobID,JobName,State,ExitCode --jobs="$forgotten" 2>/dev/null
fi
echo '# nodes'
case $shown in *' JobState=PENDING '*) sinfo --noheader --list-reasons --format=%E ;; esac
echo '# folder'
cd {folder} 2>/dev/null || exit 0
while read -r name; do
  [ -e "$name/cancelled" ] && echo "$name cancelled"
  {{ read -r ended <"$name/ended"; }} 2>/dev/null && echo "$name $ended"
done
exit 0
"""
LOGS: Final = """\
cd {folder} 2>/dev/null || exit 0
cursor=$(cat)
for log in node*.log batch.log; do
  [ -s "$log" ] || continue
  from=$(printf '%s\\n' $cursor | sed -n "s/^$log=//p")
  size=$(stat -c %s "$log")
  more=$((size - ${{from:-0}}))
  [ $more -le {most} ] || more={most}
  [ $more -gt 0 ] || continue
  echo "$log $more"
  tail -c +$((${{from:-0}} + 1)) "$log" | head -c $more
done
"""
CANCEL: Final = """\
[ -e {folder}/ended ] || [ ! -d {folder} ] || : >{folder}/cancelled
told=$(scancel {number} 2>&1) || case $told in *'Unable to contact'*|*'timed out'*) echo "$told" >&2; exit 1 ;; esac
"""
QUARANTINE: Final = """\
set -eu
listed=$(squeue --noheader --states=all --jobs={number} --format=%N)
[ -n "$listed" ] || {{ echo "Slurm has forgotten the nodes of job {number}" >&2; exit 1; }}
name=$(scontrol show hostnames "$listed" | sed -n {line}p)
scontrol update nodename="$name" state=drain reason={why}
echo "$name"
"""
SCRIPT: Final = """\
{options}
ended() {{ printf '%s\\n' "$*" >.ended && mv .ended ended; }}
attempt=${{SLURM_RESTART_COUNT:-0}}
# A second submission of this name finds the id of the first, and leaves.
echo "$SLURM_JOB_ID" >.id
ln .id id 2>/dev/null || [ "$(cat id)" = "$SLURM_JOB_ID" ] || exit 0
rm -f ended
if [ "$attempt" -gt {restarts} ]; then ended 1 {timeout} lost; exit 1; fi
{env}
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none --open-mode=append --output=node%n.log{container} \\
  {command} &
step=$!
asked=
trap 'asked=yes; kill -TERM $step 2>/dev/null' TERM
wait $step; code=$?
while [ "$asked" = yes ]; do asked=told; wait $step; again=$?; [ $again = 127 ] || code=$again; done
lost=$(tail -qn 50 node*.log 2>/dev/null | grep -q '"event": "node-lost"' && echo lost)
# 2 is a refusal, 124 the time limit, 143 a stop that was asked for: nothing that starting again would change
case $code in 0|2|124|143) again=no ;; *) again=yes ;; esac
if [ $again = yes ] && [ -z "$asked" ] && [ ! -e cancelled ] && [ "$attempt" -lt {restarts} ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
ended $code {timeout} $lost
exit $code
"""


class SlurmCluster:
    """Runs jobs by sbatch."""

    def __init__(self, address: Address, store: Store) -> None:
        self.address, self.store = address, store
        self.folder = address.get("folder", "${JobFolder}").rstrip("/")
        self.grace_s = float(address.get("grace_s", payload.GRACE_S))

    def render(self, job: Job) -> dict[str, Any]:
        """The script and where it goes; raises `Refused`."""
        script = self._script(job, self._packed(job))
        reach = json.loads(self.address["reach"]) if "reach" in self.address else ["ssh", "${HeadNode}"]
        return {
            "reach": reach,
            "folder": f"{self.folder}/{job.name}",
            "sbatch": ["--parsable", "script"],
            "script": script,
        }

    def submit(self, job: Job) -> str:
        """Start the job, or attach to the one of its name; raises `Refused`, `Unreachable`, `ClusterError`."""
        packed = self._packed(job)
        payload.deliver(packed, self.store)
        command = SUBMIT.format(folder=self._place(job.name), name=shlex.quote(job.name))
        number = self._on_head(command, self._script(job, packed)).decode().strip()
        return f"{number}.{job.name}"

    def find(self, name: str) -> str | None:
        number = self._on_head(FIND.format(folder=self._place(name), name=shlex.quote(name))).decode().strip()
        return f"{number}.{name}" if number else None

    def statuses(self, job_ids: Sequence[str]) -> dict[str, Status]:
        """How jobs stand, by one command on the head."""
        known = {job_id: match.groups() for job_id in job_ids if (match := re.fullmatch(r"(\d+)\.(.+)", job_id))}
        answer = b""
        if known:
            numbers = sorted({number for number, _ in known.values()}, key=int)
            command = STATUSES.format(numbers=" ".join(numbers), folder=shlex.quote(self.folder))
            answer = self._on_head(command, "".join(f"{name}\n" for _, name in known.values()))
        told = slurm_states.read(answer.decode(errors="replace"))
        return {job_id: told.status(*known.get(job_id, ("", job_id))) for job_id in job_ids}

    def status(self, job_id: str) -> Status:
        return self.statuses([job_id])[job_id]

    def logs(self, job_id: str, after: str = "") -> tuple[list[str], str]:
        """The whole lines of all nodes' logs from a cursor (`node0.log=120 …`) on, and the next cursor."""
        _, _, name = job_id.partition(".")
        if not name:
            return [], after
        command = LOGS.format(folder=self._place(name), most=READ_BYTES)
        offsets = dict(part.split("=") for part in after.split())
        lines: list[str] = []
        read = list(_logs(self._on_head(command, "".join(f"{part}\n" for part in after.split()))))
        several = "node1.log" in {log for log, _ in read} | set(offsets)
        for log, data in read:
            whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == READ_BYTES else b"")
            node = "0" if log == "batch.log" else log[4:-4]
            texts = whole.decode(errors="replace").removesuffix("\n").split("\n") if whole else []
            lines += [_named(text, node, several) for text in texts]
            offsets[log] = str(int(offsets.get(log, 0)) + len(whole))
        return lines, " ".join(f"{log}={offset}" for log, offset in offsets.items())

    def cancel(self, job_id: str) -> None:
        """Have Slurm send SIGTERM to all of the job, and SIGKILL after its KillWait (30 s unless it is set)."""
        number, _, name = job_id.partition(".")
        if name and number.isdigit():
            self._on_head(CANCEL.format(folder=self._place(name), number=number))

    def quarantine(self, job_id: str, node: int, why: str) -> str:
        """Drain the node: Slurm gives it to no job, and ParallelCluster's daemon on the head puts another in its place.

        Source: docs.aws.amazon.com/parallelcluster/latest/ug/slurm-workload-manager-v3.html, clustermgtd.
        """
        number = job_id.partition(".")[0]
        command = QUARANTINE.format(number=number, line=node + 1, why=shlex.quote(f"castra: {why}"[:200]))
        return f"{self._on_head(command).decode().strip()} is drained"

    def forget(self, job_id: str) -> None:
        """Nothing: the job's folder is the record of what happened."""

    def _place(self, name: str) -> str:
        return shlex.quote(f"{self.folder}/{name}")

    def _packed(self, job: Job) -> Payload:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,199}", job.name):
            raise Refused(f"{job.name!r} cannot name a job: use letters, digits, '.', '_' and '-', at most 200")
        return payload.pack(job, self.store.url, self.address.get("python", "python3"), self.grace_s)

    def _script(self, job: Job, packed: Payload) -> str:
        return SCRIPT.format(
            options="\n".join(self._options(job)),
            restarts=job.restarts,
            timeout=job.timeout_s,
            env="\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(packed.env.items())),
            container=self._container(),
            command=shlex.join(packed.command),
        )

    def _options(self, job: Job) -> Iterator[str]:
        """The script's head. The nodes keep our time limit; Slurm's, which counts in minutes, is a second one."""
        limit_s, gpus = job.timeout_s + 2 * self.grace_s, self._gpus()
        folder = f"{self.folder}/{job.name}"
        options = {
            "job-name": job.name,
            "comment": f"castra:{job.name}",
            "chdir": folder,
            "output": f"{folder}/batch.log",
            "open-mode": "append",
            "partition": self.address.get("partition"),
            "nodes": job.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": gpus or None,
            "mem": 0,  # all of it
            "time": math.ceil(limit_s / 60) + 1,
            "signal": f"B:TERM@{math.ceil(self.grace_s)}",
            "dependency": "singleton",
        }
        yield "#!/bin/bash"
        yield from (f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None)
        yield "#SBATCH --exclusive"
        yield f"#SBATCH --{'requeue' if job.restarts else 'no-requeue'}"

    def _gpus(self) -> int:
        if "gpus" in self.address:
            return int(self.address["gpus"])
        instance = catalog.find(self.address["instance_type"]) if "instance_type" in self.address else None
        return instance.accelerators if instance and instance.accelerator.startswith("NVIDIA") else 0

    def _container(self) -> str:
        if not (image := self.address.get("container")):
            return ""
        shared = "/" + self.folder.split("/")[1]
        return shlex.join(["", f"--container-image={image}", f"--container-mounts={shared}:{shared}"]).removeprefix(
            "''"
        )

    def _on_head(self, command: str, said: str = "") -> bytes:
        """What a shell command prints on the head; raises `Unreachable`, `Refused` or `ClusterError`."""
        if "reach" not in self.address:
            raise Refused("nobody said how the login node is reached: name it in the recipe (cluster.ssh)")
        try:
            reach = json.loads(self.address["reach"])
            done = subprocess.run(
                [*reach, command], input=said.encode(), capture_output=True, timeout=CALL_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unreachable(f"the cluster's head does not answer within {CALL_S:.0f} s; run again") from None
        except FileNotFoundError as error:
            raise ClusterError(f"{error.filename} is not installed here; it is how the cluster is reached") from None
        if done.returncode:
            raise _problem(done.returncode, done.stderr.decode(errors="replace"))
        return done.stdout


def _problem(code: int, said: str) -> ClusterError:
    lines = [line for line in said.strip().splitlines() if line.strip()] or [f"exit code {code}"]
    told = lines[-1].strip()
    if code == SSH_FAILED or any(word in said for word in OVERSLEPT):
        return Unreachable(
            f"the cluster's head or its Slurm controller does not answer ({told}); run again in a moment"
        )
    if REFUSED in said:
        return Refused(f"Slurm refuses the job: {said.partition(REFUSED)[2].strip()}")
    return ClusterError(f"a command failed on the cluster's head: {told}")


def _logs(answer: bytes) -> Iterator[tuple[str, bytes]]:
    """The parts of an answer: a line `<log> <bytes>`, then so many bytes."""
    while answer:
        head, _, rest = answer.partition(b"\n")
        log, size = head.decode().split()
        yield log, rest[: int(size)]
        answer = rest[int(size) :]


def _named(line: str, node: str, several: bool) -> str:
    """Slurm's own words in a node's log do not name it."""
    return line if not several or line.startswith("[node") else f"[node{node}] {line}"
