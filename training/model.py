"""The network and its loss: a Llama of transformers, cross entropy without the logits, weights compared by a hash."""

import hashlib
import math
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from training.process import JobError

PEAK_FLOPS: Final = {"A100": 312e12, "H100 80GB HBM3": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 operations per second by a part of the device's name (NVIDIA data sheets, without sparsity)."""
LOGITS_AT_ONCE: Final = {"cpu": 2**19, "cuda": 2**26}
"""How many logits the loss holds at a time: 2 MB stay in a core's cache, 256 MB keep a GPU's matrix units busy."""


def build(model: dict[str, Any], sequence_length: int) -> LlamaForCausalLM:
    """Make the network of a recipe's `model` part with random fp32 weights, drawn from torch's global generator.

    Standard deviation of the weights: sqrt(2 / (5 hidden_size)), SmallInit of Nguyen and Salazar 2019
    (arXiv:1910.05895), which fits narrow networks and wide ones.
    """
    config = LlamaConfig(
        vocab_size=model["vocab_size"],
        hidden_size=model["hidden_size"],
        intermediate_size=model["ffn_size"],
        num_hidden_layers=model["layers"],
        num_attention_heads=model["heads"],
        num_key_value_heads=model["kv_heads"],
        max_position_embeddings=sequence_length,
        tie_word_embeddings=model["tie_embeddings"],
        rope_parameters={"rope_type": "default", "rope_theta": model["rope_theta"]},
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
        initializer_range=math.sqrt(2 / (5 * model["hidden_size"])),
    )
    return LlamaForCausalLM(config)


class NextTokenLoss(nn.Module):
    """The training objective: tokens in, mean cross entropy of every next token out (nats)."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.autocast = False
        """Whether matrices are multiplied in bf16 while weights, sums and norms stay fp32."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss (fp32 scalar) of int64 [rows, length + 1]: inputs and targets overlap."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            return self._mean(tokens)

    def _mean(self, tokens: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        weight, targets = self.model.lm_head.weight, tokens[:, 1:].flatten()
        if len(targets) <= _rows_at_once(weight):
            return functional.cross_entropy(functional.linear(hidden.flatten(0, 1), weight).float(), targets)
        loss: Tensor = LinearCrossEntropy.apply(hidden.flatten(0, 1), weight, targets)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return loss


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of `hidden @ weight.T`, whose logits never exist all at once.

    The gradient of a row of logits is softmax - onehot, so it is made in the forward pass, slice by slice. With a
    vocabulary of 128 k and 8 k tokens this saves over 8 GB; on a CPU it is faster because a slice stays in the cache.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Take hidden [tokens, width], weight [vocabulary, width], targets int64 [tokens]; return an fp32 scalar."""
        device = hidden.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        rows = _rows_at_once(weight)
        matrix = weight.to(kind)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        by_hidden = torch.empty(hidden.shape, dtype=kind, device=hidden.device)
        by_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        with torch.autocast(device, enabled=False):
            for start in range(0, len(targets), rows):
                part = hidden[start : start + rows].to(kind)
                nats, slope = _loss_and_slope(part @ matrix.T, targets[start : start + rows])
                loss += nats
                slope = slope.div_(len(targets)).to(kind)
                torch.mm(slope, matrix, out=by_hidden[start : start + rows])
                _add_product(by_weight, slope.T, part)
        ctx.save_for_backward(by_hidden.to(hidden.dtype), by_weight.to(weight.dtype))
        return loss.div_(len(targets))

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of hidden and weight, times `scale`; they are made once and used up here."""
        by_hidden, by_weight = ctx.saved_tensors
        return by_hidden.mul_(scale), by_weight.mul_(scale), None


def _rows_at_once(weight: Tensor) -> int:
    """Return how many rows of logits are made at a time with an output embedding [vocabulary, width]."""
    return max(64, LOGITS_AT_ONCE.get(weight.device.type, LOGITS_AT_ONCE["cpu"]) // len(weight))


def _loss_and_slope(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows' summed cross entropy (fp32 scalar) and its gradient by their logits (fp32, as the logits)."""
    logs = torch.log_softmax(logits, 1, dtype=torch.float32)
    nats = functional.nll_loss(logs, targets, reduction="sum")
    slope = logs.exp_()
    slope[torch.arange(len(targets), device=targets.device), targets] -= 1
    return nats, slope


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to an fp32 total."""
    if right.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def start_from(model: LlamaForCausalLM, folder: Path) -> None:
    """Replace the weights by those of a Hugging Face folder. Raises JobError when a tensor is absent or misshapen."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    if not found:
        raise JobError(f"{folder} holds no *.safetensors to start from; give a folder that Castra exported")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name not in found:
                raise JobError(f"the weights in {folder} lack {name}; they are of another architecture than the recipe")
            if found[name].shape != weight.shape:
                theirs, ours = list(found[name].shape), list(weight.shape)
                raise JobError(f"{name} is {theirs} in {folder} and {ours} in the recipe; make them equal")
            weight.copy_(found[name])


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 over name, type, shape and bytes of every parameter, by name; a tied one counts once."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        whole = weight.detach().cpu().contiguous()
        digest.update(f"{name} {whole.dtype} {list(whole.shape)}\n".encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def flops_per_token(model: LlamaForCausalLM, sequence_length: int) -> float:
    """Return the operations one trained token costs: 6 N + 12 layers width length.

    Chowdhery et al., "PaLM" (2022), appendix B; N counts the output embedding but not a separate input table, which
    multiplies nothing.
    """
    config = model.config
    weights = sum(weight.numel() for weight in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.model.embed_tokens.weight.numel()
    return float(6 * weights + 12 * config.num_hidden_layers * config.hidden_size * sequence_length)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the device's peak in operations per second where it is known: bf16 on data-centre GPUs."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
