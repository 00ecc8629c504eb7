"""The training objective, of a whole network or of one pipeline stage: tokens in, summed cross entropy out."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from training.model.anatomy import Anatomy, named_weights, window_of
from training.model.attention import Context
from training.model.loss import UNTRAINED, summed_cross_entropy
from training.model.stages import keep_stage


class NextTokenLoss(nn.Module):
    """Cross entropy of every next token, summed over the trained targets (nats).

    With routed experts, and while gradients are made, their balance is added: see `training.model.experts`.
    """

    def __init__(self, model: PreTrainedModel, index: int = 0, count: int = 1) -> None:
        """Take a network, or of its decoder blocks only the `index`-th of `count` equal parts, dropping the rest."""
        super().__init__()
        self.model = model
        self.first, self.last = index == 0, index == count - 1
        if count > 1:
            keep_stage(model, index, count)
        self.autocast: torch.dtype | None = None
        """In which type matrices are multiplied while weights, sums and norms stay fp32; None: as they are."""
        self.tp: ProcessGroup | None = None
        """The ranks among which the rows of the output embedding are cut up (as torch.chunk does)."""
        self.cp: ProcessGroup | None = None
        """The ranks that share each sequence: all are called with the whole rows."""
        self._anatomy = Anatomy.of(model.config)

    @property
    def trunk(self) -> nn.Module:
        """The network below its output embedding."""
        return getattr(self.model, self._anatomy.trunk)  # type: ignore[no-any-return]  # of every family an nn.Module

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder blocks, in order."""
        return list(getattr(self.trunk, self._anatomy.blocks).children())

    @property
    def shared(self) -> nn.Parameter | None:
        """This stage's copy of an embedding that the first and the last of several stages share, or None."""
        if self.first == self.last or not self.model.config.tie_word_embeddings:
            return None
        return next((self._part("embedding") if self.first else self.model.lm_head).parameters())

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every weight here by its Hugging Face name; a tied one once."""
        return named_weights(self.model)

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, documents: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        """Return the loss summed over the trained targets (fp32 scalar) of int64 tokens [rows, length + 1].

        Inputs and targets overlap. `mask`, bool [rows, length], says which targets are trained (all without it);
        `documents`, int64 [rows, length], numbers the documents that attention keeps apart. A stage that is not the
        first takes the `hidden` states of the one before, one that is not the last returns such: [rows, positions of
        this rank, width].
        """
        with torch.autocast(tokens.device.type, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            context = Context(tokens.shape[1] - 1, documents, self.cp)
            hidden, balances = self._through(tokens, context, hidden)
            if not self.last:
                return hidden
            targets = tokens[:, 1:] if mask is None else tokens[:, 1:].masked_fill(~mask, UNTRAINED)
            loss = self._loss(self._part("norm")(hidden), context.mine(targets))
            if not balances or not torch.is_grad_enabled():  # what is only measured is cross entropy alone
                return loss
            weight = self.model.config.router_aux_loss_coef * (targets != UNTRAINED).sum(1)
            uneven: Tensor = (torch.stack(balances).mean(0) * weight).sum()
            return loss + uneven

    def _through(self, tokens: Tensor, context: Context, hidden: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Return the hidden states behind the blocks of this stage, and the balance of those with experts."""
        positions = context.positions(tokens.device)
        if hidden is None:
            hidden = self._part("embedding")(context.mine(tokens[:, :-1]))
            if self._anatomy.places is not None:
                hidden = hidden + self._part("places")(positions)
        rotary = getattr(self.trunk, "rotary_emb", None)
        turned = None if rotary is None else rotary(hidden, positions)
        config = self.model.config
        context.prepare((window_of(config, layer) for layer in range(config.num_hidden_layers)), tokens.device)
        balances = []
        for block in self.blocks:
            hidden = block(hidden, position_embeddings=turned, context=context)
            if isinstance(hidden, tuple):
                hidden, balance = hidden
                balances.append(balance)
        return hidden, balances

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        weight = self.model.lm_head.weight
        if isinstance(hidden, DTensor):
            hidden = hidden.full_tensor()
        shard = None if self.tp is None else (self.tp, self.model.config.vocab_size)
        return summed_cross_entropy(
            hidden.flatten(0, 1),
            weight.to_local() if isinstance(weight, DTensor) else weight,
            targets.flatten(),
            getattr(self.model.config, "final_logit_softcapping", None),
            shard,
        )

    def _part(self, name: str) -> nn.Module:
        return getattr(self.trunk, getattr(self._anatomy, name))  # type: ignore[no-any-return]  # of every family one
