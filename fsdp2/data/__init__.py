"""Datasets by name. Each is loaded whole into memory; nothing is imported that the chosen one doesn't need.

`load` gives a `Dataset` with a train and a test split. Normalisation belongs to the dataset, so training,
evaluation and inference cannot disagree about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp2 import beside

if TYPE_CHECKING:
    from fsdp2.data.splits import Dataset

__path__.append(beside("data"))  # python -m fsdp2.data

KINDS = {
    "digits": "image",
    "fashion-mnist": "image",
    "mnist": "image",
    "source-text": "language",
    "random-tokens": "language",
}
NAMES = tuple(KINDS)
DEFAULTS = {"image": "digits", "language": "source-text"}
CLASSES = 10  # of each dataset of images
OWN = ("text:", "chat:", "datasets:")  # before the place of one's own text or conversations
BOS = ("auto", "always", "never")  # whether a token begins each document of one's own text
ON_DISK = ("fashion-mnist", "mnist")


def kind_of(name: str) -> str:
    """The kind of model that takes a dataset: `image` or `language`."""
    return "language" if name.startswith(OWN) else KINDS[name]


def missing_files(name: str, root: str | None = None) -> list[str]:
    """Files of `name` that are not under `root`, or the cache, in torchvision's layout; empty if all are there."""
    from fsdp2.data import mnist

    return mnist.missing_files(name, mnist.cache_folder() if root is None else Path(root))


def load(
    name: str,
    *,
    root: str | None,
    seq_len: int,
    vocab_size: int | None,
    task: str = "causal",
    special_token: int | None = None,
    reading: Mapping[str, Any] | None = None,
    apart: bool = True,
    fetch: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Dataset:
    """Load a dataset; download it to a cache folder if it comes from torchvision and `root` is None.

    Call it on one rank of a node first: processes that download at the same time do the same work, and no harm.

    Args:
        task: what a language model learns of it: `causal`, `masked` or `seq2seq`.
        special_token: the one that hides others, or that a decoder begins with.
        reading: how data of one's own is read, as `fsdp2_extra.text.mixture.opened` takes it; None = bytes of text.
        say: is called from time to time while one's own text is prepared, with how far that is.
        apart: whether documents of one's own text see nothing of each other; those that a model learns in another way
            than token by token are always together.
        fetch: download or tokenise what isn't on this machine yet.

    Raises:
        DownloadFailed: the data can't be downloaded; the message says what to do instead.
        UnusableText: text or its tokenizer can't be used.
        NotHere: there is something to fetch, and `fetch` is false.
    """
    if name == "digits":
        from fsdp2.data import digits

        return digits.load()
    if name in ON_DISK:
        from fsdp2.data import mnist

        return mnist.load(name, None if root is None else Path(root), fetch=fetch)
    assert vocab_size is not None, f"{name} is language data: it needs the model's vocabulary size"
    if name == "source-text":
        from fsdp2.data import source_text

        windows = source_text.load(seq_len)
    elif name.startswith(OWN):
        from fsdp2_extra.text import mixture

        apart = apart and task == "causal"
        windows = mixture.load(name, seq_len, vocab_size, reading or {}, apart=apart, fetch=fetch, say=say)
    else:
        assert name == "random-tokens", f"{name} has a name, and nothing here that loads it"
        from fsdp2.data import random_tokens

        windows = random_tokens.load(seq_len, vocab_size)
    if task == "causal":
        return windows
    from fsdp2_extra.text.objectives import Masked, SecondHalves

    assert special_token is not None, f"{task} needs a token"
    learn = Masked if task == "masked" else SecondHalves
    train, test = (learn(split, special_token) for split in (windows.train, windows.test))
    return replace(windows, train=train, test=test)
