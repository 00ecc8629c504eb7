"""neuronx-distributed: the exact arguments of its Llama pre-training on Trainium, at v2.27.0.

Source of the names: examples/training/llama/tp_zero1_llama_hf_pretrain/tp_zero1_llama_hf_pretrain.py (tensor parallel,
ZeRO 1) and tp_pp_llama_hf_pretrain/run_llama_nxd.py (pipeline stages besides), with the variables of their shell
scripts. Both read a data set that get_dataset.py beside them has tokenised.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from training.cases.base import CaseError, Command, Paths, Upstream
from training.cases.flags import laid_over, words
from training.cases.sizes import Sizes, again, refuse, sizes

UPSTREAM: Final = Upstream(
    repository="aws-neuron/neuronx-distributed",
    version="v2.27.0",
    licence="MIT-0",
    folder="/neuronx-distributed",
    container="763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training-neuronx:"
    "2.9.0-neuronx-py312-sdk2.28.0-ubuntu24.04",
)
"""AWS's container of the SDK 2.28, which awslabs/awsome-distributed-ai extends by the examples, in its root."""

CORES: Final = {"trn1.2xlarge": 2, "trn1.32xlarge": 32, "trn1n.32xlarge": 32}
"""NeuronCores of an instance, each a rank: two of every Trainium chip."""
EXAMPLES: Final = "examples/training/llama"
PORT: Final = 44000
"""Where the ranks meet, as the examples have it."""
START: Final = f"""import os, sys
# one process of ours on each node, of whose group it is the only rank, starts the node's ranks
words = ["--node_rank", os.environ["GROUP_RANK"], "--master_addr", os.environ["MASTER_ADDR"], "--master_port", "{PORT}"]
for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "PET_"))]:
    del os.environ[name]
os.execvp("torchrun", ["torchrun", *words, *sys.argv[1:]])
"""
COMMON: Final = {"NEURON_FUSE_SOFTMAX": "1"}
ZERO1: Final = re.compile(
    r"LOG .* - \(\d+, (?P<step>\d+)\) step_loss : (?P<loss>[\d.]+|nan|inf) +learning_rate : [\d.e+-]+ +"
    r"throughput : (?P<sequences_per_second>[\d.]+) seq/s"
)
STAGES: Final = re.compile(
    r"^step (?P<step>\d+) step_time (?P<seconds>[\d.]+)s throughput (?P<sequences_per_second>[\d.]+) seq/s "
    r"(?:step )?loss (?P<loss>[\d.]+|nan|inf) grad norm (?P<grad_norm>[\d.]+|nan|inf)"
)


def command(spec: Mapping[str, Any], nodes: int, processes_per_node: int, paths: Paths) -> Command:
    """Its own torchrun once on each node, with a rank for each of its NeuronCores."""
    staged = spec["parallel"]["pp"] not in (1, "auto")
    refuse("neuronx-distributed", spec, cuts=("tp", "pp", "vpp", "cp"), also=_wrong(spec, staged=staged))
    cores = CORES.get(spec["cluster"].get("instance_type", ""), processes_per_node)
    cut = sizes(spec, nodes, cores)
    script = "tp_pp_llama_hf_pretrain/run_llama_nxd.py" if staged else _SCRIPT
    told = (_stages if staged else _zero1)(spec, cut, paths)
    flags = laid_over(words(told), spec["case"]["arguments"])
    start = (f"{paths.output}/start.py", "--nproc_per_node", str(cores), "--nnodes", str(nodes))
    return Command(
        argv=(*start, f"{paths.folder}/{EXAMPLES}/{script}", *flags),
        env=(_stages_env if staged else _zero1_env)(cores, paths),
        files={"start.py": START, "model/config.json": json.dumps(_llama(spec), indent=1)},
        per="node",
    )


_SCRIPT: Final = "tp_zero1_llama_hf_pretrain/tp_zero1_llama_hf_pretrain.py"


