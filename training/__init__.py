"""Everything that runs on the cluster's nodes: it reads one job.json and imports nothing else of Castra."""
