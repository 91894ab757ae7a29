"""When a run saves, and what becomes of a save that fails."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from fsdp2.checkpoint import meaning
from fsdp2.checkpoint.files import NotTheWriter
from fsdp2.checkpoint.full_model import full_state_api, save_full, while_rank_0
from fsdp2.checkpoint.saver import Outcome, SaveFailed, Saver
from fsdp2.checkpoint.state import AppState, Progress, is_finite
from fsdp2.config import Config
from fsdp2.models.initial import slices_of
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.meta import shared_names
from fsdp2.run.directory.marker import checkpoint_info
from fsdp2.run.directory.room import full_model_form, large
from fsdp2.run.job import Job
from fsdp2.run.process import runtime
from fsdp2.run.process.group import RunStopped, broadcast, gather
from fsdp2.run.watch.hangs import Watch
from fsdp2.units import printable

if TYPE_CHECKING:
    from fsdp2_extra.elastic.node_memory import NodeMemory
    from fsdp2_extra.elastic.replicas import Replicas


class Reporting(Protocol):
    """The part of a run's reports that this module uses."""

    def emit(self, kind: str, data: dict[str, Any]) -> None: ...

    def position(self, *, durable: bool = True) -> int:
        """Bytes of the metrics file, durable ones by default; 0 on ranks that don't write it."""
        ...

    def last_steps(self, count: int) -> list[dict[str, Any]]:
        """The newest `train` records, the oldest first; [] on ranks that don't write them."""
        ...


def is_due(every: int | str | None, step: int) -> bool:
    """Return whether what comes every so many steps, if it does, is due after this one."""
    return isinstance(every, int) and step % every == 0


