"""Direct preference optimisation:  torchrun --nproc_per_node 2 examples/dpo.py MODEL PAIRS OUT [--lora 16] [--help]

A policy learns to prefer answers that people chose to those they rejected, measured against the frozen reference that
it came from (https://arxiv.org/abs/2305.18290). That is a second sharded model, or with --lora the policy without its
adapters. MODEL is a folder of Hugging Face's, PAIRS a file of pairs (docs/data.md). Run again, on any number of ranks,
it goes on.
"""

import os
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp2 import models
from fsdp2.checkpoint import files, full_model, restore, saver, state, store, weights
from fsdp2.data.loader import Batches
from fsdp2.models import initial
from fsdp2.options.errors import ConfigError, flag_of
from fsdp2.options.parser import Parser
from fsdp2.options.values import chat_fields, checked, number, whole, word_of
from fsdp2.parallel import fully_sharded, groups, mesh, meta, precision
from fsdp2.run.parts import Base, checksum
from fsdp2.run.process.ending import exit_status
from fsdp2_extra.models import lora
from fsdp2_extra.text import forms, pairs
from fsdp2_tools.checkpoint.adapters import read_adapters
from fsdp2_tools.checkpoint.export import export

FLAGS = {
    "beta": (0.1, number(0, 100, open_minimum=True), "how much a reward counts: what leaving the reference costs"),
    "lr": (None, number(0, 1, open_minimum=True), "learning rate of AdamW; unset = 1e-6, of adapters 1e-5"),
    "epochs": (1, whole(1), "passes over the pairs"),
    "global_batch_size": (4, whole(1), "pairs in a step, over all ranks"),
    "seq_len": (1024, whole(2), "the most tokens of a question with an answer; none is cut"),
    "checkpoint_every": (100, whole(1), "steps between checkpoints"),
    "chat_fields": (None, chat_fields, "how the file calls its fields, as prompt=question,chosen=good,rejected=bad"),
    "lora": (None, whole(1), "train adapters of this rank, and no weights"),
}
FIGURES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")  # TRL's names


def parse(words=None):
    parser = Parser(prog="examples/dpo.py", description="Learn from pairs of answers.", allow_abbrev=False)
    for name in ("model", "pairs", "out"):
        parser.add_argument(name, metavar=name.upper())
    for name, (default, check, meaning) in FLAGS.items():
        said = "" if default is None else f" (default: {default})"
        parser.add_argument(flag_of(name), metavar=word_of(check), default=default, help=meaning + said)
    parser.add_argument("--mixed-precision", nargs="?", const="bf16", choices=["bf16"], help="compute in bf16")
    flags = parser.parse_args(words)
    for name, (_, check, _) in FLAGS.items():
        if getattr(flags, name) is not None:
            setattr(flags, name, checked(flag_of(name), getattr(flags, name), check))
    flags.lr = flags.lr or (1e-5 if flags.lora else 1e-6)
    return flags


class Began(dict):  # settings, as a part of a checkpoint: a run goes on with those that it began with
    state_dict = dict.copy

    def load_state_dict(self, state):
        for name in [one for one in self if state[one] != self[one]]:
            was = f"{flag_of(name)} {state[name]}"
            raise ValueError(f"began with {was}, and not {self[name]}; give that, or another OUT")


@contextmanager
def in_a_line():
    try:
        yield
    except ValueError as error:  # of a model or pairs that can't be used, or aren't those of the checkpoint
        raise ConfigError(str(error)) from None


def spec_of(flags):
    """The model as transformers has it, with adapters if there are to be some."""
    dtype = precision.DTYPES[flags.mixed_precision or "fp32"]
    adapters = lora.Lora(flags.lora, 2.0 * flags.lora, base_dtype=dtype, weights=flags.model) if flags.lora else None
    return models.get(f"hf:{flags.model}", lora=adapters)


def sharded(flags, device: torch.device, *, trained: bool):
    spec = spec_of(flags)
    model = spec.on_meta("own").eval()  # without dropout: a reference that draws masks would not be one
    if not trained:  # before sharding: what is frozen has no gradient to exchange, and is kept as it is computed
        for parameter in model.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(precision.DTYPES[flags.mixed_precision or "fp32"])
    units, ranks = groups.shard_groups(model, spec.blocks(model)), mesh.make_mesh(device.type, dist.get_world_size())
    casts = precision.fsdp2_policy(flags.mixed_precision, "fp32")
    # Without a backward nothing would free what torch keeps gathered for it after a forward.
    fully_sharded.shard(model, units, mesh=ranks, precision=casts, reshard_after_forward=None if trained else True)
    meta.allocate(model, device)
    tied = [list(spec.base_weights(names)) for names in meta.shared_names(model)]
    weights.load_weights(str(spec.weights), spec.base_weights(model.state_dict()), initial.slices_of, tied)
    lora.draw_adapters(model, 1, brought=lambda name: False)  # if it has some
    meta.check_initialised(model)
    return model


