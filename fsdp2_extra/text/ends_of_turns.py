"""With which token each answer of a conversation ends, and whether the model learns to write that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy

NONE = -1


class Turns:
    """Finds the tokens that end answers.

    An answer is a run of learned tokens. An added token of the tokenizer ends it, such as `<|im_end|>`: the last one
    of the run, or else the next one behind it, where only blanks stand between. If the token behind is the tokenizer's
    own end, the answer ends with that, unless its last token ends others' turns, too: then it is a conversation's end.

    Args:
        names: the text of each token, by its number.
        added: the tokens that the tokenizer keeps beside its vocabulary of text.
        end: the one that ends a text, if there is one.
    """

    def __init__(self, names: Sequence[str], added: Sequence[int], end: int | None) -> None:
        self._blank = {number for number, name in enumerate(names) if not name.strip()}
        self._marks, self._end = set(added) - self._blank, end

    def __call__(self, tokens: numpy.ndarray, learn: numpy.ndarray) -> Iterator[tuple[int, bool]]:
        """Of each answer, the token that ends it, `NONE` for none, and whether it is learned.

        Args:
            tokens: (n,), a conversation.
            learn: (n,), not 0 where a token is learned.
        """
        edges = numpy.flatnonzero(numpy.diff(learn != 0, prepend=False, append=False)).tolist()
        for begin, after in zip(edges[::2], edges[1::2], strict=True):
            last = self._mark(tokens[begin:after][::-1])
            behind = self._mark(tokens[after:])
            if last == NONE or (behind == self._end != last and last not in tokens[learn == 0]):
                yield behind, False
            else:
                yield last, True

    def _mark(self, tokens: numpy.ndarray) -> int:
        """The first token, blanks left out, if it is a mark."""
        first = next((int(token) for token in tokens if int(token) not in self._blank), NONE)
        return first if first in self._marks else NONE
