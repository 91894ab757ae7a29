"""The names that flags of models choose from; nothing else is loaded to check them."""

from __future__ import annotations

NAMES = ("vit", "cnn", "transformer", "llama")
LIBRARIES = ("hf", "timm")  # whose models are named with a colon, too

KERNELS = ("cudnn", "flash", "efficient", "math")  # of F.scaled_dot_product_attention
ATTENTIONS = ("auto", *KERNELS, "flex")
