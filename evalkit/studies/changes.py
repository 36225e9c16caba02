"""Checkpoints whose files are not the ones that were evaluated.

In: a finished run and its checkpoint in the study. Out: how the files on this machine differ from the run's. Weights
are compared by cached digests; those that were never hashed here are read only if the run was of another folder.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from evalkit.errors import EvalkitError
from evalkit.models.fingerprint import fingerprint, known_fingerprint
from evalkit.models.spec import ModelSpec, model_spec
from evalkit.runs.folder import Run
from evalkit.studies.study import StudyCheckpoint


def change_of(run: Run, checkpoint: StudyCheckpoint) -> str:
    """Describe how a checkpoint's files differ from the run's; empty if they do not, or if none is on this machine."""
    spec = model_spec(checkpoint.model, **checkpoint.options)
    here, evaluated = Path(spec.model).expanduser(), run.manifest.get("path")
    if spec.model == "demo" or not here.exists():
        return ""
    # Two studies can have checkpoints of one name in different folders
    elsewhere = evaluated is not None and Path(evaluated).exists() and not here.samefile(evaluated)
    recorded = run.manifest["specification"]["checkpoint"]
    changed = [part for part, digest in _known(spec, elsewhere).items() if recorded.get(part, digest) != digest]
    return f"{checkpoint.given} has other files than this run's ({', '.join(changed)})" if changed else ""


def _known(spec: ModelSpec, unhashed: bool) -> dict[str, str]:
    """Return part → digest, as far as known without the network; empty for a folder that is not complete any more.

    Args:
        spec: the model.
        unhashed: whether to read weights that were never hashed on this machine.
    """
    own = spec.tokenizer is None or Path(spec.tokenizer).expanduser().is_dir()
    try:
        checkpoint = (spec if own else replace(spec, tokenizer=None)).locate()
        found = asdict(fingerprint(checkpoint)) if unhashed else known_fingerprint(checkpoint)
    except EvalkitError:
        return {}
    return found if own else {part: digest for part, digest in found.items() if part != "tokenizer"}
