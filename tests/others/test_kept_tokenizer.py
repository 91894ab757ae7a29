"""A run keeps the tokenizer that it was trained with, wherever that came from: who uses the model gets those tokens."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fsdp2 import infer
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.store import HASH, read_marker, write_marker
from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.rundir import RunDir, read_config
from fsdp2.train import main as train
from fsdp2_extra.foreign import model_files as foreign_files
from fsdp2_tools.checkpoint.__main__ import main as checkpoint
from tests.harness import Ranks, main_in_ranks, of_kind
from tests.others.common import flags, save
from tests.test_chat import PLAIN, make_tokenizer, talk

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

STEP = Path("checkpoints", "step-00000001")
TEMPLATES = "additional_chat_templates"


def _line(place: Path, run: Path | str, *more: str) -> list[str]:
    line = flags(f"hf:{place}/model", run, f"--dataset=text:{place}/corpus.txt", "--max-steps=1", "--strategy=fsdp2")
    return [*line, "--text-field=text", *more]


def _prompt(run: Path | str) -> dict[str, Any]:
    return infer.go_on(run, "a bc", new_tokens=4, temperature=0, seed=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Path:
    """`model`, with a tokenizer of words; `other`, of bytes; and runs of two ranks: `chat` with it, and `file`.

    The run `file` was given other/tokenizer.json under another name, and text.
    """
    place = tmp_path_factory.mktemp("kept-tokenizer")
    save("llama", place / "model")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(200)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(place / "model" / "tokenizer.json"))
    (place / "model" / "tokenizer_config.json").write_text('{"eos_token": "w3", "chat_template": "nothing"}')
    (place / "model" / "vocab.txt").write_text("of the model")
    other = make_tokenizer(place / "other", PLAIN)
    (other / "model.safetensors").write_text("weights that go with it")
    (other / TEMPLATES).mkdir()
    (other / TEMPLATES / "tools.jinja").write_text(PLAIN)
    (other / "chat_template.jinja").write_text(PLAIN)
    (place / "corpus.txt").write_text("a text of bc and other letters. " * 300)
    (place / "talks.jsonl").write_text("".join(json.dumps(talk("a", f"b{i}")) + "\n" for i in range(40)))
    (other / "words.json").write_bytes((other / "tokenizer.json").read_bytes())
    chat = [f"--dataset=chat:{place}/talks.jsonl", f"--tokenizer={other}", "--seq-len=32"]
    ranks.run(main_in_ranks, _line(place, place / "chat", *chat))
    ranks.run(main_in_ranks, _line(place, place / "file", f"--tokenizer={other}/words.json"))
    return place


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, of whose tokenizer `other` nothing is left."""
    copy = Path(shutil.copytree(trained, tmp_path / "copy"))
    for run in ("chat", "file"):
        file = copy / run / "config.json"
        file.write_text(file.read_text().replace(str(trained), str(copy)))
    shutil.rmtree(copy / "other")
    return copy


