"""Drafts of n-grams: what a text has said, and answers that are over."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from anyshard.speculate import Draft, NgramDrafter, NgramStore, NgramTable

EIGHT = [1, 2, 3, 4, 5, 6, 7, 8]


def table_of(text: Sequence[int], *, vocab: int = 1000) -> NgramTable:
    table = NgramTable(vocab)
    for token in text:
        table.append(token)
    return table


def tokens(drafts: list[Draft]) -> list[int]:
    return [draft.token for draft in drafts]


# --- the text itself -----------------------------------------------------------------------------


def test_a_table_goes_on_behind_what_is_under_way() -> None:
    table = table_of([1, 2, 3, 9, 8])
    assert table.propose(2) == []
    assert tokens(table.propose(2, after=[1, 2])) == [3, 9]
    assert tokens(table.propose(2, after=[1, 2, 3])) == [9, 8]


def test_drafts_go_by_as_long_a_context_as_there_is() -> None:
    drafts = table_of([*range(12)] * 2).propose(6)
    assert tokens(drafts) == [0, 1, 2, 3, 4, 5] and {draft.match for draft in drafts} == {8}


def test_a_draft_has_the_chance_of_its_token_and_the_lower_id_of_equals() -> None:
    table = table_of([1, 2, 4, 1, 2, 3, 1, 2])
    mass, _, _ = table.after([1, 2])
    (draft,) = table.propose(1)
    assert mass[3] == mass[4] == draft.chance
    assert (draft.token, draft.second, draft.match, draft.source) == (3, 4, 2, "text")


# --- answers that are over -----------------------------------------------------------------------


def test_of_a_context_another_token_is_kept_once_it_has_come_as_often() -> None:
    store = NgramStore(1 << 12)
    for token, kept in ((9, 9), (9, 9), (7, 9), (7, 7), (9, 9)):
        store.add([*EIGHT, token])
        assert tokens(store.propose(EIGHT, 1, vocab=1000)) == [kept]


def test_a_store_goes_by_the_longest_context_and_tells_how_sure_it_is() -> None:
    store = NgramStore(1 << 12)
    for _ in range(3):
        store.add([*EIGHT, 9])
    for _ in range(4):
        store.add([50, 6, 7, 8, 77])
    (long,) = store.propose(EIGHT, 1, vocab=1000)
    (short,) = store.propose([50, 6, 7, 8], 1, vocab=1000)
    assert (long.token, long.match, long.source) == (9, 8, "store")
    assert (short.token, short.match) == (77, 3)
    assert long.chance == pytest.approx(3 / 4)
    spread = -(3 / 4) * math.log(3 / 4) - 1 / 4 * math.log(1 / 4 / 1000)
    assert long.entropy == pytest.approx(spread)


def test_what_lies_in_the_place_of_a_context_is_not_taken_for_it() -> None:
    store = NgramStore(1)
    store.add([1, 2, 3, 4])
    assert tokens(store.propose([1, 2, 3], 1, vocab=1000)) == [4]
    assert store.propose([5, 6, 7], 1, vocab=1000) == []


# --- requests ------------------------------------------------------------------------------------


def test_a_request_is_drafted_for_by_its_prompt_and_by_what_came_out() -> None:
    drafter = NgramDrafter(1000)
    drafter.begin(1, [1, 2, 3, 1, 2])
    drafter.begin(2, [1, 2, 5, 1, 2])
    assert [tokens(drafter.propose(each, 1)) for each in (1, 2)] == [[3], [5]]
    drafter.extend(1, [7, 2, 7])
    assert tokens(drafter.propose(1, 1, after=[2])) == [7]


def test_only_what_is_over_is_drafted_from_by_others_and_where_the_text_has_nothing() -> None:
    drafter = NgramDrafter(1000)
    drafter.begin(1, EIGHT)
    drafter.extend(1, [9, 10, 11])
    drafter.begin(2, [100])
    assert drafter.propose(2, 3, after=EIGHT) == []
    drafter.end(1)
    found = drafter.propose(2, 3, after=EIGHT)
    assert tokens(found) == [9, 10, 11] and {draft.source for draft in found} == {"store"}
    drafter.extend(2, [*EIGHT, 50, *EIGHT])
    assert [(draft.token, draft.source) for draft in drafter.propose(2, 1)] == [(50, "text")]