class Checkpoints:
    """The checkpoints of a run, as `--async-checkpoint`, `--keep`, `--keep-every` and `--on-checkpoint-failure` say.

    Every method is called by all ranks after the same step. A run that has lost its directory ends there with
    RunStopped, whatever `--on-checkpoint-failure` says.
    """

    def __init__(
        self,
        config: Config,
        job: Job,
        app: AppState,
        engine: Engine,
        progress: Progress,
        device: torch.device,
        memory: NodeMemory | None,
        reports: Reporting,
        watch: Watch,
    ) -> None:
        """`memory`: of `--memory-checkpoint`. `watch` is told of each save, since one may take long."""
        self.config, self.hold, self.run, self.progress = config, job.hold, job.run, progress
        self._app, self._weights, self._memory, self._reports, self._watch = app, engine.weights, memory, reports, watch
        world = runtime.world()
        self._rank, self._info = world.rank, checkpoint_info(config, world.world_size)
        self._info |= {"optimizer": job.optimizer} if job.optimizer else {}
        self._replicas: Replicas | None = None
        if config.check_replicas is not None:
            from fsdp2_extra.elastic.replicas import Replicas

            self._replicas = Replicas(engine, device, progress.step)
        self._saver = Saver(
            self.run.store,
            app,
            device,
            keep=config.keep,
            keep_every=config.keep_every,
            keep_best=config.keep_best,
            background=config.async_checkpoint is not None,
        )
        # Committed, or on its way. A checkpoint resumed from memory is not on the disk yet.
        self._saved_step = -1 if job.origin.in_memory else progress.step
        self._epochs: dict[int, int] = {}
        self._eval_loss, self._tested = dict[int, float](), ""
        self._failed: Outcome | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Wait until old checkpoints are removed, after an error too: another run may take the directory next."""
        self._saver.wait_for_removal()

    def evaluated(self, result: dict[str, Any], data: str) -> None:
        """Report an evaluation. The checkpoint of its step gets its loss, and the identity of its `data`."""
        self._tested = data
        self._eval_loss = {result["step"]: result["loss"]} if math.isfinite(result["loss"]) else {}
        self._reports.emit("eval", result)

    def save(self, epoch: int, *, last: bool = False) -> None:
        """Save the state as it is, unless this step is saved already. `--async-checkpoint skip` never skips the `last`.

        With --checkpoint-every never nothing is written; the `last` call checks the state all the same.

        Raises SaveFailed on every rank if a save failed and `--on-checkpoint-failure` is stop. Raises RunStopped before
        anything is written if an update has left NaN or infinity in the weights and `--on-nonfinite` is stop.
        """
        step, skips = self.progress.step, self.config.async_checkpoint == "skip" and not last
        if step == self._saved_step or not (self.config.saves or last):
            return
        with self._watch.phase("save"):
            if skips and any(gather(self._saver.busy)):
                reason = "the previous save is still being written"
                self._reports.emit("checkpoint_skipped", {"step": step, "reason": reason})
                return
            self._settle()
            self.compare_replicas()
            positions, finite = zip(*gather((self._reports.position(), is_finite(self._weights()))), strict=True)
            if not all(finite):
                self.stop_if_nonfinite(step, "the weights hold NaN or infinity")
            if not self.config.saves:
                return
            self._epochs[step], self._saved_step = epoch, step
            # The same on all ranks: DCP writes a plain value from whichever rank it likes.
            self.progress.metrics_position = positions[0]
            tested = {"eval_loss": self._eval_loss[step], "eval_data": self._tested} if step in self._eval_loss else {}
            info = {**self._info, **tested, "finite": all(finite)}
            before_commit = partial(self._before_commit, positions[0])
            self._report(self._saver.save(step, info, self.hold.require_folder, before_commit))

    def due(self, step: int) -> bool:
        """Return whether the state after this step is saved, on the disk or in memory."""
        in_memory = self._memory is not None and self._memory.due(step)
        return in_memory or is_due(self.config.checkpoint_every, step)

    def save_due(self, epoch: int, *, after_epoch: bool = False, last: bool = False) -> None:
        """Save the state on the disk, or else keep it in each node's memory, as is due: by steps, after an epoch, or at
        the `last` one.

        Raises as `save` does. A save into memory that fails is reported by the next one.
        """
        step, every = self.progress.step, self.config.checkpoint_every
        if last or is_due(every, step) or (after_epoch and every is None):
            self.save(epoch, last=last)
        elif self._memory is not None and self._memory.due(step):
            self._keep_in(self._memory)

    def _keep_in(self, memory: NodeMemory) -> None:
        with self._watch.phase("save"):
            self.compare_replicas()
            rng, position = self._app.parts["rng"].state_dict(), self._reports.position(durable=False)
            mine = (position, is_finite(self._weights()), memory.failure, memory.busy, rng)
            positions, finite, failures, busy, generators = zip(*gather(mine), strict=True)
            step = self.progress.step
            if not all(finite):
                self.stop_if_nonfinite(step, "the weights hold NaN or infinity")
            if failed := sorted({text for text in failures if text}):
                error = f"--memory-checkpoint: {'; '.join(failed)}"
                if self.config.on_checkpoint_failure == "stop":
                    raise SaveFailed(error)
                self._reports.emit("failure", {"step": step, "error": error, "continues": True})
            if self.config.async_checkpoint == "skip" and any(busy):
                return
            self.progress.metrics_position = positions[0]
            memory.save(step, {**self._info, "finite": all(finite)}, list(generators))

    def _before_commit(self, position: int) -> None:
        """On rank 0, upload the metrics up to `position`: in a background save, later steps are there already."""
        self.run.upload_metrics(position)
        self.hold.require_ours()

    def write_full_model(self, *, changed: bool) -> bool:
        """Write the whole model for any PyTorch program: one file, or safetensors by all ranks if it is large.

        Write nothing if it is there and nothing has `changed` since. Return False if `full_model_form` says none.
        """
        config, run = self.config, self.run
        form = full_model_form(config, remote=run.is_remote)
        if form == "none":
            return False
        self.hold.stop_if_lost()
        lacks = self._rank == 0 and not changed and not run.has_full_model(self.progress.step)
        if not (changed or broadcast(lacks)):
            return True
        said = {part: self._info[part] for part in (meaning.PART, meaning.TOKENIZER) if part in self._info}
        with self._watch.phase("full model"):
            if form == "sharded":
                from fsdp2.checkpoint.full_together import save_together

                tied = shared_names(config.spec.described(config.model_size))
                save_together(self._app, run.full_folder, self.progress.step, slices_of, tied, said)
            else:
                api = full_state_api(dcp_api=config.dcp_api)
                save_full(api, self._app, run.full_model, self.progress.step, said)
                while_rank_0(run.upload_full_model)
        return True

    def upload_metrics(self) -> None:
        """Copy the metrics file as it is to a remote run's URL."""
        if self._rank == 0:
            self.run.upload_metrics(self._reports.position())

    def poll(self) -> bool:
        """Report a save that has ended in the background, before each step. Return whether a failed one stops the run.

        Ranks may see it at different steps. They send the answer with the loss's all-reduce, and all call
        `stop_if_failed` after the same step.
        """
        ended = self._saver.ended()
        if ended is not None and ended.error is not None and self._stops(ended.error):
            self._failed = ended
        else:
            self._report(ended)
        self._report_not_removed()
        return self._failed is not None

    def stop_if_failed(self, ranks: int) -> None:
        """Raise SaveFailed on every rank if `ranks` of them have seen a save fail."""
        if ranks:
            with self._watch.phase("save"):
                self._settle()

    def stop_if_nonfinite(self, step: int, what: str) -> None:
        """Raise RunStopped if `--on-nonfinite` is stop."""
        if self.config.on_nonfinite == "stop":
            advice = "look at --lr, --clip-grad-norm, --mixed-precision and that step's data, or --on-nonfinite skip"
            self.stop(f"step {step}: {what}", "finite checkpoint", step, advice)

    def compare_replicas(self) -> None:
        """With `--check-replicas` compare the replicas and report those that differ; once for each step.

        A save asks for it too, so that no checkpoint of replicas that differ becomes the newest one. Raises RunStopped
        if the run is to stop then.
        """
        if self._replicas is None:
            return
        step = self.progress.step
        wrong, what = self._replicas.compare(step)
        if wrong:
            self._reports.emit("anomaly", {"step": step, "about": "replicas", "what": what, "ranks": wrong})
        if wrong and self.config.on_anomaly == "stop":
            advice = "examine these hosts (python -m fsdp2.doctor); a resume goes on from that checkpoint"
            self.stop(f"step {step}: {what}", "checkpoint of that time", self._replicas.agreed, advice)

    def stop(self, text: str, wanted: str, until: int, advice: str) -> NoReturn:
        """Raise RunStopped: a text, the newest finite checkpoint up to step `until`, and advice. A collective call.

        A save in flight, which is of an earlier step, ends first.
        """
        text += "; nothing was saved after it"
        with self._watch.phase("save"):
            try:
                self._settle()
            except SaveFailed as error:
                text += f"; {error}"
            self._saver.close()
            self._report_not_removed()
            last = broadcast(self._newest(wanted, until) if self._rank == 0 else "")
        raise RunStopped(printable(f"{text}; {last}; {advice}"))

    def _newest(self, wanted: str, until: int) -> str:
        store = self.run.store
        try:
            step = store.newest_finite([step for step in store.committed() if step <= until])
        except OSError as error:
            return f"the last {wanted} can't be looked up ({error})"
        return f"there is no {wanted}" if step is None else f"the last {wanted} is {store.checkpoint(step)}"

    def finish(self, *, finished: bool, changed: bool) -> dict[str, Any]:
        """Write the full model of a run that has `finished`, if `full_model_form` wants it, and wait for the last save.

        Args:
            changed: something was trained since the full model was written that may be there.

        Returns `left`, what is left of the training: `full model`, `adapters`, `checkpoint`, or None for nothing; and
        `full_model_left_out_bytes`, the size of a model that nobody asked to be written. Raises SaveFailed if what was
        trained last is not in a checkpoint.
        """
        too_large = large(self.config) if finished and self.config.writes_full_model is None else None
        try:
            full_model = finished and self.write_full_model(changed=changed)
        except Exception:
            self._saver.wait()  # the last checkpoint: it would end with this process
            raise
        with self._watch.phase("save"):
            self._settle()
        self._saver.close()
        self.hold.stop_if_lost()
        self._report_not_removed()
        if self.config.saves and self._saved_step != self.progress.step:
            raise SaveFailed(
                f"the training has ended at step {self.progress.step}, and its last checkpoint is of an earlier step: "
                "the failures above say why"
            )
        if self._memory is not None:
            self._memory.close()
        saved = ("checkpoint" if self.config.lora is None else "adapters") if self.config.saves else None
        return {"full_model_left_out_bytes": too_large, "left": "full model" if full_model else saved}

    def _report_not_removed(self) -> None:
        for text in self._saver.not_removed():
            self._reports.emit("failure", {"step": self.progress.step, "error": text, "continues": True})

    def _stops(self, error: SaveFailed) -> bool:
        return self.config.on_checkpoint_failure == "stop" or error.for_good

    def _settle(self) -> None:
        """Wait for the save in flight, or take the one that is known to have failed, and report how it has ended."""
        self._report(self._failed or self._saver.wait())

    def _report(self, ended: Outcome | None) -> None:
        if ended is None:
            return
        if ended.error is None:
            place = str(self.run.store.checkpoint(ended.step))
            facts = {"step": ended.step, "epoch": self._epochs[ended.step], "path": place}
            times = {"seconds": ended.seconds, "stall_seconds": ended.stall_seconds}
            self._reports.emit("checkpoint", {**facts, **times})
            return
        text = str(ended.error)
        if self._rank == 0:
            try:
                self.hold.require_ours()  # else what looks dead may be a save of the run that has taken over
                self.run.store.remove_dead()  # room for the next one
            except (OSError, NotTheWriter) as error:
                text += f"; what it left was not removed: {error}"
        if self._stops(ended.error):
            self.hold.stop_if_lost()  # then that is the reason, and what is left elsewhere is worth more than the error
            raise ended.error
        if self._saved_step == ended.step:
            self._saved_step = -1  # so that the end of the run tries again
        self._reports.emit("failure", {"step": ended.step, "error": text, "continues": True})
