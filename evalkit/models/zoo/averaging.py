"""Average the weights of checkpoints of one training.

In: checkpoints with the same config, tokenizer, tensor names, shapes and dtypes. Out: a folder with their mean, or
their exponential moving average, which loads as they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evalkit.display import doing, imports
from evalkit.errors import CheckpointError, UsageError
from evalkit.models.loading.files import code_files, copy_files, generation_files, quantization, tokenizer_files
from evalkit.models.loading.fingerprint import combine, file_sha256, fingerprint, stable
from evalkit.models.loading.locate import Checkpoint
from evalkit.models.zoo.named import new_folder

if TYPE_CHECKING:
    import torch


def average_checkpoints(checkpoints: Sequence[Checkpoint], output: Path, decay: float | None = None) -> None:
    """Write the mean of checkpoints' weights to `output`, which must not exist or be empty.

    With a `decay`, it is the exponential moving average in their order: of each checkpoint after the first, 1 - decay
    is added to what precedes it times the decay. It is computed in float64 and rounded to the checkpoints' dtypes.
    Integers, as in some buffers, must be equal. Config and tokenizer are copied from the last checkpoint.

    Raises:
        UsageError: fewer than two checkpoints, or the same weights twice.
        CheckpointError: checkpoints that differ in more than the values of their weights, are quantised, or changed
            while they were read.
    """
    if len(checkpoints) < 2:
        raise UsageError("an average needs two checkpoints or more; name them, oldest first")
    first, last = checkpoints[0], checkpoints[-1]
    for checkpoint in checkpoints:
        _check_settings(first, checkpoint)
    with doing(f"reading {first.given}", slow=imports("torch")):
        from huggingface_hub import save_torch_state_dict

        from evalkit.models.loading.build import read_weights
    mean: dict[str, torch.Tensor] = {}
    forms: dict[str, tuple[torch.dtype, torch.Size]] = {}
    digests = set[str]()
    for count, checkpoint in enumerate(checkpoints, 1):
        with doing(f"reading {checkpoint.given}"):
            weights = read_weights(checkpoint.weights())
            read = combine(checkpoint, weights.digests, file_sha256)
        if fingerprint(checkpoint) != read:
            raise CheckpointError(f"{checkpoint.given}: changed while it was read; run the command again")
        if read.weights in digests:
            raise UsageError(f"{checkpoint.given}: has the weights of an earlier checkpoint; name each once")
        digests.add(read.weights)
        own = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.tensors.items()}
        forms = forms or own
        for name in sorted(forms.keys() | own.keys()):
            if forms.get(name) != own.get(name):
                words = " and ".join(
                    " ".join(map(str, form)) if form else "absent" for form in (forms.get(name), own.get(name))
                )
                raise _differ(first, checkpoint, f"{name} ({words})")
            tensor = weights.tensors[name]
            if not tensor.is_floating_point():
                if not mean.setdefault(name, tensor).equal(tensor):
                    raise _differ(first, checkpoint, f"{name}, integers that have no mean")
            elif count == 1:
                mean[name] = tensor.double()
            else:  # as a step towards it, equal values stay equal to the last bit, as those of tied weights must
                mean[name] += (1 / count if decay is None else 1 - decay) * (tensor.double() - mean[name])
    with doing(f"writing {output}"), new_folder(output) as folder:
        code = code_files(last.folder) if last.config().get("auto_map") else ()
        files = (last.folder / "config.json", *generation_files(last.folder), *tokenizer_files(last.folder), *code)
        copy_files(files, last.folder, folder)
        save_torch_state_dict({name: tensor.to(forms[name][0]).contiguous() for name, tensor in mean.items()}, folder)


def _check_settings(first: Checkpoint, other: Checkpoint) -> None:
    if other.gguf is not None or quantization(config := other.config()):
        raise CheckpointError(f"{other.given}: quantised weights have no average; give folders as save_pretrained "
                              "writes them")  # fmt: skip
    mine, theirs = stable(first.config()), stable(config)
    if keys := sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)):
        raise _differ(first, other, f"{', '.join(keys[:3])} of config.json")
    if len({combine(checkpoint, (), file_sha256).tokenizer for checkpoint in (first, other)}) > 1:
        raise _differ(first, other, "their tokenizers")


def _differ(first: Checkpoint, other: Checkpoint, what: str) -> CheckpointError:
    return CheckpointError(f"{first.given} and {other.given} differ in {what}; average checkpoints of one training")