def measure(line: str) -> dict[str, float] | None:
    """Of the line per logged step of either program; sequences per second are of all ranks."""
    found = ZERO1.search(line) or STAGES.search(line)
    return {name: float(value) for name, value in found.groupdict().items()} if found else None


def _wrong(spec: Mapping[str, Any], *, staged: bool) -> list[str]:
    model, train, told = spec["model"], spec["train"], spec["parallel"]
    wrong = []
    if model["family"] != "llama":
        wrong.append("its examples have Llama's architecture: set model.family: llama")
    if train["precision"] != "bf16":
        wrong.append("it computes in bf16 with the optimizer in fp32: set train.precision: bf16")
    if train["grad_clip"] != 1:
        wrong.append("it clips gradients to a norm of 1: set train.grad_clip: 1.0")
    if again(spec) == "none":
        wrong.append("it recomputes at least the attention: set parallel.recompute: selective")
    if told["strategy"] not in ("zero1", "ddp", "zero0", "auto"):
        wrong.append(f"it shards the optimizer only, not as {told['strategy']}: set parallel.strategy: zero1")
    if staged and train["schedule"] != "cosine":
        wrong.append("with pipeline stages its schedule is a cosine: set train.schedule: cosine")
    if not staged and (train["schedule"] != "linear" or train["min_lr_ratio"] != 0):
        wrong.append("its schedule falls linearly to 0: set train.schedule: linear and train.min_lr_ratio: 0")
    if not staged and told["vpp"] not in (1, "auto"):
        wrong.append("interleaving needs pipeline stages: set parallel.vpp: 1")
    if spec["model"]["pretrained"]:
        wrong.append("it starts from weights that its own converter has cut up: leave model.pretrained empty")
    return wrong


def _data(spec: Mapping[str, Any]) -> str:
    source = spec["data"]["source"]
    if isinstance(source, str) and source.startswith("/") and not set(source) & set(" \t\n"):
        return source
    raise CaseError(
        f"neuronx-distributed reads a data set that its get_dataset.py has tokenised, which data.source {source!r} is "
        "not: give its absolute folder."
    )


def _zero1(spec: Mapping[str, Any], cut: Sizes, paths: Paths) -> list[str]:
    train, zero = spec["train"], spec["parallel"]["strategy"] == "zero1"
    switches = {
        "--use_mix_precision": True,
        "--use_zero_1": zero,
        "--sequence_parallel_enabled": cut.tp > 1,
        "--selective_checkpoint_enabled": again(spec) == "selective",
        "--qkv_linear": cut.tp > 1,
    }
    return [
        f"--model_path {paths.output}/model",
        f"--data_dir {_data(spec)}",
        f"--output_dir {paths.output}/logs",
        f"--metrics_file {paths.output}/metrics.json",
        f"--tensor_parallel_size {cut.tp}",
        f"--context_parallel_size {cut.cp}",
        f"--batch_size {cut.micro_batch_size}",
        f"--grad_accum_usteps {cut.accumulation}",
        f"--max_steps {train['steps']}",
        "--steps_this_run -1",
        f"--kv_replicator {_replicas(spec, cut)}",
        "--use_flash_attention 1",
        "--use_gpu_compatible_precision 1",
        "--logging_interval 1",
        *_shared(spec, paths),
        *(name for name, on in switches.items() if on),
    ]


