"""Adapters: what is trained, kept and exported, and that it is the same on any number of ranks and for peft."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import infer, models
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.opening import opened
from fsdp2.checkpoint.sources.source import Source
from fsdp2.checkpoint.store import HASH, read_marker, write_marker
from fsdp2.config import Config
from fsdp2.models.lora import Lora, draw_adapters, is_adapter
from fsdp2.options.errors import ConfigError
from fsdp2_tools.checkpoint.__main__ import main as checkpoint_command
from fsdp2_tools.checkpoint.adapters import Adapters, merged
from tests.harness import Ranks, imported_once, losses, main_in_ranks, of_kind
from tests.hostile.common import change_values

peft = pytest.importorskip("peft", reason="adapters are peft's layers")
imported_once("peft")

Events = list[tuple[str, dict[str, Any]]]

LLAMA = ["--model=llama", "--model-size=debug", "--dataset=random-tokens", "--seq-len=16", "--batch-size=4"]
LLAMA += ["--threads=1", "--device=cpu"]


@pytest.fixture(scope="module")
def base(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, whose weights the adapters go beside."""
    run = tmp_path_factory.mktemp("base") / "run"
    ranks.run(main_in_ranks, [*LLAMA, f"--run-dir={run}", "--max-steps=3"])
    return run


def adapt(base: Path, run: Path, *flags: str) -> list[str]:
    return [*LLAMA, f"--init-from={base}", "--lora=4", f"--run-dir={run}", "--lr=0.01", *flags]


@pytest.fixture(scope="module")
def trained(ranks: Ranks, base: Path) -> Events:
    """The events of a run of six steps of adapters, with a checkpoint in its middle."""
    line = adapt(base, base.parent / "adapters", "--max-steps=6", "--checkpoint-every=3")
    return ranks.run(main_in_ranks, line)[0]


@pytest.fixture(scope="module")
def adapters(base: Path, trained: Events) -> Path:
    return base.parent / "adapters"


def test_every_way_trains_the_same(ranks: Ranks, base: Path, adapters: Path, trained: Events, tmp_path: Path) -> None:
    expected = losses(trained)
    assert len(set(expected)) == 6
    for number, way in enumerate((["--strategy=ddp"], ["--activation-checkpointing"], ["--shard-granularity=root"])):
        events = ranks.run(main_in_ranks, adapt(base, tmp_path / str(number), "--max-steps=6", *way))[0]
        assert losses(events) == expected, way
    # Resumed on three ranks from what two have written: the sums over ranks are rounded in another order.
    resumed = ranks.run(
        main_in_ranks,
        adapt(
            base,
            tmp_path / "3",
            "--max-steps=6",
            "--global-batch-size=8",
            f"--resume={adapters}/checkpoints/step-00000003",
        ),
        ranks=3,
    )[0]
    assert losses(resumed) == pytest.approx(expected[3:], rel=1e-5)


def test_it_goes_on_bit_for_bit(ranks: Ranks, base: Path, adapters: Path, trained: Events, tmp_path: Path) -> None:
    checkpoint = adapters / "checkpoints" / "step-00000003"
    resumed = ranks.run(main_in_ranks, adapt(base, tmp_path / "run", "--max-steps=6", f"--resume={checkpoint}"))[0]
    assert losses(resumed) == losses(trained)[3:]


def test_a_base_in_bf16_changes_no_loss(
    ranks: Ranks, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str) -> tuple[list[float], Any]:
        flags = adapt(base, tmp_path / name, "--max-steps=3", "--mixed-precision")
        events = ranks.run(_in_fp32 if name == "fp32" else main_in_ranks, flags)[0]
        return losses(events), of_kind(events, "start")[0]["header"]

    (kept, header), (wide, wide_header) = run("bf16"), run("fp32")
    assert kept == wide
    assert "of them trained" in header[0]
    assert header[2] != wide_header[2]  # the memory


