"""FSDP1's names alone, under the name that they had before they were a package of their own."""

from fsdp1_interface import *  # noqa: F403
