"""The layouts: one optimizer step of the same mathematics, with the model's states spread in different ways.

    engine = spread(spec, folder, share, layout, world)
    loss, square = engine.gradients(rows)        # their sums over all ranks: the loss, the squared gradient norm
    engine.update(rate, norm)                    # or engine.discard()

Every layout starts from the same weights, divides the sum over a global batch's learned targets by their number, clips
the global norm and lets AdamW step; every one tells its states as pieces of the same whole tensors.
"""

from training.parallel.engine import Engine
from training.parallel.mesh import AXES, Layout, Rows, Share
from training.parallel.spread import check, objective_of, spread

__all__ = ["AXES", "Engine", "Layout", "Rows", "Share", "check", "objective_of", "spread"]