def likelihoods(model, tokens, targets):  # (pairs, 2, length) -> (pairs, 2): their logarithms, chosen answers first
    # Both in one forward. After two, backward would keep every whole gradient until its second part comes.
    logits = model(input_ids=tokens.flatten(0, 1), use_cache=False).logits[:, :-1].float().transpose(1, 2)
    return -F.cross_entropy(logits, targets.flatten(0, 1)[:, 1:], reduction="none").sum(1).view(-1, 2)


def without_adapters(policy):
    from peft.helpers import rescale_adapter_scale

    return rescale_adapter_scale(policy, 0)


def figures_of(policy, reference, beta, tokens, targets):  # -> (5,): FIGURES, summed over this rank's pairs
    with torch.no_grad(), nullcontext() if reference else without_adapters(policy):
        before = likelihoods(reference or policy, tokens, targets)
    rewards = beta * (likelihoods(policy, tokens, targets) - before)
    margins = rewards[:, 0] - rewards[:, 1]
    return torch.stack([-F.logsigmoid(margins).sum(), *rewards.sum(0), margins.sum(), (margins > 0).sum()])


def train(flags, data: pairs.Pairs, device: torch.device, steps: int):
    policy = sharded(flags, device, trained=True)
    reference = None if flags.lora else sharded(flags, device, trained=False)
    found, world, rank = [], dist.get_world_size(), dist.get_rank()
    optimizer = torch.optim.AdamW((one for one in policy.parameters() if one.requires_grad), lr=flags.lr)
    began = Began({name: getattr(flags, name) for name in ("beta", "lr", "global_batch_size")})
    ranks: dict[str, Any] = {"rank": rank, "world_size": world, "device": device}  # pairs have one order on all numbers
    batches = Batches(data, global_batch=flags.global_batch_size, accumulation=1, seed=1, **ranks)
    place = store.Store(files.LocalFiles(f"{flags.out}/checkpoints"))
    frozen = [one for name, one in (reference or policy).state_dict().items() if not lora.is_adapter(name)]
    name, what = ("reference", "its reference is") if reference else ("base", "its adapters go beside")
    parts: dict[str, state.Part] = {"batches": batches, "began": began, name: Base(flags.model, checksum(frozen), what)}
    app = state.AppState(policy, optimizer, parts, elsewhere=lambda name: flags.lora and not lora.is_adapter(name))
    with in_a_line():
        done = restore.restore_newest(place, app)
    for step in range(done + 1, steps + 1):
        if batches.at_end():
            batches.next_epoch()
        (batch,) = next(iter(batches))
        # A rank that has no pair in this step has another's, which counts nothing.
        figures = figures_of(policy, reference, flags.beta, batch.inputs, batch.targets) * batch.valid / batch.samples
        (figures[0] * world).backward()  # FSDP averages over ranks what is to be a sum
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := figures.detach())
        found.append(dict(zip(FIGURES, total.tolist(), strict=True)))
        if rank == 0:  # ln 2 is the loss of a policy that is still the reference
            said = "  ".join(f"{name} {value:.4f}" for name, value in found[-1].items())
            print(f"step {step}/{steps}  {said}", flush=True)
        if step % flags.checkpoint_every == 0 or step == steps:
            saver.save_now(place, app, step, keep=2)
    full_model.while_rank_0(lambda: os.path.exists(f"{flags.out}/model-{steps}") or leave(flags, steps))
    return found


def leave(flags, steps: int):
    spec, to = spec_of(flags), "peft" if flags.lora else "hf"
    like = spec.on_meta("own"), spec.files("own")
    adapters = read_adapters(like[1][lora.FILE], flags.out) if flags.lora else None
    peft = {"task_type": "CAUSAL_LM"}
    export(flags.out, f"{flags.out}/model-{steps}", to, like=like, adapters=adapters, peft=peft)


if __name__ == "__main__":
    with exit_status():
        flags = parse()
        with in_a_line():
            spec = spec_of(flags)
            if spec.task != "causal":
                raise ConfigError(f"{flags.model}: doesn't learn the next token, as answers need; give a causal model")
            most, fields = min(flags.seq_len, spec.positions or flags.seq_len), forms.fields_of(flags.chat_fields or "")
            data = pairs.load(flags.pairs, flags.model, most, spec.vocab_size("own"), fields)
        dist.init_process_group()
        device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
        steps = flags.epochs * -(-len(data) // flags.global_batch_size)
        if not train(flags, data, device, steps) and dist.get_rank() == 0:
            print(f"{flags.out} is finished")
        dist.barrier()  # gloo lets go of what the last exchange held; as Python ends, that aborts (pytorch 190489)
        dist.destroy_process_group()
