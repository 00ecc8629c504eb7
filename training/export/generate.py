"""Let an exported model speak: load the folder as any user would, and continue each prompt greedily.

python -m training.export.generate job.json
"""

from typing import Any

from training.alone import alone
from training.job import NodeJob, progress, say
from training.process import JobError


def generate(job: NodeJob) -> None:
    """Write result.json with {"samples": [{"prompt", "text"}]}, where text is what follows the prompt.

    Raises JobError when the folder does not load, or when the model has nothing to say to a prompt.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder, asked = job.inputs["export"] / "hf", job.spec["serve"]
    if not (folder / "config.json").is_file():
        raise JobError(f"there is no exported model in {folder}; run export first")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).to(device).eval()
    samples = []
    for done, prompt in enumerate(asked["prompts"], 1):
        samples.append({"prompt": prompt, "text": continued(model, tokenizer, prompt, asked["max_new_tokens"])})
        progress(done, len(asked["prompts"]), "prompt continued")
        say("sample", **samples[-1])
    job.finish({"samples": samples})


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
    alone(generate)
