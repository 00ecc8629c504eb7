"""SageMaker's training jobs as real processes: every instance is a guest (algo-1, algo-2 …) with its own /opt/ml.

All instances must end well; the first that does not ends the job. A lost instance is SageMaker's internal error, after
which the job's retry strategy may start all of it again.
"""

import itertools
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulator import faults, gangs
from emulator.gangs import LOST, Container, LogStream
from emulator.sagemaker_disk import Disk

GROUP = "/aws/sagemaker/TrainingJobs"
GRACE_S = 120.0
"""From SIGTERM to SIGKILL."""
INTERNAL = "InternalServerError: We encountered an internal error. Please try again."
NO_CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance type."
)
MESSAGES = {
    "Starting": "Preparing the instances for training",
    "Downloading": "Downloading input data",
    "Training": "Training image download completed. Training in progress.",
    "Uploading": "Uploading generated training model",
    "Stopping": "Stopping the training job",
    "Stopped": "Training job stopped",
    "Completed": "Training job completed",
    "Failed": "Training job failed",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
    "MaxWaitTimeExceeded": "Training job wait time exceeded MaxWaitTimeInSeconds provided",
    "Interrupted": "Managed spot training was interrupted; waiting for instances",
}
Record = dict[str, Any]


class Ended(Exception):
    """The job is over: status, secondary status and, if it failed, why."""

    def __init__(self, status: str, secondary: str, reason: str = "") -> None:
        super().__init__(reason)
        self.status, self.secondary, self.reason = status, secondary, reason


