"""The one data model: everything a run needs to know, told in a YAML file or in the Prefect UI's form.

A recipe is the flow parameter itself. Every field has a default that serves the miniature (two nodes on this
machine, the Python standard library as data), so `Recipe()` is a complete, runnable recipe.

Fields marked *execution* change how a run goes, never what comes out of it; they stay out of the fingerprints that
decide whether a step is done (`recipes.identity`).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from recipes.cluster import Cluster, LocalCluster
from recipes.part import Part, agreed

Flavour = Literal["local", "pcluster-cpu", "pcluster-gpu", "pcluster-neuron", "eks-gpu", "batch-ecs-gpu", "base-gpu"]
Strategy = Literal["auto", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
Size = PositiveInt | Literal["auto"]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Model(Part):
    """The network: a Llama-architecture decoder, trained from scratch; what differs from Llama is planned, not run."""

    family: Literal["llama"] = Field("llama", description="Architecture, by its transformers name.")
    hidden_size: PositiveInt = Field(192, description="Width of the residual stream.", examples=[4096])
    layers: PositiveInt = Field(2, description="Number of decoder blocks.", examples=[32])
    heads: PositiveInt = Field(6, description="Attention heads per block; must divide hidden_size.", examples=[32])
    kv_heads: PositiveInt = Field(
        6, description="Key/value heads (grouped-query attention); must divide heads.", examples=[8]
    )
    ffn_size: PositiveInt = Field(512, description="Width of the gated MLP.", examples=[14336])
    vocab_size: PositiveInt = Field(
        4096,
        ge=300,
        description="Tokens the tokenizer may have; the miniature trains one of this size.",
        examples=[128256],
    )
    tie_embeddings: bool = Field(True, description="Share the input and the output embedding.")
    rope_theta: PositiveFloat = Field(
        10000.0, description="Base of the rotary position embedding.", examples=[500000.0]
    )
    head_dim: PositiveInt | None = Field(
        None, description="Width of one attention head; empty is hidden_size / heads.", examples=[256]
    )
    gated: bool = Field(True, description="The MLP has three matrices (Llama), not two (GPT).")
    mla: bool = Field(False, description="Multi-head latent attention (DeepSeek).")
    experts: int = Field(
        0, ge=0, description="Routed experts of each block (mixture of experts); 0 is dense.", examples=[64]
    )
    topk: int = Field(0, ge=0, description="Experts that each token visits; 0 where there are none.", examples=[8])
    expert_ffn: int = Field(0, ge=0, description="Width of one expert; 0 is ffn_size.", examples=[1408])
    shared_experts: int = Field(0, ge=0, description="Experts that every token visits besides.", examples=[2])
    dense_layers: int = Field(0, ge=0, description="Leading blocks without experts.", examples=[3])

    @model_validator(mode="after")
    def _shapes_divide(self) -> Self:
        wrong = []
        if self.hidden_size % self.heads and not self.head_dim:
            wrong.append(f"heads ({self.heads}) must divide hidden_size ({self.hidden_size})")
        elif (width := self.head_dim or self.hidden_size // self.heads) % 2:
            wrong.append(f"hidden_size / heads is {width}, rotary embedding needs it even")
        if self.heads % self.kv_heads:
            wrong.append(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        return agreed(self, wrong + self._experts_agree())

    def _experts_agree(self) -> list[str]:
        wrong = []
        if self.experts and not 1 <= self.topk <= self.experts:
            wrong.append(f"topk ({self.topk}) must be at least 1 and at most experts ({self.experts})")
        if not self.experts and (self.topk or self.expert_ffn or self.shared_experts or self.dense_layers):
            wrong.append("topk, expert_ffn, shared_experts and dense_layers need experts above 0")
        if self.dense_layers > self.layers:
            wrong.append(f"dense_layers ({self.dense_layers}) is above layers ({self.layers})")
        return wrong


class Data(Part):
    """What the model learns from, and how it becomes tokens."""

    source: str = Field(
        "python-stdlib",
        description="'python-stdlib' (the standard library of the Python that runs Castra) or a folder of text files.",
        examples=["python-stdlib", "/fsx/corpus"],
    )
    include: tuple[str, ...] = Field(
        ("*.py",), min_length=1, description="File name patterns that are read.", examples=[["*.txt", "*.md"]]
    )
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
        description="'train' (byte-level BPE of model.vocab_size on this data) or the path of a tokenizer.json.",
    )

    @model_validator(mode="after")
    def _lengths_leave_some(self) -> Self:
        short = self.min_chars > self.max_chars
        return agreed(self, [f"min_chars ({self.min_chars}) is above max_chars ({self.max_chars})"] if short else [])


class Image(Part):
    """The machine image and the container the nodes start from."""

    flavour: Flavour = Field("local", description="Which image is baked; 'local' is this machine as it is.")
    ami: str = Field(
        "",
        pattern=r"^(ami-[0-9a-f]{8,17})?$",
        description="Execution. AMI to use as it is: its id, such as ami-0123456789abcdef0; empty takes AWS's own.",
        examples=["ami-0123456789abcdef0"],
    )
    container: str = Field(
        "",
        pattern=r"^\S*$",
        description="Execution. Container image that batch, eks and sagemaker run: registry/name:tag, with Python 3.11 "
        "or newer, torch, transformers and boto3; Castra's own code is brought along by every job.",
        examples=["123456789012.dkr.ecr.us-east-1.amazonaws.com/train:2026-11"],
    )


class Parallel(Part):
    """How the model and its states are spread over the ranks."""

    strategy: Strategy = Field(
        "auto",
        description="auto takes the planner's choice; ddp, fsdp2 (torch), zero1/zero2/zero3 (DeepSpeed).",
    )
    micro_batch_size: Size = Field(
        "auto", description="Sequences per rank and forward pass; auto takes the largest that fits.", examples=[4]
    )
    software: Literal["castra", "megatron"] = Field(
        "castra",
        description="Which training program is planned for: Castra's own, or Megatron-LM, which is planned and not yet "
        "run; a size above 1 below, or recompute, means megatron where nothing else is said.",
    )
    tp: Size = Field("auto", description="Tensor parallel ranks: each layer is cut up among them.", examples=[8])
    pp: Size = Field("auto", description="Pipeline stages, each with a part of the layers.", examples=[4])
    vpp: Size = Field("auto", description="Parts of the model that each pipeline stage holds (interleaved).")
    cp: Size = Field("auto", description="Context parallel ranks: each sequence is cut up among them.")
    ep: Size = Field("auto", description="Expert parallel ranks: the experts of each layer lie on so many.")
    recompute: Literal["auto", "none", "selective", "full"] = Field(
        "auto",
        description="What Megatron's backward pass does again: nothing, the attention, or whole layers; Castra's own "
        "program has train.activation_checkpointing.",
    )

    @model_validator(mode="before")
    @classmethod
    def _names_its_software(cls, value: Any) -> Any:
        """What only Megatron can do means Megatron."""
        if isinstance(value, dict) and "software" not in value and any(_is_megatrons(item) for item in value.items()):
            return value | {"software": "megatron"}
        return value

    @model_validator(mode="after")
    def _software_can(self) -> Self:
        if self.software == "megatron":
            return self
        beyond = [f"{name}: {value}" for name, value in self if _is_megatrons((name, value))]
        return agreed(self, [f"{', '.join(beyond)} is Megatron's: write software: megatron"] if beyond else [])


def _is_megatrons(field: tuple[str, Any]) -> bool:
    """Whether a field of `parallel`, with its value, asks for more than Castra's own trainer can."""
    name, value = field
    if name == "recompute":
        return bool(value != "auto")
    return name in {"tp", "pp", "vpp", "cp", "ep"} and str(value) not in {"auto", "1"}


