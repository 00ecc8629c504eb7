"""The instance catalogue: its facts are whole and plausible, looking up helps, the command prints."""

import json
import re
import subprocess
import sys

import pytest

from clusters import catalog
from clusters.base import Refused

KNOWN = catalog.load()


def test_types_no_source_describes_are_left_out() -> None:
    assert len(KNOWN) == 27
    assert "p6e-gb200.36xlarge" not in KNOWN
    assert all(name == item.name for name, item in KNOWN.items())


@pytest.mark.parametrize(
    ("name", "accelerators", "gib", "efa", "gbps", "usd"),
    [
        ("p4d.24xlarge", 8, 40, 4, 400, 21.957642),
        ("p4de.24xlarge", 8, 80, 4, 400, 27.44705),
        ("p5.48xlarge", 8, 80, 32, 3200, 55.04),
        ("p5en.48xlarge", 8, 141, 16, 3200, 63.296),
        ("p6-b200.48xlarge", 8, 179.06, 8, 3200, 113.9328),
        ("p6-b300.48xlarge", 8, 268.59, 16, 6400, 142.416),
        ("g6e.48xlarge", 8, 44.7, 4, 400, 30.13118),
        ("trn2.48xlarge", 16, 96, 16, 3200, None),
    ],
)
def test_figures_are_those_ec2_and_its_price_list_state(
    name: str, accelerators: int, gib: float, efa: int, gbps: float, usd: float | None
) -> None:
    item = catalog.find(name)
    assert (item.accelerators, item.accelerator_memory_gib, item.efa_interfaces) == (accelerators, gib, efa)
    assert (item.network_gbps, item.price_usd_per_hour) == (gbps, usd)
    assert (item.price_as_of, item.as_of, item.price_region) == ("2026-07-20", "2026-08-02", "us-east-1")


@pytest.mark.parametrize("item", KNOWN.values(), ids=lambda item: item.name)
def test_every_type_is_plausible(item: catalog.Instance) -> None:
    assert item.accelerators in {1, 4, 8, 16}
    assert 0 <= item.efa_interfaces <= item.network_cards
    assert set(item.capacity) <= {"capacity-block", "on-demand", "spot"}
    assert item.price_usd_per_hour is None or 0.1 < item.price_usd_per_hour < 500
    assert re.match(r"(NVIDIA|AWS) \w", item.accelerator)
    if item.achievable_bf16_tflops is not None and item.bf16_tflops is not None:
        assert 0.7 < item.achievable_bf16_tflops / item.bf16_tflops < 0.9
    if item.bf16_tflops and item.fp32_tflops:
        assert item.fp32_tflops < item.bf16_tflops


def test_a_link_figure_is_half_of_the_published_bidirectional_one() -> None:
    assert catalog.find("p4de.24xlarge").nvlink_gb_per_s == 600 / 2
    assert catalog.find("p5.48xlarge").nvlink_gb_per_s == 900 / 2


def test_what_a_healthy_all_reduce_reaches_is_half_of_the_line_but_on_b300() -> None:
    """Its published all-reduces are at 44 % of the line at 16 GiB and 50 % at 64 GiB."""
    below = {name: item.healthy_line_fraction for name, item in KNOWN.items() if item.healthy_line_fraction != 0.5}
    assert below == {"p6-b300.48xlarge": 0.4}


def test_a_misspelt_type_is_refused_with_its_neighbours() -> None:
    with pytest.raises(Refused, match=r"^'p5\.48xlage' is not .*: did you mean p5\.48xlarge or p5e\.48xlarge"):
        catalog.find("p5.48xlage")
    with pytest.raises(Refused, match=r"`python -m clusters.catalog` lists them"):
        catalog.find("?")


def test_words_narrow_the_list_whatever_their_case() -> None:
    assert [item.name for item in catalog.matching(["h100", "EFA", "48xlarge"])] == ["p5.48xlarge"]
    assert catalog.matching([]) == list(KNOWN.values())


def test_the_table_shows_every_type_on_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert catalog.main([]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in KNOWN)
    assert max(map(len, told.splitlines())) <= 80
    assert "55.04" in told
    assert "2026-07-20" in told


def test_json_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert catalog.main(["--json", "p5.48"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["name"] == "p5.48xlarge"
    assert told["achievable_bf16_tflops"] == 794
    assert told["capacity"] == ["capacity-block", "on-demand", "spot"]


def test_no_match_is_an_error_that_says_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    assert catalog.main(["abacus"]) == 1
    assert "no instance type matches 'abacus': try" in capsys.readouterr().err


def test_looking_up_a_type_loads_nothing_heavy() -> None:
    code = "import clusters.catalog as c, sys; c.find('p5.48xlarge'); print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"rich", "boto3", "prefect", "numpy", "pydantic"} & set(re.findall(r"'([a-z0-9]+)'", loaded))
