"""Direct preference optimisation:  torchrun --nproc_per_node 2 examples/dpo.py MODEL PAIRS OUT [OURS=THEIRS,…]

Two models are sharded: a policy that is trained, and the frozen reference that it came from. Each step compares answers
that people chose with those they rejected (https://arxiv.org/abs/2305.18290). MODEL is a folder of Hugging Face's,
PAIRS a file of pairs (docs/data.md). Run again, on any number of ranks, it goes on.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2.checkpoint import files, full_model, restore, saver, state, store, weights
from fsdp2.data.loader import Batches
from fsdp2.models import initial
from fsdp2.models.meta import parameters_on_meta
from fsdp2.options.errors import ConfigError
from fsdp2.parallel import fully_sharded, groups, mesh, meta
from fsdp2.run.process.ending import exit_status
from fsdp2_extra.models import blocks
from fsdp2_extra.text import forms, pairs, tokenizer_file
from fsdp2_tools.checkpoint.export import export

BETA, RATE, EPOCHS, SAVE_EVERY = 0.1, 1e-6, 1, 100
BATCH, LENGTH = 4, 1024  # pairs a step over all ranks, and the most tokens of a question with an answer


@contextmanager
def in_a_line():
    try:
        yield
    except ValueError as error:  # of pairs that can't be used, or aren't those of the checkpoint
        raise ConfigError(str(error)) from None


def build(folder):
    with parameters_on_meta():
        # Without dropout: a reference that draws masks would not be one.
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()


def sharded(folder: str, device: torch.device, *, trained: bool):
    model = build(folder)
    model.requires_grad_(trained)  # before sharding: what is frozen has no gradient to exchange
    units = groups.shard_groups(model, blocks.find_blocks(model))
    ranks = mesh.make_mesh(device.type, dist.get_world_size())
    # Without a backward nothing would free what torch keeps gathered for it after a forward.
    fully_sharded.shard(model, units, mesh=ranks, reshard_after_forward=None if trained else True)
    meta.allocate(model, device)
    weights.load_weights(folder, model.state_dict(), initial.slices_of, meta.shared_names(model))
    meta.check_initialised(model)
    return model


def margin(model, tokens, targets):  # (pairs, 2, length) -> (pairs,): how much likelier each chosen answer is
    # Both in one forward. After two, backward would keep every whole gradient until its second part comes.
    logits = model(input_ids=tokens.flatten(0, 1), use_cache=False).logits[:, :-1].transpose(1, 2)
    found = -F.cross_entropy(logits, targets.flatten(0, 1)[:, 1:], reduction="none").sum(1).view(-1, 2)
    return found[:, 0] - found[:, 1]


def loss_of(policy, reference, tokens, targets):  # the sum over this rank's pairs
    with torch.no_grad():
        before = margin(reference, tokens, targets)
    return -F.logsigmoid(BETA * (margin(policy, tokens, targets) - before)).sum()


def train(folder: str, data: pairs.Pairs, out: Path, device: torch.device, steps: int, rate: float = RATE):
    policy, reference = sharded(folder, device, trained=True), sharded(folder, device, trained=False)
    optimizer, losses, world = torch.optim.AdamW(policy.parameters(), lr=rate), [], dist.get_world_size()
    rank = dist.get_rank()  # the order of pairs is one on any number of ranks
    batches = Batches(data, global_batch=BATCH, accumulation=1, seed=1, rank=rank, world_size=world, device=device)
    place = store.Store(files.LocalFiles(out / "checkpoints"))
    app = state.AppState(policy, optimizer, {"batches": batches})
    with in_a_line():
        done = restore.restore_newest(place, app)
    for step in range(done + 1, steps + 1):
        if batches.at_end():
            batches.next_epoch()
        (batch,) = next(iter(batches))
        # A rank that has no pair in this step has another's, which counts nothing.
        loss = loss_of(policy, reference, batch.inputs, batch.targets) * batch.valid / batch.samples
        (loss * world).backward()  # FSDP averages over ranks what is to be a sum
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach())
        losses.append(total.item())
        if rank == 0:  # ln 2 is the loss of a policy that is still the reference
            print(f"step {step}/{steps}  loss {losses[-1]:.4f}", flush=True)
        if step % SAVE_EVERY == 0 or step == steps:
            saver.save_now(place, app, step, keep=2)
    if losses:
        like = build(folder), tokenizer_file.tokenizer_files(folder)
        full_model.while_rank_0(lambda: export(str(out), f"{out}/model-{steps}", "hf", like=like))
    return losses


if __name__ == "__main__":
    with exit_status():
        with in_a_line():
            folder, place, out, *fields = sys.argv[1:] if len(sys.argv) > 3 else sys.exit(__doc__)
            config = AutoConfig.from_pretrained(folder)
            most = min(LENGTH, getattr(config, "max_position_embeddings", LENGTH))
            data = pairs.load(place, folder, most, config.vocab_size, forms.fields_of(",".join(fields)))
        dist.init_process_group()
        device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
        if not train(folder, data, Path(out), device, EPOCHS * -(-len(data) // BATCH)) and dist.get_rank() == 0:
            print(f"{out} is finished")
        dist.barrier()  # gloo lets go of what the last exchange held; as Python ends, that aborts (pytorch 190489)
        dist.destroy_process_group()
