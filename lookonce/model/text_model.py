"""The text model of one step: embedding, encoder rows in their places, decoder, head.

Three ways lead to the same logits; a step takes the first that is for it:

    native   few tokens, plain decoder, CPU: one call of compiled code
    lean     plain decoder: torch's operators over the same weights
    hooked   any other: transformers' own forward
"""

from __future__ import annotations

import torch
from torch import Tensor

from lookonce.model.attention.backend import AttentionBackend
from lookonce.model.attention.cpu import KernelBackend
from lookonce.model.decoders import LeanDecoder, Step, choose_decoder
from lookonce.model.families.base import ModelFamily
from lookonce.model.kv_pages import KVPages
from lookonce.model.native.decoder import DecodeInputs, NativeDecoder, native_decoder
from lookonce.model.step_inputs import StepInputs


class TextModel:
    """Bound to one model's weights and KV pages."""

    def __init__(
        self,
        family: ModelFamily,
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
        kv_pages: KVPages,
    ) -> None:
        self._family = family
        self._backend = backend
        self._kv_pages = kv_pages
        self._decoder = choose_decoder(family, dtype, device)
        self._native: NativeDecoder | None = None
        if isinstance(self._decoder, LeanDecoder) and isinstance(backend, KernelBackend):
            self._native = native_decoder(self._decoder, family, dtype, kv_pages)

    @property
    def is_native(self) -> bool:
        """Whether decode steps run in compiled code."""
        return self._native is not None

    def __call__(self, inputs: StepInputs, rows: Tensor | None) -> Tensor:
        """Logits [S, V] float32 of the sampled tokens.

        `rows` [N, W] are the encoder rows that go to `inputs.embed_at`; None: there are none.
        """
        embeds, extras = self._placed(inputs, rows)
        if self._native is not None and not extras:
            logits = self._native.logits(
                DecodeInputs(
                    inputs.token_ids,
                    embeds,
                    inputs.position_ids,
                    inputs.sample_rows,
                    inputs.metadata,
                )
            )
            if logits is not None:
                return logits
        return self.predict(sampled_rows(self._decode(inputs, embeds, extras), inputs))

    def hidden(self, inputs: StepInputs, rows: Tensor | None) -> Tensor:
        """Last hidden states [T, H] of all tokens."""
        return self._decode(inputs, *self._placed(inputs, rows))

    def _placed(
        self, inputs: StepInputs, rows: Tensor | None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Embeddings with encoder rows in their places, and what else they bring; None without."""
        if inputs.embed_at is None or rows is None:
            return None, {}
        embeds = self._family.embed_tokens(inputs.token_ids)
        return embeds, self._family.place(embeds, inputs.embed_at, rows)

    def _decode(
        self, inputs: StepInputs, embeds: Tensor | None, extras: dict[str, Tensor]
    ) -> Tensor:
        if embeds is None:
            embeds = self._family.embed_tokens(inputs.token_ids)
        step = Step(inputs.metadata, self._backend, self._kv_pages)
        return self._decoder(embeds, inputs.position_ids, step, extras)

    def predict(self, hidden: Tensor) -> Tensor:
        """Last hidden states [S, H] → logits [S, V]."""
        logits: Tensor = self._family.lm_head(hidden).float()
        softcap = self._family.final_softcap
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits


def sampled_rows(hidden: Tensor, inputs: StepInputs) -> Tensor:
    """[T, H] → [S, H]: what is sampled after."""
    return hidden if inputs.sample_rows is None else hidden.index_select(0, inputs.sample_rows)