def _in_fp32(flags: list[str]) -> Events:
    from fsdp2.options import own_model

    before = own_model.base_dtype
    own_model.base_dtype = lambda config: torch.float32
    try:
        return main_in_ranks(flags)
    finally:
        own_model.base_dtype = before


def test_a_checkpoint_holds_adapters_alone_and_says_of_what(adapters: Path, base: Path) -> None:
    with opened(str(adapters)) as source:
        names = [name.removeprefix("app.model.") for name in source.tensors if name.startswith("app.model.")]
        assert names
        assert all(is_adapter(name) for name in names)
        assert source.read("app.base.weights") == str(base)
    assert not (adapters / "full_model").exists()
    described = json.loads((adapters / "model" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base)


def test_other_weights_below_the_adapters_are_noticed(ranks: Ranks, adapters: Path, base: Path, tmp_path: Path) -> None:
    other = base.parent / "other"
    ranks.run(main_in_ranks, [*LLAMA, f"--run-dir={other}", "--max-steps=2"])
    line = adapt(other, tmp_path / "run", "--max-steps=7", f"--resume={adapters}")
    message = ranks.run(_refused, line)[0]
    assert message.startswith("--resume: ")
    assert f"its adapters go beside the weights of {base} at that time, and the weights of {other} differ" in message


def _refused(flags: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        main_in_ranks(flags)
    return str(caught.value)


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits


def test_peft_and_transformers_get_the_same_model(base: Path, adapters: Path, tmp_path: Path) -> None:
    import peft
    import transformers

    for form, place in (("peft", adapters), ("hf", adapters)):
        assert checkpoint_command(["export", str(place), str(tmp_path / form), "--format", form]) == 0
    assert checkpoint_command(["export", str(base), str(tmp_path / "base"), "--format", "hf"]) == 0
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = logits(plain, tokens)
    beside = logits(peft.PeftModel.from_pretrained(plain, tmp_path / "peft"), tokens)
    merged = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), tokens)
    assert (beside - before).abs().max() > 1e-3
    # W x + s B A x is rounded in other places than (W + s B A) x.
    assert torch.allclose(beside, merged, rtol=1e-4, atol=1e-5)
    # Ours, of the same tensors: the same layers, and another order of multiplying in rotary embeddings alone.
    config = Config(model="llama", model_size="debug", init_from=str(base), lora=4)
    ours = config.spec.build("debug")
    with opened(str(base)) as weights, opened(str(adapters)) as trained:
        for name, tensor in ours.state_dict().items():
            source, plain_name = (trained, name) if is_adapter(name) else (weights, name.replace(".base_layer.", "."))
            tensor.copy_(source.read(f"app.model.{plain_name}"))
    with torch.no_grad():
        assert torch.allclose(ours(tokens), beside, rtol=1e-5, atol=1e-5)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a scale of its own": (
        {"lora_alpha": 9.0},
        "says lora_alpha 9.0, and COMMIT.json of the checkpoint 8.0",
    ),
    "a rank of its own": ({"r": 8}, "of its run says r 8, and COMMIT.json of the checkpoint 4"),
    "turned over": ({"fan_in_fan_out": True}, "says fan_in_fan_out True, and COMMIT.json of the checkpoint False"),
    "a scale of 1e30": ({"lora_alpha": 1e30}, "lora_alpha is no number above 0, and up to 1000000"),
    "no number": ({"lora_alpha": float("nan")}, "lora_alpha is no number above 0"),
    "endless": ({"lora_alpha": float("inf")}, "lora_alpha is no number above 0"),
    "negative": ({"lora_alpha": -8.0}, "lora_alpha is no number above 0"),
    "true": ({"lora_alpha": True}, "lora_alpha is no number above 0"),
    "text": ({"lora_alpha": "8"}, "lora_alpha is no number above 0"),
    "no rank": ({"r": 0}, "r is no whole number from 1 to 1000000"),
    "half a rank": ({"r": 0.5}, "r is no whole number from 1 to 1000000"),
    "a base that is no text": ({"base_model_name_or_path": "\ud800"}, "base_model_name_or_path is no name"),
    "a base with a NUL": ({"base_model_name_or_path": "a\0b"}, "base_model_name_or_path is no name"),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("earlier", [False, True])
