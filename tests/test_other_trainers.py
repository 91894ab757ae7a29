"""Flags under the names that other trainers have for them: a refusal says ours."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fsdp2 import infer
from fsdp2.config import Config, parse
from fsdp2.infer import parse as parse_infer
from fsdp2.options.errors import ConfigError, flag_of
from fsdp2.options.parser import OTHERS, instead
from fsdp2.run.directory.rundir import RunDir, read_config
from fsdp2_tools.data.options import parse as parse_data

LR = "--learning-rate: no such flag; here it is --lr"
TWO = "--bf16: no such flag; here it is --mixed-precision bf16; --num-train-epochs: no such flag; here it is --epochs"


@pytest.mark.parametrize(
    ("read", "words", "said"),
    [
        (parse, "--learning-rate 2e-5", LR),
        (parse, "--learning_rate=2e-5", "--learning_rate=2e-5: no such flag; here it is --lr"),
        (parse, "--bf16 --num-train-epochs 3 --lr 1e-4", TWO),
        (parse, "--logging-steps 9", "--logging-steps: no such flag; each step is in the run's metrics.jsonl; drop it"),
        (parse_data, "show --learning-rate 2e-5", LR),
        (parse_data, "prepare a --tokenizer b --out c --boss d", "--boss: no such flag; did you mean --bos?"),
        (parse_infer, "RUN --max-new-tokens 9", "--max-new-tokens: no such flag; here it is --new-tokens"),
        (parse, "--eval-steps 9", "--eval-steps: no such flag; here it is --eval-every"),
        (parse_infer, "RUN --report-to wandb", "--report-to: no such flag; see --help"),
    ],
)
def test_a_refusal_names_the_flag_here(read: Any, words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(words.split())
    assert str(caught.value) == said


def test_a_file_of_settings_is_told_the_same(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("learning_rate = 1e-5\n")
    with pytest.raises(ConfigError, match=r"run\.toml: learning_rate is not a flag; here it is --lr$"):
        parse(["--config", str(tmp_path / "run.toml")])


def test_a_program_is_told_the_same() -> None:
    job: dict[str, Any] = {"learning_rate": 1e-5, "batch_size": 8}
    with pytest.raises(ConfigError, match=r"^Config: learning-rate is not a flag; here it is --lr$"):
        Config(**job)


def test_a_models_own_configuration_is_told_from_a_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"config\.json: model_type is not a flag; .*: train it by --model hf:FOLDER"):
        parse(["--config", str(tmp_path / "config.json")])
    with pytest.raises(ConfigError, match=r"config\.json: model_type is not a flag; .*: train it by --model hf:FOLDER"):
        read_config(RunDir(tmp_path))


def test_each_name_leads_to_a_flag_that_there_is() -> None:
    ours = {flag_of(name) for name in ({field.name for field in dataclasses.fields(Config)} | infer.FLAGS.keys())}
    for name, meant in tomllib.loads(OTHERS.read_text()).items():
        assert f"--{name}" not in ours
        if meant.startswith("--"):
            assert re.split("[ ,]", meant)[0] in ours
            assert instead(f"--{name}", ours) == f"here it is {meant}"
