"""The loops of `examples/` on two ranks are the same loops in one process."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from examples import dpo, own_loop
from fsdp2.checkpoint import files, store
from fsdp2.checkpoint.sources.opening import opened
from fsdp2.checkpoint.sources.source import weights
from fsdp2.data.loader import Batches
from fsdp2.data.splits import IGNORED
from fsdp2.options.errors import ConfigError
from fsdp2_extra.models import blocks, lora
from fsdp2_extra.text import pairs
from fsdp2_extra.text.tokenizer_file import own_tokenizer
from tests.harness import Ranks, same
from tests.hostile.common import change_values
from tests.others.common import plain, save
from tests.programs import on_ranks_of_its_own
from tests.test_chat import PLAIN, make_tokenizer, talk

CPU = torch.device("cpu")
PAIRS = Path(dpo.__file__).with_name("pairs.jsonl")


def test_it_fits_on_a_screen() -> None:
    assert len(Path(own_loop.__file__).read_text().splitlines()) <= 66


def _norm_on_two_ranks(gradients: list[Tensor]) -> Tensor:
    """As two ranks add it up that hold half of each gradient: the last bits aren't those of a sum over whole ones."""
    halves = [[gradient.chunk(2)[rank] for gradient in gradients] for rank in (0, 1)]
    squares = [torch.nn.utils.get_total_norm(half, foreach=True).square() for half in halves]
    return torch.stack(squares).sum().sqrt()


def _plain_loop(folder: str, steps: int, norm: float) -> tuple[list[float], list[float], nn.Module]:
    """Losses, norms and the model of own_loop.py's loop in one process, with what each of two ranks gets in turn."""
    model = plain(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(steps):
        order = torch.randperm(len(own_loop.TEXT), generator=torch.Generator().manual_seed(step))[: own_loop.ROWS]
        parts = []
        for mine in filter(len, order.tensor_split(2)):
            loss = model(input_ids=own_loop.TEXT[mine], labels=own_loop.TEXT[mine]).loss
            parts.append(loss * len(mine) / len(order))
            parts[-1].backward()
        losses.append(sum(parts).item())  # in fp32, as the ranks add them
        norms.append(float(_norm_on_two_ranks([p.grad for p in model.parameters() if p.grad is not None])))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), norm, torch.tensor(norms[-1]), foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model


