"""Whether the engine can serve a request at all: checked on receipt, before it waits for a step."""

from __future__ import annotations

from collections.abc import Mapping

from lookonce.core.request import Request
from lookonce.core.request_validation import Door
from lookonce.engine.process.grammar_pool import Compile
from lookonce.errors import BadRequestError
from lookonce.types.grammar import CompiledGrammar, Grammar
from lookonce.types.media import ProcessedItem
from lookonce.types.model import ModelInfo
from lookonce.types.request import GenerateRequest
from lookonce.types.sampling import SamplingParams


def no_grammar(grammar: Grammar) -> CompiledGrammar:
    raise BadRequestError(f"{grammar.param} is not served here", param=grammar.param)


class RequestPreprocessor:
    """Says no before anything is spent.

    Uses the scheduler's own door, which only reads limits that never change, so it may be asked
    from another thread than the scheduler's.
    """

    def __init__(self, model: ModelInfo, door: Door, compile_grammar: Compile = no_grammar) -> None:
        """`compile_grammar` takes its time, so whoever judges calls it in another thread."""
        self.model = model
        self.compile_grammar = compile_grammar
        self._door = door

    def check(self, request: GenerateRequest, items: Mapping[bytes, ProcessedItem]) -> Request:
        """The request as the scheduler takes it in, so that it is built only once.

        `items`: those of the request that the engine holds already. Raises a `RequestError`
        naming what the served model cannot take.
        """
        self._check_length(request)
        self._check_sampling(request.sampling)
        return self._door.build_request(request, dict(items))

    def _check_length(self, request: GenerateRequest) -> None:
        num_tokens = request.prompt.shape[0] if request.prompt.shape else 0
        wanted, limit = request.sampling.max_tokens or 1, self.model.max_model_len
        if num_tokens + wanted > limit:
            raise BadRequestError(
                f"the model takes {limit} tokens; the prompt has {num_tokens} and {wanted} more "
                "were asked for",
                param="max_tokens" if num_tokens < limit else "prompt",
                code="context_length_exceeded",
            )

    def _check_sampling(self, sampling: SamplingParams) -> None:
        named = {"stop_token_ids": sampling.stop_token_ids, "logit_bias": sampling.logit_bias or ()}
        for name, token_ids in named.items():
            for token in token_ids:
                if not 0 <= token < self.model.vocab_size:
                    raise BadRequestError(
                        f"{name} holds {token}; token ids are 0 to {self.model.vocab_size - 1}",
                        param=name,
                    )
