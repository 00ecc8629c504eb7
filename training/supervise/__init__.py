"""Supervision of a run: heartbeats, who hangs and whom to blame, who is slow, bad steps, how often it was restarted."""

from training.supervise.supervisor import Supervisor

__all__ = ["Supervisor"]
