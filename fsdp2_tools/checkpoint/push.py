"""`export --push`: an exported folder as a new private repository of the hub, after a confirmation.

`destination` comes before the export, so that what is refused has cost no work. It asks the hub who is logged in and
whether the name is free. Nothing else is sent before somebody has agreed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fsdp2.checkpoint.refusal import Refused, one_line
from fsdp2.units import install, printable, size

MADE_BY_THE_HUB = {".gitattributes"}  # in a repository that is new and empty
T = TypeVar("T")


@dataclass(frozen=True)
class Destination:
    """A repository that may be written to.

    Attributes:
        api: huggingface_hub's HfApi.
        user: who is logged in.
        exists: it is there already, private and empty.
    """

    name: str
    api: Any
    user: str
    exists: bool


def destination(name: str) -> Destination:
    """Ask the hub about a repository's name, OWNER/NAME. Raises Refused if nothing can be pushed there."""
    try:
        from huggingface_hub import HfApi, get_token, is_offline_mode
        from huggingface_hub.errors import RepositoryNotFoundError
    except ImportError:
        raise Refused(f"--push: huggingface_hub isn't installed; {install('hf')}") from None
    if is_offline_mode():
        raise Refused("--push: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids to ask the hub; unset it")
    if get_token() is None:
        raise Refused("--push: nobody is logged in to the hub; run hf auth login, or set HF_TOKEN")
    api = HfApi()
    who = _asked(api.whoami, f"--push: {api.endpoint} doesn't say who is logged in")
    if who.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise Refused("--push: the token may only read; make one that may write, and run hf auth login with it")

    def files() -> set[str] | None:
        try:
            there = api.model_info(name)
        except RepositoryNotFoundError:
            return None
        if not there.private:
            raise Refused(
                f"--push {name}: is public, and what is pushed stays private until you publish it; choose another name"
            )
        return {file.rfilename for file in there.siblings or ()} - MADE_BY_THE_HUB

    there = _asked(files, f"--push {name}")
    if there:
        raise Refused(f"--push {name}: has files, and nothing is overwritten; choose another name")
    return Destination(name, api, str(who["name"]), there is not None)


def push(to: Destination, folder: Path, *, agreed: bool) -> bool:
    """Upload a folder; False if whoever is asked, without `agreed`, doesn't agree. Raises Refused if that fails."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    what = f"{len(files)} files, {size(sum(file.stat().st_size for file in files))}"
    if not agreed:
        question = f"push {what}, to {to.api.endpoint}/{to.name}, private, as {to.user}? [y/N]"
        print(printable(question), end=" ", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return False

    def upload() -> None:
        if not to.exists:
            to.api.create_repo(to.name, private=True)
        to.api.upload_folder(repo_id=to.name, folder_path=folder, commit_message="Export of FSDP2's fsdp2.checkpoint")

    _asked(upload, f"{folder} is written, but not pushed; hf upload --private {to.name} {folder} tries again")
    print(f"pushed {what}, to {printable(f'{to.api.endpoint}/{to.name}')}, private")
    return True


def _asked(ask: Callable[[], T], failed: str) -> T:
    """Return the hub's answer. Raises Refused for any error: which HTTP library raises it depends on the version."""
    try:
        return ask()
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{failed} ({one_line(error)[:200]})") from None
