"""A language model goes on with a text: the same tokens in one process, sharded, and in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fsdp2 import infer
from fsdp2.options.errors import ConfigError
from fsdp2_extra.text.prompts import Asked, asked_of
from fsdp2_extra.text.tokenizer_file import open_tokenizer
from fsdp2_tools.checkpoint.__main__ import main as checkpoint_command
from tests.harness import Ranks, main_in_ranks, of_kind, small
from tests.test_chat import GENERATION, PLAIN, make_tokenizer, talk

PROMPT = "öäü\nö"


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama after a few steps on text, and the file with it."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "text.txt").write_text("öäü\n" * 3000)
    flags = ["--model=llama", "--model-size=debug", f"--dataset=text:{folder / 'text.txt'}", "--seq-len=32"]
    flags += ["--batch-size=8", "--max-steps=30", "--lr=0.01", "--threads=1", "--device=cpu"]
    events = ranks.run(main_in_ranks, [*flags, f"--run-dir={folder / 'run'}"])[0]
    evaluation = of_kind(events, "eval")[-1]
    assert evaluation["perplexity"] == pytest.approx(torch.tensor(evaluation["loss"]).exp().item(), rel=1e-6)
    return folder / "run"


def _go_on(run: Path, temperature: float, sharded: bool) -> str:
    result = infer.go_on(run, PROMPT, new_tokens=40, temperature=temperature, seed=3, sharded=sharded)
    return str(result["text"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_text_however_many_ranks_hold_the_model(ranks: Ranks, run: Path, temperature: float) -> None:
    (alone,) = ranks.run(_go_on, run, temperature, False, ranks=1)
    assert len(alone) > 10
    assert ranks.run(_go_on, run, temperature, True, ranks=2) == [alone, alone]


def test_a_temperature_near_zero_is_zero(run: Path) -> None:
    assert _go_on(run, 1e-320, False) == _go_on(run, 0.0, False)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_text_that_is_drawn_says_so(run: Path, temperature: float, capsys: pytest.CaptureFixture[str]) -> None:
    _go_on(run, temperature, False)
    said = "temperature 0.5, seed 3; --temperature 0 takes the likeliest\n" in capsys.readouterr().out
    assert said == (temperature > 0)


def test_the_tokens_are_those_that_transformers_generates(run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "hf"
    assert checkpoint_command(["export", str(run), str(out), "--format", "hf"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.tensor([list(PROMPT.encode())])
    # No more than the sequence that it was trained on: from there on the window here moves on, and theirs grows.
    theirs = model.generate(tokens, max_new_tokens=32 - tokens.shape[1], do_sample=False, pad_token_id=0)[0]
    ours = infer.go_on(run, PROMPT, new_tokens=32 - tokens.shape[1], temperature=0.0, seed=1)["text"]
    assert bytes(theirs[tokens.shape[1] :].tolist()).decode(errors="replace") == ours


def test_a_character_is_printed_when_it_is_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = infer.go_on(run, PROMPT, new_tokens=60, temperature=0.0, seed=1)["text"]
    assert "ö" in text
    printed = capsys.readouterr().out
    assert PROMPT + text.rstrip("\ufffd") in printed


def test_what_a_model_does_not_see_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"temperature": 0.0, "seed": 1}
    for new_tokens, left_out in ((32, False), (33, True)):  # the run's sequences are of 32
        infer.go_on(run, "ab", new_tokens=new_tokens - 1, **given)
        note = "\nthe model sees 32 tokens at a time: it wrote the end without the beginning of the prompt\n"
        assert capsys.readouterr().out.endswith(note) == left_out
    with pytest.raises(ConfigError, match="--prompt: has 33 tokens, and the model sees the last 32; shorten it"):
        infer.go_on(run, "a" * 33, new_tokens=1, **given)


def _answers(run: Path, prompt_as: str | None, sharded: bool) -> str:
    given: dict[str, Any] = {"new_tokens": 12, "temperature": 0.0, "seed": 1, "sharded": sharded}
    return str(infer.go_on(run, "hi", prompt_as=prompt_as, **given)["text"])


@pytest.mark.parametrize("template", [PLAIN, GENERATION])
def test_a_model_of_conversations_gets_a_message_and_ends_its_answer(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str
) -> None:
    """The prompt is that of training, and the token that ended answers there ends this one."""
    pytest.importorskip("transformers")
    tokenizer, file = make_tokenizer(tmp_path / "tokenizer", template), tmp_path / "talks.jsonl"
    file.write_text((json.dumps(talk("hi", "yes")) + "\n") * 40)
    flags = ["--model=llama", "--model-size=debug", f"--dataset=chat:{file}", f"--tokenizer={tokenizer}"]
    flags += ["--seq-len=64", "--batch-size=2", "--max-steps=24", "--lr=0.01", "--threads=1", "--device=cpu"]
    run = tmp_path / "run"
    ranks.run(main_in_ranks, [*flags, f"--run-dir={run}"])
    assert ranks.run(_answers, run, None, True) == ["yes", "yes"]
    assert _answers(run, "chat", False) == "yes"
    said = "prompt: a user's message, by the chat template; --prompt-as text takes it as it is\nhi\nyes\n"
    assert capsys.readouterr().out.endswith(said)
    assert _answers(run, "text", False) != "yes"
    assert "by the chat template" not in capsys.readouterr().out


class _Letters:
    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def test_the_token_that_ends_an_answer_is_not_shown() -> None:
    """Also where the tokenizer's decoder wouldn't leave it out."""
    said: list[str] = []
    asked = Asked("a", numpy.array([97]), frozenset({33}), _Letters())  # type: ignore[arg-type]
    assert asked.answer([98, 99, 33], said.append) == "bc"
    assert "".join(said) == "abc\n"


def test_a_system_message_stands_before_the_question(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = str(make_tokenizer(tmp_path / "tokenizer", PLAIN))
    ours = asked_of("hi", "chat:a", folder, "auto", None, "be short")
    text = open_tokenizer(folder).encode(["<s><|system|>\nbe short<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\n"])
    assert ours.tokens.tolist() == list(next(iter(text)))
    with pytest.raises(ConfigError, match="--system: only a chat template has a place for it; add --prompt-as chat"):
        asked_of("hi", "text:a", folder, "auto", None, "be short")


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match='--prompt "": is empty'):
        infer.parse(["runs/x", "--prompt="])


def test_a_model_that_predicts_something_else_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(main_in_ranks, small(tmp_path / "run", "--max-steps=1"), ranks=1)
    with pytest.raises(ConfigError, match="--prompt: vit wasn't trained to continue a text; drop --prompt"):
        infer.go_on(tmp_path / "run", "a", new_tokens=1, temperature=0.0, seed=1)
