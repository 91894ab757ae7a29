"""A run's saves one after another: plans that are kept, old checkpoints that are removed beside the training."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan

from fsdp2.checkpoint.dcp_files import ShardWriter
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.restore import restore
from fsdp2.checkpoint.saver import Saver
from fsdp2.checkpoint.state import AppState, Progress, RandomState
from fsdp2.checkpoint.store import Store, verify
from tests.harness import Ranks, make_engine, one_step, same

CPU = torch.device("cpu")


def _app(flags: str = "") -> tuple[AppState, Any, Progress]:
    engine, progress = make_engine(flags), Progress()
    return AppState(engine.model, engine.optimizer, {"progress": progress, "rng": _random()}), engine, progress


def _random() -> RandomState:
    return RandomState(dist.get_rank(), CPU)


def _is_restored(store: Store, step: int, app: AppState, flags: str = "") -> bool:
    again, _, progress = _app(flags)
    verify(store.checkpoint(step))
    restore(store.checkpoint(step), again)
    ours, theirs = app.state_dict(), again.state_dict()
    return progress.step == step and all(same(_local(ours[part]), _local(theirs[part])) for part in ("model", "optim"))


def _local(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _local(value) for key, value in tree.items()}
    return tree.to_local() if hasattr(tree, "to_local") else tree


def _plans_are_kept(folder: Path) -> dict[str, bool]:
    """Saves of two savers by turns, of which one fails between planning and writing."""
    sent: list[bool] = []
    real_plan, real_begin = ShardWriter.prepare_global_plan, Store.begin

    def planning(self: ShardWriter, plans: list[SavePlan]) -> list[SavePlan]:
        sent.append(any(plan.usable for plan in plans))
        return real_plan(self, plans)

    def begin(self: Store, step: int) -> None:
        if step == 3:
            raise OSError("there is no room for step 3")
        real_begin(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "prepare_global_plan", planning)
        patch.setattr(Store, "begin", begin)
        states = [_app(), _app("--cpu-offload --shard-granularity=root --optimizer=sgd")]
        stores = [Store(LocalFiles(folder / str(number))) for number in range(2)]
        savers = [Saver(store, app, CPU, keep=9) for store, (app, _, _) in zip(stores, states, strict=True)]
        failed = []
        for step in range(1, 6):
            for saver, (_, engine, progress) in zip(savers, states, strict=True):
                one_step(engine)
                progress.step = step
                ended = saver.save(step, {})
                assert ended is not None
                failed.append(ended.error is not None)
        for saver in savers:
            saver.close()
    first = sent[::2]
    return {
        "step 3 alone failed": failed == [False] * 4 + [True] * 2 + [False] * 4,
        "plans were sent once, and after a failure": dist.get_rank() != 0 or first == [True, False, False, True, False],
        "the first is whole": _is_restored(stores[0], 5, states[0][0]),
        "the second is whole": _is_restored(stores[1], 5, states[1][0], "--optimizer=sgd"),
    }


def test_plans_are_kept_from_save_to_save_and_dropped_after_a_failure(ranks: Ranks, tmp_path: Path) -> None:
    for result in ranks.run(_plans_are_kept, tmp_path):
        assert result == dict.fromkeys(result, True)


def _removal(folder: Path, background: bool) -> dict[str, Any]:
    """Old checkpoints are removed only after the save has returned on all ranks; the third can't be."""
    app, engine, _ = _app()
    one_step(engine)
    let_go, removed = threading.Semaphore(0), list[Sequence[int]]()  # a removal for each release, however late

    class SlowStore(Store):
        def commit(self, step: int, files: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any]) -> None:
            removed.append(self.committed())  # what there is when the next one is committed
            super().commit(step, files, info)

        def retain(self, keep: int, keep_every: int | None = None, keep_best: bool = False) -> list[int]:
            if not let_go.acquire(timeout=60):
                raise OSError("the save waited for the removal")
            if self.committed()[-1] == 3:
                raise OSError("the disk is tired")
            return super().retain(keep, keep_every, keep_best)

    saver = Saver(SlowStore(LocalFiles(folder)), app, CPU, keep=1, background=background)
    for step in (1, 2, 3):
        ended = saver.save(step, {}) or saver.wait()
        dist.barrier()  # every rank has come here before anything is removed
        let_go.release()
        assert ended is not None
        assert ended.error is None
    saver.close()
    return {"seen": removed, "left": Store(LocalFiles(folder)).committed(), "not removed": saver.not_removed()}


@pytest.mark.parametrize("background", [False, True])
def test_old_checkpoints_are_removed_beside_the_training(ranks: Ranks, tmp_path: Path, background: bool) -> None:
    first, second = ranks.run(_removal, tmp_path, background)
    assert first["seen"] == [[], [1], [2]]  # removed before the next save was committed
    assert first["left"] == [2, 3]
    assert first["not removed"] == ["step 3 is saved, but old checkpoints could not be removed: the disk is tired"]
    assert second["not removed"] == []


def _gpu_of_the_thread(folder: Path) -> list[tuple[Any, bool]]:
    seen: list[tuple[Any, bool]] = []

    def set_device(device: torch.device) -> None:
        seen.append((device, threading.current_thread() is threading.main_thread()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "set_device", set_device)
        saver = Saver(Store(LocalFiles(folder)), _app()[0], torch.device("cuda", 1), keep=1)
        saver.save(1, {})
        saver.close()
    return seen


def test_the_thread_that_saves_uses_the_gpu_of_its_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_gpu_of_the_thread, tmp_path, ranks=1) == [[(torch.device("cuda", 1), False)]]
