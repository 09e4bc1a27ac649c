import pytest

from stoker.feed.stream_progress import ShardProgress, StreamProgress, Turns
from stoker.feed.trainer.session import LOCAL
from stoker.feed.trainer.shards import (
    MAX_LOSSES_IN_A_ROW,
    SETTLE_SECONDS,
    ShardScheduler,
    idle_words,
)
from stoker.feed.wire.protocol import EarlierEpoch, OwnState, ShardOrigin


def streams(num_shards: int = 2, **options: object) -> ShardScheduler:
    made = ShardScheduler(
        **{"num_shards": num_shards, "prefetch": 2, "max_bytes": 1 << 30, **options}
    )
    made.begin()
    return made


def settled(num_shards: int = 2, **options: object) -> ShardScheduler:
    made = streams(num_shards, **options)
    made.grant("a", 2)
    made.settle()
    return made


def answer(books: ShardScheduler, peer: str, number: int, digest: int = 1) -> bool:
    start = books.stream_of(number, shared_seed=None)
    return books.arrived(
        peer, number, generation=start.generation, digest=digest, frame_bytes=10, now=0.0
    )


def owners_of(books: ShardScheduler) -> list[object]:
    return [shard.owner for shard in books._shards]


def test_each_shard_is_asked_for_as_many_batches_as_it_may_have_open_oldest_first():
    books = settled()
    assert books.window(0.0) == 4
    assert books.assign(0.0) == [("a", 0), ("a", 1), ("a", 2), ("a", 3)]
    answer(books, "a", 0)
    assert books.window(0.0) == 4


@pytest.mark.parametrize(
    ("shards", "workers", "owners"),
    [
        # Local workers are granted first: they are there before the first host is.
        (1, {LOCAL: 1, "a": 1}, ["a"]),
        (4, {LOCAL: 8, "a": 2, "b": 2}, ["a", "a", "b", "b"]),
        (3, {LOCAL: 1, "a": 2}, ["a", "a", LOCAL]),
        # All workers have one: each peer gets as many more as it has credits.
        (8, {LOCAL: 2, "a": 2}, ["a"] * 4 + [LOCAL] * 4),
        (6, {"large": 2, "small": 1}, ["large"] * 4 + ["small"] * 2),
    ],
)
def test_shards_go_to_hosts_while_one_has_a_free_worker_then_by_credits(shards, workers, owners):
    books = streams(shards)
    for peer, count in workers.items():
        books.grant(peer, 2 * count)
    books.settle()
    books.assign(0.0)
    assert sorted(owners_of(books), key=str) == sorted(owners, key=str)


@pytest.mark.parametrize(
    ("shards", "ranks", "workers", "is_set", "said"),
    [
        (1, 1, 4, False, "the stream has 1 shard (num_workers=1): 3 of 4 data workers have"),
        (1, 2, 3, False, "the stream has 2 shards (2 ranks with num_workers=1): 1 of 3 data"),
        (1, 2, 7, False, "set num_workers=4 in the script, or feed.shards: 4"),
        (1, 1, 7, True, "(feed.shards: 1)"),
        (4, 1, 4, False, ""),
        (8, 1, 4, False, ""),
    ],
)
def test_data_workers_without_a_shard_are_told_of_with_the_setting_that_gives_each_one(
    shards, ranks, workers, is_set, said
):
    text = idle_words(num_shards=shards, ranks=ranks, data_workers=workers, is_set=is_set)
    assert said in text
    assert bool(text) == bool(said)
    assert not is_set or "num_workers" not in text


def test_a_stream_without_workers_is_not_said_to_have_one():
    text = idle_words(num_shards=1, ranks=1, data_workers=2, is_set=False, has_workers=False)
    assert "the stream has 1 shard (num_workers=0): 1 of 2 data workers has" in text


def test_hosts_on_their_way_are_waited_for_a_moment():
    books = streams()
    books.grant("a", 2)
    assert books.assign(10.0) == []
    assert books.next_check(10.5) == pytest.approx(SETTLE_SECONDS - 0.5)
    books.grant("b", 2)
    asks = books.assign(10.0 + SETTLE_SECONDS)
    assert {peer for peer, _ in asks} == {"a", "b"}
    assert books.next_check(13.0) is None


def test_what_a_stream_has_changed_comes_with_the_first_answer_behind_its_end():
    books = settled(1)
    books.assign(0.0)
    generation = books.stream_of(0, shared_seed=None).generation
    books.ended("a", 0, generation=generation, random_state=b"changes")
    books.ended("a", 1, generation=generation)
    assert books.changes == b"changes"