def test_own_loop(ranks: Ranks, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    expected, norms, trained = _plain_loop(folder, 6, 1.0)
    assert max(norms) > 1.0, "nothing is clipped: the test shows less than it says"
    first = ranks.run(own_loop.train, tmp_path / "out", folder, CPU, 3)
    rest = ranks.run(own_loop.train, tmp_path / "out", folder, CPU)
    assert [one + more for one, more in zip(first, rest, strict=True)] == [expected] * 2
    exported = plain(str(tmp_path / "out" / "model-6"))
    tokens = own_loop.TEXT[:2]
    assert torch.equal(exported(input_ids=tokens).logits, trained.eval()(input_ids=tokens).logits)


def test_own_loop_exports_its_last_step_also_when_it_was_killed_before(ranks: Ranks, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    _, _, trained = _plain_loop(folder, 4, 1.0)
    ranks.run(own_loop.train, tmp_path / "out", folder, CPU, 4)  # no multiple of what it saves after
    exported = tmp_path / "out" / "model-4"
    shutil.rmtree(exported)
    assert ranks.run(own_loop.train, tmp_path / "out", folder, CPU, 4) == [[], []]
    tokens = own_loop.TEXT[:2]
    assert torch.equal(plain(str(exported))(input_ids=tokens).logits, trained.eval()(input_ids=tokens).logits)


def test_own_loop_goes_on_with_the_same_dropout(ranks: Ranks, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    file = Path(folder) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_dropout": 0.5}))
    whole = ranks.run(own_loop.train, tmp_path / "whole", folder, CPU)
    first = ranks.run(own_loop.train, tmp_path / "out", folder, CPU, 3)
    rest = ranks.run(own_loop.train, tmp_path / "out", folder, CPU)
    assert [one + more for one, more in zip(first, rest, strict=True)] == whole
    assert whole[0] != _plain_loop(folder, 6, 1.0)[0]


def _with_one_row(out: Path, folder: str) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_loop, "ROWS", 1)
        return own_loop.train(out, folder, CPU, 3)


def test_own_loop_on_more_ranks_than_a_step_has_rows(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    monkeypatch.setattr(own_loop, "ROWS", 1)
    assert ranks.run(_with_one_row, tmp_path / "out", folder) == [_plain_loop(folder, 3, 1.0)[0]] * 2


def _asked_to_stop(out: Path, folder: str) -> list[float]:
    class OnRank1:
        times = 0

        @property
        def reason(self) -> str | None:
            self.times += 1
            return "SIGTERM" if (dist.get_rank(), self.times) == (1, 2) else None

    return own_loop.train(out, folder, CPU, stop=OnRank1())


def test_own_loop_saves_on_all_ranks_when_one_is_asked_to_stop(ranks: Ranks, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    first = ranks.run(_asked_to_stop, tmp_path / "out", folder)
    assert [len(losses) for losses in first] == [2, 2]
    rest = ranks.run(own_loop.train, tmp_path / "out", folder, CPU)
    assert first[0] + rest[0] == _plain_loop(folder, 6, 1.0)[0]


def _pairs(folder: str) -> pairs.Pairs:
    return pairs.load(str(PAIRS), own_tokenizer(Path(folder)), 64, 256, as_="text")


def _flags(folder: str, out: Path, *more: str) -> Any:
    plain = ["--lr=1e-3", "--schedule=constant", "--warmup-steps=0", "--clip-grad-norm=off", "--pairs-as=text"]
    return dpo.parse([folder, str(PAIRS), str(out), *plain, *more])


def _dpo_on_ranks(folder: str, out: Path, steps: int, *more: str) -> list[dict[str, float]]:
    return dpo.train(_flags(folder, out, *more), _pairs(folder), CPU, steps)


def _losses_on_ranks(folder: str, out: Path, steps: int, *more: str) -> list[float]:
    return [figures["loss"] for figures in _dpo_on_ranks(folder, out, steps, *more)]


def _dpo_by_hand(folder: str, *more: str) -> dict[str, Any]:
    """Of one step its gradients, and what has become of the reference."""
    flags = _flags(folder, Path(), *more)
    policy, reference = (dpo.sharded(flags, CPU, trained=trained) for trained in (True, False))
    (batch,) = next(iter(_batches(folder, dist.get_rank())))
    (dpo.figures_of(policy, reference, 0.1, batch.inputs, batch.targets)[0] / batch.samples * 2).backward()
    return {
        "gradients": {name: one.grad.full_tensor() for name, one in policy.named_parameters()},
        "dtypes": {one.dtype for one in policy.parameters()} | {one.dtype for one in reference.parameters()},
        "reference is sharded": all(isinstance(one, DTensor) for one in reference.parameters()),
        "reference": {name: one.full_tensor() for name, one in reference.named_parameters()},
        "its gradients": [name for name, one in reference.named_parameters() if one.grad is not None],
    }


def _batches(folder: str, rank: int) -> Batches:
    return Batches(_pairs(folder), global_batch=4, accumulation=1, seed=1, rank=rank, world_size=2, device=CPU)


def _dpo_alone(folder: str, steps: int, policy: nn.Module) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Figures and the first step's gradients in one process, with what each of two ranks gets in turn."""
    reference = plain(folder)
    optimizer = torch.optim.AdamW([one for one in policy.parameters() if one.requires_grad], lr=1e-3)
    both, found, first = [_batches(folder, rank) for rank in (0, 1)], [], {}
    for step in range(steps):
        parts = []
        for batches in both:
            if batches.at_end():
                batches.next_epoch()
            (batch,) = next(iter(batches))
            parts.append(dpo.figures_of(policy, reference, 0.1, batch.inputs, batch.targets) / batch.samples)
            parts[-1][0].backward()
        found.append(dict(zip(dpo.FIGURES, (parts[0] + parts[1]).tolist(), strict=True)))
        if step == 0:
            first = {name: one.grad.clone() for name, one in policy.named_parameters() if one.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return found, first


def test_dpo(ranks: Ranks, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    figures, gradients = _dpo_alone(folder, 6, plain(folder))  # three epochs, whose second steps have two pairs of six
    losses = [one["loss"] for one in figures]
    untouched = dict(plain(folder).named_parameters())
    assert losses[-1] < losses[0]
    whole = ranks.run(_dpo_on_ranks, folder, tmp_path / "whole", 6)
    assert whole == [figures] * 2
    exported = tmp_path / "whole" / "model-6"
    shutil.rmtree(exported)  # as a kill between the last checkpoint and the export leaves it
    assert ranks.run(_dpo_on_ranks, folder, tmp_path / "whole", 6) == [[]] * 2
    assert (exported / "config.json").is_file()
    assert ranks.run(_losses_on_ranks, folder, tmp_path / "out", 3) == [losses[:3]] * 2
    shutil.copytree(tmp_path / "out", tmp_path / "alone")
    assert ranks.run(_losses_on_ranks, folder, tmp_path / "out", 6) == [losses[3:]] * 2
    for some in (1, 3):  # of three ranks, one has no pair of two
        shutil.copytree(tmp_path / "alone", tmp_path / f"on-{some}")
        for rest in ranks.run(_losses_on_ranks, folder, tmp_path / f"on-{some}", 6, ranks=some):
            assert rest == pytest.approx(losses[3:], rel=1e-5)
    for found in ranks.run(_dpo_by_hand, folder):
        assert same(found["gradients"], gradients)
        assert found["reference is sharded"]
        assert same(found["reference"], untouched)
        assert found["its gradients"] == []


def test_dpos_figures_are_those_of_the_paper(tmp_path: Path) -> None:
    """Each answer by itself, without padding, in fp64: log sigmoid of beta times the margin of the policy's gains."""
    policy, reference = (plain(save("llama", tmp_path / str(seed), seed).removeprefix("hf:")) for seed in (0, 1))
    data = _pairs(str(tmp_path / "0"))
    inputs, learned = data.__getitems__(range(len(data)))
    found = dpo.figures_of(policy, reference, 0.1, inputs, learned).tolist()

    def likelihood(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        (answer,) = (targets != IGNORED).nonzero(as_tuple=True)
        words = model.double()(input_ids=tokens[None, : answer.max() + 1]).logits[0].log_softmax(1)
        return torch.stack([words[at - 1, tokens[at]] for at in answer.tolist()]).sum()

    rewards = [
        [0.1 * (likelihood(policy, *answer) - likelihood(reference, *answer)) for answer in zip(*pair, strict=True)]
        for pair in zip(inputs, learned, strict=True)
    ]
    chosen, rejected = torch.tensor(rewards, dtype=torch.float64).unbind(1)
    margins = chosen - rejected
    losses = -torch.log(1 / (1 + torch.exp(-margins)))
    expected = [float(one.sum()) for one in (losses, chosen, rejected, margins, margins > 0)]
    # Each is a difference of fp32 numbers near 100, which are 8e-6 apart.
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert 0 < expected[4] < len(margins), "each pair is judged alike: the test shows less than it says"


def test_dpo_with_adapters_has_one_model(ranks: Ranks, tmp_path: Path) -> None:
    """Its losses are those of a second model as the reference; a checkpoint and the export hold the adapters alone."""
    peft = pytest.importorskip("peft")
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    make_tokenizer(Path(folder), PLAIN)
    more = ("--lora=4",)
    policy = plain(folder)
    lora.Lora(4, 8.0).adapt(policy, blocks.find_blocks(policy))
    lora.draw_adapters(policy, 1, brought=lambda name: False)
    figures, gradients = _dpo_alone(folder, 4, policy)
    assert all(lora.is_adapter(name) for name in gradients)
    assert figures[0]["loss"] == pytest.approx(math.log(2))
    assert figures[-1]["loss"] < figures[0]["loss"]
    assert figures[-1]["rewards/margins"] > 0
    out = tmp_path / "out"
    assert ranks.run(_dpo_on_ranks, folder, out, 2, *more) == [figures[:2]] * 2
    assert ranks.run(_dpo_on_ranks, folder, out, 4, *more) == [figures[2:]] * 2
    with opened(str(out)) as source:
        assert weights(source).keys() == gradients.keys()
    exported = peft.AutoPeftModelForCausalLM.from_pretrained(out / "model-4")
    tokens = own_loop.TEXT[:2]
    expected = policy.eval()(input_ids=tokens).logits
    assert torch.allclose(exported(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-6)
    assert (out / "model-4" / "tokenizer.json").read_bytes() == (Path(folder) / "tokenizer.json").read_bytes()


def _refused(folder: str, out: Path, *more: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        _dpo_on_ranks(folder, out, 4, *more)
    return str(refusal.value)


def _set(end: str, value: Any, state: dict[str, Any]) -> None:
    names = [name for name in state if name.endswith(end)]
    assert names
    state.update(dict.fromkeys(names, value))


def test_dpo_goes_on_as_it_began(ranks: Ranks, tmp_path: Path) -> None:
    """Another reference, rate or size of a step would be another training, and no figure says so."""
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    other = shutil.copytree(folder, tmp_path / "other")
    file = other / "model.safetensors"
    save_file({name: 2 * one for name, one in load_file(file).items()}, file, {"format": "pt"})
    ranks.run(_dpo_on_ranks, folder, tmp_path / "out", 2)
    for model, flag, why in (
        (str(other), "--epochs=3", r"the weights of \S+model at that time, and the weights of \S+other differ"),
        (folder, "--lr=0.01", r"began with --lr 0\.001, and not 0\.01; give that, or another OUT"),
        (folder, "--beta=0.2", r"began with --beta 0\.1, and not 0\.2"),
        (folder, "--global-batch-size=2", "began with --global-batch-size 4, and not 2"),
    ):
        for said in ranks.run(_refused, model, tmp_path / "out", flag):
            assert re.search(why, said)
    for end, value in {".maximize": True, "schedule.last_epoch": 0, ".weight_decay": 50.0}.items():
        forged = Path(shutil.copytree(tmp_path / "out", tmp_path / end))
        (step,) = (forged / "checkpoints").glob("step-*2")
        change_values(files.LocalFiles(step), functools.partial(_set, end, value))
        for said in ranks.run(_refused, folder, forged, "--epochs=3"):
            assert "its checkpoint has other settings of the optimizer, or of the schedule" in said
    # What a stranger's marker names beside these is no flag.
    place = store.Store(files.LocalFiles(f"{tmp_path}/out/checkpoints"))
    checkpoint = place.checkpoint(place.committed()[-1])
    marker = {key: value for key, value in store.read_marker(checkpoint).items() if key != store.HASH}
    store.write_marker(checkpoint, {**marker, "began": {"nosuch": 1}})
    assert ranks.run(_dpo_on_ranks, folder, tmp_path / "out", 3)


@pytest.mark.parametrize("more", [(), ("--lora=4",)], ids=["weights", "adapters"])
def test_dpo_computes_in_bf16(ranks: Ranks, tmp_path: Path, more: tuple[str, ...]) -> None:
    """What is trained stays in fp32, what is frozen is kept in bf16, and logarithms are taken in fp32."""
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    (half, _), (whole, _) = (
        ranks.run(_dpo_on_ranks, folder, tmp_path / name, 4, *more, *flag)
        for name, flag in (("half", ("--mixed-precision",)), ("whole", ()))
    )
    assert half[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert half != whole
    assert [one["loss"] for one in half] == pytest.approx([one["loss"] for one in whole], rel=0.05)
    if not more:
        (found, _) = ranks.run(_dpo_by_hand, folder, "--mixed-precision")
        assert found["dtypes"] == {torch.float32, torch.bfloat16}
        assert {one.dtype for one in found["gradients"].values()} == {torch.float32}


def test_dpo_draws_no_dropout(ranks: Ranks, tmp_path: Path) -> None:
    """The first loss is that of a policy which still is the reference: no mask makes them differ."""
    folder = save("gpt2", tmp_path / "model", n_positions=64, resid_pdrop=0.5).removeprefix("hf:")
    assert ranks.run(_losses_on_ranks, folder, tmp_path / "out", 1) == [[pytest.approx(math.log(2), rel=1e-6)]] * 2


def test_dpo_runs_as_a_program(tmp_path: Path) -> None:
    """On conversations, by a model's own template; what can't be used is one line."""
    folder, file = save("llama", tmp_path / "model", vocab_size=300).removeprefix("hf:"), tmp_path / "pairs.jsonl"
    make_tokenizer(Path(folder), PLAIN)
    lines = [
        {"chosen": talk(f"q{n}", "yes")["messages"], "rejected": talk(f"q{n}", "no")["messages"]} for n in range(6)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = str(tmp_path / "out")
    status, printed = on_ranks_of_its_own(2, dpo.__file__, [folder, str(file), out], tmp_path, {})
    assert status == 0, printed
    numbers = "  ".join(rf"{name} -?\d\.\d{{4}}" for name in dpo.FIGURES)
    assert re.findall(rf"^step (\d)/2  {numbers}$", printed, re.MULTILINE) == ["1", "2"]  # of one rank
    assert {"config.json", "tokenizer.json"} <= {one.name for one in (tmp_path / "out" / "model-2").iterdir()}
    short = save("llama", tmp_path / "short", vocab_size=300, max_position_embeddings=4).removeprefix("hf:")
    make_tokenizer(Path(short), PLAIN)
    masked = save("bert", tmp_path / "masked").removeprefix("hf:")
    (tmp_path / "others.jsonl").write_text(file.read_text().replace("yes", "yea"))
    for words, part in (
        ([folder, str(tmp_path / "others.jsonl"), out], "--dataset: the checkpoint's data differs from this run's"),
        ([folder, str(tmp_path / "none.jsonl"), out], "none.jsonl: there is no file of text"),
        ([short, str(file), out], "more than 4 tokens (none is cut)"),
        ([masked, str(file), out], "masked: doesn't learn the next token, as answers need; give a causal model"),
        ([folder, str(file), out, "--chat-fields=chosen=good"], "line 1: has no field good, which --chat-fields names"),
        (
            [folder, str(file), out, "--chat-fields=chosen=good;chosen=a"],
            "for 2 sources, of which 1 are given; give each",
        ),
        ([folder, str(file), out, "--learning-rate=1e-6"], "--learning-rate=1e-6: no such flag; here it is --lr"),
        ([folder, str(file), out, "--lora=0"], "--lora 0: must be 1 or more"),
        ([folder, str(file)], "the following arguments are required: OUT"),
    ):
        status, printed = on_ranks_of_its_own(2, dpo.__file__, words, tmp_path, {})
        assert status == 2
        assert next(line for line in printed.splitlines() if "error" in line).startswith("fsdp2: error: ")
        assert part in printed
        assert "Traceback" not in printed


def test_own_loop_runs_as_a_program(tmp_path: Path) -> None:
    status, printed = on_ranks_of_its_own(2, own_loop.__file__, [str(tmp_path)], tmp_path, {})
    assert status == 0, printed
    first, second = (json.loads(line) for line in re.findall(r"\[\d[\d., ]+\]", printed))
    assert first == second
    assert first[-1] < first[0]
    assert (tmp_path / "model-6" / "config.json").is_file()