def test_adapters_count_as_their_checkpoint_says(
    adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, earlier: bool
) -> None:
    changed, reason = CHANGES[kind]
    if earlier and kind == "turned over":
        return  # the flags, which are all that such a marker has, don't say it
    run = Path(shutil.copytree(adapters, tmp_path / "run"))
    if earlier:
        _as_before(run)
    file = run / "model" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    for form in ("hf", "peft", "pt"):
        assert checkpoint_command(["export", str(run), str(tmp_path / "out"), f"--format={form}"]) == 2
        out, line = capsys.readouterr()
        assert (out, line.count("\n"), reason in line) == ("", 1, True), line
        assert not (tmp_path / "out").exists()


def test_a_base_at_a_url_is_opened_only_by_name(
    adapters: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(adapters, tmp_path / "run"))
    file = run / "model" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "s3://a-place/of/theirs"}))
    words = ["export", str(run), str(tmp_path / "out"), "--format=hf"]
    assert checkpoint_command(words) == 2
    assert capsys.readouterr().err.endswith("if you trust that, add --base s3://a-place/of/theirs\n")
    assert checkpoint_command([*words, f"--base={base}"]) == 0


def _as_before(run: Path) -> None:
    """A marker of the version that kept the flags alone."""
    for folder in (run / "checkpoints").iterdir():
        marker = read_marker(LocalFiles(folder))
        assert marker.pop("adapters")["lora_alpha"] == 8.0
        write_marker(LocalFiles(folder), {key: value for key, value in marker.items() if key != HASH})


def _settings() -> dict[str, Any]:
    """Each setting that peft has for adapters beside those of a run, with a value that it hasn't by default."""
    others = {bool: True, float: 0.5, int: 8, dict: {"q_proj": 2}, type(None): [0]}
    own = {"base_model_name_or_path", "fan_in_fan_out", "r", "lora_alpha", "inference_mode", "peft_version"}
    found = {key: others.get(type(value), "x") for key, value in peft.LoraConfig().to_dict().items() if key not in own}
    more = {"layers_to_transform": 0, "target_modules": "all-linear", "layers_pattern": "layers", "bias": "lora_only"}
    return {**found, **more, "init_lora_weights": "pissa"}


