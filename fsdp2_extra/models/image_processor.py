"""The image processor beside a model of transformers, by which whoever serves the model makes images of pixels."""

from __future__ import annotations

import json


def differs(processor: bytes, mean: float, std: float) -> list[str]:
    """Warn of a preprocessor_config.json that gives a model other images than training did, with `mean` and `std`."""
    ours = [mean, std]
    try:
        found = json.loads(processor)
        on = found.get("do_normalize", True)
        theirs = [found["image_mean"], found["image_std"]] if on and "image_mean" in found else [[0.0], [1.0]]
        near = all(abs(one - own) < 1e-3 for some, own in zip(theirs, ours, strict=True) for one in some)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return []  # nothing that an image processor would read
    if near or not found:
        return []
    return [
        f"warning: images are normalised by mean {ours[0]:g} and std {ours[1]:g}, and the model's "
        f"preprocessor_config.json says {theirs[0][:3]} and {theirs[1][:3]}: change it before the model is served"
    ]
