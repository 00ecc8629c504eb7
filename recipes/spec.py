"""The one data model: everything a run needs to know, told in a YAML file or in the Prefect UI's form.

A recipe is the flow parameter itself. Every field has a default that serves the miniature (two nodes on this
machine, the Python standard library as data), so `Recipe()` is a complete, runnable recipe.

Fields marked *execution* change how a run goes, never what comes out of it; they stay out of the fingerprints that
decide whether a step is done (`recipes.identity`).
"""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Flavour = Literal["local", "pcluster-cpu", "pcluster-gpu", "pcluster-neuron", "eks-gpu", "batch-ecs-gpu", "base-gpu"]
Strategy = Literal["auto", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Rung = Annotated[
    str,
    Field(
        pattern=r"^(on-demand|spot|(block|reservation):cr-[0-9a-f]{8,17}|plan:arn:aws[a-z-]*:sagemaker:\S+)$",
        description="A way to get instances: on-demand, spot, block:cr-…, reservation:cr-… or plan:arn….",
    ),
]
Zone = Annotated[
    str,
    Field(
        pattern=r"^[a-z]{2}(-[a-z]+)+-\d[a-z]$", description="Availability zone: a region and a letter, as us-east-1b."
    ),
]


class Part(BaseModel):
    """A frozen section of a recipe that refuses fields it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


P = TypeVar("P", bound=Part)


def _agreed(part: P, wrong: list[str]) -> P:
    """The part, if nothing is wrong with how its fields go together; else all of it, one sentence a line."""
    if wrong:
        raise ValueError("\n".join(wrong))
    return part


class Model(Part):
    """The network: a Llama-architecture decoder, trained from scratch."""

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

    @model_validator(mode="after")
    def _shapes_divide(self) -> Self:
        wrong = []
        if self.hidden_size % self.heads:
            wrong.append(f"heads ({self.heads}) must divide hidden_size ({self.hidden_size})")
        elif self.hidden_size // self.heads % 2:
            wrong.append(f"hidden_size / heads is {self.hidden_size // self.heads}, rotary embedding needs it even")
        if self.heads % self.kv_heads:
            wrong.append(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        return _agreed(self, wrong)


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
        return _agreed(self, [f"min_chars ({self.min_chars}) is above max_chars ({self.max_chars})"] if short else [])


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


class LocalCluster(Part):
    """This machine: each node is a torchrun group of its own."""

    kind: Literal["local"] = Field("local", description="Which kind of cluster.")
    nodes: PositiveInt = Field(2, le=16, description="Nodes, each a torchrun group on this machine.")
    processes_per_node: PositiveInt = Field(1, le=16, description="Training processes (ranks) per node.")


class AwsCluster(Part):
    """What every AWS cluster shares."""

    instance_type: str = Field(
        "p4de.24xlarge",
        description="EC2 instance type; `python -m clusters.catalog` lists them.",
        examples=["p5.48xlarge"],
    )
    alternatives: tuple[str, ...] = Field(
        (),
        description="Instance types to try where the first is not to be had, in order; the layout is planned anew.",
        examples=[["p5en.48xlarge"]],
    )
    nodes: PositiveInt = Field(2, description="Number of instances.", examples=[16])
    region: str = Field(
        "us-east-1", pattern=r"^[a-z]{2}(-[a-z]+)+-\d$", description="AWS region: its code, such as us-east-1."
    )
    zones: tuple[Zone, ...] = Field(
        (),
        description="Availability zones to try, in order; empty tries all of the region that offer the type.",
        examples=[["us-east-1b", "us-east-1d"]],
    )
    capacity: tuple[Rung, ...] = Field(
        ("on-demand",),
        min_length=1,
        description="The ladder of ways to get instances, tried in order: on-demand, spot, block:cr-… (a capacity "
        "block), reservation:cr-… (a targeted reservation), plan:arn… (a SageMaker training plan).",
        examples=[["block:cr-0123456789abcdef0", "on-demand"]],
    )
    patience_minutes: PositiveFloat = Field(
        30.0, description="How long instances are waited for before the next rung is tried. Unit: minutes."
    )
    placement_group: bool | None = Field(
        None, description="Put the instances close together; empty does so wherever the capacity allows it."
    )
    lustre_gib: int = Field(
        0, ge=0, description="Size of an FSx for Lustre file system mounted at /fsx; 0 makes none. Unit: GiB."
    )


class SlurmCluster(AwsCluster):
    """Slurm: AWS ParallelCluster, AWS PCS or SageMaker HyperPod."""

    kind: Literal["slurm"] = Field("slurm", description="Which kind of cluster.")
    flavour: Literal["parallelcluster", "pcs", "hyperpod"] = Field(
        "parallelcluster", description="Which of AWS's services runs Slurm."
    )
    head_instance_type: str = Field("m5.2xlarge", description="EC2 instance type of the head or login node.")
    ssh: str = Field(
        "",
        pattern=r"^[\w.@:-]*$",
        description="How ssh reaches the head or login node: a host, or an alias of ~/.ssh/config; empty finds "
        "ParallelCluster's head node by itself.",
        examples=["castra-login"],
    )
    python: str = Field(
        "python3",
        description="The Python with torch and transformers on the nodes.",
        examples=["/fsx/venv/bin/python"],
    )
    containers: bool = Field(False, description="Install enroot and pyxis and run the jobs in image.container.")


class BatchCluster(AwsCluster):
    """AWS Batch multi-node parallel jobs."""

    kind: Literal["batch"] = Field("batch", description="Which kind of cluster.")


class EksCluster(AwsCluster):
    """Kubernetes: Amazon EKS, with node groups of its own or on SageMaker HyperPod."""

    kind: Literal["eks"] = Field("eks", description="Which kind of cluster.")
    flavour: Literal["nodegroup", "hyperpod"] = Field("nodegroup", description="Who brings the nodes.")
    kubernetes_version: str = Field(
        "1.35",
        pattern=r"^1\.\d{2}$",
        description="Version of the control plane: two numbers, such as 1.35.",
        examples=["1.34"],
    )
    workload: Literal["job", "jobset"] = Field(
        "job",
        description="job: an indexed Job, as every cluster has it; jobset: a JobSet, restarted as a gang in place.",
    )
    queue: str = Field("", description="Name of a Kueue LocalQueue that admits the jobs; empty uses none.")


class SageMakerCluster(AwsCluster):
    """SageMaker training jobs."""

    kind: Literal["sagemaker"] = Field("sagemaker", description="Which kind of cluster.")
    warm_pool_minutes: int = Field(
        0, ge=0, le=60, description="Keep the instances this long for the next job, at their price. Unit: minutes."
    )
    volume_gib: PositiveInt = Field(500, description="Disk of each instance. Unit: GiB.")


Cluster = Annotated[
    LocalCluster | SlurmCluster | BatchCluster | EksCluster | SageMakerCluster, Field(discriminator="kind")
]


class Parallel(Part):
    """How the model and its states are spread over the ranks."""

    strategy: Strategy = Field(
        "auto",
        description="auto takes the planner's choice; ddp, fsdp2 (torch), zero1/zero2/zero3 (DeepSpeed).",
    )
    micro_batch_size: PositiveInt | Literal["auto"] = Field(
        "auto", description="Sequences per rank and forward pass; auto takes the largest that fits.", examples=[4]
    )


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
    precision: Literal["fp32", "bf16"] = Field("fp32", description="Arithmetic of the forward and backward pass.")
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
        return _agreed(self, wrong)


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
