"""Score a trained model on held-out documents, in bits per byte, beside what compressing them without a model takes.

    python -m training.score job.json

Bits per byte does not depend on the tokenizer, so it compares models and compressors alike. Whole documents are scored,
in the dataset's order, as one stream of tokens cut into windows of data.sequence_length that do not overlap: each
window starts without context, so a model that looks further back is judged a little too harshly. The token that ends a
document is paid for by the model and costs the compressors nothing. Of a conversation the assistant's turns are scored.
"""

from training.score.baselines import folder_nats, gzip_bits, unigram_bits
from training.score.likelihood import total_nats
from training.score.program import score
from training.score.text import HeldOut, Tokens, choose
from training.score.trained import base_folder, skeleton_of, trained

__all__ = [
    "HeldOut",
    "Tokens",
    "base_folder",
    "choose",
    "folder_nats",
    "gzip_bits",
    "score",
    "skeleton_of",
    "total_nats",
    "trained",
    "unigram_bits",
]
