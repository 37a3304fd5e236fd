"""The driver's answer about clocks, temperature and power."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from trtopt.hardware.clocks import Clocks, parse_clocks, read_clocks

BUS = "0000:65:00.0"
UNDER_LOAD = "00000000:65:00.0, 1740, 1215, 1980, 2619, 61, 412.55, 700.00, 0x0000000000000004"


def test_every_field_is_read() -> None:
    assert parse_clocks(UNDER_LOAD + "\n", BUS) == Clocks(
        1740.0, 1215.0, 1980.0, 2619.0, 61.0, 412.55, 700.0, clocks_held_by=("software power cap",)
    )


def test_the_gpu_is_found_by_its_address_among_several() -> None:
    answer = f"00000000:0A:00.0, 345, 405, 2100, 9501, 40, 21.0, 350.00, 0x0000000000000001\n{UNDER_LOAD}\n"
    assert parse_clocks(answer, BUS).sm_clock_mhz == 1740.0
    idle = parse_clocks(answer, "0000:0a:00.0")
    assert (idle.sm_clock_mhz, idle.clocks_held_by) == (345.0, ("idle",))


def test_another_domain_is_another_gpu() -> None:
    assert parse_clocks(UNDER_LOAD, "0001:65:00.0").sm_clock_mhz is None


def test_what_the_gpu_does_not_tell_is_unknown() -> None:
    answer = "00000000:65:00.0, 2085, [N/A], 3003, [N/A], 55, [Not Supported], [N/A], [N/A]"
    assert parse_clocks(answer, BUS) == Clocks(2085.0, None, 3003.0, None, 55.0, None, None, clocks_held_by=None)


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        ("0x0000000000000000", ()),
        ("0x0000000000000060", ("software thermal slowdown", "hardware thermal slowdown")),
        ("0x0000000000000088", ("hardware slowdown", "hardware power brake")),
        ("0x0000000000000401", ("idle", "0x400")),
        ("Not Active", None),
    ],
)
def test_reasons_are_named_and_new_ones_kept(mask: str, reasons: tuple[str, ...] | None) -> None:
    assert parse_clocks(UNDER_LOAD.replace("0x0000000000000004", mask), BUS).clocks_held_by == reasons


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "No devices were found",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        UNDER_LOAD.rsplit(",", 1)[0],
    ],
)
def test_no_answer_is_a_problem_with_the_drivers_words(answer: str) -> None:
    found = parse_clocks(answer, BUS)
    assert found == Clocks(clocks_unknown=found.clocks_unknown)
    assert BUS in found.clocks_unknown and answer.strip() in found.clocks_unknown


def _program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_gpu_is_kept_busy_until_the_driver_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path, f"while [ ! -e {tmp_path}/busy ]; do sleep 0.01; done; echo '{UNDER_LOAD}'", monkeypatch)
    assert read_clocks(BUS, (tmp_path / "busy").touch).sm_clock_mhz == 1740.0


def test_a_driver_that_knows_only_the_old_name_is_asked_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = 'Field "clocks_event_reasons.active" is not a valid field to query.'
    script = f"case $1 in *event_reasons*) echo '{refusal}'; exit 2;; *) echo '{UNDER_LOAD}';; esac"
    _program(tmp_path, script, monkeypatch)
    assert read_clocks(BUS) == parse_clocks(UNDER_LOAD, BUS)


def test_a_driver_that_refuses_both_names_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path, "echo 'Field \"clocks.sm\" is not a valid field to query.'; exit 2", monkeypatch)
    assert "clocks.sm" in read_clocks(BUS).clocks_unknown


def test_without_a_driver_the_problem_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-smi" in read_clocks(BUS).clocks_unknown
