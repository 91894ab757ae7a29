"""A tokenizer.json beside what transformers makes of its folder.

Training reads tokenizer.json as it is. AutoTokenizer opens the class that the folder names, and several classes build
parts of the tokenizer again, or follow settings of tokenizer_config.json. Whoever serves the model then gives it other
tokens than those it was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdp2_extra.foreign.code import installed_code_only

# Texts that classes are known to read in their own ways: letters, case, accents, spaces, numbers, lines, other scripts.
MOST = 64  # of declared tokens that are tried
PROBES = ("Hello", "It's naïve, ÉCOLE", "a  b\t12345", "def f(x):\n    return x\n", "東京 данные 🙂")


def opened(folder: Path) -> Any:
    """A folder's tokenizer as transformers has it, without code that isn't installed. Raises what transformers does."""
    from transformers import AutoTokenizer

    with installed_code_only(folder):
        # Said in any case: unset, transformers asks on the terminal.
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def unlike(folder: Path, tokenizer: Any, special: str, declared: Sequence[str] = (), texts: Sequence[str] = ()) -> str:
    """Tell in a clause how AutoTokenizer reads a text differently; "" where it doesn't, or can't be asked.

    It can't where transformers isn't installed, or doesn't open the folder without code that isn't.

    Args:
        tokenizer: a `tokenizers.Tokenizer` of the folder's tokenizer.json.
        special: the text of a token that ends a document, or "".
        declared: ordinary tokens of tokenizer.json that the files beside it declare: transformers cuts words at them.
        texts: some that are trained on, tried after the probes.
    """
    if find_spec("transformers") is None:
        return ""
    try:
        with installed_code_only(folder):
            auto = opened(folder)
            words = tokenizer.get_vocab() if declared else {}
            cut = [f"Hello{one} {one}s" for one in declared[:MOST]]
            for one in declared[:MOST]:
                longer = sorted(
                    (word for word in words if one in word and one != word), key=lambda word: (len(word), word)
                )
                cut += [tokenizer.decode([words[word]], skip_special_tokens=False) for word in longer[:4]]
            probes = [(text, False) for text in (*PROBES, *[f"Hello{special}"] * bool(special), *cut, *texts)]
            for text, whole in (*probes, (PROBES[0], True)):
                ours = tokenizer.encode(text, add_special_tokens=whole).ids
                theirs = auto(text, add_special_tokens=whole)["input_ids"]
                if ours != theirs:
                    same = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if len({*pair}) > 1), 0)
                    at = same if text in texts else 0
                    near = tokenizer.decode(ours[max(0, at - 4) : at + 4], skip_special_tokens=False)
                    what = f"{near!r} in the data" if at else repr(text[:80])
                    what += " with what begins and ends a text" * whole
                    theirs, ours = theirs[at : at + 8], ours[at : at + 8]
                    return f"{type(auto).__name__} makes {theirs} of {what}, and tokenizer.json {ours}"
    except Exception:  # its errors are of no class of their own, and tokenizer.json can be read without it
        return ""
    return ""
