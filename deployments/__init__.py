"""Deployments, work pool, schedules and automations, and one command that brings all of it up on this machine."""
