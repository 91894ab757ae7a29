"""Direct preference optimisation:  torchrun --nproc_per_node 2 examples/dpo.py MODEL PAIRS OUT [--lora 16] [--help]

A policy learns to prefer answers that people chose to those they rejected, measured against the frozen reference that
it came from (https://arxiv.org/abs/2305.18290). That is a second sharded model, or with --lora the policy without its
adapters. MODEL is a folder of Hugging Face's, PAIRS a file of pairs (docs/data.md). Run again, on any number of ranks,
it goes on.
"""

import json
import math
import os
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp2 import models
from fsdp2.checkpoint import files, full_model, meaning, restore, saver, state, store, weights
from fsdp2.data.loader import Batches, evaluation_batches
from fsdp2.models import initial
from fsdp2.options.errors import ConfigError, flag_of
from fsdp2.options.parser import Parser
from fsdp2.options.values import (
    chat_fields,
    checked,
    location,
    number,
    one_of,
    or_off,
    steps_or_share,
    trackers,
    whole,
    word_of,
)
from fsdp2.parallel import fully_sharded, groups, mesh, meta, precision
from fsdp2.parallel.activation_checkpointing import checkpoint_activations
from fsdp2.parallel.shards import groups_of
from fsdp2.report.metrics import MetricsFile
from fsdp2.run import restoring
from fsdp2.run.checkpoints import is_due
from fsdp2.run.directory.marker import shapes_of
from fsdp2.run.parts import Base, checksum
from fsdp2.run.process import runtime
from fsdp2.run.process.ending import exit_status
from fsdp2.run.process.group import broadcast, process_group
from fsdp2.run.process.signals import StopSignals
from fsdp2.run.schedule import Schedule
from fsdp2_extra.models import lora
from fsdp2_extra.text import pairs
from fsdp2_extra.text.mixture import by_source
from fsdp2_extra.text.tokenizer_file import own_tokenizer
from fsdp2_extra.trackers import listeners, logins
from fsdp2_tools.checkpoint.adapters import read_adapters
from fsdp2_tools.checkpoint.card import card
from fsdp2_tools.checkpoint.export import export

FLAGS = {
    "beta": (0.1, number(0, 100, open_minimum=True), "how much a reward counts: what leaving the reference costs"),
    "lr": (None, number(0, 1, open_minimum=True), "learning rate of AdamW; unset = 1e-6, of adapters 1e-5"),
    "schedule": ("cosine", one_of("cosine", "linear", "constant"), "how the learning rate falls"),
    "warmup_steps": (0.03, steps_or_share, "optimizer steps in which it rises first; below 1 a share of all"),
    "clip_grad_norm": (1.0, or_off(number(0, 1e30, open_minimum=True)), "clip the gradients to this norm, or off"),
    "epochs": (1, whole(1), "passes over the pairs"),
    "global_batch_size": (4, whole(1), "pairs in a step, over all ranks"),
    "batch_size": (None, whole(1), "pairs of a rank in one forward, of which a step has several; unset = all in one"),
    "seq_len": (1024, whole(2), "the most tokens of a question with an answer; none is cut"),
    "bad_samples": ("refuse", one_of("refuse", "drop"), "pairs that are too long, or have no two answers"),
    "pairs_as": (None, one_of("chat", "text"), "texts through the chat template, or raw; unset = raw without prompts"),
    "eval_pairs": (None, location, "pairs that are evaluated after each epoch, and not learned"),
    "checkpoint_every": (100, whole(1), "steps between checkpoints"),
    "chat_fields": (None, chat_fields, "a file's names of fields: prompt=question,chosen=good; ; before --eval-pairs'"),
    "eval_every": (None, whole(1), "also evaluate after each N steps"),
    "lora": (None, whole(1), "train adapters of this rank, and no weights"),
    "lora_alpha": (None, number(0, 1e6, open_minimum=True), "adapters count alpha / rank times; unset = 2 x rank"),
    "track": (None, trackers, "also write to wandb, mlflow or tensorboard, or several by commas"),
}
FIGURES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")  # TRL's names
AS_IT_BEGAN = ("lora", "lora_alpha", "beta", "lr", "schedule", "warmup_steps", "clip_grad_norm", "global_batch_size")


