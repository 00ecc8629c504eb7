"""The network and its objective, for every layout: eight families, one attention, sliced loss, stages, adapters.

A trainer takes four steps, the same for one process and for a thousand:

    objective = NextTokenLoss(skeleton(spec["model"], length, folder), index=stage, count=stages)   # weights on meta
    ... add_adapters, checkpoint_activations, compile_blocks, then shard it: parallelize_module, fully_shard ...
    allocate(objective, device)                      # empty memory for this rank's parts only; buffers are kept
    materialise(objective.model, seed, folder)       # every rank fills exactly its boxes, one tensor at a time

Every layout then starts from the same bits: a weight is drawn from its name and the seed, block of rows by block.
`objective(tokens, mask, documents)` is the fp32 sum of the cross entropy over the trained targets of these rows; set
`objective.autocast` (dtype), `.tp` and `.cp` (process groups) before the first call. Under context parallelism every
rank of `cp` gets the whole rows, computes the two chunks that are its own, and returns their part of the sum. A stage
that is not the last returns hidden states, one that is not the first takes them as `hidden`. `objective.weights()`
yields (canonical name, parameter) for checkpoints; `objective.shared` is the copy of a tied embedding, on the first
and on the last of several stages, whose gradients the trainer must add up.
"""

from training.model.anatomy import Anatomy, named_weights, window_of
from training.model.attention import Context
from training.model.families import build, skeleton
from training.model.flops import PEAK_FLOPS, flops_per_token, peak_flops
from training.model.initial import allocate, box_of, materialise, weights_sha256
from training.model.lora import add_adapters, materialise_in_4_bits, round_to_4_bits
from training.model.loss import LOGITS_AT_ONCE, summed_cross_entropy
from training.model.objective import NextTokenLoss
from training.model.pretrained import start_from
from training.model.savings import checkpoint_activations, compile_blocks

__all__ = [
    "LOGITS_AT_ONCE",
    "PEAK_FLOPS",
    "Anatomy",
    "Context",
    "NextTokenLoss",
    "add_adapters",
    "allocate",
    "box_of",
    "build",
    "checkpoint_activations",
    "compile_blocks",
    "flops_per_token",
    "materialise",
    "materialise_in_4_bits",
    "named_weights",
    "peak_flops",
    "round_to_4_bits",
    "skeleton",
    "start_from",
    "summed_cross_entropy",
    "weights_sha256",
    "window_of",
]
