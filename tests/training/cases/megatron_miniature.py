"""Stands in for Megatron-LM's pretrain_gpt.py: its library, Megatron Core, trains by its command line, on CPUs.

Megatron Core (on PyPI) is Megatron-LM's tensor and pipeline parallelism, model, schedules and datasets; pretrain_gpt.py
is not in the package. Its code says "cuda" wherever it makes a tensor, so that here "cuda" is taken for the CPU, and
gloo carries what NCCL would. Adam is torch's, and there is no data parallelism.
"""

import importlib
import os
import time
import warnings
from typing import Any

import torch
from torch import distributed
from torch.overrides import TorchFunctionMode

from tests.training.cases.upstream_parsers import parse

CPU = torch.device("cpu")
TABLE = "megatron_lm-core_v0.16.1"


class CudaIsTheCpu(TorchFunctionMode):
    """Makes on the CPU whatever is asked for on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told = dict(kwargs or {})
        if "cuda" in str(told.get("device")):
            told["device"] = CPU
        return args[0] if getattr(function, "__name__", "") == "cuda" else function(*args, **told)


def core(name: str) -> Any:
    """A module of Megatron Core, which only some machines have."""
    return importlib.import_module(f"megatron.core.{name}")


def stand_in() -> None:
    """Take the CPU for a GPU from here on."""
    here: Any = CudaIsTheCpu()
    here.__enter__()
    vars(torch.cuda)["current_device"] = lambda: CPU  # device= takes it as well as a number
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    vars(torch.cuda)["manual_seed"] = torch.manual_seed
    torch.cuda.synchronize = lambda *_: None
    random = core("tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def network(told: dict[str, Any]) -> Any:
    """This rank's part of the model."""
    parallel = core("parallel_state")
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "attention_dropout")
    cut = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel", "hidden_dropout")
    plain = ("gradient_accumulation", "bias_dropout", "bias_activation", "masked_softmax")
    config = core("transformer.transformer_config").TransformerConfig(
        **{name: told[name] for name in (*sizes, *cut)},
        **{f"{name}_fusion": False for name in plain},
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
    )
    return core("models.gpt").GPTModel(
        config=config,
        transformer_layer_spec=core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(),
        vocab_size=told["vocab_size"] + 1,
        max_sequence_length=told["max_position_embeddings"],
        pre_process=parallel.is_pipeline_first_stage(),
        post_process=parallel.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type=told["position_embedding_type"],
    )


def samples(told: dict[str, Any]) -> torch.Tensor:
    """The dataset's first sequences, read by Megatron's own reader: [steps x batch, length + 1]."""
    documents = core("datasets.indexed_dataset").IndexedDataset(told["data_path"][0])
    length = told["seq_length"]
    wanted = told["train_iters"] * told["global_batch_size"]
    ids: list[int] = []
    for number in range(len(documents)):
        ids += documents[number].tolist()
        if len(ids) > wanted * length:
            break
    stride = torch.arange(wanted)[:, None] * length
    return torch.tensor(ids)[stride + torch.arange(length + 1)[None]]


def main(words: list[str]) -> None:
    """Train, and log as Megatron-LM's last rank does."""
    warnings.simplefilter("ignore")
    told = parse(TABLE, words)
    stand_in()
    parallel = core("parallel_state")
    distributed.init_process_group("gloo")
    parallel.initialize_model_parallel(told["tensor_model_parallel_size"], told["pipeline_model_parallel_size"])
    torch.manual_seed(told["seed"] + 100 * parallel.get_pipeline_model_parallel_rank())
    core("tensor_parallel.random").model_parallel_cuda_manual_seed(told["seed"])
    model, ids = network(told), samples(told)
    optimizer = torch.optim.AdamW(model.parameters(), lr=told["lr"])
    for step, batch in enumerate(torch.split(ids, told["global_batch_size"]), 1):
        begun = time.perf_counter()
        loss = _step(model, batch, told)
        optimizer.step()
        optimizer.zero_grad()
        if loss is not None and parallel.get_tensor_model_parallel_rank() == 0:
            print(
                f" [2026-01-01 00:00:00.000000] iteration {step:8d}/{told['train_iters']:8d} | elapsed time per "
                f"iteration (ms): {(time.perf_counter() - begun) * 1e3:.1f} | learning rate: {told['lr']:.6E} | "
                f"lm loss: {loss:.6E} | loss scale: 1.0 | number of nan iterations:   0 |",
                flush=True,
            )
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)


def _step(model: Any, batch: torch.Tensor, told: dict[str, Any]) -> float | None:
    """One optimizer step's passes; returns the loss on the last stage."""
    length, micro = told["seq_length"], told["micro_batch_size"]
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

    def forward(pieces: Any, model: Any) -> Any:
        ids = next(pieces)
        places = torch.arange(length).expand(micro, -1)
        losses = model(ids[:, :-1], places, hidden, labels=ids[:, 1:])
        return losses, lambda output: (output.mean(), {"lm loss": output.mean().detach()})

    found = core("pipeline_parallel").get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(torch.split(batch, micro)),
        model=model,
        num_microbatches=told["global_batch_size"] // micro,
        seq_length=length,
        micro_batch_size=micro,
        forward_only=False,
    )
    return sum(float(one["lm loss"]) for one in found) / len(found) if found else None
