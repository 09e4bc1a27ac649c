"""Checks who makes the shards of an iterable dataset, without any process."""

import pytest

from stoker.feed.trainer.session import LOCAL
from stoker.feed.trainer.shards import (
    MAX_LOSSES_IN_A_ROW,
    SETTLE_SECONDS,
    ShardScheduler,
    idle_words,
)


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


def end(books: ShardScheduler, peer: str, number: int) -> None:
    books.ended(peer, number, generation=books.stream_of(number, shared_seed=None).generation)


def test_every_shard_is_asked_for_its_first_batches_oldest_first():
    assert settled().assign(0.0) == [("a", 0), ("a", 1), ("a", 2), ("a", 3)]


def test_shards_go_to_peers_in_proportion_to_their_credits():
    books = streams(6)
    books.grant("large", 4)
    books.grant("small", 2)
    books.settle()
    books.assign(0.0)
    assert sorted(map(str, books.owners())) == ["large"] * 4 + ["small"] * 2


def test_the_window_is_what_the_shards_may_have_open():
    books = settled(3)
    assert books.window(0.0) == 6
    books.assign(0.0)
    answer(books, "a", 0)
    assert books.window(0.0) == 6


def owners_of(books: ShardScheduler, **workers: int) -> list[str]:
    for peer, count in workers.items():
        books.grant(LOCAL if peer == "local" else peer, 2 * count)
    books.settle()
    books.assign(0.0)
    return ["local" if owner == LOCAL else str(owner) for owner in books.owners()]


def test_a_shard_goes_to_a_data_host_while_one_has_a_free_worker():
    # Local workers are granted first: they are there before the first host is.
    assert owners_of(streams(1), local=1, a=1) == ["a"]
    assert sorted(owners_of(streams(4), local=8, a=2, b=2)) == ["a", "a", "b", "b"]


def test_shards_beyond_the_workers_of_data_hosts_are_made_by_local_workers():
    assert sorted(owners_of(streams(3), local=1, a=2)) == ["a", "a", "local"]
    # All workers have one: each peer gets as many more as it has credits.
    assert sorted(owners_of(streams(8), local=2, a=2)) == ["a"] * 4 + ["local"] * 4


def test_a_host_whose_credits_the_ranks_share_counts_with_this_ranks_share():
    # Of two ranks, each has half of the credits of a host with two workers: both go there.
    assert owners_of(streams(1), local=1, a=1) == ["a"]
    assert sorted(owners_of(streams(2), local=1, a=1)) == ["a", "local"]


@pytest.mark.parametrize(
    ("shards", "ranks", "workers", "said"),
    [
        (1, 1, 4, "the stream has 1 shard (num_workers=1): 3 of 4 data workers have nothing to do"),
        (1, 2, 3, "the stream has 2 shards (2 ranks with num_workers=1): 1 of 3 data workers has"),
        (4, 1, 4, ""),
        (8, 1, 4, ""),
    ],
)
def test_data_workers_without_a_shard_are_told_of(shards, ranks, workers, said):
    text = idle_words(num_shards=shards, ranks=ranks, data_workers=workers, is_set=False)
    assert text.startswith(said)
    assert bool(text) == bool(said)


def test_the_advice_names_the_number_of_shards_that_gives_each_worker_one():
    text = idle_words(num_shards=1, ranks=2, data_workers=7, is_set=False)
    assert "set num_workers=4 in the script, or feed.shards: 4" in text
    text = idle_words(num_shards=1, ranks=1, data_workers=7, is_set=True)
    assert "(feed.shards: 1)" in text
    assert "num_workers" not in text


def test_hosts_on_their_way_are_waited_for_a_moment():
    books = streams()
    books.grant("a", 2)
    assert books.assign(10.0) == []
    assert books.next_check(10.5) == pytest.approx(SETTLE_SECONDS - 0.5)
    books.grant("b", 2)
    asks = books.assign(10.0 + SETTLE_SECONDS)
    assert {peer for peer, _ in asks} == {"a", "b"}
    assert books.next_check(13.0) is None


def test_batches_are_there_in_the_order_of_their_shard_only():
    books = settled(1)
    books.assign(0.0)
    assert answer(books, "a", 1)
    assert not books.is_there(1)
    assert answer(books, "a", 0)
    assert books.is_there(0)
    assert books.is_there(1)