def _stages(spec: Mapping[str, Any], cut: Sizes, paths: Paths) -> list[str]:
    train, zero = spec["train"], spec["parallel"]["strategy"] == "zero1"
    return [
        f"--training_config {paths.output}/model",
        f"--training_dir {_data(spec)}",
        f"--tb_dir {paths.output}/logs",
        f"--metrics_file {paths.output}/metrics.json",
        f"--tensor_parallel_size {cut.tp}",
        f"--pipeline_parallel_size {cut.pp}",
        f"--virtual_pipeline_size {cut.vpp}",
        f"--context_parallel_size {cut.cp}",
        f"--train_batch_size {cut.batch_per_replica}",
        f"--num_microbatches {cut.accumulation}",
        f"--max_steps {train['steps']}",
        f"--min_lr {train['learning_rate'] * train['min_lr_ratio']:g}",
        "--constant_steps 0",
        f"--kv_replicator {_replicas(spec, cut)}",
        "--use_flash_attention 1",
        "--use_meta_device_init 1",
        f"--use_sequence_parallel {int(cut.tp > 1)}",
        f"--use_selective_checkpoint {int(again(spec) == 'selective')}",
        f"--use_zero1_optimizer {int(zero)}",
        f"--qkv_linear {int(cut.tp > 1)}",
        "--pretrained_weight 0",
        "--save_load_xser 1",
        *_shared(spec, paths),
    ]


def _shared(spec: Mapping[str, Any], paths: Paths) -> list[str]:
    train = spec["train"]
    every = train["checkpoint_every"]
    return [
        f"--seq_len {spec['data']['sequence_length']}",
        f"--lr {train['learning_rate']:g}",
        f"--warmup_steps {train['warmup_steps']}",
        f"--weight_decay {train['weight_decay']:g}",
        f"--beta1 {train['beta1']:g}",
        f"--beta2 {train['beta2']:g}",
        f"--seed {train['seed']}",
        f"--checkpoint_dir {paths.output}/checkpoints",
        f"--checkpoint_freq {every if isinstance(every, int) else 500}",
        f"--num_kept_checkpoint {train['keep_checkpoints']}",
        "--loading_step latest_if_exists",
    ]


def _replicas(spec: Mapping[str, Any], cut: Sizes) -> int:
    """Copies of each key/value head where there are more ranks than heads."""
    heads: int = spec["model"]["kv_heads"]
    if cut.tp > heads and cut.tp % heads:
        raise CaseError(
            f"{cut.tp} tensor parallel ranks are no multiple of {heads} key/value heads: change parallel.tp."
        )
    return max(1, cut.tp // heads)


def _llama(spec: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as transformers' LlamaConfig reads it."""
    model, length = spec["model"], spec["data"]["sequence_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": model["hidden_size"],
        "initializer_range": 0.02,
        "intermediate_size": model["ffn_size"],
        "max_position_embeddings": length,
        "num_attention_heads": model["heads"],
        "num_hidden_layers": model["layers"],
        "num_key_value_heads": model["kv_heads"],
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": model["rope_theta"],
        "tie_word_embeddings": model["tie_embeddings"],
        "use_cache": True,
        "vocab_size": model["vocab_size"],
        "sequence_parallel_enabled": False,
        "selective_checkpoint_enabled": False,
    }


def _zero1_env(cores: int, paths: Paths) -> dict[str, str]:
    counted = ("NEURON_RT_NUM_CORES", "NUM_NEURONCORES", "TPU_NUM_DEVICES", "TPU_CHIPS_PER_HOST_BOUNDS")
    return {
        **COMMON,
        **dict.fromkeys(counted, str(cores)),
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
        "MALLOC_ARENA_MAX": "64",
        "NEURON_CC_FLAGS": f"--model-type transformer --cache_dir={paths.output}/compiled",
        "PYTHONPATH": f"{paths.folder}/{EXAMPLES}",
    }


def _stages_env(cores: int, paths: Paths) -> dict[str, str]:
    del cores  # this example takes what it finds
    return {
        **COMMON,
        "XLA_DISABLE_FUNCTIONALIZATION": "0",
        "XLA_DOWNCAST_BF16": "1",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "7",
        "MALLOC_ARENA_MAX": "128",
        "NEURON_CC_FLAGS": f"--model-type=transformer --cache_dir={paths.output}/compiled",
        "PYTHONPATH": f"{paths.folder}/{EXAMPLES}",
    }
