"""One pair of eyes for all jobs of a cluster: however many are watched, the cluster is asked at a bounded rate.

Schedulers answer for many jobs in one call and throttle those who ask often. So whoever wants to know how a job stands
asks the watcher, which asks the cluster for all of them at once, and not more often than every `pace_s` seconds.
"""

import threading
import time

from clusters.base import Cluster, Status

CALLS_PER_S = 5.0
"""Log calls at most: the quota of CloudWatch FilterLogEvents per account and region (AWS, CloudWatch Logs quotas)."""


class Watcher:
    """Watches jobs of one cluster; safe to share between threads."""

    def __init__(self, cluster: Cluster, pace_s: float, calls_per_s: float = CALLS_PER_S) -> None:
        self.cluster, self.pace_s = cluster, pace_s
        self._spacing_s = 1 / calls_per_s
        self._known: dict[str, Status] = {}
        self._wanted: set[str] = set()
        self._asking, self._reading = threading.Lock(), threading.Lock()
        self._asked = self._read = float("-inf")

    def status(self, job_id: str) -> Status:
        """How a job stands, as of `pace_s` seconds ago at most; waits for the next look if it is new."""
        self._wanted.add(job_id)  # not under the lock: a look that is about to happen is for this job too
        with self._asking:
            known = self._known.get(job_id)
            if known is None or (not known.state.done and time.monotonic() - self._asked >= self.pace_s):
                self._look()
            return self._known[job_id]

    def logs(self, job_id: str, after: str) -> tuple[list[str], str]:
        """`Cluster.logs`, when it is this caller's turn."""
        with self._reading:
            time.sleep(max(0.0, self._read + self._spacing_s - time.monotonic()))
            self._read = time.monotonic()
        return self.cluster.logs(job_id, after)

    def _look(self) -> None:
        time.sleep(max(0.0, self._asked + self.pace_s - time.monotonic()))
        self._asked = time.monotonic()
        going = [job for job in list(self._wanted) if (known := self._known.get(job)) is None or not known.state.done]
        self._known.update(self.cluster.statuses(going))
