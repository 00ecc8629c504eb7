"""Prepare data with datatrove or datasets; runs in an environment of its own (see benchmarks/data.py).

    prepare_data.py datatrove|datasets|minhash CORPUS.jsonl TOKENIZER.json END OUTPUT

The tokens of datatrove come to lie in OUTPUT/*.ds; of minhash one JSON line tells how many documents it removes.
"""

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

LENGTH = 2048


def datatrove(corpus: Path, tokenizer: str, end: str, output: Path) -> None:
    """Read lines, tokenise, write, documents in their order."""
    from datatrove.executor.local import LocalPipelineExecutor  # type: ignore[import-not-found]  # not in our own
    from datatrove.pipeline.readers import JsonlReader  # type: ignore[import-not-found]  # environment
    from datatrove.pipeline.tokens import DocumentTokenizer  # type: ignore[import-not-found]  # environment

    reader = JsonlReader(str(corpus.parent), glob_pattern=corpus.name)
    writer = DocumentTokenizer(str(output), tokenizer_name_or_path=tokenizer, eos_token=end, shuffle_documents=False)
    LocalPipelineExecutor([reader, writer], tasks=1, workers=1, logging_dir=str(output / "log")).run()


def datasets(corpus: Path, tokenizer: str, end: str, output: Path) -> None:
    """Load, map to ids, map to rows of one length, save."""
    import datasets as library  # type: ignore[import-untyped]  # has no types
    from transformers import PreTrainedTokenizerFast

    library.disable_progress_bars()
    library.disable_caching()
    made = PreTrainedTokenizerFast(tokenizer_file=tokenizer)
    eos = made.convert_tokens_to_ids(end)

    def encoded(batch: dict[str, Any]) -> dict[str, Any]:
        found = made(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return {"input_ids": [[*ids, eos] for ids in found]}

    def packed(batch: dict[str, Any]) -> dict[str, Any]:
        flat = list(chain(*batch["input_ids"]))
        return {"input_ids": [flat[i : i + LENGTH] for i in range(0, len(flat) // LENGTH * LENGTH, LENGTH)]}

    read = library.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(output / "cache"))
    rows = read.map(encoded, batched=True, remove_columns=read.column_names).map(packed, batched=True)
    rows.save_to_disk(str(output / "rows"))


def minhash(corpus: Path, tokenizer: str, end: str, output: Path) -> None:
    """Sign, put into buckets, cluster: all that datatrove needs to know which documents to remove."""
    del tokenizer, end
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (  # type: ignore[import-not-found]  # not in our own environment
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig  # type: ignore[import-not-found]  # as above
    from datatrove.pipeline.readers import JsonlReader

    config = MinhashConfig()
    signed, buckets, removed = (str(output / name) for name in ("signed", "buckets", "removed"))
    steps = (
        ([JsonlReader(str(corpus.parent), glob_pattern=corpus.name), MinhashDedupSignature(signed, config=config)], 1),
        ([MinhashDedupBuckets(signed, buckets, config=config)], config.num_buckets),
        ([MinhashDedupCluster(buckets, removed, config=config)], 1),
    )
    for i, (pipeline, tasks) in enumerate(steps):
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=str(output / f"log{i}")).run()
    found = sum(path.stat().st_size // 4 for path in Path(removed).glob("*.remove"))
    print(json.dumps({"removed": found}))


if __name__ == "__main__":
    name, where, vocabulary, last, into = sys.argv[1:]
    {"datatrove": datatrove, "datasets": datasets, "minhash": minhash}[name](Path(where), vocabulary, last, Path(into))
