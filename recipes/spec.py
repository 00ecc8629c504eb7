"""The one data model: everything a run needs to know, told in a YAML file or in the Prefect UI's form.

A recipe is the flow parameter itself. Every field has a default that serves the miniature (two nodes on this
machine, the Python standard library as data), so `Recipe()` is a complete, runnable recipe.

Fields marked *execution* change how a run goes, never what comes out of it; they stay out of the fingerprints that
decide whether a step is done (`recipes.identity`).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from recipes.case import MEGATRONS, Case
from recipes.checks import Checks
from recipes.cluster import Cluster, LocalCluster
from recipes.data import Data
from recipes.model import Model
from recipes.parallel import Parallel, Strategy
from recipes.part import Part, Size, agreed
from recipes.weights import linear_layers

__all__ = [
    "Budget",
    "Case",
    "Checks",
    "Data",
    "Export",
    "Flavour",
    "Image",
    "Model",
    "Parallel",
    "Recipe",
    "Score",
    "Serve",
    "Strategy",
    "Train",
]

Flavour = Literal["local", "pcluster-cpu", "pcluster-gpu", "pcluster-neuron", "eks-gpu", "batch-ecs-gpu", "base-gpu"]
Fraction = Annotated[float, Field(ge=0, lt=1)]


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
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="The learning rate after warm-up: cosine or linear decay to min_lr_ratio, constant, or wsd, which "
        "is constant and decays linearly over the last decay_ratio of the steps.",
    )
    decay_ratio: Fraction = Field(0.2, description="wsd: share of the steps in which the learning rate decays.")
    precision: Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"] = Field(
        "fp32",
        description="Arithmetic of the forward and backward pass; Castra's own program runs fp32, bf16 and fp16 (with "
        "a loss scale), the others are planned.",
    )
    activation_checkpointing: bool | Literal["selective"] = Field(
        False,
        description="Recompute activations in the backward pass: true, whole layers, about a third more work, far less "
        "memory; selective, all but the matrix products.",
    )
    compile: bool = Field(False, description="Compile the decoder blocks with torch.compile.")
    lora_rank: int = Field(
        0, ge=0, description="Train low-rank adapters of this rank beside frozen weights; 0 trains all weights."
    )
    lora_alpha: PositiveFloat = Field(32.0, description="Adapters are scaled by lora_alpha / lora_rank.")
    lora_targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="Linear layers that get an adapter, by the last part of their name.",
    )
    lora_base: Literal["full", "nf4"] = Field(
        "full",
        description="What the frozen weights beside adapters are kept in: full precision, or 4 bits (NF4, as QLoRA); "
        "4 bits need strategy: ddp.",
    )
    on_bad_step: Literal["stop", "skip"] = Field(
        "stop",
        description="When a loss or gradient is not finite, or the loss spikes: stop, or skip that update and go on.",
    )
    max_bad_steps: PositiveInt = Field(10, description="skip: stop after so many bad steps in a row.")
    loss_spike: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="A loss above so many times the median of the last 100 steps is a bad step; empty judges none.",
        examples=[3.0],
    )
    eval_every: int = Field(
        0, ge=0, description="Optimizer steps between losses on held-out data; 0 measures none.", examples=[1000]
    )
    eval_sequences: PositiveInt = Field(64, description="Held-out sequences of such a loss.")
    seed: int = Field(1, ge=0, description="Seed of the initial weights and of the sample order.")
    checkpoint_every: Size = Field(
        200,
        description="Execution. Optimizer steps between checkpoints; auto takes the plan's (Young, Daly).",
    )
    keep_checkpoints: PositiveInt = Field(
        2,
        description="Execution. How many checkpoints are kept, newest first, besides that of the best held-out loss.",
    )
    hang_after_s: PositiveFloat = Field(
        600.0,
        description="Execution. A step that takes longer ends the attempt, with every rank's stack in the output. "
        "Unit: seconds.",
    )
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
    max_perplexity: PositiveFloat | None = Field(None, description="Upper limit on the held-out perplexity per token.")
    baseline: str = Field(
        "",
        description="A Hugging Face folder that is scored on the same text; the model must not be worse than it.",
        examples=["/fsx/models/last-month"],
    )
    tasks: tuple[str, ...] = Field(
        (), description="Tasks of lm-evaluation-harness (needs lm_eval on the nodes).", examples=[["hellaswag"]]
    )


class Export(Part):
    """The Hugging Face folder."""

    dtype: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="Type of the exported weights.")
    quantize: Literal["none", "int8", "int4"] = Field(
        "none", description="Write a weight-only quantised copy besides: int8 per channel, or int4 in groups of 128."
    )
    merge_lora: bool = Field(True, description="Add trained adapters to the weights; false writes them apart (PEFT).")
    push_to: str = Field(
        "",
        description="Upload the folder there: s3://bucket/prefix, or hf://name (with the environment's HF_TOKEN).",
        examples=["s3://my-models/llama3-8b"],
    )
    max_shard_mb: PositiveInt = Field(5000, description="Largest safetensors file. Unit: MB (10^6 bytes).")
    license: str = Field("apache-2.0", description="Licence named in the model card (Hugging Face identifier).")
    parity_tolerance: PositiveFloat = Field(
        1e-4, description="Largest difference allowed between a logit of the training model and of the export."
    )


class Serve(Part):
    """The check that the exported model speaks, and how it is served."""

    prompts: tuple[str, ...] = Field(
        ("def __init__(self", "import os\n", "for i in range("), min_length=1, description="Texts to continue."
    )
    max_new_tokens: PositiveInt = Field(40, description="Tokens generated per prompt.")
    tp: PositiveInt = Field(1, description="Execution. Tensor parallel ranks that serve the model together.")


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
    case: Case = Field(Case(), description="Whose program trains, or measures.")
    parallel: Parallel = Field(Parallel(), description="How the work is spread over the ranks.")
    checks: Checks = Field(Checks(), description="The proof of the cluster before it is paid to train.")
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

    @model_validator(mode="before")
    @classmethod
    def _case_has_its_software(cls, value: Any) -> Any:
        """Megatron's frameworks are planned as Megatron, and read its files: nobody need say it."""
        case = value.get("case") if isinstance(value, dict) else None
        if not isinstance(case, dict) or case.get("framework") not in MEGATRONS:
            return value
        for name, told in (("parallel", {"software": "megatron"}), ("data", {"megatron": True})):
            part = {} if value.get(name) in (None, "auto") else value[name]
            value = value | ({name: told | part} if isinstance(part, dict) else {})
        return value

    @model_validator(mode="after")
    def _case_is_planned(self) -> Self:
        ours = self.case.framework in MEGATRONS and self.parallel.software != "megatron"
        told = f"case.framework {self.case.framework} goes with parallel.software: megatron"
        return agreed(self, [told] if ours else [])

    @model_validator(mode="after")
    def _adapters_have_layers(self) -> Self:
        layers = linear_layers(self.model)
        strange = [name for name in self.train.lora_targets if name not in layers] if self.train.lora_rank else []
        wrong = [f"train.lora_targets {', '.join(strange)}: {self.model.family} has only {', '.join(layers)}"]
        wrong = wrong if strange else []
        if self.train.lora_base == "nf4":
            if not self.train.lora_rank:
                wrong.append("train.lora_base nf4 is of adapters: write train.lora_rank above 0")
            if self.parallel.strategy not in ("auto", "ddp"):
                wrong.append(f"train.lora_base nf4 goes with parallel.strategy: ddp, not {self.parallel.strategy}")
        return agreed(self, wrong)
