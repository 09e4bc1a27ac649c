from pathlib import Path

from stoker.profile.lockstep import Agreement, Board


def ranks(folder: Path, count: int) -> list[Agreement]:
    board = Board(folder)
    return [Agreement(board, rank=rank, world_size=count) for rank in range(count)]


def test_all_ranks_change_at_the_step_that_rank_0_named_first(tmp_path):
    first, second = ranks(tmp_path, 2)
    second.propose("accelerator", at_step=1)
    assert not first.is_due("accelerator", at_step=100)
    first.propose("accelerator", at_step=50)
    first.propose("accelerator", at_step=70)
    due = [
        next(step for step in range(50, 60) if rank.is_due("accelerator", at_step=step))
        for rank in (first, second)
    ]
    assert due[0] == due[1]
    # A rank may be a step ahead when the note appears.
    assert due[0] > 51


def test_a_single_rank_changes_at_once_and_leaves_no_file(tmp_path):
    (only,) = ranks(tmp_path, 1)
    only.propose("loader", at_step=7)
    only.propose("loader", at_step=30)
    assert only.is_due("loader", at_step=7)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_ran_ahead_knows_that_it_is_late(tmp_path):
    first, second = ranks(tmp_path, 2)
    first.propose("loader", at_step=10)
    assert second.is_due("loader", at_step=40)
    assert second.is_late("loader", at_step=40)


def test_what_one_rank_is_about_to_do_is_known_to_all(tmp_path):
    first, second = ranks(tmp_path, 2)
    assert first.warning() is None
    second.warn("overwrite last.pt")
    assert first.warning() == second.warning() == "overwrite last.pt"


def test_ranks_meet_unless_the_process_is_asked_to_stop(tmp_path):
    first, second = ranks(tmp_path, 2)
    assert not first.meet("end", deadline_seconds=60.0, is_stopped=lambda: True)
    assert not first.meet("end", deadline_seconds=0.05, is_stopped=lambda: False)
    assert second.meet("end", deadline_seconds=1.0, is_stopped=lambda: False)


class Gone(Board):
    def read(self, name: str) -> str | None:
        raise RuntimeError("connection closed")


def test_a_meeting_ends_when_the_rank_that_holds_the_notes_has_left(tmp_path):
    rank = Agreement(Gone(tmp_path), rank=1, world_size=2)
    assert not rank.meet("end", deadline_seconds=60.0, is_stopped=lambda: False)
    assert not rank.is_due("loader", at_step=5)
    assert rank.handed_in(0) is None


def test_ranks_that_no_variable_counts_are_counted_by_the_names_of_their_hosts(tmp_path):
    own = ranks(tmp_path, 3)
    for agreement, host in zip(own, ("algo-1", "algo-1", "algo-2"), strict=True):
        agreement.come_from(host)
    assert own[2].ranks_on_host("algo-1") == 2
    assert own[0].ranks_on_host("algo-2") == 1