def test_an_export_has_the_tokenizer_of_training_and_none_of_the_models(
    trained: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = transformers.AutoTokenizer.from_pretrained(trained / "other")
    for source in ("chat", "file", f"chat/{STEP}", "chat/full_model/full-model.pt"):
        out = place / "out"
        assert checkpoint(["export", str(place / source), str(out), "--format", "hf"]) == 0
        found = transformers.AutoTokenizer.from_pretrained(out)
        assert found("a bc é").input_ids == ours("a bc é").input_ids
        assert (found.chat_template, found.eos_token) == (ours.chat_template, "<|end|>")
        assert (out / TEMPLATES / "tools.jinja").read_text() == PLAIN
        assert not (out / "vocab.txt").exists()
        assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
        assert transformers.AutoModelForCausalLM.from_pretrained(out).config.vocab_size == 256
        shutil.rmtree(out)
    assert checkpoint(["export", str(place / "chat"), str(out), "--format", "safetensors"]) == 0
    assert "no tokenizer" not in capsys.readouterr().out


def test_generators_stop_where_answers_end(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the model's own files name another token, as those of a base model do: they don't know the template."""
    end = transformers.AutoTokenizer.from_pretrained(trained / "other").convert_tokens_to_ids("<|end|>")
    before = transformers.GenerationConfig.from_pretrained(trained / "model").eos_token_id
    assert before not in (None, end)

    def exported(run: Path, form: str) -> tuple[Any, str]:
        out = tmp_path / f"{run.name}-{form}"
        assert checkpoint(["export", str(run), str(out), "--format", form]) == 0
        names = form == "hf" and transformers.GenerationConfig.from_pretrained(out).eos_token_id
        return names, capsys.readouterr().out

    names, said = exported(trained / "chat", "hf")
    assert (names, "; its generation_config.json names <|end|> too, which ends an answer" in said) == (
        [before, end],
        True,
    )
    names, said = exported(trained / "file", "hf")  # of text
    assert (names, "ends an answer" in said) == (before, False)
    pytest.importorskip("peft")
    chat = [f"--dataset=chat:{trained}/talks.jsonl", f"--tokenizer={trained}/other", "--seq-len=32"]
    train(parse(_line(trained, tmp_path / "lora", *chat, "--lora=2")))
    _, said = exported(tmp_path / "lora", "peft")
    assert (
        f"answer ends with <|end|>, which the base doesn't name: generate with eos_token_id=[{before}, {end}]" in said
    )


def test_an_export_of_a_run_on_bytes_has_no_tokenizer(trained: Path, tmp_path: Path, capsys: Any) -> None:
    train(parse(_line(trained, tmp_path / "run", "--tokenizer=bytes", "--strategy=none")))
    assert checkpoint(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "hf"]) == 0
    assert "; no tokenizer, because the run was trained on bytes\n" in capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        *("README.md", "config.json", "generation_config.json", "model.safetensors")
    ]


def test_inference_reads_the_tokenizer_that_the_run_keeps(trained: Path, place: Path) -> None:
    def use(at: Path) -> list[Any]:
        result = infer.main(at / "chat")
        return [result["loss"], result["count"], _prompt(at / "file")["text"]]

    before = use(trained)
    # What lies there now is another one of as many tokens.
    make_tokenizer(place / "other", None, "<s>")
    (place / "other" / "words.json").write_bytes((place / "other" / "tokenizer.json").read_bytes())
    assert use(place) == before
    shutil.rmtree(place / "other")
    assert use(place) == before
    assert read_config(RunDir(place / "file")).tokenizer == f"{place}/file/tokenizer"
    # Training has it where its own is gone.
    line = [f"--config={place}/file/config.json", f"--run-dir={place}/new"]
    assert parse(line).tokenizer == f"{place}/file/tokenizer"
    (place / "other").mkdir()
    (place / "other" / "words.json").write_text("{}")
    assert parse(line).tokenizer == f"{place}/other/words.json"


@pytest.mark.parametrize("change", ["edit", "add", "remove"])
def test_a_kept_tokenizer_that_was_changed_is_refused(
    place: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = place / "chat" / "tokenizer"
    name = {"edit": f"{TEMPLATES}/tools.jinja", "add": "added_tokens.json", "remove": "tokenizer_config.json"}[change]
    if change == "remove":
        (kept / name).unlink()
    else:
        (kept / name).write_text("{}")
    wrong = f"tokenizer/{name}: isn't as it was when the weights were saved"
    for source in ("chat", "chat/full_model/full-model.pt"):
        assert checkpoint(["export", str(place / source), str(place / "out"), "--format", "hf"]) == 2
        assert wrong in capsys.readouterr().err
    for use in (infer.main, _prompt):
        with pytest.raises(ConfigError, match=wrong):
            use(place / "chat")


def test_a_run_of_before_keeps_no_tokenizer(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(trained / "file", tmp_path / "run"))
    shutil.rmtree(run / "tokenizer")
    assert checkpoint(["export", str(run), str(tmp_path / "out"), "--format", "hf"]) == 2  # its marker has hashes
    assert "isn't as it was when the weights were saved" in capsys.readouterr().err
    for folder in (LocalFiles(run / "full_model"), LocalFiles(run / STEP)):
        write_marker(
            folder, {key: value for key, value in read_marker(folder).items() if key not in (HASH, "tokenizer")}
        )
    assert infer.main(run)["loss"] == infer.main(trained / "file")["loss"]
    assert checkpoint(["export", str(run), str(tmp_path / "out"), "--format", "hf"]) == 0
    assert (
        f"no tokenizer, because the run keeps no copy of --tokenizer {trained}/other/words" in capsys.readouterr().out
    )
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    note = _resumed(trained, run, f"--tokenizer={trained}/other/words.json")
    assert note is None
    assert (run / "tokenizer" / "tokenizer.json").is_file()


def _resumed(place: Path, run: Path, *more: str, steps: int = 2) -> Any:
    events: list[tuple[str, dict[str, Any]]] = []
    line = [*_line(place, run, *more, "--global-batch-size=8"), f"--max-steps={steps}"]
    train(parse(line), lambda kind, data: events.append((kind, data)))
    return of_kind(events, "resume")[0]["note"]


def test_a_resume_says_what_has_changed_of_the_tokenizer_and_keeps_the_new_one(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained / "file", tmp_path / "run"))
    other = Path(shutil.copytree(trained / "other", tmp_path / "other"))
    given = f"--tokenizer={other}/words.json"
    assert _resumed(trained, run, given) is None  # the same files, wherever they lie
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "other"}))
    shutil.rmtree(other / TEMPLATES)
    changed = f"{TEMPLATES}/tools.jinja, tokenizer_config.json of {given.replace('=', ' ')} changed"
    assert _resumed(trained, run, given, steps=3) == f"since the checkpoint {changed}"
    assert not (run / "tokenizer" / TEMPLATES / "tools.jinja").exists()
    assert infer.main(run)["count"] > 0
    # Its own copy is a tokenizer like another.
    assert _resumed(trained, run, f"--tokenizer={run}/tokenizer", steps=4) is None


def test_a_run_at_a_url_keeps_it_there(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    other = Path(shutil.copytree(trained / "other", tmp_path / "other"))
    train(parse(_line(trained, "memory://kept-tokenizer", f"--tokenizer={other}", "--strategy=none")))
    before = _prompt("memory://kept-tokenizer")["text"]
    shutil.rmtree(other)
    assert infer.main("memory://kept-tokenizer")["count"] > 0
    assert _prompt("memory://kept-tokenizer")["text"] == before
    monkeypatch.setattr(foreign_files, "MOST_KEPT", 10)
    with pytest.raises(ConfigError, match=r"tokenizer: .* has more than 0 MiB; remove it there"):
        read_config(RunDir("memory://kept-tokenizer"))


def test_a_run_that_died_before_its_first_commit_starts_again_elsewhere(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has written to its URL by then is known for a run's there."""
    line = _line(trained, "memory://died-early", f"--tokenizer={trained}/other", "--strategy=none", "--max-steps=2")

    def die(kind: str, data: Any) -> None:
        if kind == "train":
            raise ZeroDivisionError

    for place, on_event in (("first", die), ("second", None)):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        with pytest.raises(ZeroDivisionError) if on_event else nullcontext():
            train(parse(line), on_event)


def test_adapters_are_exported_with_it(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    train(parse(_line(trained, tmp_path / "run", f"--tokenizer={trained}/other", "--lora=2")))
    ours = transformers.AutoTokenizer.from_pretrained(trained / "other")
    for form, weights in (("hf", "model.safetensors"), ("peft", "adapter_model.safetensors")):
        out = tmp_path / form
        assert checkpoint(["export", str(tmp_path / "run"), str(out), "--format", form]) == 0
        kept = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", f"{TEMPLATES}/tools.jinja")
        assert all((out / one).read_bytes() == (trained / "other" / one).read_bytes() for one in kept)
        assert transformers.AutoTokenizer.from_pretrained(out).chat_template == ours.chat_template
        assert (out / weights).is_file()
    assert not (out / "config.json").exists(), "of the model, which the adapters go beside"
    (tmp_path / "run" / "tokenizer" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer/tokenizer_config.json: isn't as it was"):
        _prompt(tmp_path / "run")
    assert checkpoint(["export", str(tmp_path / "run"), str(tmp_path / "more"), "--format", "peft"]) == 2


def test_adapters_of_a_model_with_a_tokenizer_of_its_own_bring_that(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    train(parse(_line(trained, tmp_path / "run", "--lora=2")))
    assert checkpoint(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "peft"]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (trained / "model" / name).read_bytes()


def test_a_tokenizer_that_no_run_can_keep_is_refused(trained: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(trained / "other", tmp_path / "other"))
    (tmp_path / "private").write_text("secret")
    (other / "vocab_more").symlink_to(tmp_path / "private")
    with pytest.raises(ConfigError, match=r"vocab_more: is a link out of the folder, and each run keeps it"):
        train(parse(_line(trained, tmp_path / "run", f"--tokenizer={other}", "--strategy=none")))
    assert not (tmp_path / "run").exists()
