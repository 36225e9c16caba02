"""Checkpoints on the Hugging Face hub: ask once, briefly; fetch only what is needed; else the local cache.

In: `name` or `org/name`, with or without `@revision`. Out: the folder of its snapshot and the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path

from evalkit.errors import CheckpointError, first_line
from evalkit.models.files import CHAT_TEMPLATES, TOKENIZER_PATTERNS

_REACH_SECONDS = 3.0
_ALWAYS = ("*.json", "*.model", "*.txt", "*.jinja")


def fetch(
    given: str, *, pickles: bool, code: bool, weights: bool = True, say: Callable[[str], None]
) -> tuple[Path, str | None]:
    """Bring a hub snapshot onto this machine.

    Args:
        given: `name` or `org/name`, with or without `@revision` (a branch, tag or commit).
        pickles: whether pickled weights may come, which they do only where there are no safetensors.
        code: whether Python files may come.
        weights: False for the tokenizer alone.
        say: told before a download starts.

    Raises:
        CheckpointError: no such model or revision, no right to it, or the hub is out of reach and the
            cache does not hold it.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, _, revision = given.partition("@")
    try:
        info = HfApi().model_info(name, revision=revision or None, timeout=_REACH_SECONDS)
        listing = [file.rfilename for file in info.siblings or []]
    except HFValidationError as error:
        raise CheckpointError(f"{given}: no such folder here, and no name that the hub allows") from error
    except GatedRepoError as error:
        raise CheckpointError(f"{given}: the hub asks for its terms to be accepted, then `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{name}: the hub has no revision '{revision}' of it") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{given}: no such folder here, and no such model on the hub (or a private one: `hf auth login`)"
        ) from error
    except Exception as error:  # offline, timeout, proxy, server: whatever it is, the cache is what remains
        return _cached(given, name, revision or None, error)
    if "config.json" not in listing and weights:
        raise CheckpointError(f"{given}: on the hub, but without a config.json, so not a transformers checkpoint")
    say(f"{given}: fetching from the hub what is not yet in its cache")
    wanted = choose(listing, pickles=pickles, code=code, weights=weights)
    try:
        return Path(snapshot_download(name, revision=info.sha, allow_patterns=wanted)), info.sha
    except Exception as error:
        raise CheckpointError(f"{given}: the download broke off ({first_line(error)}); try again") from error


def choose(listing: Iterable[str], *, pickles: bool, code: bool, weights: bool) -> list[str]:
    """Of a repository's files, those that loading needs. Only its top folder counts, and that of its chat templates."""
    near = [name for name in listing if "/" not in name or name.rpartition("/")[0] == CHAT_TEMPLATES]
    patterns = ["config.json", *TOKENIZER_PATTERNS]
    if weights:
        patterns = [*_ALWAYS, "*.safetensors"]
        if pickles and not any(name.endswith(".safetensors") for name in near):
            patterns.append("pytorch_model*.bin")
        if code:
            patterns.append("*.py")
    return [name for name in near if any(fnmatch(name, pattern) for pattern in patterns)]


def _cached(given: str, name: str, revision: str | None, why: Exception) -> tuple[Path, str | None]:
    """The snapshot in the hub's local cache, when the hub itself cannot be asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as error:
        offline = isinstance(why, OfflineModeIsEnabled)
        reason = "HF_HUB_OFFLINE is set" if offline else f"it cannot be reached ({type(why).__name__})"
        raise CheckpointError(
            f"{given}: no such folder here; if the hub is meant: {reason} and its cache lacks this model"
        ) from error
    return folder, folder.name
