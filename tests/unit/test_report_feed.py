"""Checks what the report's picture of the feed shows, read back from its SVG."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations

import msgspec
import pytest

from stoker.launch.feed_log import COLUMNS, FeedInterval, RankRate, csv_text
from stoker.report.feed_picture import draw_feed, read_feed
from stoker.report.page import does_loading_wait
from support import sample_records
from support.feed_rows import host_rate, write_feed

SVG = "{http://www.w3.org/2000/svg}"


def story_of(folder, *, hosts=2, intervals=60):
    story = read_feed(write_feed(folder, hosts=hosts, intervals=intervals))
    assert story is not None
    return story


def page_of(folder, feed):
    none = dict.fromkeys(("profile", "decision", "evaluation"))
    text = sample_records.write_page(folder, **none, feed_file=feed)
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("\N{NARROW NO-BREAK SPACE}", " ")


def paths(svg, css):
    drawn = [path.get("d", "") for path in svg.iter(f"{SVG}path") if path.get("class") == css]
    corner = re.compile(r"([-\d.]+) ([-\d.]+)")
    return [[(float(x), float(y)) for x, y in corner.findall(path)] for path in drawn]


def test_each_host_has_a_row_and_its_gap_is_where_it_was_lost(tmp_path):
    drawing = draw_feed(story_of(tmp_path), width=960, name="feed")
    svg = ElementTree.fromstring(drawing.markup())
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    for name in ("Waiting for data", "Batches ready", "data-1", "data-2", "gpu-1, own workers"):
        assert name in texts
    lost, steady, local = paths(svg, "compute")
    floor = max(y for _, y in lost)
    low = [x for x, y in lost if y == floor]
    # Lost from the 26th to the 40th of 60 intervals: so much of the width has no height.
    assert pytest.approx(min(x for x in low if x > 0), abs=17) == 960 * 26 / 60
    assert pytest.approx(max(x for x in low if x < 960), abs=17) == 960 * 40 / 60
    assert all(y < max(y for _, y in steady) for x, y in steady[1:-1])
    # One scale: the local workers' row is a third as high as a data host's.
    heights = [max(y for _, y in row) - min(y for _, y in row) for row in (steady, local)]
    assert heights[1] == pytest.approx(heights[0] * 7.5 / 22, rel=0.1)
    # What was made elsewhere is marked on the row of the host that was lost.
    titles = [title.text for title in svg.iter(f"{SVG}title") if "elsewhere" in (title.text or "")]
    assert titles == ["data-1: five batches made elsewhere instead"]
    (mark,) = [line for line in svg.iter(f"{SVG}line") if line.get("class") == "lead wait"]
    assert float(mark.get("x1", 0)) == pytest.approx(960 * 26.5 / 60, abs=0.1)


@pytest.mark.parametrize("width", [360.0, 960.0])
@pytest.mark.parametrize("hosts", [1, 12, 40])
def test_labels_of_the_feed_do_not_clash(tmp_path, width, hosts):
    drawing = draw_feed(story_of(tmp_path, hosts=hosts), width=width, name="feed")
    for one, other in combinations(drawing.labels, 2):
        assert not one.overlaps(other), f"{one.text} / {other.text}"
    assert all(box.left >= -1 and box.right <= width + 1 for box in drawing.labels)


def test_a_long_run_of_many_hosts_stays_a_small_picture(tmp_path):
    story = story_of(tmp_path, hosts=40, intervals=480)
    drawing = draw_feed(story, width=960, name="feed")
    assert len(drawing.markup()) < 120_000
    assert any(label.text == "30 more hosts" for label in drawing.labels)


def test_the_report_names_the_present_limit_and_the_one_of_the_whole_run(tmp_path):
    file = write_feed(tmp_path)
    names = {"data-1": "algo-2", "gpu-1": "algo-1", "data-2": "<script>alert(1)</script>"}
    for name, other in names.items():
        file.write_text(file.read_text().replace(name, other))
    text = page_of(tmp_path, file)
    assert "Who fed the trainer" in text
    assert "What limits it in the last quarter of the run: the trainer" in text
    assert "Over the whole run: the data workers" in text
    assert re.search(r"data host 1</th><td[^>]*>15\.\d", text)
    assert '<th scope="row">training host, own workers</th>' in text
    assert "<script" not in text


def test_a_report_without_a_feed_does_not_speak_of_it(tmp_path):
    assert "Who fed the trainer" not in page_of(tmp_path, None)
    assert "Who fed the trainer" not in page_of(tmp_path, tmp_path / "missing.csv")


@pytest.mark.parametrize(
    "text", ["", ",".join(COLUMNS) + "\n", "a,b\n1,2\n", "\0\0", ",".join(COLUMNS) + "\n1,2,ra"]
)
def test_a_broken_file_is_as_no_file(tmp_path, text):
    (tmp_path / "feed.csv").write_text(text)
    assert read_feed(tmp_path / "feed.csv") is None


@pytest.mark.parametrize(("wall", "is_storage_named"), [(0.0391, False), (0.39, True)])
def test_faster_storage_is_no_advice_for_a_cpu_bound_job(tmp_path, wall, is_storage_named):
    profile = sample_records.profile()
    step = msgspec.structs.replace(profile.step, loader_wall_seconds=wall)
    # Others have its cores: its worker is at work, and has a CPU for half of that.
    host = host_rate("algo-2", 9.0, workers=1)
    host = replace(host, busy_cpus=0.5, in_flight=1, credits=3)
    rank = RankRate(name="0", batches_per_second=9.0, wait_share=0.3, window=4)
    interval = FeedInterval(start_seconds=0.0, seconds=2.0, ranks=(rank,), hosts=(host,))
    feed = tmp_path / "feed.csv"
    feed.write_text(",".join(COLUMNS) + "\n" + csv_text(interval))
    waits = does_loading_wait(msgspec.structs.replace(profile, step=step))
    story = read_feed(feed, does_loading_wait=waits)
    assert ("faster storage" in story.limit.advice) == is_storage_named