@dataclass(slots=True, eq=False)
class TrainingJob:
    """One training job; times are in seconds."""

    region: str
    arn: str
    told: Record
    """The request that made it."""
    status: str = "InProgress"
    reason: str = ""
    created: float = field(default_factory=time.time)
    changed: float = field(default_factory=time.time)
    started: float = 0.0
    ended: float = 0.0
    transitions: list[Record] = field(default_factory=list)
    stopping: bool = False
    keep_alive_s: int = 0
    reused_by: str = ""
    instances: list[Container] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.told["TrainingJobName"])

    @property
    def secondary(self) -> str:
        """Its secondary status."""
        return str(self.transitions[-1]["Status"])

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.status in ("Completed", "Failed", "Stopped")

    @property
    def artifacts(self) -> str:
        """Where its model goes."""
        return f"{self.told['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{self.name}/output/model.tar.gz"

    def enter(self, secondary: str) -> None:
        """Come to the next secondary status."""
        now = time.time()
        if self.transitions:
            self.transitions[-1]["EndTime"] = now
        self.transitions.append({"Status": secondary, "StartTime": now, "StatusMessage": MESSAGES[secondary]})
        self.changed = now

    def run(self) -> None:
        """Carry the job through to its end."""
        for attempt in itertools.count(1):
            try:
                self._attempt()
                ended = Ended("Completed", "Completed")
            except Ended as told:
                ended = told
            except (LookupError, OSError, RuntimeError) as error:
                ended = Ended("Failed", "Failed", str(error))
            if ended.reason != INTERNAL:
                break
            if self.told.get("EnableManagedSpotTraining"):  # instances come and go
                self.enter("Interrupted")
            elif attempt > self.told.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0):
                break
            self.enter("Starting")
        self.ended, self.reason = time.time(), ended.reason
        self.enter(ended.secondary)
        self.status = ended.status

    def _attempt(self) -> None:
        self._provision()
        folder = Path(tempfile.mkdtemp(prefix="castra-training-"))
        disks: list[Disk] = []
        try:
            self._boot(folder, disks)
            self._train(disks)
        finally:
            for disk in disks:
                disk.leave()
            for container in self.instances:
                container.close()
            self.instances.clear()
            shutil.rmtree(folder, ignore_errors=True)

    def _provision(self) -> None:
        """Get the instances, if they are to be had; on Spot, wait for them."""
        kind = self.told["ResourceConfig"]["InstanceType"].removeprefix("ml.")
        spot = bool(self.told.get("EnableManagedSpotTraining"))
        plan = self.told["ResourceConfig"].get("TrainingPlanArn", "").rpartition("/")[2]
        market, zones = "spot" if spot else plan or "on-demand", self._zones()
        while all(faults.no_capacity(kind, zone, market) is not None for zone in zones):
            if not spot:
                raise Ended("Failed", "Failed", NO_CAPACITY)
            if time.time() - self.created > self.told["StoppingCondition"]["MaxWaitTimeInSeconds"]:
                raise Ended("Stopped", "MaxWaitTimeExceeded")
            self._hear()
            time.sleep(gangs.POLL_S)
        self._hear()

    def _zones(self) -> list[str]:
        """The zones in which the instances may be."""
        from emulator.world import World

        if "VpcConfig" not in self.told:
            return [f"{self.region}a"]
        subnets = World.region(self.region).services.ec2.describe_subnets(SubnetIds=self.told["VpcConfig"]["Subnets"])
        return sorted({one["AvailabilityZone"] for one in subnets["Subnets"]})

    def _hear(self) -> None:
        """Obey a stop that came before the program was started."""
        if self.stopping:
            raise Ended("Stopped", "Stopped")

    def _boot(self, folder: Path, disks: list[Disk]) -> None:
        """Boot the instances and bring everything there."""
        from emulator.world import World

        hosts = [f"algo-{number}" for number in range(1, self.told["ResourceConfig"]["InstanceCount"] + 1)]
        self.enter("Downloading")
        for node, host in enumerate(hosts):
            stream = f"{self.name}/{host}-{int(time.time() * 1000)}"
            container = Container(self.name, node, host, LogStream(self.region, GROUP, stream, make_group=True))
            self.instances.append(container)
            root = container.disk / "opt/ml" if container.disk else folder / host
            disk = Disk(root, World.region(self.region).services.s3)
            disks.append(disk)
            disk.configure(self._config(host, hosts))
            for channel in self.told.get("InputDataConfig", []):
                disk.bring(channel["ChannelName"], channel["DataSource"]["S3DataSource"]["S3Uri"])
            if url := self._checkpoints():
                disk.restore(url)
        self._hear()

    def _config(self, host: str, hosts: list[str]) -> Record:
        """The files of /opt/ml/input/config."""
        kind = self.told["ResourceConfig"]["InstanceType"]
        group = {"instance_group_name": "homogeneousCluster", "instance_type": kind, "hosts": hosts}
        channels = {
            one["ChannelName"]: {
                "TrainingInputMode": one.get("InputMode", self.told["AlgorithmSpecification"]["TrainingInputMode"]),
                "S3DistributionType": one["DataSource"]["S3DataSource"].get(
                    "S3DataDistributionType", "FullyReplicated"
                ),
                "RecordWrapperType": one.get("RecordWrapperType", "None"),
            }
            for one in self.told.get("InputDataConfig", [])
        }
        place = {"current_host": host, "current_instance_type": kind, "current_group_name": "homogeneousCluster"}
        resources = place | {"hosts": hosts, "instance_groups": [group], "network_interface_name": "eth0"}
        parameters = self.told.get("HyperParameters", {})
        return {"resourceconfig": resources, "hyperparameters": parameters, "inputdataconfig": channels}

    def _train(self, disks: list[Disk]) -> None:
        """Run the program on all instances, then upload what it made."""
        self.enter("Training")
        self.started = self.started or time.time()
        for container, disk in zip(self.instances, disks, strict=True):
            container.start(*self._command(container, disk))
        url = self._checkpoints()
        followers = [disk.follow(url) for disk in disks] if url else []
        why = self._wait()
        if why:
            self.status = "Stopping"
            self.enter("Stopping")
        codes = [container.code for container in self.instances]  # those stopped now have not failed
        gangs.stop(self.instances, GRACE_S)
        for disk, follower in zip(disks, followers, strict=False):
            disk.leave()
            follower.join()
        if not why and LOST in codes:
            raise Ended("Failed", "Failed", INTERNAL)
        self._upload(disks, url)
        if why:
            raise Ended("Stopped", why)
        for disk, code in zip(disks, codes, strict=True):
            if code:
                raise Ended("Failed", "Failed", f"AlgorithmError: {disk.failure}, exit code: {code}")

    def _wait(self) -> str:
        """Wait for the program's end; returns why it must be stopped, "" if it has ended by itself."""
        limit = self.told["StoppingCondition"].get("MaxRuntimeInSeconds", 86_400)
        while True:
            codes = [container.code for container in self.instances]
            if None not in codes or any(codes):
                return ""
            if self.stopping:
                return "Stopped"
            if time.time() - self.started > limit:
                return "MaxRuntimeExceeded"
            time.sleep(gangs.POLL_S)

    def _upload(self, disks: list[Disk], url: str) -> None:
        if not self.stopping:
            self.enter("Uploading")
        for disk in disks:
            if url:
                disk.send(url)
        disks[0].archive("model", self.artifacts)
        disks[0].archive("output/data", self.artifacts.replace("model.tar.gz", "output.tar.gz"))

    def _checkpoints(self) -> str:
        return str(self.told.get("CheckpointConfig", {}).get("S3Uri", ""))

    def _command(self, container: Container, disk: Disk) -> tuple[list[str], dict[str, str]]:
        """What the container runs and finds in its environment."""
        from emulator.world import World

        algorithm = self.told["AlgorithmSpecification"]
        if "ContainerEntrypoint" not in algorithm:
            raise LookupError("ClientError: the emulator has no images: give ContainerEntrypoint")
        words = algorithm["ContainerEntrypoint"] + algorithm.get("ContainerArguments", [])
        job = {"TRAINING_JOB_NAME": self.name, "TRAINING_JOB_ARN": self.arn}
        env = gangs.container_environment(World.endpoint, container.guest.name) | self.told.get("Environment", {}) | job
        if container.disk is None:  # plain processes share one disk: each has another folder for /opt/ml
            words = [word.replace("/opt/ml", str(disk.root)) for word in words]
            env = {key: value.replace("/opt/ml", str(disk.root)) for key, value in env.items()}
            env["SM_ROOT"] = str(disk.root)
        return words, env


def start(job: TrainingJob) -> None:
    """Run a job in the background."""
    job.enter("Starting")
    threading.Thread(target=job.run, daemon=True).start()
