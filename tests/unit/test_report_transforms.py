from stoker.records import Check, ProfileState, TransformCost
from stoker.report.verdict import transform_rows
from support import builders, sample_records

COSTS = (
    TransformCost(name="getitem", cpu_seconds=0.006, share=0.75, samples=36),
    TransformCost(
        name="Crop<b>", within="getitem", cpu_seconds=0.004, share=0.5, bytes_in=9e5, bytes_out=100,
        samples=36,
    ),
    TransformCost(name="Flip", within="getitem", cpu_seconds=1e-6, share=0.001, samples=36),
    TransformCost(name="collate", cpu_seconds=0.002, share=0.25, bytes_out=2048, samples=9),
)  # fmt: skip


def page(tmp_path, profile):
    none = dict.fromkeys(("decision", "training", "evaluation"))
    return sample_records.write_page(tmp_path, profile=profile, **none)


def profile_with(*costs, read_bytes=None):
    storage = {"read_bytes": read_bytes, "storage_bytes_per_second": 2e8}
    return builders.profile(step_seconds=0.1, transforms=costs, **storage)


def test_parts_that_cost_something_stand_in_the_report_and_names_are_text(tmp_path):
    rows = transform_rows(COSTS)
    assert [(row.name, row.is_part) for row in rows] == [
        ("getitem", False),
        ("Crop<b>", True),
        ("collate", False),
    ]
    assert [row.size for row in rows] == ["", "900 kB → 100 B", "2.05 kB"]
    html = page(tmp_path, profile_with(*COSTS, read_bytes=4e6))
    assert "Parts of loading" in html
    assert "Crop&lt;b&gt;" in html
    assert "Crop<b>" not in html
    assert "A step reads 4.00 MB from storage, which gives each host 200 MB per second" in html
    without = page(tmp_path, profile_with())
    assert "Parts of loading" not in without
    assert "from storage" not in without


def test_states_stand_in_the_report_with_their_shares(tmp_path):
    profile = builders.profile(
        step_seconds=0.1,
        check=Check(predicted_step_seconds=0.05, error=-0.5, explained=False, state="straggler"),
        states=(
            ProfileState(id="straggler", text="one slow rank: <8 ms", share=0.62),
            ProfileState(id="gil", text="held"),
        ),
    )
    html = page(tmp_path, profile)
    assert "not explained by the parts but by the state straggler" in html
    assert "one slow rank: &lt;8 ms" in html
    assert "62\u00a0%" in html or "62%" in html
    assert html.index("one slow rank") < html.index("held")
    assert "<h3>States</h3>" not in page(tmp_path, profile_with())