def test_an_exhausted_shard_is_left_out_of_the_round():
    books = settled(3)
    books.assign(0.0)
    end(books, "a", 1)
    for number in (0, 2, 3, 5):
        assert answer(books, "a", number)
    taken = []
    for _ in range(4):
        taken.append(books.head)
        books.take(0.0)
    assert taken == [0, 2, 3, 5]
    assert not books.is_over()


def test_the_epoch_is_over_when_all_shards_are_exhausted():
    books = settled()
    books.assign(0.0)
    end(books, "a", 0)
    end(books, "a", 1)
    assert books.is_over()
    assert books.assign(0.0) == []


def test_an_end_that_overtakes_a_batch_does_not_hide_it():
    books = settled(1)
    books.assign(0.0)
    end(books, "a", 1)
    assert not books.is_over()
    assert answer(books, "a", 0)
    books.take(0.0)
    assert books.is_over()


def test_a_retry_of_a_lost_shard_tells_what_had_arrived():
    books = settled(1)
    books.assign(0.0)
    answer(books, "a", 0, digest=77)
    books.grant("b", 2)
    books.mark_lost("a")
    assert books.assign(0.0) == [("b", 1)]
    start = books.stream_of(1, shared_seed=None)
    assert (start.made, start.digest, start.generation) == (1, 77, 2)


def test_what_overtook_others_is_made_again_after_a_loss():
    books = settled(1)
    books.assign(0.0)
    answer(books, "a", 1)
    books.grant("b", 2)
    books.mark_lost("a")
    assert books.assign(0.0) == [("b", 0), ("b", 1)]


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
    assert answer(books, "a", 0)
    assert not answer(books, "a", 0)


def test_answers_of_another_peer_are_refused():
    books = settled(1)
    books.assign(0.0)
    assert not answer(books, "b", 0)


def test_a_shard_that_dies_at_one_place_again_and_again_is_given_up():
    books = settled(1)
    for number in range(MAX_LOSSES_IN_A_ROW):
        books.assign(0.0)
        is_hopeless = books.mark_failed(
            "a", 0, generation=books.stream_of(0, shared_seed=None).generation
        )
        assert is_hopeless == (number == MAX_LOSSES_IN_A_ROW - 1)


def test_progress_forgives_losses():
    books = settled(1)
    for number in range(2 * MAX_LOSSES_IN_A_ROW):
        books.assign(0.0)
        answer(books, "a", number)
        generation = books.stream_of(number, shared_seed=None).generation
        assert not books.mark_failed("a", number + 1, generation=generation)
        books.take(0.0)


def test_a_peer_that_drains_loses_its_shards_at_once():
    books = settled(1)
    books.assign(0.0)
    books.grant("b", 2)
    books.mark_draining("a")
    assert [peer for peer, _ in books.assign(0.0)] == ["b", "b"]


def test_a_slow_stream_is_not_judged():
    books = settled(1)
    books.assign(0.0)
    books.grant("b", 2)
    assert books.overdue(1e6) == []


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


def test_persistent_streams_stay_where_they_are():
    books = settled(2, persists=True)
    books.assign(0.0)
    before = [books.stream_of(number, shared_seed=None).generation for number in range(2)]
    books.begin()
    assert books.owners() == ["a", "a"]
    assert [books.stream_of(number, shared_seed=None).generation for number in range(2)] == before
    assert books.assign(0.0)[0] == ("a", 0)


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


def test_a_new_process_is_told_what_was_made_of_epochs_that_were_stopped_early():
    books = settled(1, persists=True)
    books.assign(0.0)
    answer(books, "a", 0)
    for _ in range(2):
        books.begin()
        books.begin()
        books.assign(0.0)
    books.begin()
    books.mark_lost("a")
    start = books.stream_of(0, shared_seed=None)
    assert (start.state, start.earlier) == (b"", (2, 2, 2))


def test_other_streams_begin_anew_with_each_epoch():
    books = settled(2)
    books.assign(0.0)
    before = books.stream_of(0, shared_seed=None).generation
    books.begin()
    assert books.owners() == [None, None]
    assert books.stream_of(0, shared_seed=None).generation > before


def test_nothing_is_asked_for_once_nobody_wants_it():
    books = settled()
    books.mark_complete()
    assert books.is_over()
    assert books.look(0.0) == (0, False)
    assert books.assign(0.0) == []
