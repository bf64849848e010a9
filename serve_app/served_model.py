"""The model behind a pool and its tokenizer, as the ingress knows them."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.protocol import ErrorInfo, ErrorKind, ModelCard, RequestRefused
from serve_app.errors import model_not_found
from serve_app.tokenization import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind a pool and its tokenizer, which always agree."""

    card: ModelCard
    tokenizer: Tokenizer

    @classmethod
    def from_card(cls, card: ModelCard) -> ServedModel:
        """Build the tokenizer of a card; takes a second or so and blocks.

        Raises:
            ValueError: the card's tokenizer cannot be read.
        """
        return cls(card, Tokenizer.from_files(card.tokenizer_files))

    def check_name(self, asked: str | None) -> None:
        """Refuse another model's name; none at all means this one.

        Raises:
            ApiError: 404.
        """
        if asked is not None and asked != self.card.name:
            raise model_not_found(asked, self.card.name)

    def check_token_ids(self, ids: list[int], param: str) -> None:
        """Refuse ids the model does not have.

        Raises:
            RequestRefused: names `param`.
        """
        if ids and (min(ids) < 0 or max(ids) >= self.card.vocab_size):
            largest = self.card.vocab_size - 1
            message = f"{param} holds a token id outside the vocabulary; ids end at {largest}"
            raise RequestRefused.invalid(param, message)

    def check_prompt(self, ids: list[int], param: str) -> None:
        """Refuse a prompt that is empty or leaves no room for an answer.

        Raises:
            RequestRefused: names `param`.
        """
        if not ids:
            message = f"{param} is empty: it must hold at least one token"
            raise RequestRefused.invalid(param, message)
        self.check_token_ids(ids, param)
        context = self.card.max_model_len
        if len(ids) >= context:
            message = (
                f"{param} has {len(ids)} tokens, but the model's context is {context} "
                f"tokens, output included; shorten it to at most {context - 1} tokens"
            )
            raise RequestRefused(ErrorInfo(ErrorKind.CONTEXT_LENGTH, message, param))
