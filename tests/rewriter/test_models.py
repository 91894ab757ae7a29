"""What is done with a sharded model in its own class, or by methods that it has from FSDP1's."""

from __future__ import annotations

from pathlib import Path

from migration.rewriter.check import everything, load
from migration.rewriter.rewrite import rewrite

METHODS = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType


def main(model):
    model = FSDP(model, device_id=torch.device("cpu"))
    with model.summon_full_params(model):
        print(model.weight)
    model.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    print(len(model.fsdp_modules(model)), model.forward(torch.ones(2)))
    return model.state_dict()
"""
DECAY = """\
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer.forward(x)

    def configure_optimizers(self):
        found = {name: parameter for name, parameter in self.named_parameters()}
        found = {name: parameter for name, parameter in found.items() if parameter.requires_grad}
        decayed = [parameter for parameter in found.values() if parameter.dim() >= 2]
        return torch.optim.AdamW(decayed, weight_decay=0.1)


def main():
    model = FSDP(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    return model.configure_optimizers()
"""

KINDS = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

kind = StateDictType.FULL_STATE_DICT


def main(model, last):
    model = FSDP(model, device_id=torch.device("cpu"))
    if kind == StateDictType.LOCAL_STATE_DICT:
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            return model.state_dict()
    if kind is not StateDictType.SHARDED_STATE_DICT:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return model.state_dict()
"""
STRATEGIES = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy as Strategy


def strategy_of(name):
    if hasattr(Strategy, name):
        return Strategy[name]
    return None


def main(model, other, name, mesh):
    cpu = torch.device("cpu")
    model = FSDP(model, sharding_strategy=strategy_of(name), device_mesh=mesh, device_id=cpu)
    other = FSDP(other, sharding_strategy=strategy_of(name), device_id=cpu)
    return model, other
"""
PRECISIONS = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

casting = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
plain = MixedPrecision(param_dtype=torch.bfloat16)


def main(model, other, cast):
    cpu = torch.device("cpu")
    model = FSDP(model, mixed_precision=casting if cast else plain, device_id=cpu)
    other = FSDP(other, mixed_precision=plain, device_id=cpu)
    return model, other
"""


def _rewritten(tmp_path: Path, text: str) -> tuple[str, list[tuple[int, str]], list[str]]:
    """The new text; line and code of each finding; the codes of what is asked."""
    path = tmp_path / "program.py"
    path.write_text(text)
    result = rewrite(load([str(path)])[0])
    found = [(finding.line or 0, finding.code) for finding in everything([str(path)]).findings]
    return result.files[0].data.decode(), found, [problem.code for problem in result.undecided]


def test_static_methods_that_are_called_on_a_model(tmp_path: Path) -> None:
    text, found, asked = _rewritten(tmp_path, METHODS)
    assert {(8, "FM09"), (10, "FM05"), (11, "FM03"), (11, "FM08")} <= set(found)
    assert asked == []
    assert "with model.summon_full_params(model):" in text
    assert "print(len(model.fsdp_modules(model)), model(torch.ones(2)))" in text


def test_decay_by_dimension_is_found_in_the_models_own_method(tmp_path: Path) -> None:
    text, found, asked = _rewritten(tmp_path, DECAY)
    assert (17, "FC28") in found
    assert asked == ["FC28"]
    assert "register_fsdp_forward_method" not in text
    assert "return self.layer(x)" in text


def test_kinds_stay_what_they_are(tmp_path: Path) -> None:
    text, _, asked = _rewritten(tmp_path, KINDS)
    assert asked == ["FD03"]
    assert "kind = StateDictType.FULL_STATE_DICT" in text
    assert "with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):" in text
    assert "if kind is not StateDictType.SHARDED_STATE_DICT:" in text


def test_where_one_call_needs_run_time_all_have_it(tmp_path: Path) -> None:
    text, _, asked = _rewritten(tmp_path, STRATEGIES)
    assert asked == []
    assert text.count("= FSDP(") == 2
    text, _, asked = _rewritten(tmp_path, PRECISIONS)
    assert asked == []
    assert text.count("= FSDP(") == 2
    assert "fully_shard" not in text
