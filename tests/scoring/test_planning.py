"""Trees of shared prefixes, and plans of their batches, compared with sets of prefixes and loops over lists."""

from __future__ import annotations

import pickle
from functools import reduce
from itertools import accumulate, pairwise, takewhile
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from evalkit.errors import ScoringError
from evalkit.scoring import pack
from evalkit.scoring.pack import MIN_SAVING, MIN_TRUNK, Sequences, SequenceSet, batches_of, plan
from evalkit.scoring.tree import TRUNK, Tree, build_tree, sort_key, trunk_length
from tests.marks import fast

Prefix = tuple[int, ...]
Case = tuple[list[NDArray[np.int32]], list[NDArray[np.bool_]], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sequences over few tokens, so that they share, repeat and contain one another; what of them to score; a trunk."""
    trunk = draw(st.lists(st.integers(0, 2), max_size=4))
    # A prefix of another sequence, a duplicate and a sequence with but one token after the trunk are all legal
    tails = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=7))
    sequences = [np.array(trunk + tail, dtype=np.int32) for tail in tails]
    is_scored = [
        np.array(draw(st.lists(st.booleans(), min_size=len(s), max_size=len(s))), dtype=bool) for s in sequences
    ]
    return sequences, is_scored, len(trunk)


def prefixes(tree: Tree, trunk: NDArray[np.int32]) -> list[Prefix]:
    """For each node, the tokens that it sees, trunk first, itself last."""
    nodes = range(len(tree.tokens))
    seen = [[k for k in nodes if k <= q < tree.ends[k]] for q in nodes]
    return [(*trunk.tolist(), *(int(tree.tokens[k]) for k in ancestors)) for ancestors in seen]


@given(cases())
def test_a_tree_is_the_trie_of_its_sequences(case: Case) -> None:
    sequences, is_scored, trunk = case
    tree = build_tree(sequences, is_scored, trunk)
    first = max(trunk, 1)
    whole = [tuple(s.tolist()) for s in sequences]
    stem = sequences[0][:trunk]
    seen = prefixes(tree, stem)

    # Every distinct input prefix is one node, and attends to its ancestors and nothing else
    assert sorted(seen) == sorted({s[:end] for s in whole for end in range(trunk + 1, len(s))})
    assert tree.positions.tolist() == [len(prefix) - 1 for prefix in seen]

    # Every distinct (prefix, scored token) is one pair
    before = [tuple(stem.tolist()) if node == TRUNK else seen[node] for node in tree.pair_nodes.tolist()]
    pairs = list(zip(before, tree.pair_targets.tolist(), strict=True))
    expected = {
        (s[:at], s[at]) for s, want in zip(whole, is_scored, strict=True) for at in range(first, len(s)) if want[at]
    }
    assert sorted(pairs) == sorted(expected)

    # A sequence's path leads to the pairs of its scored tokens, in order
    for s, want, path in zip(whole, is_scored, tree.paths, strict=True):
        assert [None if p < 0 else pairs[p] for p in path.tolist()] == [
            (s[:at], s[at]) if want[at] else None for at in range(first, len(s))
        ]


tokens = st.lists(st.integers(0, 3), min_size=2, max_size=8)


@given(st.lists(tokens, min_size=1, max_size=6))
def test_trunk_is_the_longest_prefix_that_leaves_each_sequence_an_input(sequences: list[list[int]]) -> None:
    shortest = min(map(len, sequences))
    common = max(n for n in range(shortest + 1) if len({tuple(s[:n]) for s in sequences}) == 1)
    assert trunk_length([np.array(s, dtype=np.int32) for s in sequences]) == min(common, shortest - 2)


@given(st.lists(st.integers(0, 2**31 - 1)), st.lists(st.integers(0, 2**31 - 1)))
def test_keys_sort_as_sequences_do(a: list[int], b: list[int]) -> None:
    left, right = (sort_key(np.array(s, dtype=np.int32)) for s in (a, b))
    assert (left < right) == (a < b)


# Order, common prefixes, and plans

SEQUENCES = st.lists(st.sampled_from([0, 1, 2, 256, 70_000]), min_size=1, max_size=7)
ITEMS = st.lists(st.lists(SEQUENCES, min_size=1, max_size=4), min_size=1, max_size=8)
Lists = list[list[list[int]]]


def sequences_of(items: Lists, groups: list[str] | None = None) -> Sequences:
    """All tokens are scored; item 3 of group "a" is "a 3" in messages."""
    names = groups or [""] * len(items)
    arrays = [[np.array(sequence, np.int32) for sequence in item] for item in items]
    return Sequences.of(
        SequenceSet(f"{name} {number}", name, item, [np.ones(len(sequence), np.bool_) for sequence in item])
        for number, (name, item) in enumerate(zip(names, arrays, strict=True))
    )


def common(left: list[int], right: list[int]) -> list[int]:
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))]


def nodes(item: list[list[int]]) -> int:
    return len({tuple(sequence[:n]) for sequence in item for n in range(1, len(sequence))})


@given(ITEMS, st.integers(1, 12), st.data())
def test_order_common_prefixes_and_sizes(items: Lists, at_once: int, data: st.DataObject) -> None:
    whole, sequences = [sequence for item in items for sequence in item], sequences_of(items)
    assert np.argsort(sequences.ranks).tolist() == sorted(range(len(whole)), key=lambda i: (whole[i], i))
    lowest, highest = sequences.extremes
    assert [whole[i] for i in lowest] == [min(item) for item in items]
    assert [whole[i] for i in highest] == [max(item) for item in items]
    assert [[sequence.tolist() for sequence in sequences[i].sequences] for i in range(len(items))] == items
    assert sequences.nodes.tolist() == list(map(nodes, items))
    pairs = data.draw(st.lists(st.tuples(*[st.integers(0, len(whole) - 1)] * 2), max_size=9))
    left, right = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_AT_ONCE", at_once)
        lengths = sequences.common(left, right).tolist()
    assert lengths == [len(common(whole[a], whole[b])) for a, b in pairs]


def random_items(seed: int) -> tuple[Lists, list[str]]:
    """Items of four groups with preambles, a passage, and endings; some sequences are equal."""
    dice = np.random.default_rng(seed)

    def some(most: int, ids: int = 4) -> list[int]:
        return dice.integers(0, ids, dice.integers(0, most)).tolist()

    first, preambles = some(30), [some(200) for _ in range(4)]
    often = (0, 0.5, 1)[seed % 3]
    items, groups = [], []
    for _ in range(int(dice.integers(1, 60))):
        group = int(dice.integers(0, 4))
        stem = (first if dice.random() < often else []) + preambles[group] + some(8, 3)
        items.append([[*stem, *some(9), 1, 2] for _ in range(int(dice.integers(1, 5)))])
        groups.append(f"group {group}")
    return items, groups


def expected_plan(items: Lists, groups: list[str], budget: int) -> list[tuple[int, list[int]]]:
    """(length of the trunk, numbers of items) of each batch."""
    lists = [sorted(item) for item in items]
    order = sorted(range(len(items)), key=lambda number: (lists[number][0], number))

    def trunk(members: list[int]) -> int:
        whole = [sequence for number in members for sequence in lists[number]]
        length = max(0, min(len(reduce(common, whole)), min(map(len, whole)) - 2))
        return length if length >= MIN_TRUNK else 0

    def shared(a: int, b: int) -> int:
        sides = [(lists[a][side][:-1], lists[b][side][:-1]) for side in (0, -1)]
        return max(len(common(left, right)) for left, right in sides)

    parts: list[list[int]] = []
    for group in dict.fromkeys(groups[number] for number in order):
        members = [number for number in order if groups[number] == group]
        for before, number in zip([None, *members], members, strict=False):
            if before is None or shared(before, number) < MIN_TRUNK:
                parts.append([])
            parts[-1].append(number)
    single = []
    for members in parts:
        saved, own = trunk(members) - trunk(order), sum(nodes(lists[number]) - trunk(members) for number in members)
        batches = min(len(members), ceil(own / max(1, budget - saved)))
        too_large = sum(nodes(lists[number]) for number in members) > budget
        if len(members) == len(order) or (too_large and (batches - 1) * saved >= MIN_SAVING):
            single.append(members)
    pooled = [number for number in order if not any(number in members for members in single)]
    planned = []
    for members in [*single, *([pooled] if pooled else [])]:
        length = trunk(members) if sum(nodes(lists[number]) for number in members) > budget else 0
        again = {b: max(0, shared(a, b) - length) for a, b in pairwise(members)} | {members[0]: 0}
        fresh = {number: nodes(lists[number]) - length - again[number] for number in members}
        while members:
            sizes = list(accumulate([again[members[0]], *(fresh[number] for number in members)]))[1:]
            fitting = max(1, sum(size <= budget for size in sizes))
            best = len(members)
            if fitting < len(members):
                like = sizes[-1] / ceil(sizes[-1] / budget)
                costs = {count: again[members[count]] + MIN_SAVING * abs(sizes[count - 1] - like) / like
                         for count in range(1, fitting + 1)}  # fmt: skip
                best = max(count for count in costs if costs[count] == min(costs.values()))
            planned.append((length, members[:best]))
            members = members[best:]
    return planned


@pytest.mark.parametrize("seed", fast(range(6), range(60)))
def test_batches_are_those_of_a_plan_by_loops(seed: int) -> None:
    items, groups = random_items(seed)
    sequences = sequences_of(items, groups)
    for budget in (5, 60, 300):
        planned = plan(sequences, budget)
        assert [(batch.trunk, list(batch.items)) for batch in planned] == expected_plan(items, groups, budget)
        for batch in batches_of(sequences, budget):
            assert len(batch.tree.tokens) <= budget or len(batch.items) == 1
            assert len(batch.tree.paths) == sum(len(items[number]) for number in batch.items)
            other = pickle.loads(pickle.dumps(batch))
            assert "tree" not in vars(other) and other.items == batch.items
            assert other.tree.tokens.tolist() == batch.tree.tokens.tolist()
    assert plan(sequences_of([]), 5) == []


def distinct(items: Lists) -> int:
    return nodes([sequence for item in items for sequence in item])


def computed(items: Lists, budget: int) -> tuple[int, list[int]]:
    """Tokens of all batches and of their trunks, each run once where batches follow each other; and the trunks."""
    batches = batches_of(sequences_of(items), budget)
    trunks = [batch.trunk.tolist() for batch in batches]
    runs = [trunk for before, trunk in pairwise([[], *trunks]) if trunk != before]
    return sum(len(batch.tree.tokens) for batch in batches) + sum(map(len, runs)), list(map(len, trunks))


def test_truncated_contexts_do_not_cost_others_their_trunk() -> None:
    """Contexts that lost their left end share no prefix; those of a task that are whole share the solved examples."""
    dice = np.random.default_rng(0)
    examples = dice.integers(0, 500, 300).tolist()
    whole = [[[*examples, *dice.integers(0, 500, 60).tolist()]] for _ in range(50)]
    truncated = [[dice.integers(0, 500, 340).tolist()] for _ in range(6)]
    tokens, trunks = computed([*truncated, *whole], budget=1000)
    assert max(trunks) == 300
    assert tokens <= distinct([*truncated, *whole]) + 2 * MIN_TRUNK


def test_a_prefix_that_fills_a_batch_is_computed_once() -> None:
    dice = np.random.default_rng(1)
    examples = dice.integers(0, 500, 900).tolist()
    few = [[[*examples, *dice.integers(0, 500, 70).tolist()]] for _ in range(2)]
    others = [[dice.integers(0, 500, 80).tolist()] for _ in range(40)]
    sequences = sequences_of([*few, *others], ["few"] * 2 + ["other"] * 40)
    batches = batches_of(sequences, 1000)
    assert [len(batch.trunk) for batch in batches if set(batch.items) & {0, 1}] == [900]
    assert sum(len(batch.tree.tokens) for batch in batches) == distinct([*few, *others]) - 900


def test_batches_end_between_passages() -> None:
    """Eight passages of 150 tokens with 12 questions each, of which a batch holds about two and a half."""
    dice = np.random.default_rng(2)
    passages = dice.integers(0, 500, (8, 150)).tolist()
    items = [[[*passage, *dice.integers(0, 500, 25).tolist()]] for passage in passages for _ in range(12)]
    assert computed(items, budget=1000)[0] == distinct(items)


def test_requests_without_the_question_do_not_hide_what_documents_share() -> None:
    """Each document has sequences with and without its question, as for pmi."""
    dice = np.random.default_rng(3)
    examples = dice.integers(100, 500, 200).tolist()
    for answer in (50, 600):  # before and after the questions in lexicographic order
        items = []
        for _ in range(60):
            choices = dice.integers(0, 500, (4, 3)).tolist()
            question = [*examples, *dice.integers(0, 500, 20).tolist()]
            items.append([[*start, *choice] for start in (question, [answer]) for choice in choices])
        # 60 documents of 237 nodes each, of which 200 are shared; alone they would fill 15 batches
        assert len(plan(sequences_of(items), 1000)) <= ceil(60 * 37 / (1000 - 200)) + 1


@pytest.mark.parametrize("tail", [5, 100])
def test_too_small_a_budget_names_one_that_is_enough(tail: int) -> None:
    """Two groups with preambles of 60 tokens, and after them so many of each item's own."""
    dice = np.random.default_rng(0)
    preambles = dice.integers(0, 500, (2, 60)).tolist()
    items = [[preambles[number % 2] + dice.integers(0, 500, tail).tolist()] for number in range(12)]
    sequences = sequences_of(items, [f"subject {number % 2}" for number in range(12)])
    with pytest.raises(ScoringError, match=r"subject \d \d+ takes \d+ tokens .* give at least \d+") as caught:
        plan(sequences, 3, must_fit=True)
    enough = int(str(caught.value).split("give at least ")[1].split(",")[0])
    assert all(len(planned.of(sequences).tree.tokens) <= enough for planned in plan(sequences, enough, must_fit=True))
