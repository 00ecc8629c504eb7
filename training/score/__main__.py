"""`python -m training.score job.json`."""

from training.alone import alone
from training.score.program import score

if __name__ == "__main__":
    alone(score)