def test_late_answers_of_an_earlier_start_are_refused():
    books = settled(1)
    books.assign(0.0)
    old = books.stream_of(0, shared_seed=None).generation
    assert not books.mark_failed("a", 0, generation=old)
    assert books.assign(0.0) == [("a", 0), ("a", 1)]
    assert not books.arrived("a", 0, generation=old, digest=1, frame_bytes=1, now=0.0)
    books.ended("a", 0, generation=old)
    assert not books.is_over()
    assert not books.mark_failed("a", 0, generation=old)
    assert not answer(books, "b", 0)
    assert answer(books, "a", 0)
    assert not answer(books, "a", 0)


def test_a_shard_that_dies_at_one_place_again_and_again_is_given_up():
    books = settled(1)
    for number in range(MAX_LOSSES_IN_A_ROW):
        books.assign(0.0)
        is_hopeless = books.mark_failed(
            "a", 0, generation=books.stream_of(0, shared_seed=None).generation
        )
        assert is_hopeless == (number == MAX_LOSSES_IN_A_ROW - 1)


def test_a_peer_that_drains_loses_its_shards_at_once():
    books = settled(1)
    books.assign(0.0)
    books.grant("b", 2)
    books.mark_draining("a")
    assert [peer for peer, _ in books.assign(0.0)] == ["b", "b"]


def test_memory_is_bounded_but_the_head_is_always_asked_for():
    books = settled(4, max_bytes=25, prefetch=8)
    books.assign(0.0)
    for number in range(32):
        answer(books, "a", number)
    for _ in range(31):
        books.take(0.0)
    assert books.assign(0.0) == [("a", 32)]
    books.take(0.0)
    books.mark_lost("a")
    books.grant("b", 2)
    books.settle()
    assert books.assign(0.0) == [("b", 32), ("b", 33)]


@pytest.mark.parametrize("persists", [True, False])
def test_persistent_streams_stay_where_they_are_and_others_begin_with_each_epoch(persists):
    books = settled(persists=persists)
    books.assign(0.0)
    before = books.stream_of(0, shared_seed=None).generation
    books.begin()
    assert owners_of(books) == (["a", "a"] if persists else [None, None])
    assert (books.stream_of(0, shared_seed=None).generation == before) == persists


def test_a_new_process_is_given_the_random_states_that_were_told_last():
    books = settled(1, persists=True)
    books.assign(0.0)
    start = books.stream_of(0, shared_seed=None)
    assert (start.state, start.earlier) == (b"", ())
    answer(books, "a", 0)
    books.ended("a", 1, generation=start.generation, random_state=b"after the first epoch")
    for _ in range(2):
        # At the end of the epoch, and when the next one begins.
        books.begin()
    assert books.stream_of(0, shared_seed=None).state == b"after the first epoch"
    books.assign(0.0)
    generation = books.stream_of(0, shared_seed=None).generation
    books.arrived(
        "a",
        0,
        generation=generation,
        digest=1,
        frame_bytes=1,
        now=0.0,
        random_state=b"of the second epoch",
    )
    books.mark_lost("a")
    start = books.stream_of(0, shared_seed=None)
    assert (start.state, start.earlier, start.made) == (b"of the second epoch", (), 1)


def left(books: ShardScheduler) -> None:
    books.begin()
    books.mark_complete()


def test_a_new_process_is_told_what_torchs_worker_would_have_made_of_epochs_that_were_left():
    books = settled(1, persists=True)
    books.assign(0.0)
    answer(books, "a", 0)
    books.take(0.0)
    left(books)
    for _ in range(2):
        # Left before anything was asked for.
        books.begin()
        left(books)
    books.begin()
    books.assign(0.0)
    books.mark_lost("a")
    left(books)
    books.begin()
    start = books.stream_of(0, shared_seed=None)
    assert [epoch.num_made for epoch in start.earlier] == [3, 2, 2, 2]
    assert (start.state, start.epochs_before) == (b"", 4)


def test_a_new_process_is_told_the_epochs_of_hugging_faces_streams():
    books = settled(1, persists=True)
    books.divide(1, resumed=None, epochs=(4, 0))
    left(books)
    books.begin()
    books.divide(1, resumed=None, epochs=(5, 0))
    books.assign(0.0)
    start = books.stream_of(0, shared_seed=None)
    assert start.epochs == (5, 0)
    assert start.earlier == (EarlierEpoch(2, (4, 0)),)


def test_batches_are_counted_as_torch_asks_for_them_where_a_shard_has_ended():
    books = settled(2, persists=True)
    books.assign(0.0)
    answer(books, "a", 0)
    books.ended("a", 2, generation=books.stream_of(2, shared_seed=None).generation)
    answer(books, "a", 1)
    answer(books, "a", 3)
    for _ in range(3):
        books.take(0.0)
    # 0 to 3 first, 4 and 5 after 0 and 1; for the end at 2 and for 3 the shard that is left.
    assert [shard.sent for shard in books._shards] == [3, 5]


