"""CPU copies of a state dict, so that training goes on while they are written.

Parameters and optimizer state change in `optimizer.step()` and nowhere else. So they need not be copied before
training goes on, but only before that: the copy runs beside the next forward and backward, and a hook on the
optimizer waits for it. Everything else (buffers, counters, random state) is copied at once.

Source: https://pytorch.org/blog/reducing-checkpointing-times/
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class Staging:
    """Copies trees of tensors into buffers that are kept from one copy to the next, pinned for tensors on a GPU.

    A run on a GPU has tensors on the CPU as well: offloaded parameters, and the steps that an optimizer counts.

    One copy is in use at a time: `copy` overwrites the one before. Each is followed by `finish`, in another thread.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._buffers: dict[tuple[Any, ...], tuple[Any, Tensor]] = {}  # path -> layout, tensor
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._finished = threading.Event()
        self._finished.set()
        self._copied: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._before_step())

    @torch.no_grad()
    def copy(self, tree: Any) -> Any:
        """A tree of the same names with CPU tensors; they may be read after `finish`.

        DTensors stay DTensors, with the same placements. Nothing is sent, but for the first DTensor of a mesh of
        GPUs: then all ranks must call.
        """
        # By identity, which a storage keeps: a tensor without elements, or without memory in a test, has no address.
        changed_by_step = {id(storage): storage for storage in map(Tensor.untyped_storage, self._stepped_tensors())}
        later: list[tuple[Tensor, Tensor]] = []

        def stage(tensor: Tensor, path: tuple[Any, ...]) -> Tensor:
            local, staged = _local(tensor), self._staged(tensor, path)
            buffer = _local(staged)
            if id(local.untyped_storage()) in changed_by_step:
                later.append((buffer, local))
            else:
                buffer.copy_(local, non_blocking=True)  # on a GPU in order with what comes next
            return staged

        staged = _map_tensors(tree, stage)
        self._start(later)
        return staged

    def _stepped_tensors(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from (_local(parameter) for parameter in group["params"])
        for state in self._optimizer.state.values():
            yield from (_local(value) for value in state.values() if isinstance(value, Tensor))

    def _staged(self, tensor: Tensor, path: tuple[Any, ...]) -> Tensor:
        """A CPU tensor like this one, the same at each copy: to make a DTensor takes longer than to start its copy."""
        like, staged = self._buffers.get(path, (None, None))
        local = _local(tensor)
        wanted: Any = tensor.shape, tensor.dtype, local.device
        if isinstance(tensor, DTensor):
            wanted = (*wanted, tensor.placements, tensor.device_mesh)
        if staged is None or like != wanted:
            # Pinned memory helps copies from a GPU alone.
            staged = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            if isinstance(tensor, DTensor):
                mesh, shape, stride = self._cpu_mesh(tensor.device_mesh), tensor.shape, tensor.stride()
                staged = DTensor.from_local(
                    staged, mesh, tensor.placements, run_check=False, shape=shape, stride=stride
                )
            self._buffers[path] = wanted, staged
        return staged

    def _cpu_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The same ranks as a mesh of CPUs: a DTensor's local tensor has to be on its mesh's kind of device."""
        if mesh.device_type == "cpu":
            return mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        return self._meshes[mesh]

    def _start(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        # Where nothing runs beside the CPU, `finish` copies, in its thread.
        self._pairs = [pair for pair in pairs if _on_cpu(pair)]
        if self._pairs:
            self._finished.clear()
        if self._stream is None:
            return
        # After what has been issued so far, the last optimizer step, and beside what comes next.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy([pair for pair in pairs if not _on_cpu(pair)], self._stream)
            # Also without any pair: what `copy` has begun to copy at once is part of it.
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _before_step(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)  # the GPU waits, the CPU goes on
        self._finished.wait()

    def finish(self) -> None:
        """Return when the copies are whole. Raises what made a copy fail; training goes on all the same."""
        pairs, self._pairs = self._pairs, []
        try:
            _copy(pairs)
        finally:
            self._finished.set()
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Take the hook off the optimizer."""
        self._hook.remove()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _on_cpu(pair: tuple[Tensor, Tensor]) -> bool:
    return pair[1].device.type == "cpu"


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None = None) -> None:
    for buffer, local in pairs:
        buffer.copy_(local, non_blocking=stream is not None)
        if stream is not None:
            local.record_stream(stream)


def _map_tensors(tree: Any, function: Callable[[Tensor, tuple[Any, ...]], Tensor], path: tuple[Any, ...] = ()) -> Any:
    """A tree of dicts and lists with each tensor replaced; other leaves are copied."""
    if isinstance(tree, dict):
        return {key: _map_tensors(value, function, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_tensors(value, function, (*path, i)) for i, value in enumerate(tree))
    if isinstance(tree, Tensor):
        return function(tree, path)
    return copy.deepcopy(tree)
