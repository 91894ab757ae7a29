"""The refusals of one's own text, and of the tokenizer that reads it."""

from __future__ import annotations

from fsdp2.config import Config
from fsdp2.data.errors import UnusableText
from fsdp2.options.errors import ConfigError
from fsdp2.run.dataset import reading_of, tokenizer_of
from fsdp2_extra.text.mixture import opened
from fsdp2_extra.text.prepared import Encoder
from fsdp2_extra.text.text import check
from fsdp2_extra.text.tokenizer_file import own_tokenizer, tokenizer_files


def check_own_text(config: Config, *, read: bool) -> None:
    """Raise ConfigError for text, or a tokenizer, that can't be used; with `read`, the files are looked into, too."""
    require_tokenizer(config)
    _, _, named = config.dataset.partition(":")
    try:
        words = config.spec.vocab_size(config.model_size) or 0
        drop, whole = config.bad_samples == "drop", config.eval_dataset is not None
        for place, encoder in opened(config.dataset, **reading_of(config)):
            if encoder.kind == "chat" and config.spec.task != "causal":
                raise UnusableText("holds conversations, which are learned token by token; use a causal model")
            require_mask(config, encoder)
            if config.tokenizer not in (None, "bytes"):
                tokenizer_files(str(config.tokenizer))  # a run keeps them
            apart = config.documents == "apart"
            check(place, config.seq_len, words, encoder, apart=apart, read=read, drop=drop, whole=whole)
    except UnusableText as error:
        also = f" with --eval-dataset {config.eval_dataset}" if config.eval_dataset else ""
        raise ConfigError(f"--dataset {config.dataset}{also}: {str(error).removeprefix(f'{named}: ')}") from None


def require_tokenizer(config: Config) -> None:
    """Raise ConfigError if bytes would take the place of a model's own tokenizer, which is in another form."""
    if config.tokenizer is None and (own := config.spec.weights) is not None:
        try:
            own_tokenizer(own)
        except UnusableText as error:
            raise ConfigError(f"--model {error}, or say --tokenizer bytes") from None


def require_mask(config: Config, encoder: Encoder) -> None:
    """Raise ConfigError if the token that hides others, which the model names, is an ordinary one of the text's."""
    token = config.spec.special_token
    if config.spec.task != "masked" or token is None or token >= encoder.size or token in encoder.about["added"]:
        return
    raise ConfigError(
        f"--tokenizer {tokenizer_of(config)}: --model {config.model} hides tokens behind token {token}, which is "
        f"{encoder.tokenizer.decode([token])[:40]!r} there; give the model's own tokenizer, or put this one's files "
        "into the model's folder"
    )