@pytest.mark.parametrize("by", ["file", "marker", "both"])
def test_a_setting_by_which_adapters_mean_something_else_is_refused(
    adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    """peft would take them otherwise, and nothing else tells which was meant: no hash covers the file."""
    run = Path(shutil.copytree(adapters, tmp_path / "run"))
    file, folder = run / "model" / "adapter_config.json", LocalFiles(run / "checkpoints" / "step-00000006")
    was, marker = json.loads(file.read_text()), {k: v for k, v in read_marker(folder).items() if k != HASH}
    assert len(_settings()) > 20
    for key, value in _settings().items():
        if by != "marker":
            file.write_text(json.dumps({**was, key: value}))
        elif key != "target_modules":  # which then differs
            file.write_text(json.dumps({name: one for name, one in was.items() if name != key}))
        if by != "file":
            write_marker(folder, {**marker, "adapters": {**was, key: value}})
        for form in ("hf", "peft", "pt"):
            assert checkpoint_command(["export", str(run), str(tmp_path / "out"), f"--format={form}"]) == 2, key
            out, line = capsys.readouterr()
            assert (out, line.count("\n"), f" {key}" in line) == ("", 1, True), line
    assert not (tmp_path / "out").exists()


def _of(name: str, half: str) -> bool:
    return name.startswith("app.model.") and half in name


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gone": (Path.unlink, ""),
    "a pipe": (lambda path: [make(path) for make in (Path.unlink, os.mkfifo)], "is not a regular file"),
    "terabytes": (lambda path: os.truncate(path, 2 << 40), "has more than 16 MiB"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_description_that_is_gone_is_the_markers(
    adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """The adapters alone were exported as the model's weights."""
    run = Path(shutil.copytree(adapters, tmp_path / "run"))
    change, reason = FILES[kind]
    change(run / "model" / "adapter_config.json")
    checkpoint = run / "checkpoints" / "step-00000006"
    for form in ("pt", "peft"):
        for source, out in ((adapters, tmp_path / form), (run, tmp_path / f"{form}-changed")):
            status = checkpoint_command(["export", str(source), str(out), f"--format={form}"])
            line = capsys.readouterr().err
            assert (status, out.exists()) == ((2, False) if reason and source == run else (0, True))
            assert reason in line or source == adapters
    if kind == "gone":
        assert torch.load(tmp_path / "pt").keys() == torch.load(tmp_path / "pt-changed").keys()
        description = [(tmp_path / name / "adapter_config.json").read_bytes() for name in ("peft", "peft-changed")]
        assert json.loads(description[0]) == json.loads(description[1])
        (checkpoint / "COMMIT.json").unlink()
        checkpoint.rename(tmp_path / "alone")
        assert checkpoint_command(["export", str(tmp_path / "alone"), str(tmp_path / "out"), "--format=pt"]) == 2
        assert "holds adapters, and no adapter_config.json of a run beside it" in capsys.readouterr().err


TENSORS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another rank": (lambda s: s.update({n: one[:2] for n, one in s.items() if _of(n, "lora_A")}), "and r is 4"),
    "one half": (lambda s: s.pop(next(n for n in s if _of(n, "lora_B"))), "and r is 4"),
    "a whole weight": (lambda s: s.update({"app.model.lm_head.weight": torch.ones(2, 2)}), "lm_head.weight is no half"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_the_description_does_not_name_are_refused(
    adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    run = Path(shutil.copytree(adapters, tmp_path / "run"))
    change, reason = TENSORS[kind]
    change_values(LocalFiles(run / "checkpoints" / "step-00000006"), change)
    for form in ("peft", "pt"):
        assert checkpoint_command(["export", str(run), str(tmp_path / "out"), f"--format={form}"]) == 2
        line = capsys.readouterr().err
        assert "its tensors aren't the adapters that adapter_config.json describes: " in line
        assert reason in line


def test_a_base_that_has_changed_since_is_neither_merged_nor_used(
    ranks: Ranks, base: Path, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it does where the run that it is of goes on."""
    place, run = Path(shutil.copytree(base, tmp_path / "base")), Path(shutil.copytree(adapters, tmp_path / "run"))
    for file in (run / "config.json", run / "model" / "adapter_config.json"):
        file.write_text(file.read_text().replace(str(base), str(place)))
    assert checkpoint_command(["export", str(run), str(tmp_path / "before"), "--format=pt"]) == 0
    assert infer.main(run)["count"] > 0
    ranks.run(main_in_ranks, [*LLAMA, f"--run-dir={place}", "--max-steps=4"])
    assert checkpoint_command(["export", str(run), str(tmp_path / "after"), "--format=pt"]) == 2
    assert f"its adapters go beside the weights that {place}" in capsys.readouterr().err
    assert checkpoint_command(["export", str(run), str(tmp_path / "peft"), "--format=peft"]) == 0
    with pytest.raises(ConfigError, match="its adapters go beside the weights of"):
        infer.main(run)


def test_inference_refuses_another_scale_than_the_checkpoints(adapters: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(adapters, tmp_path / "run"))
    content = json.loads((run / "config.json").read_text())
    content["flags"]["lora-alpha"] = 1000.0
    (run / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"was made with --lora-alpha None, and the run's config\.json says 1000\.0"):
        infer.main(run)


def test_inference_puts_both_together(adapters: Path, trained: Events) -> None:
    assert infer.main(adapters)["accuracy"] == of_kind(trained, "eval")[-1]["accuracy"]


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"lora": None, "lora_alpha": 8.0}, "--lora-alpha without --lora"),
        ({"init_from": None}, "--lora without weights"),
        ({"strategy": "fsdp1"}, "--lora with --strategy fsdp1"),
        ({"freeze": ("*",)}, "--freeze with --lora"),
        ({"save_model": True}, "--save-model with --lora"),
        ({"init_partial": True}, "--init-partial with --lora"),
    ],
)
def test_what_makes_no_sense_is_refused(base: Path, values: dict[str, Any], part: str) -> None:
    given: dict[str, Any] = {"model": "llama", "model_size": "debug", "init_from": str(base), "lora": 4}
    with pytest.raises(ConfigError) as caught:
        Config(**{**given, **values})
    assert part in str(caught.value)


def test_a_target_that_matches_nothing_is_named(base: Path, tmp_path: Path) -> None:
    message = "--model llama: --lora-targets *.query: no linear layer has such a name; they are like model."
    with pytest.raises(ConfigError, match=re.escape(message)):
        main_in_ranks(adapt(base, tmp_path / "run", "--lora-targets=*.query"))
    assert not (tmp_path / "run").exists()


def test_a_layer_with_transposed_weights() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    facts = Lora(2, 4.0).adapt(model, list(model.transformer.h))
    assert facts["fan_in_fan_out"] is True
    with pytest.raises(ValueError, match=r"some of the layers are nn\.Linear and some Conv1D"):
        Lora(2, 4.0, ("*",)).adapt(transformers.GPT2LMHeadModel(config), [])


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_the_embedding_too_gets_no_adapter(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    numbers = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Qwen3Config(**numbers, head_dim=4, vocab_size=16, tie_word_embeddings=tied)
    model = transformers.Qwen3ForCausalLM(config)
    if tied:
        with pytest.raises(
            ValueError, match=r"--lora-targets lm_head: shares its weight with model\.embed_tokens, and"
        ):
            Lora(2, 4.0, ("*",)).adapt(model, list(model.model.layers))
        Lora(2, 4.0).adapt(model, list(model.model.layers))  # those in blocks
    else:
        assert "lm_head" in Lora(2, 4.0, ("*",)).adapt(model, list(model.model.layers))["target_modules"]


def test_an_export_that_cant_merge_advises_no_merging_elsewhere() -> None:
    def source(*names: str) -> Source:
        tensors = {name: torch.empty(2, 2, device="meta") for name in names}
        return Source("a place", tensors, [], {name: (name,) for name in names}, lambda _: torch.zeros(2, 2))

    ours = source("lm_head.lora_A.default.weight", "lm_head.lora_B.default.weight")
    with pytest.raises(Refused, match="use --format peft, and load both, unmerged") as caught:
        merged(ours, source("model.embed_tokens.weight"), Adapters(b"", "base", 2, 1.0, ("lm_head",), False))
    assert "merge_and_unload" not in str(caught.value)


def test_averages_that_no_checkpoint_would_hold_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="--lora: training changes the averages"):
        Lora(2, 4.0).adapt(model, [model])


def test_adapters_start_where_pefts_do() -> None:
    torch.manual_seed(0)
    spec = models.get("llama", lora=Lora(16, 8.0))
    theirs, ours = spec.build("debug"), spec.build("debug")
    draw_adapters(ours, seed=1, brought=lambda name: False)
    for name, tensor in ours.named_parameters():
        if ".lora_A." in name:
            assert not torch.equal(tensor, theirs.get_parameter(name))
            assert tensor.std().item() == pytest.approx(theirs.get_parameter(name).std().item(), rel=0.1)
        elif ".lora_B." in name:
            assert not tensor.any()
            assert not theirs.get_parameter(name).any()