def test_nothing_is_asked_for_once_nobody_wants_it():
    books = settled()
    books.mark_complete()
    assert books.is_over()
    assert books.look(0.0) == (0, False)
    assert books.assign(0.0) == []


def of_other_ranks(*turns: tuple[int, int], made: int = 0, every: int = 2) -> StreamProgress:
    """Returns a stream of an earlier run's shards, of which several ranks hand out a part."""
    origin = ShardOrigin(rank=0, world_size=len(turns), shard=0, num_workers=1, base_seed=0)
    shards = [
        ShardProgress(num_made=made, digest=made, origin=origin, turns=Turns(every, turn))
        for _, turn in turns
    ]
    return StreamProgress(num_workers=len(shards), shards=shards)


def resumed(progress: StreamProgress, **options: object) -> ShardScheduler:
    books = settled(len(progress.shards), **options)
    books.divide(len(progress.shards), resumed=progress)
    return books


def test_a_rank_asks_for_its_turns_of_a_shard_that_others_read():
    books = resumed(of_other_ranks((0, 1), (1, 0)))
    # Positions 1 and 3 of the first shard, 0 and 2 of the second one.
    assert books.assign(0.0) == [("a", 1), ("a", 2), ("a", 5), ("a", 6)]
    assert books.head == 1
    answer(books, "a", 2, digest=20)
    # Its process makes what others hand out: the checksum is of both.
    answer(books, "a", 1, digest=10)
    start = books.stream_of(5, shared_seed=None)
    assert (start.made, start.digest) == (1, 10)
    start = books.stream_of(6, shared_seed=None)
    assert (start.made, start.digest) == (2, 20)


def test_turns_are_taken_in_order_and_counted():
    books = resumed(of_other_ranks((0, 1), (1, 0)))
    books.assign(0.0)
    for number in (1, 2, 5, 6):
        answer(books, "a", number)
    taken: list[int] = []
    while books.is_there(books.head) and len(taken) < 4:
        taken.append(books.head)
        books.take(0.0)
    assert taken == [1, 2, 5, 6]
    assert books.num_taken == 4
    assert books.committed_bytes == 0
    assert books.assign(0.0) == [("a", 9), ("a", 10), ("a", 13), ("a", 14)]


def test_a_turn_behind_a_shards_end_ends_it():
    books = resumed(of_other_ranks((0, 1), made=2))
    books.assign(0.0)
    books.ended("a", 3, generation=books.stream_of(3, shared_seed=None).generation)
    assert books.is_over()


def test_a_shard_that_is_lost_is_made_again_from_its_last_batch_that_came():
    books = resumed(of_other_ranks((0, 2), made=4, every=3))
    assert books.assign(0.0) == [("a", 5), ("a", 8)]
    answer(books, "a", 5, digest=66)
    books.mark_lost("a")
    books.grant("b", 2)
    books.settle()
    assert books.assign(0.0) == [("b", 8)]
    start = books.stream_of(8, shared_seed=None)
    assert (start.made, start.digest) == (6, 66)


def test_a_datasets_state_is_kept_until_no_turn_that_is_held_back_needs_it():
    books = resumed(of_other_ranks((0, 0), every=3), prefetch=20)
    books.assign(0.0)
    for count in range(12):
        position = 3 * count
        start = books.stream_of(position, shared_seed=None)
        own = OwnState(num_made=position + 1, digest=1, state=b"state")
        books.arrived(
            "a", position, generation=start.generation, digest=1, frame_bytes=1, now=0.0, own=own
        )
        books.take(0.0)
    progress = of_other_ranks((0, 0), every=3)
    books.show(progress)
    kept = [own.num_made for own in progress.shards[0].owns]
    # Of the last five batches, as four of them may not be with the script yet.
    assert kept[0] <= 34 - 4 * 3
    assert len(kept) < 12


def test_persistent_shards_of_other_ranks_end_where_the_last_one_does():
    # The first one is far ahead: it is passed over until the other one has come as far.
    progress = of_other_ranks((0, 0), (1, 0), every=1)
    progress.shards[0].num_made = 5
    books = resumed(progress, persists=True)
    books.assign(0.0)
    answer(books, "a", 1)
    books.take(0.0)
    books.ended("a", 3, generation=books.stream_of(3, shared_seed=None).generation)
    answer(books, "a", 10)
    books.take(0.0)
    books.ended("a", 12, generation=books.stream_of(12, shared_seed=None).generation)
    assert books.is_over()
