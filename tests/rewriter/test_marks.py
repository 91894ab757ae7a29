"""What rewrite leaves and marks, and what it leaves alone without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rewriter.test_commands import run

HEAD = (
    "import torch\nimport torch.distributed as dist\n"
    "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
)


@pytest.mark.parametrize(
    ("program", "code", "kept"),
    [
        (
            # A norm of this rank's shards, which nothing adds up: FSDP2's shards are others.
            "def norm(model, loss):\n    model = FSDP(model)\n    dist.all_reduce(loss)\n    total = 0\n"
            "    for p in model.parameters():\n        total += p.grad.norm() ** 2\n    return total\n",
            "FC26",
            "p.grad.norm() ** 2",
        ),
        (
            "def optimizer(model):\n    model = FSDP(model)\n    keep = lambda name, p: p.ndim < 2\n"
            "    named = list(model.named_parameters())\n    return [p for n, p in named if keep(n, p)]\n",
            "FC28",
            "p.ndim < 2",
        ),
        (
            "model = FSDP(net)\nif type(model.module).__name__ == 'Net':\n    print(model.module.size)\n",
            "FC08",
            "if type(model.module).__name__ == 'Net':\n    print(model.size)",
        ),
        (
            "def made(net):\n    model = FSDP(net)\n    net.init_weights()\n    return model\n",
            "FC32",
            "net.init_weights()",
        ),
    ],
)
def test_what_means_something_else_is_marked(tmp_path: Path, program: str, code: str, kept: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(HEAD + program)
    assert run("rewrite", "--write", path) == 1
    made = path.read_text()
    assert f"# fsdp2: {code} " in made
    assert kept in made
    assert "fully_shard(" in made


@pytest.mark.parametrize(
    "program",
    [
        # Whoever gets what wraps isn't in the program.
        "from functools import partial\n\n\ndef wrapper():\n    return partial(FSDP, use_orig_params=True)\n\n\n"
        "def clip(model):\n    if isinstance(model, FSDP):\n        model.clip_grad_norm_(1.0)\n",
        # A class of its own has a constructor of its own.
        "class Mine(FSDP):\n    pass\n\n\ndef made(net):\n    return Mine(net), FSDP(net)\n",
        # Which model it is comes from a file that wasn't given.
        "from elsewhere import current\n\n\ndef made(net):\n    return FSDP(net)\n\n\n"
        "def clip():\n    model = current()\n    return model.no_sync, model.clip_grad_norm_(1.0)\n",
        # Something else changes the options.
        "def made(change):\n    options = {}\n    change(options)\n    return FSDP(torch.nn.Linear(2, 2), **options)\n",
        # Somebody else gets them too.
        "def made(net):\n    options = {}\n    options.update(use_orig_params=True)\n"
        "    return FSDP(net, **options), options\n",
        # They are loaded with what the precision is.
        "from torch.distributed.fsdp import MixedPrecision\n\n\ndef made(settings):\n"
        "    return FSDP(torch.nn.Linear(2, 2), mixed_precision=MixedPrecision(**settings))\n",
        # The device is known at run time alone, and may be made of itself.
        "def made(model, device):\n    device = torch.device(device)\n    return FSDP(model, device_id=device)\n\n\n"
        "made(torch.nn.Linear(2, 2), torch.device('cpu'))\n",
        # A function that returns options has another caller.
        "def options(low):\n    made = {'use_orig_params': low}\n    return made\n\n\nprint(options(True))\n\n\n"
        "def made(net):\n    return FSDP(net, **options(False))\n",
        # One unit has arguments of its own.
        "from torch.distributed.fsdp.wrap import enable_wrap, wrap\n\n\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        self.one = wrap(torch.nn.Linear(2, 2), use_orig_params=False)\n\n\n"
        "def made():\n    with enable_wrap(wrapper_cls=FSDP):\n        return wrap(Net())\n",
    ],
)
def test_what_is_decided_elsewhere_keeps_its_interface(tmp_path: Path, program: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(HEAD + program)
    assert run("rewrite", "--write", path) == 0
    made = path.read_text()
    assert "from fsdp1_interface import" in made
    assert "torch.distributed.fsdp import FullyShardedDataParallel" not in made
    assert run("check", tmp_path) == 0


def test_a_branch_for_other_models_stays(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    program = HEAD + (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n\n\n"
        "def made(model, sharded):\n    if not sharded:\n        return DDP(model)\n    return FSDP(model)\n\n\n"
        "def state(model, sharded):\n    if sharded:\n        found = FSDP.optim_state_dict(model, optimizer)\n"
        "        return model.state_dict(), found\n    else:\n"
        "        return model.state_dict(), optimizer.state_dict()\n\n\n"
        "optimizer = torch.optim.SGD(made(torch.nn.Linear(2, 2), True).parameters())\n"
        "state(made(torch.nn.Linear(2, 2), True), True)\n"
    )
    path.write_text(program)
    run("rewrite", "--write", path)
    made = path.read_text()
    assert "get_model_state_dict(model" in made
    assert "        return model.state_dict(), optimizer.state_dict()\n" in made


def test_a_file_that_only_passes_a_model_on_is_moved_with_the_rest(tmp_path: Path) -> None:
    """It doesn't say FSDP1's name: it imports what makes the model, through a package."""
    package = tmp_path / "sharding"
    package.mkdir()
    (package / "__init__.py").write_text("from .wrap import made\n")
    (package / "wrap.py").write_text(HEAD + "\n\ndef made(model):\n    return FSDP(model)\n")
    (tmp_path / "loop.py").write_text(
        "import sharding\n\n\ndef average(model, other):\n"
        "    for a, b in zip(model.parameters(), other.parameters()):\n"
        "        a.lerp_(b, 0.5)\n\n\naverage(sharding.made(None), sharding.made(None))\n"
    )
    assert run("rewrite", "--write", tmp_path) == 0
    assert "from sharding.fsdp1_interface import" in (package / "wrap.py").read_text(), "the loop needs it"


@pytest.mark.parametrize(
    "program",
    [
        # Whole parameters have whole shapes.
        "def sizes(net):\n    model = FSDP(net)\n    with FSDP.summon_full_params(model, writeback=False):\n"
        "        return [p.shape for p in model.parameters()], sum(p.numel() for p in model.parameters())\n",
        # Where nothing is sharded, values may be drawn.
        "def made(net, sharded):\n    if sharded:\n        net = FSDP(net)\n    else:\n        net.init_weights()\n"
        "    return net\n",
    ],
)
def test_what_goes_on_meaning_the_same_is_not_marked(tmp_path: Path, program: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(HEAD + program)
    assert run("rewrite", "--write", path) == 0
    assert "# fsdp2:" not in path.read_text()


def test_what_tells_sharded_models_from_whole_ones_is_asked(tmp_path: Path) -> None:
    """NO_SHARD too becomes an FSDPModule, where it is more than DDP."""
    path = tmp_path / "script.py"
    path.write_text(
        HEAD + "from torch.distributed.fsdp import ShardingStrategy\n"
        "from torch.distributed.fsdp._runtime_utils import _reshard\n\n\n"
        "def made(net):\n    return FSDP(net, sharding_strategy=ShardingStrategy.NO_SHARD)\n\n\n"
        "def free(net):\n    model = made(net)\n    if model.sharding_strategy is not ShardingStrategy.NO_SHARD:\n"
        "        _reshard(model, model._handle, True)\n"
    )
    assert run("rewrite", "--write", path) == 1
    assert "# fsdp2: FC31 " in path.read_text()


def test_no_device_is_set_where_the_program_sets_none(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        HEAD + "def made(net, where):\n    return FSDP(net, device_id=where if where.type == 'cuda' else None)\n"
    )
    assert run("rewrite", "--write", path) == 0
    assert "    if where.type == 'cuda':\n        torch.cuda.set_device(where)\n    return fully" in path.read_text()


@pytest.mark.parametrize(("saved", "plain"), [("", True), ("torch.save(model.state_dict(), 'model.pt')\n", False)])
def test_buffers_that_are_cast_keep_their_own_dtype_in_a_file(tmp_path: Path, saved: str, plain: bool) -> None:
    path = tmp_path / "script.py"
    made = "net = torch.nn.Linear(8, 8)\nnet.register_buffer('scale', torch.ones(8))\n"
    made += "model = FSDP(net, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))\n"
    path.write_text(HEAD + "from torch.distributed.fsdp import MixedPrecision\n" + made + saved)
    assert run("rewrite", "--write", path) == 0
    text = path.read_text()
    assert ("buffer.data = buffer.to(torch.bfloat16)" in text) == plain
    assert ("from fsdp1_interface import" in text) != plain
