"""What a recipe's model learns from."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from recipes.part import Part, Size, agreed


class Data(Part):
    """What the model learns from, and how it becomes tokens."""

    source: str | tuple[str, ...] = Field(
        "python-stdlib",
        description="'python-stdlib' (the standard library of the Python that runs Castra), a folder or file, an "
        "s3://bucket/prefix, hf://name[:split] (a Hugging Face dataset; needs the extra 'hub'), or a list of these.",
        examples=["python-stdlib", "/fsx/corpus", ["s3://my-data/web", "/fsx/books"]],
    )
    include: tuple[str, ...] = Field(
        ("*.py",),
        min_length=1,
        description="File name patterns that are read.",
        examples=[["*.jsonl.zst", "*.parquet"]],
    )
    kind: Literal["text", "chat"] = Field(
        "text",
        description="text: documents, every token of which is learned; chat: conversations, of which only the "
        "assistant's turns are.",
    )
    text_field: str = Field("text", description="Where JSONL and Parquet files keep a document's text.")
    messages_field: str = Field(
        "messages", description="Where they keep a conversation: a list of {role, content}, or {prompt, completion}."
    )
    chat_template: Literal["tokenizer", "llama3.1", "gemma2", "chatml"] = Field(
        "tokenizer", description="How a conversation becomes text: the tokenizer's own template, or one that is known."
    )
    packing: Literal["concat", "best-fit"] = Field(
        "concat",
        description="concat: one stream of tokens, cut everywhere; best-fit: whole documents where they fit into a "
        "sequence, the rest padded.",
    )
    documents_apart: bool = Field(
        False, description="Attention does not look over the border between two documents of a sequence."
    )
    megatron: bool = Field(False, description="Write the training tokens as Megatron's .bin and .idx besides.")
    workers: Size = Field(
        "auto", description="Execution. Processes that prepare the data on each node; auto is one per core."
    )
    nodes: PositiveInt = Field(1, description="Execution. Nodes that prepare the data, each its share of the files.")
    min_chars: PositiveInt = Field(200, description="Shorter documents are dropped. Unit: characters.")
    max_chars: PositiveInt = Field(500_000, description="Longer documents are dropped. Unit: characters.")
    max_documents: PositiveInt | None = Field(
        None, description="Read at most this many documents, taken evenly over the source; empty reads all."
    )
    near_duplicate: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Drop a document whose estimated Jaccard similarity with an earlier one is at least this; "
        "1 drops exact copies only.",
    )
    held_out: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.03, description="Share of the documents (by a hash of their path) kept for scoring, never trained on."
    )
    sequence_length: PositiveInt = Field(128, ge=16, description="Tokens per training sequence.", examples=[8192])
    tokenizer: str = Field(
        "train",
        description="'train' (byte-level BPE of model.vocab_size on this data) or the path of a tokenizer.json, or of "
        "a Hugging Face folder that has one.",
    )

    @model_validator(mode="after")
    def _lengths_leave_some(self) -> Self:
        short = self.min_chars > self.max_chars
        wrong = [f"min_chars ({self.min_chars}) is above max_chars ({self.max_chars})"] if short else []
        if self.kind == "chat" and self.megatron:
            wrong.append("megatron files have no loss mask: leave megatron false for kind chat")
        if not self.source:
            wrong.append("source names nothing: give a folder, s3://, hf:// or python-stdlib")
        return agreed(self, wrong)
