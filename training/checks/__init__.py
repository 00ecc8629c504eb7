"""Proofs a cluster must give before anything is paid for on it."""
