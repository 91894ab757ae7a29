"""FSDP2 in a loop of one's own:  torchrun --nproc_per_node 2 examples/own_loop.py OUT [MODEL]
MODEL is a folder of Hugging Face's, or else a tiny Llama. Run again, on any number of ranks, it goes on."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fsdp2.checkpoint import files, full_model, restore, saver, state, store, weights
from fsdp2.models import initial
from fsdp2.models.meta import parameters_on_meta
from fsdp2.parallel import fully_sharded, groups, mesh, meta
from fsdp2.run.process import signals
from fsdp2_extra.models import blocks
from fsdp2_tools.checkpoint.export import export

TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
ROWS, TEXT = 8, torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 32, 1)  # of a step; all windows of 32 bytes


def build(folder):  # parameters without memory; buffers, such as rotary tables, with the values that their code gives
    with parameters_on_meta():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)


def train(out: Path, folder: str, device: torch.device, steps: int = 6, norm: float = 1.0, stop=None) -> list[float]:
    model, ranks, losses = build(folder), mesh.make_mesh(device.type, dist.get_world_size()), []
    fully_sharded.shard(model, groups.shard_groups(model, blocks.find_blocks(model)), mesh=ranks)
    meta.allocate(model, device)  # memory for this rank's shards alone, NaN until they get a value
    weights.load_weights(folder, model.state_dict(), initial.slices_of, meta.shared_names(model))  # this rank's rows
    meta.check_initialised(model)  # raises if anything still holds that NaN
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    place, app = store.Store(files.LocalFiles(out / "checkpoints")), state.AppState(model, optimizer, {})
    stop = stop or signals.StopSignals()  # which remembers none until it is entered
    for step in range(done := restore.restore_newest(place, app, seed=1), steps):
        order = torch.randperm(len(TEXT), generator=torch.Generator().manual_seed(step))  # on any number of ranks
        mine = order[:ROWS].tensor_split(ranks.size())[dist.get_rank()]
        tokens = TEXT[mine if len(mine) else order[:1]].to(device)  # without a row of its own, another's with weight 0
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss * len(mine) / ROWS
        (loss * ranks.size()).backward()  # FSDP averages over ranks, and this is a sum
        fully_sharded.clip(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := torch.stack([loss.detach(), loss.new_tensor(stop.reason is not None)]))
        losses.append(total[0].item())
        if (step + 1) % 3 == 0 or step + 1 == steps or total[1]:
            saver.save_now(place, app, step + 1, keep=2)
        if total[1]:  # SIGTERM or Ctrl-C on any rank: all of them save, and end, after the same step
            return losses
    made = out / f"model-{max(done, steps)}"  # the newest checkpoint's, which is exported
    full_model.while_rank_0(lambda: made.exists() or export(str(out), str(made), "hf", like=(build(folder), {})))
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    out, folder = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else f"{sys.argv[1]}/tiny"
    if len(sys.argv) == 2:
        full_model.while_rank_0(lambda: LlamaForCausalLM(LlamaConfig.from_dict(TINY)).save_pretrained(folder))
    with signals.StopSignals() as stop:
        print(train(out, folder, device, stop=stop))
    dist.barrier()  # gloo lets go of what the last exchange held; as Python ends, that aborts (pytorch 190489)
    dist.destroy_process_group()
