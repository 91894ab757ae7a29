"""The names that flags of models choose from; nothing else is loaded to check them."""

from __future__ import annotations

import os

NAMES = ("vit", "cnn", "transformer", "llama")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  # the files of them in a folder of transformers
LIBRARIES = ("hf", "timm")  # whose models are named with a colon, too

KERNELS = ("cudnn", "flash", "efficient", "math")  # of F.scaled_dot_product_attention
BY_TORCH = ("auto", *KERNELS)
ATTENTIONS = (*BY_TORCH, "flex")


def on_hub(place: str) -> bool:
    """Return whether the place of a model of transformers is a name on the hub, which would be asked: it's no path."""
    return not place.startswith(("/", ".", "~")) and place.count("/") < 2 and not os.path.exists(place)
