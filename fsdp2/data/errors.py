"""Errors of data that can't be had. Each message is one line that says why, and what to do instead."""

from __future__ import annotations


class DownloadFailed(OSError):
    """Data that can't be downloaded."""


class NotHere(Exception):
    """Data that has to be downloaded or tokenised before it can be read."""


class UnusableText(ValueError):
    """Text, or a tokenizer, that can't be used."""