class Train(Part):
    """The optimisation."""

    steps: PositiveInt = Field(900, description="Optimizer steps.", examples=[100000])
    global_batch_size: PositiveInt = Field(16, description="Sequences per optimizer step, over all ranks.")
    learning_rate: PositiveFloat = Field(4e-3, lt=1, description="Peak learning rate (AdamW).", examples=[3e-4])
    min_lr_ratio: Fraction = Field(0.1, description="Final learning rate as a share of the peak (cosine decay).")
    warmup_steps: int = Field(30, ge=0, description="Linear warm-up. Unit: optimizer steps.")
    weight_decay: float = Field(0.1, ge=0, description="AdamW weight decay, on matrices only.")
    beta1: Fraction = Field(0.9, description="AdamW first moment decay.")
    beta2: Fraction = Field(0.95, description="AdamW second moment decay.")
    grad_clip: PositiveFloat = Field(1.0, description="Gradients are scaled down to this global norm.")
    precision: Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"] = Field(
        "fp32",
        description="Arithmetic of the forward and backward pass; Castra's own program runs fp32 and bf16, the others "
        "are planned.",
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: about a third more work, far less memory."
    )
    seed: int = Field(1, ge=0, description="Seed of the initial weights and of the sample order.")
    checkpoint_every: PositiveInt = Field(200, description="Execution. Optimizer steps between checkpoints.")
    keep_checkpoints: PositiveInt = Field(2, description="Execution. How many checkpoints are kept, newest first.")
    rehearse_failure_at: PositiveInt | None = Field(
        None,
        description="Execution. Kill every rank once at this step, to prove that the run resumes from its checkpoint.",
    )
    timeout_hours: PositiveFloat = Field(24.0, description="Execution. The job stops itself after this long.")
    attempts: PositiveInt = Field(3, description="Execution. How often a failed job is started again.")

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        wrong = []
        if self.warmup_steps >= self.steps:
            wrong.append(f"warmup_steps ({self.warmup_steps}) must be below steps ({self.steps})")
        if self.rehearse_failure_at is not None and self.rehearse_failure_at >= self.steps:
            wrong.append(f"rehearse_failure_at ({self.rehearse_failure_at}) must be below steps ({self.steps})")
        return agreed(self, wrong)


