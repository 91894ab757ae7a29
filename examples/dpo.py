"""Direct preference optimisation:  torchrun --nproc_per_node 2 examples/dpo.py MODEL

Two models are sharded: a policy that is trained, and the frozen reference that it came from. Each step compares answers
that people chose with those they rejected (https://arxiv.org/abs/2305.18290). MODEL is a folder of Hugging Face's.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2.checkpoint.weights import load_weights
from fsdp2.models import initial
from fsdp2.models.meta import parameters_on_meta
from fsdp2.parallel import fully_sharded, groups, mesh, meta
from fsdp2_extra.models import blocks

PAIRS = [  # question, the answer that was chosen, the one that was rejected
    ("What is 2 + 2? ", "4", "It depends."),
    ("Name a colour. ", "Blue.", "Why do you ask?"),
    ("Is water wet? ", "Yes, to the touch.", "No idea"),
    ("Capital of Peru? ", "Lima", "A city in Peru, I think."),
]
BETA, LENGTH = 0.1, 48


def rows(answer: int):  # (pairs, LENGTH) bytes as tokens, and as targets: -100 where no answer stands
    tokens, targets = torch.zeros(len(PAIRS), LENGTH, dtype=torch.long), torch.full((len(PAIRS), LENGTH), -100)
    for row, pair in enumerate(PAIRS):
        start, text = len(pair[0]), (pair[0] + pair[answer]).encode()
        tokens[row, : len(text)] = torch.tensor(list(text))
        targets[row, start : len(text)] = tokens[row, start : len(text)]
    return tokens, targets


def sharded(folder: str, device: torch.device, *, trained: bool):
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.requires_grad_(trained)  # before sharding: what is frozen has no gradient to exchange
    units = groups.shard_groups(model, blocks.find_blocks(model))
    ranks = mesh.make_mesh(device.type, dist.get_world_size())
    # Without a backward nothing would free what torch keeps gathered for it after a forward.
    fully_sharded.shard(model, units, mesh=ranks, reshard_after_forward=None if trained else True)
    meta.allocate(model, device)
    load_weights(folder, model.state_dict(), initial.slices_of, meta.shared_names(model))
    meta.check_initialised(model)
    return model


def margin(model, chosen, rejected):  # by how much each chosen answer is the likelier one: (pairs,)
    # Both in one forward. After two, backward would keep every whole gradient until its second part comes.
    tokens, targets = (torch.cat(both) for both in zip(chosen, rejected, strict=True))
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    likely, unlikely = -F.cross_entropy(logits.transpose(1, 2), targets[:, 1:], reduction="none").sum(1).view(2, -1)
    return likely - unlikely


def loss_of(policy, reference, chosen, rejected):  # the sum over this rank's pairs
    with torch.no_grad():
        before = margin(reference, chosen, rejected)
    return -F.logsigmoid(BETA * (margin(policy, chosen, rejected) - before)).sum()


def train(folder: str, device: torch.device, steps: int = 5) -> list[float]:
    policy, reference = sharded(folder, device, trained=True), sharded(folder, device, trained=False)
    optimizer, losses, world = torch.optim.AdamW(policy.parameters(), lr=1e-3), [], dist.get_world_size()
    chosen, rejected = (
        [part.tensor_split(world)[dist.get_rank()].to(device) for part in rows(answer)] for answer in (1, 2)
    )
    for _ in range(steps):
        loss = loss_of(policy, reference, chosen, rejected) / len(PAIRS)
        (loss * world).backward()  # FSDP averages over ranks what is to be a sum
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach())
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    print(train(sys.argv[1], device))
    dist.destroy_process_group()
