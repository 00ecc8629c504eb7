"""Checkpoints that are whole or absent, in one form for every layout: saved beside the training, verified before trust.

A tensor is in it as boxes, each with its place in the whole; so any layout resumes from any other, and the export reads
it without torch. The place in the data is the step itself, so a checkpoint needs nothing else.
"""

from training.checkpoint.collect import collect
from training.checkpoint.loading import load, load_weights
from training.checkpoint.manifest import MANIFEST, Identity, Manifest
from training.checkpoint.piece import Piece
from training.checkpoint.places import BYTES_PER_WEIGHT, check_room, latest, path_of, read
from training.checkpoint.reader import Reader
from training.checkpoint.saver import Saver

__all__ = [
    "BYTES_PER_WEIGHT",
    "MANIFEST",
    "Identity",
    "Manifest",
    "Piece",
    "Reader",
    "Saver",
    "check_room",
    "collect",
    "latest",
    "load",
    "load_weights",
    "path_of",
    "read",
]
