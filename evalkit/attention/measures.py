"""Measures of attention maps, and the computer of a run.

In: the map of a layer in blocks and what is read of it (`Reading`); of a run, a loaded model and batches of sequences.
Out: arrays by the names of the measures, [heads], or [heads, bins] for names that end in `_by_position`; of a run, the
journal's rows. All but the ranks come from one pass over the blocks.

Maps may be signed (cog and differential attention). A measure with signs uses the weights A[i, j] of row i over keys
j ≤ i; one without uses the normalised weights |A[i, j]| / Σ_j |A[i, j]|, which sum to 1 in every row. In a row whose
weights are all 0 the normalised weights are 0 too, and so are its shares, distance and `entropy`. Row 0 has one key,
itself, and is left out of means over rows, but of those over all tokens.

- bos: `bos`, `bos_abs`: mean over rows i ≥ 1 of the first token's weight, and of its normalised weight; both also by
  position.
- mass: `mass_<category>`, `mass_abs_<category>`: mean over the readers of the weights that the keys of a category have
  together, and of the normalised weights.
- entropy: `entropy_shifted`, `entropy`: of the row `last`, in nats; `entropy_by_position` of all rows i ≥ 1.
- negative: `bos_negative`: share of rows i ≥ 1 whose weight of the first token is negative.
- rank: `rank`, `rank_squares`, `rank_stable`: see `_ranks_of`; they need each head's whole map.
- sink: `sink`, `sink_abs`: mean over the first 64 rows of the first token's weight, and of its normalised weight;
  `sink_rate`, `sink_abs_rate`: whether that is above 0.3.
- distance: `distance`: mean over rows i ≥ 1 of Σ_j (i − j) under the normalised weights, in tokens.
- sparsity: `sparsity`: mean over rows i ≥ 1 of the share of keys j ≤ i with |A[i, j]| < 0.01 max_j |A[i, j]|, or 0.
- bos_tokens: `bos_token`: the first token's weight in each of the rows 1 to 512, by position alone.
- all_tokens: `bos_all`, `bos_negative_all`: as `bos` and `bos_negative`, over all rows, as in the paper.
- similarity: `similarity`: mean over the layer's other heads of the cosine of the two flattened maps.

Absent measures: those of bos, bos_tokens, negative and all_tokens where the first token is not BOS (`sink` stays, since
it is about the first token); means over rows i ≥ 1 of a single token; mass without readers; sink of less than 64
tokens; similarity of a single head.

Sources: the Integral Transformer's paper, section 5 and appendix C, for bos, mass, `entropy_shifted`, `bos_negative`
and `rank`; arXiv 2410.10781 (Attention-Sink) for sink, α of the first token at T = 64, whose share of α > 0.3 is its
sink rate. The paper's entropy is of (a − min a) / Σ(a − min a) over the keys j ≤ i, those outside of a sliding window
too. As soon as one weight is negative this lifts all near-zero weights, so `entropy` stands beside it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from numpy.typing import NDArray

from evalkit.attention.attention_calls import MapBlocks
from evalkit.attention.documents import AnalysedSequence, Reading
from evalkit.attention.groups import (
    BOS_TOKENS,
    CATEGORIES,
    FINISHED,
    GROUPS,
    MASS,
    MEASURES,
    MOST_POSITIONS,
    RANK,
    RANKED_LAYERS,
    SINK_SHARE,
    SPARSE_SHARE,
    AttentionRow,
    chosen_layers,
)
from evalkit.attention.map_blocks import MapReader
from evalkit.display import Say
from evalkit.errors import ScoringError
from evalkit.models.loading.tokenizer import refuse_tokens_without_rows
from evalkit.models.memory import is_out_of_memory, refuse_to_split
from evalkit.requests.batches import Batch, Budget
from evalkit.runs.columns import schema_of
from evalkit.runs.traits import BatchDevice, place_of

if TYPE_CHECKING:
    from evalkit.models.loading.load import LoadedModel

Floats = NDArray[np.float64]

SINK_TOKENS = 64
"""Rows that the measures of the sink use; T of arXiv 2410.10781."""
_OF_WEIGHTS = frozenset({"negative", "similarity", "all_tokens", BOS_TOKENS, RANK})
"""Groups that need no magnitudes of rows."""
_BY_POSITION = "_by_position"
_CHECKED_TOKENS = 48


def measures_of(blocks: MapBlocks, reading: Reading, groups: Collection[str]) -> dict[str, Floats]:
    """Compute groups of measures of one layer, of `GROUPS`; a `ValueError` if the reading does not fit the map.

    Returns [heads] by name, and [heads, bins] for names that end in `_by_position`, with the bins of `position_edges`,
    of `bos_token` one for each token.
    """
    if unknown := sorted(set(groups) - set(GROUPS)):
        raise ValueError(f"no group of measures '{unknown[0]}'; there are {', '.join(GROUPS)}")
    positions = np.append(reading.readers, reading.last)
    if positions.min() < 0 or positions.max() >= blocks.tokens:
        raise ValueError(f"a position of the reading is outside of the sequence's {blocks.tokens} tokens")
    if MASS in groups and (reading.categories is None or len(reading.categories) != blocks.tokens):
        raise ValueError(f"the measures of mass need the categories of {blocks.tokens} tokens")
    measured = {} if set(groups) == {RANK} else _MapSums(blocks, reading, groups).measures()
    if RANK in groups:
        # Head by head, so that one head's map is in memory
        ranks = np.array([_ranks_of(blocks.head(head)) for head in range(blocks.heads)])
        measured |= dict(zip((RANK, "rank_squares", "rank_stable"), ranks.T, strict=True))
    if "sink" in measured:
        rates = {f"{name}_rate": measured[name] > SINK_SHARE for name in ("sink", "sink_abs")}
        measured |= {name: above.astype(np.float64) for name, above in rates.items()}
    return measured


class _MapSums:
    """Sums over the rows of a map, in one pass over its blocks and for all heads at once.

    Weights are read in the blocks' dtype; sums over rows of blocks are added in float64. Arrays that no group needs
    are zero.
    """

    def __init__(self, blocks: MapBlocks, reading: Reading, groups: Collection[str]) -> None:
        self._reading, self._groups = reading, frozenset(groups)
        heads, self._tokens = blocks.heads, blocks.tokens
        # [heads, tokens] A[i, 0]; Σ_j |A[i, j]|; Σ_j |A[i, j]| (i − j); entropy of the normalised weights; their number
        # that is not near zero
        self._first, self._magnitude, self._distance, self._entropy, self._dense = np.zeros((5, heads, self._tokens))
        # [heads, last + 1] the row of `Reading.last`
        self._last = np.zeros((heads, reading.last + 1))
        # [2, heads, categories] sums over readers of the keys of a category: of weights, of normalised ones
        self._mass = np.zeros((2, heads, len(CATEGORIES)))
        # [heads, heads] inner products of the flattened maps of two heads
        self._products = torch.zeros(heads, heads, dtype=torch.float64)
        # [tokens, categories] whether a key is of a category
        self._keys = torch.empty(0)
        if MASS in groups:
            self._keys = torch.nn.functional.one_hot(torch.as_tensor(reading.categories).long(), len(CATEGORIES))
        for start, block in blocks.blocks():
            self._add(start, block)

    def _add(self, start: int, block: torch.Tensor) -> None:
        """Add a block, [heads, rows, keys]; its weights are replaced by their absolute values."""
        reading, groups, stop = self._reading, self._groups, start + block.shape[1]
        self._first[:, start:stop] = block[:, :, 0].cpu().numpy()
        if start <= reading.last < stop and "entropy" in groups:
            row = block[:, reading.last - start, : reading.last + 1]
            self._last[:, : row.shape[1]] = row.cpu().double().numpy()
        if "similarity" in groups:
            flat = block.flatten(1)
            self._products += (flat @ flat.T).cpu().double()
        if groups <= _OF_WEIGHTS:
            return
        inside = (reading.readers >= start) & (reading.readers < stop)
        readers = torch.from_numpy(reading.readers[inside] - start)
        read = block[:, readers] if MASS in groups and len(readers) else None
        magnitude = block.abs_()
        total = magnitude.sum(-1)
        self._magnitude[:, start:stop] = total.cpu().numpy()
        if "distance" in groups:
            # From the block's first row: with larger numbers the two terms would cancel
            keys = torch.arange(start, start - block.shape[2], -1, device=total.device, dtype=total.dtype)
            rows = torch.arange(block.shape[1], device=total.device, dtype=total.dtype)
            self._distance[:, start:stop] = (magnitude @ keys + total * rows).cpu().numpy()
        if "sparsity" in groups:
            # Keys after the query have the weight 0 and are not counted
            is_dense = (magnitude >= SPARSE_SHARE * magnitude.amax(-1, keepdim=True)) & (magnitude > 0)
            self._dense[:, start:stop] = is_dense.sum(-1).cpu().numpy()
        if read is not None:
            self._keys = self._keys.to(read)
            masses, magnitudes = ((rows @ self._keys[: rows.shape[2]]).cpu().double() for rows in (read, read.abs()))
            shares = _divided(magnitudes.numpy(), total[:, readers].cpu().double().numpy()[:, :, None])
            self._mass += np.stack((masses.numpy().sum(1), shares.sum(1)))
        if "entropy" in groups:
            # Σ (a / t) log(a / t) = Σ (a log a) / t − log t
            logs = magnitude.clamp_min(torch.finfo(block.dtype).tiny).log_()
            mean = logs.mul_(magnitude).sum(-1) / total
            self._entropy[:, start:stop] = (total.log() - mean).clamp_(min=0).nan_to_num_(0.0).cpu().numpy()

    def measures(self) -> dict[str, Floats]:
        """Return the measures of the groups, but the ranks and the rates, that apply to the sequence."""
        first, negative, shares = self._first, self._first < 0, _divided(np.abs(self._first), self._magnitude)
        readers, bos, tokens = len(self._reading.readers), self._reading.bos, self._tokens
        measured: dict[str, Floats] = {}
        if bos and "bos" in self._groups:
            measured |= _means("bos", first) | _means("bos_abs", shares)
        if readers and MASS in self._groups:
            for kind, masses in zip(("mass", "mass_abs"), self._mass / readers, strict=True):
                measured |= {f"{kind}_{name}": masses[:, number] for number, name in enumerate(CATEGORIES)}
        if "entropy" in self._groups:
            last = self._entropy[:, self._reading.last]
            measured |= {"entropy_shifted": shifted_entropy(self._last), "entropy": last}
            measured |= _means("entropy", self._entropy) | {"entropy": last}
        if bos and tokens > 1 and "negative" in self._groups:
            measured["bos_negative"] = negative[:, 1:].astype(float).mean(1)
        if bos and tokens > 1 and BOS_TOKENS in self._groups:
            measured[f"bos_token{_BY_POSITION}"] = first[:, 1 : MOST_POSITIONS + 1]
        if tokens >= SINK_TOKENS and "sink" in self._groups:
            measured |= {"sink": first[:, :SINK_TOKENS].mean(1), "sink_abs": shares[:, :SINK_TOKENS].mean(1)}
        if tokens > 1 and "distance" in self._groups:
            measured["distance"] = _divided(self._distance, self._magnitude)[:, 1:].mean(1)
        if tokens > 1 and "sparsity" in self._groups:
            measured["sparsity"] = 1 - (self._dense / np.arange(1, tokens + 1))[:, 1:].mean(1)
        if (heads := len(first)) > 1 and "similarity" in self._groups:
            products = self._products.numpy()
            norms = np.sqrt(products.diagonal())
            cosines = _divided(products, np.outer(norms, norms))
            measured["similarity"] = (cosines.sum(1) - cosines.diagonal()) / (heads - 1)
        if bos and "all_tokens" in self._groups:
            measured |= {"bos_all": first.mean(1), "bos_negative_all": negative.mean(1)}
        return measured


def _divided(parts: Floats, wholes: Floats) -> Floats:
    """Divide; 0 where the divisor is 0."""
    return np.divide(parts, wholes, out=np.zeros_like(parts), where=wholes != 0)


def _means(name: str, rows: Floats) -> dict[str, Floats]:
    """Average [heads, tokens] over rows i ≥ 1, and by position."""
    tokens = rows.shape[1]
    if tokens == 1:
        return {}
    starts = np.array(position_edges(tokens)[:-1])
    counts = np.diff(np.append(starts, tokens))
    return {name: rows[:, 1:].mean(1), f"{name}{_BY_POSITION}": np.add.reduceat(rows, starts, axis=1) / counts}


def position_edges(tokens: int) -> tuple[int, ...]:
    """Return the edges 1, 2, 4, 8 … of bins of positions, [1, 2), [2, 4) …, up to the first one past the last token.

    The last bin may have positions that the sequence does not. One token has no bins: the only edge is 1.
    """
    return tuple(2**power for power in range(1 + (tokens - 1).bit_length()))


def shifted_entropy(row: Floats) -> Floats:
    """Compute the paper's entropy of rows of visible keys, [heads, keys] → [heads], in nats.

    The smallest weight of a row is subtracted from all, then they are divided by their sum; a row of equal weights
    counts as uniform.
    """
    lifted = row - row.min(-1, keepdims=True)
    sums = lifted.sum(-1)
    shares = _divided(lifted, sums[:, None])
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.where(sums == 0, math.log(row.shape[-1]), -(shares * logs).sum(-1))


def _ranks_of(head: torch.Tensor) -> tuple[float, float, float]:
    """Compute three effective ranks of a map, [tokens, tokens], with the singular values σ₁ ≥ σ₂ ≥ … ≥ 0.

    - exp of the entropy of σ / Σσ; Roy and Vetterli, "The effective rank" (EUSIPCO 2007), definition 1;
    - the same of σ² / Σσ²: exp of the entropy of the shares of variance;
    - the stable rank, Σσ² / σ₁²: the squared ratio of the Frobenius norm and the spectral norm.

    The singular values are computed in the map's dtype, sums in float64.
    """
    values = torch.linalg.svdvals(head).double()
    largest = float(values.max())
    if largest == 0:
        return 0.0, 0.0, 0.0
    values = values / largest
    squares = values.square()
    plain, squared = (float(torch.special.entr(weights / weights.sum()).sum().exp()) for weights in (values, squares))
    return plain, squared, float(squares.sum())


@dataclass(frozen=True)
class AttentionFacts:
    window: int


class Analysis:
    """Computer of batches of sequences; a batch has no token budget."""

    def __init__(self, specification: Mapping[str, Any], loaded: LoadedModel, _: Budget, say: Say) -> None:
        self._model = loaded.model
        self._reader = reader = MapReader(loaded.model, say)
        requested, names = specification["layers"], specification["measures"]
        chosen = chosen_layers(requested, reader.layers)
        last = {} if requested else {RANK: chosen[-RANKED_LAYERS:], BOS_TOKENS: chosen[-1:]}
        groups = {layer: [name for name in names if layer in last.get(name, chosen)] for layer in chosen}
        self._groups = {layer: members for layer, members in groups.items() if members}
        sample = np.arange(_CHECKED_TOKENS, dtype=np.int64) * 37 % loaded.tokenizer.vocab_size
        sample[0] = loaded.bos_id if loaded.bos_id is not None else 0
        reader.check(sample)
        self.facts = AttentionFacts(min(loaded.window, specification.get("window", loaded.window)))
        self.about: dict[str, Any] = {
            "loaded": loaded.facts(),
            "maps": reader.kind,
            "attention_layers": list(reader.layers),
            "layers": {str(layer): members for layer, members in self._groups.items()},
        }
        self._place = place_of(loaded.device, reader.kind)

    def place(self, batch: Batch | None = None) -> BatchDevice:
        return self._place

    def compute(self, batch: Batch) -> pa.Table:
        return rows_of([(sequence, self._measured(sequence)) for sequence in batch.content])

    def _measured(self, sequence: AnalysedSequence) -> dict[int, dict[str, Floats]]:
        by_layer: dict[int, dict[str, Floats]] = {}

        def use(layer: int, blocks: MapBlocks) -> None:
            by_layer[layer] = measures_of(blocks, sequence, self._groups[layer])

        label = f"{sequence.subtask} document {sequence.doc_id}"
        refuse_tokens_without_rows(self._model, label, sequence.tokens)
        try:
            self._reader.read(sequence.tokens, tuple(self._groups), use)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            tokens = f"{len(sequence.tokens):,} tokens"
            refuse_to_split(f"{label}, {tokens}")
            raise ScoringError(f"{label}: out of memory on {tokens}; leave rank out of --measures") from error
        return by_layer


def rows_of(measured: Sequence[tuple[AnalysedSequence, Mapping[int, Mapping[str, Floats]]]]) -> pa.Table:
    """Return the rows of some sequences, each with layer → its measures, as of `measures_of`."""
    rows: list[tuple[Any, ...]] = [(*_key(sequence), 0, FINISHED, None, np.zeros(1)) for sequence, _ in measured]
    for sequence, by_layer in measured:
        for layer, values_of in by_layer.items():
            for name, values in values_of.items():
                measure, bins = name.removesuffix(_BY_POSITION), position_edges(len(sequence.tokens))[:-1]
                bins = tuple(range(1, 1 + values.shape[-1])) if MEASURES[measure].of_tokens else bins
                about = *_key(sequence), layer, measure
                firsts = (None,) if measure == name else bins
                rows += [(*about, *of_bin) for of_bin in zip(firsts, values.reshape(len(values), -1).T, strict=True)]
    columns = [name for name in AttentionRow._fields if name != "head"]
    table = pd.DataFrame(rows, columns=columns).explode("value")
    # Rounded as in the final table: the journal's compression halves
    rounded = table["value"].astype(np.float32).astype(np.float64)
    table = table.assign(head=table.groupby(level=0).cumcount(), value=rounded)
    return pa.Table.from_pandas(table, schema_of(AttentionRow), preserve_index=False)


def _key(sequence: AnalysedSequence) -> tuple[Any, ...]:
    checksum, tokens = zlib.crc32(sequence.tokens.tobytes()), len(sequence.tokens)
    about = sequence.subtask, sequence.doc_id, sequence.choice, sequence.cluster
    return *about, checksum, tokens, sequence.truncated
