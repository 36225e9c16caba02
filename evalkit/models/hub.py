"""Download checkpoints from the Hugging Face hub, with the local cache as fallback.

In: `name` or `org/name`, with or without `@revision`. Out: the folder of its snapshot and the commit. The hub is
queried once, with a short timeout, and only the files needed are downloaded.
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
    """Download a hub snapshot, or find it in the local cache.

    Args:
        given: `name` or `org/name`, with or without `@revision` (a branch, tag or commit).
        pickles: whether pickled weights may be downloaded; they are only if there are no safetensors.
        code: whether Python files may be downloaded.
        weights: False for the tokenizer alone.
        say: called before a download starts.

    Raises:
        CheckpointError: the model or revision does not exist or is not accessible, or the hub cannot be reached and
            the model is not in the cache.
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
        raise CheckpointError(f"{given}: folder not found, and not a valid name on the hub") from error
    except GatedRepoError as error:
        raise CheckpointError(f"{given}: gated on the hub; accept its terms there, then run `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{name}: revision '{revision}' not found on the hub") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{given}: not found, neither as a folder nor on the hub (for a private model run `hf auth login`)"
        ) from error
    except Exception as error:  # offline, timeout, proxy, server: the cache is the fallback for all
        return _cached(given, name, revision or None, error)
    if "config.json" not in listing and weights:
        raise CheckpointError(
            f"{given}: found on the hub, but has no config.json, so it is not a transformers checkpoint"
        )
    say(f"{given}: downloading from the hub the files that are not cached")
    needed = needed_files(listing, pickles=pickles, code=code, weights=weights)
    try:
        return Path(snapshot_download(name, revision=info.sha, allow_patterns=needed)), info.sha
    except Exception as error:
        raise CheckpointError(f"{given}: the download failed ({first_line(error)}); try again") from error


def needed_files(listing: Iterable[str], *, pickles: bool, code: bool, weights: bool) -> list[str]:
    """Select the files of a repository that loading needs, in its top folder and its chat template folder."""
    candidates = [name for name in listing if "/" not in name or name.rpartition("/")[0] == CHAT_TEMPLATES]
    patterns = ["config.json", *TOKENIZER_PATTERNS]
    if weights:
        patterns = [*_ALWAYS, "*.safetensors"]
        if pickles and not any(name.endswith(".safetensors") for name in candidates):
            patterns.append("pytorch_model*.bin")
        if code:
            patterns.append("*.py")
    return [name for name in candidates if any(fnmatch(name, pattern) for pattern in patterns)]


def _cached(given: str, name: str, revision: str | None, why: Exception) -> tuple[Path, str | None]:
    """Return the snapshot in the hub's local cache; used if the hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as error:
        offline = isinstance(why, OfflineModeIsEnabled)
        reason = "HF_HUB_OFFLINE is set" if offline else f"it cannot be reached ({type(why).__name__})"
        raise CheckpointError(
            f"{given}: folder not found; as a hub model: {reason} and the model is not in its cache"
        ) from error
    return folder, folder.name