class Score(Part):
    """The gate a model must pass before it is exported."""

    max_tokens: PositiveInt = Field(200_000, description="Held-out tokens that are scored, at most.")
    must_beat: tuple[Literal["gzip", "unigram"], ...] = Field(
        ("gzip", "unigram"), description="Baselines whose bits per byte the model must undercut on the held-out text."
    )
    max_bits_per_byte: PositiveFloat | None = Field(
        None, description="Upper limit on held-out bits per byte; empty asks only for the baselines."
    )


class Export(Part):
    """The Hugging Face folder."""

    dtype: Literal["fp32", "bf16"] = Field("fp32", description="Type of the exported weights.")
    max_shard_mb: PositiveInt = Field(5000, description="Largest safetensors file. Unit: MB (10^6 bytes).")
    license: str = Field("apache-2.0", description="Licence named in the model card (Hugging Face identifier).")
    parity_tolerance: PositiveFloat = Field(
        1e-4, description="Largest difference allowed between a logit of the training model and of the export."
    )


class Serve(Part):
    """The check that the exported model speaks."""

    prompts: tuple[str, ...] = Field(
        ("def __init__(self", "import os\n", "for i in range("), min_length=1, description="Texts to continue."
    )
    max_new_tokens: PositiveInt = Field(40, description="Tokens generated per prompt.")


class Budget(Part):
    """What may be spent."""

    max_usd: PositiveFloat | None = Field(
        None,
        description="Execution. A plan above this is refused before anything is created, and the jobs' own time limits "
        "keep a run below it. Unit: US dollars.",
    )
    approve_above_usd: PositiveFloat | None = Field(
        None,
        description="Execution. A plan above this waits until somebody approves it in the Prefect UI. "
        "Unit: US dollars.",
    )


class Recipe(Part):
    """One model's whole life."""

    name: str = Field(
        "miniature",
        pattern=r"^[a-z][a-z0-9-]{0,38}[a-z0-9]$",
        description="Names every resource and result: lower-case letters, digits and dashes, 2 to 40 characters.",
    )
    description: str = Field("", description="One line for people.")
    store: str = Field(
        ".castra/store",
        pattern=r"^\S+$",
        description="Execution. Where results live: a folder, file:///folder or s3://bucket/prefix.",
        examples=["s3://my-models/castra"],
    )
    model: Model = Field(Model(), description="The network.")
    data: Data = Field(Data(), description="The training data.")
    image: Image = Field(Image(), description="The machine image.")
    cluster: Cluster = Field(LocalCluster(), description="Execution. Where the jobs run.")
    parallel: Parallel = Field(Parallel(), description="How the work is spread over the ranks.")
    train: Train = Field(Train(), description="The optimisation.")
    score: Score = Field(Score(), description="The gate before export.")
    export: Export = Field(Export(), description="The exported folder.")
    serve: Serve = Field(Serve(), description="The check that the exported model speaks.")
    budget: Budget = Field(Budget(), description="What may be spent.")
    keep: bool = Field(False, description="Execution. Leave the cluster standing after the run (until it expires).")

    @model_validator(mode="before")
    @classmethod
    def _parallel_auto(cls, value: Any) -> Any:
        """Let `parallel: auto` stand for the planner's choice of everything."""
        if isinstance(value, dict) and value.get("parallel") == "auto":
            return value | {"parallel": {}}
        return value