def parse(words=None):
    parser = Parser(prog="examples/dpo.py", description="Learn from pairs of answers.", allow_abbrev=False)
    for name in ("model", "pairs", "out"):
        parser.add_argument(name, metavar=name.upper())
    for name, (default, check, what) in FLAGS.items():
        said = "" if default is None else f" (default: {default})"
        parser.add_argument(flag_of(name), metavar=word_of(check), default=default, help=what + said)
    parser.add_argument("--mixed-precision", nargs="?", const="bf16", choices=["bf16"], help="compute in bf16")
    again: dict[str, Any] = {"nargs": "?", "const": "block", "choices": ["block", "op"]}
    parser.add_argument("--activation-checkpointing", **again, help="activations again in backward; bare = block")
    # What a training's schedule and trackers read, without a flag here.
    parser.set_defaults(max_steps=None, gamma=1.0, lr_floor=0.0, tensorboard=False)
    flags = parser.parse_args(words)
    for name, (_, check, _) in FLAGS.items():
        if getattr(flags, name) is not None:
            setattr(flags, name, checked(flag_of(name), getattr(flags, name), check))
    flags.model = os.path.expanduser(flags.model)
    if os.path.isdir(flags.model):  # of a name on the hub there may be no such folder
        flags.model = os.path.abspath(flags.model)  # adapters name it, and are merged from anywhere
    flags.lr, flags.track = flags.lr or (1e-5 if flags.lora else 1e-6), flags.track or ()
    if flags.lora_alpha and not flags.lora:
        raise ConfigError("--lora-alpha: there are no adapters without --lora RANK; add it, or drop this one")
    if flags.eval_every and not flags.eval_pairs:
        raise ConfigError("--eval-every: there is nothing to evaluate without --eval-pairs; add it, or drop this one")
    flags.lora_alpha = flags.lora_alpha or (2.0 * flags.lora if flags.lora else None)
    return flags


def require_same(flags, place: store.Store, kept: dict[str, bytes]) -> None:
    """Raise ConfigError on all ranks if a run would go on with other settings than it began with, or another model.

    kept: what stands in MODEL beside its weights and says what they mean.
    """
    marker: dict[str, Any] = {}
    if dist.get_rank() == 0 and (steps := place.committed()):
        with suppress(store.DamagedCheckpoint):  # restoring it says that
            marker = store.read_marker(place.checkpoint(steps[-1]))
    began, changed = broadcast((marker.get("began", {}), meaning.others(marker, kept)))
    if began and flags.lora:
        began.setdefault("lora_alpha", 2.0 * flags.lora)  # in checkpoints from before there was the flag
    if changed:
        raise ConfigError(
            f"{flags.model}/{changed[0]}: has changed since {flags.out} began; put it back, or another OUT"
        )
    for name, was in began.items():
        if name in AS_IT_BEGAN and was != (now := getattr(flags, name)):
            was, now = ("none" if one is None else one for one in (was, now))
            raise ConfigError(
                f"{flags.out}: began with {flag_of(name)} {was}, and not {now}; give that, or another OUT"
            )


@contextmanager
def in_a_line():
    try:
        yield
    except ValueError as error:  # of a model or pairs that can't be used, or aren't those of the checkpoint
        raise ConfigError(str(error)) from None


def spec_of(flags):
    """The specification of transformers' model, with adapters if `--lora` asks for them."""
    dtype = precision.DTYPES[flags.mixed_precision or "fp32"]
    adapters = lora.Lora(flags.lora, flags.lora_alpha, base_dtype=dtype, weights=flags.model) if flags.lora else None
    return models.get(f"hf:{flags.model}", lora=adapters)


def without_adapters_file(files_of_model) -> dict[str, bytes]:
    return {name: content for name, content in files_of_model.items() if name != lora.FILE}


def sharded(flags, device: torch.device, *, trained: bool):
    spec = spec_of(flags)
    model = spec.on_meta("own").eval()  # without dropout: a reference that draws masks would not be one
    if not trained:  # before sharding: what is frozen has no gradient to exchange, and is kept as it is computed
        for parameter in model.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(precision.DTYPES[flags.mixed_precision or "fp32"])
    if trained and flags.activation_checkpointing:  # before sharding, whose all-gathers stay outside
        checkpoint_activations(spec.blocks(model), flags.activation_checkpointing)
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


