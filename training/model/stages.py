"""A network cut into pipeline stages, whose weights keep the names they have in the whole."""

from torch import nn
from transformers import PreTrainedModel

from training.model.anatomy import Anatomy
from training.process import JobError


def keep_stage(network: PreTrainedModel, index: int, count: int) -> None:
    """Drop from a network what the `index`-th of `count` stages has no part in.

    The first stage has the embeddings of tokens and places, the last the norm and the output embedding; a tied one is
    on both. Raises JobError when there are fewer blocks than stages.
    """
    anatomy = Anatomy.of(network.config)
    trunk = getattr(network, anatomy.trunk)
    blocks = getattr(trunk, anatomy.blocks)
    if len(blocks) < count:
        raise JobError(f"{count} pipeline stages need as many layers and model.layers is {len(blocks)}; use fewer")
    own = share(len(blocks), index, count)
    setattr(trunk, anatomy.blocks, nn.ModuleDict({str(place): blocks[place] for place in own}))
    if index > 0:
        for part in filter(None, (anatomy.embedding, anatomy.places)):
            setattr(trunk, part, None)
    if index < count - 1:
        setattr(trunk, anatomy.norm, None)
        network.lm_head = None


def share(blocks: int, index: int, count: int) -> range:
    """Return which blocks a stage has; where they do not divide, the first stages have one more."""
    size, more = divmod(blocks, count)
    start = index * size + min(index, more)
    return range(start, start + size + (index < more))
