"""What accelerate, and transformers' Trainer with it, leaves of an FSDP2 run: a resume goes on from it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp2 import data, models
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.opening import opened
from fsdp2.data.loader import Batches
from fsdp2.models.spec import ModelSpec
from fsdp2_tools.checkpoint.__main__ import main as commands
from fsdp2_tools.checkpoint.import_ import import_
from tests.harness import Ranks, losses, main_in_ranks, of_kind
from tests.others.common import BATCH, SEED, WORDS, flags, plain, save

LR, DECAY, BETAS = 0.01, 0.1, (0.9, 0.95)
HOW = (f"--lr={LR}", "--optimizer=adamw", f"--weight-decay={DECAY}", f"--betas={BETAS[0]},{BETAS[1]}")


def _batches(dataset: Any) -> Batches:
    return Batches(
        dataset.train,
        global_batch=2 * BATCH,
        accumulation=1,
        seed=SEED,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=torch.device("cpu"),
        workers=0,
    )


def _trained_by_accelerate(model: str, folder: str) -> list[float]:
    """A plain loop that shards with torch alone: two steps, what accelerate saves, and the losses of three more.

    Those begin with the data's first batch, as a run that resumes from another program's checkpoint does.
    """
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import fsdp_utils

    spec = models.get(model)
    net = plain(model).train()
    for block in spec.blocks(net):
        fully_shard(block)
    fully_shard(net)
    wide = [one for one in net.parameters() if one.dim() > 1]
    thin = [one for one in net.parameters() if one.dim() <= 1]
    groups = [{"params": wide, "weight_decay": DECAY}, {"params": thin, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # notes the first rate in each group
    dataset = data.load("random-tokens", root=None, seq_len=16, vocab_size=256)
    _steps(net, optimizer, spec, _batches(dataset), 2)
    PartialState(cpu=True)  # for its logger
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "False")  # which it sets, for transformers
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    of_this_rank = SimpleNamespace(num_processes=2, process_index=dist.get_rank(), is_fsdp2=True)
    fsdp_utils.save_fsdp_model(plugin, of_this_rank, net, folder)
    fsdp_utils.save_fsdp_optimizer(plugin, of_this_rank, optimizer, net, folder)
    return _steps(net, optimizer, spec, _batches(dataset), 3)


def _steps(
    net: nn.Module, optimizer: torch.optim.Optimizer, spec: ModelSpec, batches: Batches, count: int
) -> list[float]:
    found: list[float] = []
    for (batch,) in batches:
        loss = spec.loss(spec.call(net, batch), batch.targets)
        (loss * dist.get_world_size() / batch.target_count).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        found.append(float(total / batch.target_count))
        if len(found) == count:
            break
    return found


@pytest.fixture(scope="module")
def left(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[float]]:
    """A model, the folder that its training left, and the losses with which it went on."""
    root = tmp_path_factory.mktemp("accelerate")
    model, folder = save("llama", root / "model"), root / "checkpoint-2"
    expected = ranks.run(_trained_by_accelerate, model, str(folder))[0]
    # What Trainer writes beside it.
    torch.save({"last_epoch": 2}, folder / "scheduler.pt")
    torch.save({"python": (3,)}, folder / "rng_state_0.pth")
    (folder / "trainer_state.json").write_text('{"global_step": 2}')
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["optimizer_0", "pytorch_model_fsdp_0"]
    return model, folder, expected


def test_a_run_goes_on_with_the_losses_of_the_other_program(
    ranks: Ranks, left: tuple[str, Path, list[float]], tmp_path: Path
) -> None:
    model, folder, expected = left
    lines = import_(str(folder), str(tmp_path / "imported"))
    assert lines[0].endswith("21 tensors of a model and its optimizer"), lines
    assert not any("left out" in line for line in lines), lines
    assert lines[2].startswith("its optimizer has 2 groups of parameters")
    line = flags(model, tmp_path / "run", *WORDS, *HOW, "--schedule=constant", "--max-steps=3", "--no-save-model")
    events = ranks.run(main_in_ranks, [*line, f"--resume={tmp_path / 'imported'}"])[0]
    assert of_kind(events, "resume")
    assert losses(events) == expected
    assert len(set(expected)) == 3
    fresh = ranks.run(main_in_ranks, [*flags(model, tmp_path / "fresh", *WORDS, *HOW), "--max-steps=3"])[0]
    assert losses(fresh) != expected, "the moments count"


def test_its_weights_alone_are_read_where_they_are(left: tuple[str, Path, list[float]]) -> None:
    _, folder, _ = left
    assert commands(["show", str(folder)]) == 0
    with opened(str(folder)) as both, opened(str(folder / "pytorch_model_fsdp_0")) as alone:
        names = {name for name in both.tensors if name.startswith("model.")}
        assert names == alone.tensors.keys()
        assert all(torch.equal(both.read(name), alone.read(name)) for name in names)
        assert "optimizer.state.lm_head.weight.exp_avg" in both.tensors


def test_of_two_models_one_has_to_be_chosen(left: tuple[str, Path, list[float]], tmp_path: Path) -> None:
    _, folder, _ = left
    two = Path(shutil.copytree(folder, tmp_path / "two"))
    shutil.copytree(two / "pytorch_model_fsdp_0", two / "pytorch_model_fsdp_1")
    with pytest.raises(Refused, match="is in pytorch_model_fsdp_0 and in pytorch_model_fsdp_1; give one of them"):
        import_(str(two), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    (two / "optimizer_0" / "__0_0.distcp").write_bytes(b"")
    shutil.rmtree(two / "pytorch_model_fsdp_1")
    assert commands(["import", str(two), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
