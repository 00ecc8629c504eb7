"""Where a job runs: one interface, one adapter per scheduler, the instance catalogue, the ledger of what exists."""
