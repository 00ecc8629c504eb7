"""Let an exported model speak: load the folder as any user would, and continue each prompt greedily.

python -m training.export.generate job.json
torchrun --nproc-per-node 2 -m training.export.generate job.json      # each rank with a part of every layer
"""

from typing import Any

from training.job import NodeJob, progress, say
from training.process import JobError
from training.ranks import World, run


def generate(job: NodeJob, world: World) -> None:
    """Write result.json with {"samples": [{"prompt", "text"}], "ranks"}, where text is what follows the prompt.

    Raises JobError when the folder does not load, or when the model has nothing to say to a prompt.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from training.serve.weights import load

    logging.disable_progress_bar()
    folder, asked = job.inputs["export"] / "hf", job.spec["serve"]
    model = load(folder, world)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    samples = []
    for done, prompt in enumerate(asked["prompts"], 1):
        samples.append({"prompt": prompt, "text": continued(model, tokenizer, prompt, asked["max_new_tokens"])})
        if world.rank == 0:
            progress(done, len(asked["prompts"]), "prompt continued")
            say("sample", **samples[-1])
    if world.rank == 0:
        job.finish({"samples": samples, "ranks": world.size})


def continued(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    """Return what a transformers model adds to a prompt, greedily. Raises JobError where that is nothing."""
    import torch

    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=model.device)
    room = model.config.max_position_embeddings - ids.shape[1]
    if not ids.shape[1] or room < 1:
        raise JobError(
            f"serve.prompts: {prompt[:40]!r} is {ids.shape[1]} tokens long and the model reads 1 to "
            f"{model.config.max_position_embeddings - 1}; change the prompt"
        )
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(max_new_tokens, room),
            min_new_tokens=1,
            do_sample=False,
            pad_token_id=model.config.eos_token_id,
        )
    text: str = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    if not text:
        raise JobError(f"the model says nothing after {prompt[:40]!r}; train it longer or change serve.prompts")
    return text


if __name__ == "__main__":
    run(generate)
