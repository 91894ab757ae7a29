"""Tables of positions, of every architecture that the installed transformers knows."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from fsdp2.models.meta import parameters_on_meta
from fsdp2.models.positions import SHORT, too_long
from fsdp2.models.spec import ModelSpec
from fsdp2_extra.models.blocks import find_blocks
from tests.others.table import AUTO, LARGEST
from tests.others.tiny import tiny

LONG = 200  # tokens, of models with 64 positions


def _call(model: nn.Module, batch: Any) -> Any:
    return model(**(batch.inputs if isinstance(batch.inputs, dict) else {"input_ids": batch.inputs}))


def _runs(model: nn.Module, kind: str, length: int) -> bool:
    tokens = torch.full((1, length), 3)
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens} if kind == "seq2seq" else tokens
    try:
        with torch.no_grad():
            _call(model, SimpleNamespace(inputs=inputs))
    except Exception:  # whatever its code raises
        return False
    return True


@pytest.mark.slow
def test_what_takes_long_sequences_is_never_refused() -> None:
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    refused: dict[bool, list[str]] = {True: [], False: []}  # whether a long sequence runs -> what is refused
    count = {True: 0, False: 0}
    for kind, (auto, table) in AUTO.items():
        for name in getattr(modeling_auto, table):
            try:
                config = tiny(CONFIG_MAPPING[name])
                config.use_cache = False
                if kind == "causal" and hasattr(config, "is_decoder"):
                    config.is_decoder = True
                make = getattr(transformers, auto).from_config
                with torch.device("meta"):
                    large = sum(one.numel() for one in make(config).parameters()) > LARGEST
                if large:
                    continue
                model = make(config, dtype=torch.float32)
                with parameters_on_meta():
                    empty = make(config, dtype=torch.float32)
            except Exception:  # of what the tiny configurations don't know yet
                continue
            if not _runs(model, kind, SHORT):
                continue
            runs = _runs(model, kind, LONG)
            count[runs] += 1
            spec = cast(ModelSpec, SimpleNamespace(task=kind, call=_call))
            halves = 2 if kind == "seq2seq" else 1
            if too_long(spec, empty, find_blocks(empty), halves * LONG) is not None:
                refused[runs].append(f"{kind} {name}")
    print(f"{count[True]} take {LONG} tokens; of {count[False]} that don't, {len(refused[False])} are refused")
    assert refused[True] == []
    assert count[True] > 150
    assert len(refused[False]) > 0.85 * count[False]
