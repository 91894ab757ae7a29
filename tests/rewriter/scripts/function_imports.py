import contextlib
import os
import torch
import torch.distributed as dist

try:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision
    HAVE_FSDP = True
except ImportError:
    FSDP, MixedPrecision, HAVE_FSDP = None, None, False


def get_module(model):
    return model.module if hasattr(model, "module") else model


class Engine:
    fsdp_options = {"device_id": torch.device("cpu"), "use_orig_params": True}

    def __init__(self, model, precision="bf16", accum=2):
        self.accum = accum
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
        from functools import partial
        self.model = FSDP(
            model,
            auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=int(40)),
            mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=dtype),
            **self.fsdp_options,
        )
        params = [{"params": [p for n, p in self.model.named_parameters() if n.endswith("bias")], "weight_decay": 0.0},
                  {"params": [p for n, p in self.model.named_parameters() if not n.endswith("bias")]}]
        self.opt = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)

    def run(self, n):
        for i in range(n):
            ctx = self.model.no_sync if (i + 1) % self.accum else contextlib.nullcontext
            with ctx():
                loss = self.model(torch.randn(4, 6)).float().square().mean() / self.accum
                loss.backward()
            if (i + 1) % self.accum == 0:
                gn = FSDP.clip_grad_norm_(self.model, 1e4)
                self.opt.step(); self.opt.zero_grad()
            if dist.get_rank() == 0:
                print(loss.item())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    e = Engine(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 6)))
    torch.manual_seed(dist.get_rank())
    e.run(4)
    print(len(list(get_module(e.model).children()))) if dist.get_rank() == 0 else None
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
