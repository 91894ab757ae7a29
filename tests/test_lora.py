"""Adapters: what is trained, kept and exported, and that it is the same on any number of ranks and for peft."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp2 import infer, models
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.opening import opened
from fsdp2.checkpoint.sources.source import Source, weights
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.run.parts import checksum
from fsdp2_extra.models.lora import Lora, draw_adapters, is_adapter
from fsdp2_tools.checkpoint.__main__ import main as checkpoint_command
from fsdp2_tools.checkpoint.adapters import Adapters, merged
from tests.harness import Ranks, imported_once, losses, main_in_ranks, of_kind, refusal_in_ranks

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


def test_dropout_is_of_training_alone(ranks: Ranks, base: Path, trained: Events, tmp_path: Path) -> None:
    def run(name: str, *way: str) -> Events:
        flags = adapt(base, tmp_path / name, "--max-steps=6", "--checkpoint-every=3", "--lora-dropout=0.5", *way)
        return ranks.run(main_in_ranks, flags)[0]

    events = run("run")
    dropped, kept = losses(events), losses(trained)
    assert dropped[0] == kept[0]  # B is zero there
    assert not set(dropped[1:]) & set(kept[1:])
    for number, way in enumerate(("--strategy=ddp", "--activation-checkpointing")):
        assert losses(run(str(number), way)) == dropped
    assert losses(run("resumed", f"--resume={tmp_path / 'run' / 'checkpoints' / 'step-00000003'}")) == dropped[3:]
    assert infer.main(tmp_path / "run")["accuracy"] == of_kind(events, "eval")[-1]["accuracy"]
    assert checkpoint_command(["export", str(tmp_path / "run"), str(tmp_path / "peft"), "--format=peft"]) == 0
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["lora_dropout"] == 0.5
    model = models.get("llama", lora=Lora(4, 8.0, dropout=0.5)).build("debug")
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        tokens = torch.arange(16)[None]
        assert not torch.equal(model.train()(tokens), model(tokens))
        assert torch.equal(model.eval()(tokens), model(tokens))


def test_a_base_in_bf16_changes_no_loss(
    ranks: Ranks, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str) -> tuple[list[float], Any]:
        flags = adapt(base, tmp_path / name, "--max-steps=3", "--mixed-precision")
        events = ranks.run(_in_fp32 if name == "fp32" else main_in_ranks, flags)[0]
        return losses(events), of_kind(events, "start")[0]["header"]

    def memory(header: list[str]) -> str:
        (line,) = (line for line in header if line.startswith("memory: "))
        return line

    (kept, header), (wide, wide_header) = run("bf16"), run("fp32")
    assert kept == wide
    assert "of them trained" in header[0]
    assert memory(header) != memory(wide_header)


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
    message = ranks.run(refusal_in_ranks, line)[0]
    assert message.startswith("--resume: ")
    assert f"its adapters go beside the weights of {base} at that time, and the weights of {other} differ" in message


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
    file = tmp_path / "peft" / "adapter_config.json"
    described = json.loads(file.read_text())
    assert (described["task_type"], described["base_model_name_or_path"]) == ("CAUSAL_LM", str(base))
    file.write_text(json.dumps({**described, "base_model_name_or_path": str(tmp_path / "base")}))
    alone = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft")
    assert torch.equal(logits(alone, tokens), beside)
    merged = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), tokens)
    assert (beside - before).abs().max() > 1e-3
    # W x + s B A x is rounded in other places than (W + s B A) x.
    assert torch.allclose(beside, merged, rtol=1e-4, atol=1e-5)
    # Ours, of the same tensors: the same layers, and another order of multiplying in rotary embeddings alone.
    config = Config(model="llama", model_size="debug", init_from=str(base), lora=4)
    ours = config.spec.build("debug")
    with opened(str(base)) as under, opened(str(adapters)) as trained:
        for name, tensor in ours.state_dict().items():
            source, plain_name = (trained, name) if is_adapter(name) else (under, name.replace(".base_layer.", "."))
            tensor.copy_(source.read(f"app.model.{plain_name}"))
    with torch.no_grad():
        assert torch.allclose(ours(tokens), beside, rtol=1e-5, atol=1e-5)


def test_a_sum_with_a_base_in_bf16_is_rounded_once(ranks: Ranks, base: Path, tmp_path: Path) -> None:
    def export(place: Path, name: str, *flags: str) -> dict[str, Tensor]:
        assert checkpoint_command(["export", str(place), str(tmp_path / name), "--format", "safetensors", *flags]) == 0
        return load_file(tmp_path / name / "model.safetensors")

    narrow = export(base, "base", "--dtype=bf16")
    line = [*LLAMA, f"--init-from={tmp_path / 'base'}", "--lora=4", f"--run-dir={tmp_path / 'run'}", "--lr=0.01"]
    ranks.run(main_in_ranks, [*line, "--max-steps=2"])
    kept, wide = export(tmp_path / "run", "kept"), export(tmp_path / "run", "wide", "--dtype=fp32")
    with opened(str(tmp_path / "run")) as trained:
        adapters = weights(trained)
        layers = [name.removesuffix(".lora_A.default.weight") for name in adapters if ".lora_A." in name]
        assert layers
        for layer in layers:
            a, b = (trained.read(adapters[f"{layer}.lora_{half}.default.weight"]).double() for half in "AB")
            total = narrow[f"{layer}.weight"].double() + 2.0 * b @ a  # --lora-alpha is twice the rank
            assert torch.equal(wide[f"{layer}.weight"], total.float())
            assert torch.equal(kept[f"{layer}.weight"], total.bfloat16())


def test_inference_puts_both_together(adapters: Path, trained: Events) -> None:
    assert infer.main(adapters)["accuracy"] == of_kind(trained, "eval")[-1]["accuracy"]


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"lora": None, "lora_alpha": 8.0}, "--lora-alpha without --lora"),
        ({"lora": None, "lora_dropout": 0.1}, "--lora-dropout without --lora"),
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


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8])
def test_adapters_of_a_type_that_none_has_are_refused(dtype: torch.dtype) -> None:
    names = [f"layers.0.q.lora_{half}.default.weight" for half in "AB"]
    shapes = dict(zip(names, ((2, 4), (4, 2)), strict=True))
    tensors = {name: torch.empty(shape, device="meta", dtype=dtype) for name, shape in shapes.items()}
    ours = Source("a place", tensors, [], {name: (name,) for name in names}, lambda name: torch.zeros(shapes[name]))
    name = "layers.0.q.weight"
    base = Source("b", {name: torch.empty(4, 4, device="meta")}, [], {name: (name,)}, lambda _: torch.zeros(4, 4))
    with pytest.raises(Refused, match=f"describes: those of layers.0.q are {dtype}"):
        merged(ours, base, Adapters(b"", "base", 2, 1.0, ("q",), False))


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


def _checksum(weight: Tensor, buffer: Tensor) -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return checksum([distribute_tensor(weight, mesh, [Shard(0)]), buffer])


def test_a_checksum_of_weights_counts_buffers_once(ranks: Ranks) -> None:
    """They are whole on each rank: a base is the same one on any number of ranks, and in one process."""
    weight, buffer = torch.randn(4, 3), torch.ones(5)
    expected = checksum([weight, buffer])
    assert ranks.run(_checksum, weight, buffer) == [expected] * 2
    assert checksum([weight, 2 * buffer]) != expected