def evaluated(policy, reference, flags, held_out: pairs.Pairs, device: torch.device) -> dict[str, float]:
    """The means of FIGURES over pairs that aren't learned. A collective call."""
    total, world = torch.zeros(len(FIGURES), dtype=torch.float64, device=device), dist.get_world_size()
    at_a_time = flags.batch_size or -(-flags.global_batch_size // world)
    with torch.no_grad():
        for batch in evaluation_batches(held_out, at_a_time, dist.get_rank(), world, device):
            total += figures_of(policy, reference, flags.beta, batch.inputs, batch.targets) * batch.valid
    for group in groups_of(policy):
        group.reshard()  # as a backward would
    dist.all_reduce(total)
    return dict(zip(FIGURES, (total / len(held_out)).tolist(), strict=True))


def header(flags, data: pairs.Pairs, held_out: pairs.Pairs | None, policy, steps: int) -> list[str]:
    sizes = [(one.numel(), one.requires_grad) for one in policy.parameters()]
    trained, world = sum(size for size, learns in sizes if learns), dist.get_world_size()
    warm = f"{flags.warmup_steps:.0%}" if flags.warmup_steps < 1 else flags.warmup_steps
    clip = "not clipped" if flags.clip_grad_norm is None else f"clipped to norm {flags.clip_grad_norm:g}"
    reference = "the policy without its adapters" if flags.lora else "a frozen copy"
    batch = min(flags.global_batch_size, len(data))
    return [
        f"model: {flags.model}, {sum(size for size, _ in sizes):,} parameters, {trained:,} of them trained; reference: "
        f"{reference}; {flags.mixed_precision or 'fp32'} on {world} rank{'s' * (world > 1)}",
        f"pairs: {data.about}",
        *([f"held out: {held_out.about}"] if held_out else []),
        f"steps: {steps:,} in all; global batch {batch:,} pairs; beta {flags.beta:g}; AdamW, lr {flags.lr:g}, "
        f"{flags.schedule} after {warm} of warm-up; gradients {clip}",
    ]


def tracked(flags, say) -> listeners.Trackers:
    own, folder = dict(vars(flags)), Path(flags.out).absolute()
    plain = {name: one if isinstance(one, (int, float, str)) else str(one) for name, one in own.items()}
    kept = listeners.run_id(files.LocalFiles(folder), fresh=False)
    return listeners.Trackers(flags.track, listeners.Run(kept, None, {}, plain, folder), say)


def train(flags, data: pairs.Pairs, device: torch.device, steps: int, held_out: pairs.Pairs | None = None, stop=None):
    place = store.Store(files.LocalFiles(f"{flags.out}/checkpoints"))
    own_files = spec_of(flags).files("own")
    require_same(flags, place, kept := without_adapters_file(own_files))
    stop = stop or StopSignals()  # which remembers none until it is entered
    policy = sharded(flags, device, trained=True)
    reference = None if flags.lora else sharded(flags, device, trained=False)
    found, world, rank = [], dist.get_world_size(), dist.get_rank()
    learned = [one for one in policy.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=flags.lr)
    ranks: dict[str, Any] = {"rank": rank, "world_size": world, "device": device}  # pairs have one order on all numbers
    parts_of_step = -(-flags.global_batch_size // (world * flags.batch_size)) if flags.batch_size else 1
    batches = Batches(data, global_batch=flags.global_batch_size, accumulation=parts_of_step, seed=1, **ranks)
    schedule, progress = Schedule(flags, optimizer, batches), state.Progress()
    frozen = [one for name, one in (reference or policy).state_dict().items() if not lora.is_adapter(name)]
    name, what = ("reference", "its reference is") if reference else ("base", "its adapters go beside")
    parts: dict[str, state.Part] = {"batches": batches, "schedule": state.SchedulerState(schedule.scheduler)}
    parts |= {"progress": progress, name: Base(flags.model, checksum(frozen), what)}
    app = state.AppState(policy, optimizer, parts, not_saved=lambda name: flags.lora and not lora.is_adapter(name))
    ours = restoring.settings_of(optimizer)
    with in_a_line():
        done = restore.restore_newest(place, app, seed=1)
        restoring.require_possible(optimizer, ours, theirs := restoring.settings_of(optimizer))
        if theirs != ours or schedule.scheduler.last_epoch != done:
            raise ValueError(f"{flags.out}: its checkpoint has other settings of the optimizer, or of the schedule")
    schedule.go_on(done, None)
    os.makedirs(flags.out, exist_ok=True)
    if rank == 0 and not os.path.lexists(f"{flags.out}/model"):  # for fsdp2.checkpoint export
        meaning.replace(files.LocalFiles(f"{flags.out}/model"), own_files, lambda name: False)
    metrics = MetricsFile(Path(flags.out) / "metrics.jsonl", rank)
    metrics.cut(progress.metrics_position, done)

    def say(*lines: str) -> None:
        if rank == 0:
            print(*lines, sep="\n", flush=True)

    say(*(lines := header(flags, data, held_out, policy, steps)))
    if done:
        say(f"resumed from {place.checkpoint(done)} at step {done:,}, epoch {batches.epoch + 1}")
    told: list[MetricsFile | listeners.Trackers] = [metrics]
    if rank == 0 and flags.track:
        told.append(tracked(flags, say))

    def emit(kind: str, facts: dict[str, Any]) -> None:
        for listener in told:
            listener(kind, facts)

    emit("resume" if done else "start", {"header": lines, "step": done})
    exported = f"{flags.out}/model-{steps}"
    described = {meaning.PART: meaning.hashes(kept), "model": shapes_of(policy)}  # what a run's marker has, for exports
    if flags.lora:
        described["adapters"] = json.loads(own_files[lora.FILE])
    for step in range(done + 1, steps + 1):
        if batches.at_end():
            batches.next_epoch()
        total = torch.zeros(len(FIGURES) + 1, device=device)  # the last counts the ranks that were asked to stop
        total[-1] = stop.reason is not None
        for batch in next(iter(batches)):
            # A rank without a pair in this microbatch computes another rank's, with weight 0.
            figures = figures_of(policy, reference, flags.beta, batch.inputs, batch.targets) * batch.valid
            (figures[0] / batch.samples * world).backward()  # FSDP averages over ranks, and this is a sum
            total[:-1] += figures.detach() / batch.samples
        norm = fully_sharded.clip(learned, flags.clip_grad_norm or math.inf)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()
        schedule.after_step()
        dist.all_reduce(total)
        found.append(dict(zip(FIGURES, total[:-1].tolist(), strict=True)))
        # ln 2 is the loss of a policy that is still the reference
        say(f"step {step}/{steps}  " + in_words(found[-1]))
        facts = {"step": step, "epoch": batches.epoch, "lr": rate, "grad_norm": float(norm), "samples": batch.samples}
        emit("train", facts | found[-1])
        if held_out and (batches.at_end() or step == steps or is_due(flags.eval_every, step)):
            result = evaluated(policy, reference, flags, held_out, device)
            emit("eval", {"step": step, "epoch": batches.epoch, "count": len(held_out), **result})
            say(f"held out, after step {step}  " + in_words(result))
        if is_due(flags.checkpoint_every, step) or step == steps or total[-1]:
            progress.step, progress.metrics_position = step, broadcast(metrics.position())
            began = {one: getattr(flags, one) for one in AS_IT_BEGAN}
            saver.save_now(place, app, step, keep=2, info={"began": began, **described})
            say(f"wrote {place.checkpoint(step)}")
        if total[-1] and step < steps:
            reason = stop.agreed(runtime.world())
            say(f"stopped by {reason} after step {step}; the same command goes on")
            break
    else:
        full_model.while_rank_0(lambda: os.path.exists(exported) or export_model(flags, steps))
        reason = "finished" if found else "already finished"
        say(f"wrote {exported}" if found else f"{flags.out} is finished; {exported} has its model")
        say(f"read it: Auto{'Peft' * bool(flags.lora)}ModelForCausalLM.from_pretrained({exported!r})")
    emit("end", {"step": progress.step, "reason": reason})
    for listener in told:
        listener.close()
    return found


def in_words(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in figures.items())


def export_model(flags, steps: int):
    spec, to = spec_of(flags), "peft" if flags.lora else "hf"
    own_files = spec.files("own")
    like = spec.on_meta("own"), without_adapters_file(own_files)
    adapters = read_adapters(own_files[lora.FILE], flags.out) if flags.lora else None
    more = {"peft": {"task_type": "CAUSAL_LM"}, "talks": flags.pairs_as != "text"}
    of_model = {"model": f"hf:{flags.model}"}  # as a run of fsdp2.train names it
    chosen = {name.replace("_", "-"): one for name, one in vars(flags).items()} | of_model
    known = dict.fromkeys(("model", "pairs", "mixed_precision")) | {name: one for name, (one, *_) in FLAGS.items()}

    def card_of(step: int | None) -> bytes:
        library, by = "peft" if flags.lora else "transformers", "examples/dpo.py"
        return card(Path(flags.out), {"flags": chosen}, step, library, "causal", by=by, defaults=known)

    export(flags.out, f"{flags.out}/model-{steps}", to, like=like, adapters=adapters, card=card_of, **more)


if __name__ == "__main__":
    with exit_status():
        flags = parse()
        world, few = runtime.world(), f"--global-batch-size {flags.global_batch_size}: fewer pairs than"
        if flags.global_batch_size < (ranks := world.world_size):
            raise ConfigError(f"{few} the {ranks} ranks that share them; give {ranks} or more")
        if world.rank == 0:
            logins.require_trackers(flags)
        with in_a_line():
            spec = spec_of(flags)
            if spec.task != "causal":
                raise ConfigError(f"{flags.model}: doesn't learn the next token, as answers need; give a causal model")
            tokenizer = own_tokenizer(Path(str(spec.weights)))  # of a name on the hub, the folder in its cache
            how: dict[str, Any] = {"length": min(flags.seq_len, spec.positions or flags.seq_len)}
            how |= {"as_": flags.pairs_as, "drop": flags.bad_samples == "drop", "vocab_size": spec.vocab_size("own")}
            places = by_source([one for one in (flags.pairs, flags.eval_pairs) if one], flags.chat_fields)
            data, *held_out = [pairs.load(place, tokenizer, fields=own, **how) for place, own in places]
        device = runtime.pick_device("auto", world)
        with process_group(world, device), StopSignals() as stop:
            steps = flags.epochs * -(-len(data) // flags.global_batch_size)
            train(flags, data, device, steps, held_out[0] if held_out else None, stop)
