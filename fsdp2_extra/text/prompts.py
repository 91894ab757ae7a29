"""A prompt as tokens: the beginning of a text, or a user's message to a model that has learned conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy

from fsdp2.data import OWN
from fsdp2.data.errors import UnusableText
from fsdp2.options.errors import ConfigError
from fsdp2_extra.text.chat import Chat, has_template, open_chat
from fsdp2_extra.text.ends_of_turns import NONE, Turns
from fsdp2_extra.text.places import sources
from fsdp2_extra.text.rows import Row
from fsdp2_extra.text.tokenizer import Tokenizer, document
from fsdp2_extra.text.tokenizer_file import open_tokenizer

BY_TEMPLATE = "prompt: a user's message, by the chat template; --prompt-as text takes it as it is"
AS_IT_IS = "prompt: a text that goes on; --prompt-as chat makes it a user's message, by the chat template"


class Asked(NamedTuple):
    """A prompt as a model gets it.

    Attributes:
        shown: before the answer.
        tokens: (n,).
        ends: the tokens of which each ends the answer.
    """

    shown: str
    tokens: numpy.ndarray
    ends: frozenset[int | None]
    tokenizer: Tokenizer

    def answer(self, tokens: Iterable[int], say: Callable[[str], None]) -> str:
        """Say the prompt, and the answer while its tokens come; the answer."""
        known, text, said = self.tokens.tolist(), "", ""
        before = self.tokenizer.decode(known)  # decoded alone, what follows may lose the space before it
        say(self.shown)
        for token in tokens:
            if token in self.ends:  # a mark of the template's, and no text
                break
            known.append(token)
            text = self.tokenizer.decode(known)[len(before) :]
            # What a token ends may be the rest of a character.
            if not text.endswith("\ufffd"):
                say(text.removeprefix(said))
                said = text
        say("\n")
        return text


def asked_of(words: str, dataset: str, tokenizer: str, bos: str, as_: str | None, system: str | None = None) -> Asked:
    """A text that is to go on; or, of conversations, what stood before an answer to these words in training.

    Args:
        dataset: the run's, which decides where `as_`, `chat` or `text`, is None.
        tokenizer, bos: as `open_tokenizer` takes them; of `chat` a folder with a chat template.
        system: of `chat`, the message before.

    Raises ConfigError.
    """
    own = dataset.startswith(OWN) and any(source.startswith("chat:") for source, _ in sources(dataset))
    try:
        if as_ == "chat" or (as_ is None and own):
            chat = open_chat(tokenizer)
            tokens, learn, turns = _answered(chat, tokenizer, words, system)
            ends = frozenset({chat.end, *(end for end, _ in turns)})
            return Asked(f"{BY_TEMPLATE}\n{words}\n", tokens[: learn.argmax()], ends, chat.tokenizer)
        if system:
            raise ConfigError("--system: only a chat template has a place for it; add --prompt-as chat, or drop it")
        plain = open_tokenizer(tokenizer, bos)
        (tokens,) = plain.encode([words])
    except UnusableText as error:
        raise ConfigError(f"--prompt: {error}") from None
    tokens = document(tokens, plain.begin, plain.end, ends=False)
    if len(tokens) == 0:
        raise ConfigError("--prompt: holds no token; give some text")
    said = as_ is None and tokenizer != "bytes" and has_template(tokenizer)
    return Asked(f"{AS_IT_IS}\n{words}" if said else words, tokens, frozenset({plain.end}), plain)


def ends_of_an_answer(tokenizer: str) -> dict[int, str]:
    """The tokens, and their texts, that a model learns to end an answer with by a folder's chat template.

    Raises UnusableText.
    """
    chat = open_chat(tokenizer)
    _, _, turns = _answered(chat, tokenizer, "no", None)
    return {end: chat.tokenizer.names[end] for end, learned in turns if learned and end != NONE}


def _answered(
    chat: Chat, tokenizer: str, words: str, system: str | None
) -> tuple[numpy.ndarray, numpy.ndarray, list[tuple[int, bool]]]:
    """A short conversation as tokens, (n,), which of them are learned, and as `Turns` has where its answer ends."""
    messages = [{"role": "user", "content": words}, {"role": "assistant", "content": "yes"}]
    messages[:0] = [{"role": "system", "content": system}] if system else []
    ((tokens, learn),) = chat.encode([Row({"messages": messages}, "the prompt", 0)])
    if not learn[1:].any():
        raise UnusableText(f"{tokenizer}: its chat template marks no answer; --prompt-as text needs none")
    return tokens, learn, list(Turns(chat.tokenizer.names, chat.about["added"], chat.end)(tokens, learn))
