"""Train a sharded model:  torchrun --nproc_per_node 2 -m fsdp2.train

The whole job on one page. Read `main` top to bottom: process, data, model, where to start, the loop, what is
left behind. What a step does is in `train_step`; everything else is one call away.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdp2.config import Config, parse
from fsdp2.run.process import early

if __name__ == "__main__":
    early.answer(parse)

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from fsdp2.checkpoint.state import Part, Progress, seed_everything
from fsdp2.data.loader import Batch
from fsdp2.evaluate import evaluate
from fsdp2.observing import observed
from fsdp2.options.own_model import blocks_of
from fsdp2.options.strategies import check_device
from fsdp2.parallel.baselines import baseline
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.rules import Start
from fsdp2.parallelize import parallelize
from fsdp2.report import header
from fsdp2.report.metrics import OnEvent, StepLog
from fsdp2.report.reports import Reports
from fsdp2.report.throughput import Throughput
from fsdp2.run.between import Between
from fsdp2.run.checkpoints import Checkpoints, is_due
from fsdp2.run.dataset import load_data, training_batches
from fsdp2.run.initial_weights import DrawnWeights, LoadedWeights
from fsdp2.run.preflight import examine_first, preflight
from fsdp2.run.process import ending, runtime
from fsdp2.run.process.group import process_group
from fsdp2.run.process.runtime import World
from fsdp2.run.process.settings import growing_segments, process_settings
from fsdp2.run.process.signals import StopSignals, fails_to_torchrun
from fsdp2.run.schedule import Schedule
from fsdp2.run.start import agree, keep_in_memory, resume, state_of_run, try_out, write_start
from fsdp2.run.watch.hangs import Watch


@growing_segments()  # around all of it: what uses the GPU first reads this setting
def main(
    config: Config, on_event: OnEvent | None = None, also_saved: Mapping[str, Part] | None = None
) -> dict[str, Any]:
    """Train as `config` says, in a process group that exists already or in one of its own. A collective call.

    Args:
        on_event: called on every rank with (kind, data); the kinds are those of metrics.jsonl, `train` a step late.
        also_saved: name -> an object with `state_dict` and `load_state_dict`, which checkpoints hold and resumes load.

    Returns the data of the `end` event. Raises ConfigError before anything is started if the run makes no
    sense here. Any later error ends the run without saving, since other ranks may be elsewhere.
    """
    world = runtime.world()
    device = runtime.pick_device(config.device, world)
    check_device(config, device.type)
    examine_first(config, world, device)  # with --doctor
    job, stop = preflight(config, world), StopSignals()
    with stop.early(), job.hold, process_group(world, device, config), process_settings(config) as garbage:
        folder = agree(config, job, world)  # on what rank 0 has chosen: where, and from what
        runtime.set_threads(config.threads, world)

        # Data: the same order of samples on all ranks, and this rank's part of it.
        dataset = load_data(config, world)
        batches = training_batches(config, dataset, world, device)

        # Model: meta -> sharded -> initialised -> with its optimizer.
        engine = make_engine(config, world, device, restoring=job.origin.checkpoint is not None)
        schedule = Schedule(config, engine.optimizer, batches)
        seed_everything(config.seed, world.rank // config.tp)  # for dropout, the same for the same activations

        # Where to start. All that a resumed run needs is part of this state.
        progress = Progress()
        app = state_of_run(config, engine, schedule.scheduler, batches, progress, world, device, also_saved)
        restored = resume(job, app, engine.ema, hashes=config.verify == "hash")
        if not restored["random_state_restored"]:
            seed_everything(config.seed, world.rank // config.tp, progress.step)
        first_step, random_state = progress.step, app.parts["rng"].state_dict()
        job.add_note(schedule.go_on(progress.step, job.origin.before))
        try_out(config, engine, dataset, device)

        def finished() -> bool:
            return batches.epoch >= config.epochs or progress.step >= (config.max_steps or math.inf)

        def at() -> dict[str, int]:
            return {"step": progress.step, "epoch": batches.epoch}

        with job.hold.starting():
            memory = keep_in_memory(config, folder, app, device)
            write_start(config, job, world, engine.files, in_memory=memory is not None, finished=finished())
            reports = Reports(
                config, job.run.metrics, job.run.files, world.rank, world.world_size, batches.steps_per_epoch, on_event
            )
            # Steps after the checkpoint will be done again; cut, each stands in the file once.
            job.add_note(reports.metrics.cut(progress.metrics_position if job.restores_own() else 0, progress.step))
        watch = Watch(config, engine.model, job.run, reports.last_words)
        checkpoints = Checkpoints(config, job, app, engine, progress, device, memory, reports, watch)

        def test() -> float:
            with watch.phase("evaluation"), engine.evaluating():
                result = evaluate(engine.forward, dataset.test, config, world, device)
            checkpoints.evaluated({**at(), **result}, dataset.test.content)
            return result["accuracy"]

        with reports, stop, observed(config, engine, checkpoints, world, device) as peak_bytes, watch, checkpoints:
            speed = Throughput(config, dataset.train, device, world.world_size)
            opening = header.lines(config, engine, dataset, world.world_size, device, job.run.path, reports.plan)
            opening += header.steps(config, batches, progress.step + schedule.course.left) + speed.lines
            reports.emit(*job.opening_event({"header": opening, **at(), **dataset.facts, **engine.started, **restored}))
            if config.inspect:
                reports.console.lines(header.inspection(config, engine))

            # The loop. An epoch is its steps, an evaluation, a new learning rate and a checkpoint.
            accuracy: float | None = None
            between = Between(config, checkpoints, reports, watch, stop, garbage)
            log = StepLog(reports.emit, device, checkpoints.stop_if_nonfinite, between.look, speed)
            app.parts["rng"].load_state_dict(random_state)  # a model made to be described may have drawn numbers
            while not finished():
                log.restart_clock()
                for microbatches in batches:
                    votes = between.before_step(progress.step + 1)
                    facts, values = train_step(engine, microbatches, config, world, votes)
                    progress.step += 1
                    schedule.after_step()
                    log.add({**at(), "step_in_epoch": batches.steps_done(), **facts}, values)
                    between.after_step(progress.step, log.failed)
                    if log.stop or finished():  # of all ranks' votes, a step late
                        break
                    tests = is_due(config.eval_every, progress.step)
                    if (tests or checkpoints.due(progress.step)) and not batches.at_end():
                        log.flush()
                        accuracy = test() if tests else accuracy
                        checkpoints.save_due(batches.epoch)
                        log.restart_clock()
                log.flush()
                if log.stop:
                    checkpoints.save(batches.epoch, last=True)
                    break
                accuracy = test()
                if batches.at_end():  # and not ended by --max-steps
                    schedule.after_epoch()
                    batches.next_epoch()
                checkpoints.save_due(batches.epoch, after_epoch=True, last=finished())

            # What is left behind: unless it is large, one file that any PyTorch program can load.
            reason = stop.agreed(world) if log.stop else "already finished" if accuracy is None else "finished"
            left = checkpoints.finish(finished=finished(), changed=accuracy is not None)
            done = {**at(), "steps": progress.step - first_step, "reason": reason, "accuracy": accuracy}
            end = reports.end({**done, "run_dir": job.run.place, **left}, log, peak_bytes)
            checkpoints.upload_metrics()
    return end


def train_step(
    engine: Engine, microbatches: Iterator[Batch], config: Config, world: World, votes: Sequence[bool]
) -> tuple[dict[str, Any], Tensor]:
    """One optimizer step over the microbatches of this rank. A collective call.

    Args:
        votes: what this rank has to say that all must hear after the same step.

    Returns what is known on the CPU, and on the device (2 + votes,) float64: the mean loss over the global
    batch, the gradient norm, and for each vote how many ranks gave it.
    """
    engine.begin_step()  # with explicit prefetching the first all-gather runs while data is read
    losses: list[Tensor] = []
    share = world.share(config.tp, config.sp)
    for batch in microbatches:
        with engine.losses():
            loss = config.spec.loss(engine.forward(batch), batch.targets)
            # Ranks' gradients will be averaged. The sum of losses x ranks / targets in the global batch makes
            # that the gradient of the mean over the global batch, also where shares are uneven.
            engine.backward(
                loss * (share.of * share.pieces / batch.target_count * batch.valid), last_microbatch=batch.last
            )
        losses.append(loss.detach() if batch.valid and share.counts else torch.zeros_like(loss))
    norm = engine.clip(config.clip_grad_norm)
    # The norm is the same on all ranks. fp16's gradient scaler looks at the gradients itself.
    may_skip = config.on_nonfinite == "skip" and not engine.scaler.is_enabled()
    updated = engine.step(update=not may_skip or bool(norm.isfinite()))
    total = torch.stack(losses).double().sum()
    norm = norm.to(total.device, total.dtype, non_blocking=True)  # with offload it is on the CPU
    sums = torch.stack([total, norm, *(torch.full_like(total, vote) for vote in votes)])
    dist.all_reduce(sums)  # one collective for logging and for agreeing to stop
    scale = {"loss_scale": engine.loss_scale} if engine.scaler.is_enabled() else {}
    skipped = {"skipped": not updated} if may_skip or scale else {}
    lr = engine.optimizer.param_groups[0]["lr"]
    facts: dict[str, Any] = {"lr": lr, "samples": batch.samples, **scale, **skipped}
    # All ranks judge the same norm, also where replicas have come to differ. The mean of equal ones is exact.
    return facts, torch.stack([sums[0] / batch.target_count, sums[1] / world.world_size, *sums[2:]])


def make_engine(config: Config, world: World, device: torch.device, *, restoring: bool) -> Engine:
    """The sharded model with initial values or `--init-from`'s, which a checkpoint would replace. A collective call."""
    # Nothing is drawn that would be replaced. Which tensors --init-partial leaves out is known after the weights.
    weights = LoadedWeights(config, restoring=restoring)
    start = Start(
        build=lambda: config.spec.on_meta(config.model_size),
        blocks_of=blocks_of(config),
        set_weights=DrawnWeights(config, brought=weights.brings),
        load_weights=weights if weights.wanted else None,
        brought=weights.brings,
        device=device,
        world_size=world.world_size,
    )
    engine = engine_of(config, start)
    engine.started = weights.facts
    if config.ema is not None or config.lora is not None:
        from fsdp2.run.parts import add_parts

        add_parts(config, engine)
    return engine


def engine_of(config: Config, start: Start) -> Engine:
    """The strategy's engine: no other place asks for it, as each is driven in the same way. A collective call."""
    spec = config.spec
    if config.strategy == "fsdp2":
        engine: Engine = parallelize(config, methods=spec.methods, splits=spec.splits, **vars(start))
    else:
        engine = baseline(config.strategy).build(config, start)
    engine.call = spec.call
    return engine


@record  # lets torchrun show the traceback of the rank that failed first
def cli() -> None:
    """Run the command line as one rank, and exit with its status. A collective call."""
    with ending.exit_status():
        end = main(parse())
    if fails_to_torchrun(end["reason"]):
        sys.exit(1)


if __name__ == "__main__":
    cli()
