"""The search over builder options, on landscapes of times that are known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from drawn_cases import seeds
from report_samples import ENGINE

from trtopt.config import BuildConfig
from trtopt.engine.backend import TENSORRT, TENSORRT_RTX
from trtopt.engine.cache import EngineCache
from trtopt.engine.option_search import AXES, NOISE, Answer, EngineTime, Options, remembered, search_options
from trtopt.engine.run import why_not_run
from trtopt.errors import EngineBuildError, TargetError, UsageError
from trtopt.events import Event, ignore
from trtopt.pipeline.compile import check_search
from trtopt.pipeline.manifest import builder_of
from trtopt.report.schema.decisions import BuilderTrial

EVERY = 1 + sum(len(values) for _, values in AXES)
KEY = "ab" * 32


class Landscape:
    """Engines by their options; each costs a product of one factor for each option, or what is said of it."""

    def __init__(self, factors: dict[str, float], *, spread: float = 0.0, own: dict[Options, float] | None = None):
        self.factors, self.spread, self.own = factors, spread, own or {}
        self.asked: list[Options] = []
        self.refuses: set[str] = set()
        self.restless: set[str] = set()

    def us(self, options: Options) -> float:
        found = 1000.0
        for item in options:
            found *= self.factors.get(item, 1.0)
        return self.own.get(options, found)

    def ask(self, options: Options) -> Answer[Options]:
        self.asked.append(options)
        if self.refuses & set(options):
            raise EngineBuildError("no such option")
        stable = not self.restless & set(options)
        return Answer(EngineTime(self.us(options), self.spread, stable, 2.5, "00"), options)


def random_landscape(dice: random.Random) -> Landscape:
    found = Landscape({item: dice.uniform(0.7, 1.4) for item in items()}, spread=dice.choice((0.0, 3.0, 40.0)))
    every = list(itertools.product(*((None, *values) for _, values in AXES)))
    for values in dice.sample(every, 40):
        options = tuple(f"{key}={value}" for (key, _), value in zip(AXES, values, strict=True) if value is not None)
        found.own[options] = dice.uniform(500, 1500)
    found.refuses = set(dice.sample(items(), dice.randrange(3)))
    found.restless = set(dice.sample(items(), dice.randrange(3)))
    return found


def items() -> list[str]:
    return [f"{key}={value}" for key, values in AXES for value in values]


@pytest.mark.parametrize("seed", seeds(200))
def test_the_bound_is_kept_and_the_result_never_slower_than_as_asked_for(seed: int) -> None:
    dice = random.Random(seed)
    net, builds = random_landscape(dice), dice.randrange(1, 40)
    fixed = set(dice.sample([key for key, _ in AXES], dice.randrange(3)))
    found = search_options(builds, fixed, net.ask)
    assert len(net.asked) <= builds and len(set(net.asked)) == len(net.asked)
    assert net.asked[0] == () and [trial.options for trial in found.trials] == net.asked
    start, end = net.us(()), net.us(found.options)
    assert end <= start and found.best.measured.median_us == end and found.best.engine == found.options
    if found.options:
        assert start - end > max(NOISE * start, 2 * net.spread)
    assert [trial.options for trial in found.trials if trial.chosen] == [found.options]
    assert not (net.refuses | net.restless) & set(found.options)
    assert not any(item.partition("=")[0] in fixed for options in net.asked for item in options)
    assert all(trial.reason for trial in found.trials)


@pytest.mark.parametrize("seed", range(20))
def test_one_option_is_varied_at_a_time(seed: int) -> None:
    net = random_landscape(random.Random(seed))
    found = search_options(64, (), net.ask)
    bests = {()}
    for options in net.asked[1:]:
        assert any(len(set(options) ^ set(best)) in (1, 2) for best in bests), options
        bests.add(options)
    more = search_options(64, (), net.ask)
    assert more == found  # no chance in it


@pytest.mark.parametrize("seed", range(20))
def test_options_that_do_not_interact_are_all_found(seed: int) -> None:
    dice = random.Random(seed)
    net = Landscape({item: dice.choice((0.8, 0.9, 1.0, 1.2)) for item in items()})
    found = search_options(64, (), net.ask)
    best = 1000.0
    for key, values in AXES:
        best *= min(1.0, *(net.factors[f"{key}={value}"] for value in values))
    assert net.us(found.options) == pytest.approx(best)


@pytest.mark.parametrize(("spread", "gain", "taken"), [(0, 0.019, 0), (0, 0.021, 1), (30, 0.05, 0), (30, 0.07, 1)])
def test_a_difference_within_the_noise_keeps_the_simpler_options(spread: float, gain: float, taken: bool) -> None:
    found = search_options(EVERY, (), Landscape({"tiling=fast": 1 - gain}, spread=spread).ask)
    assert found.options == (("tiling=fast",) if taken else ())
    (trial,) = (trial for trial in found.trials if trial.options == ("tiling=fast",))
    assert trial.reason == (
        f"{gain:.1%} faster than as asked for" if taken else f"within the noise of as asked for ({-gain:+.1%})"
    )


def test_every_option_is_tried_once_where_nothing_helps() -> None:
    net = Landscape(dict.fromkeys(items(), 1.1))
    found = search_options(64, (), net.ask)
    assert sorted(net.asked) == sorted([(), *((item,) for item in items())]) and len(net.asked) == EVERY
    assert {trial.reason for trial in found.trials[1:]} == {"10.0% slower than as asked for"}


def test_knobs_of_a_build_route_are_axes_of_their_own() -> None:
    knobs = (("-a", ("on", "off")), ("-b", ("0", "1", "2")))
    net = Landscape({"-a=off": 0.8, "-b=2": 0.9, "tiling=fast": 0.9})
    found = search_options(64, (), net.ask, (*AXES, *knobs))
    assert found.options == ("tiling=fast", "-a=off", "-b=2")


def test_what_the_builder_refuses_is_reported_and_the_engine_as_asked_for_must_build() -> None:
    net = Landscape({"tiling=fast": 0.5})
    net.refuses = {"tiling=fast"}
    found = search_options(64, (), net.ask)
    refused = [trial for trial in found.trials if trial.median_us is None]
    assert [trial.options for trial in refused] == [("tiling=fast",)] and "no such option" in refused[0].reason
    assert found.options == ()

    def fail(options: Options) -> Answer[None]:
        raise EngineBuildError("the network is refused")

    with pytest.raises(EngineBuildError, match="the network is refused"):
        search_options(8, (), fail)


def asking(net: Landscape, folder: Path, said: list[Event]) -> Callable[[Options], Answer[Options]]:
    cache = EngineCache(folder, said.append)

    def ask(options: Options) -> Answer[Options]:
        key = f"{abs(hash(options)):064x}"
        return remembered(cache, key, lambda: net.ask(options), refusals=bool(options))

    return ask


def test_a_second_search_asks_nothing_and_finds_the_same(tmp_path: Path) -> None:
    first, second = (random_landscape(random.Random(3)) for _ in range(2))
    first.refuses = second.refuses = {"tiling=full"}
    said: list[Event] = []
    found = search_options(12, (), asking(first, tmp_path, said))
    again = search_options(12, (), asking(second, tmp_path, said))
    assert first.asked and second.asked == [] and any(trial.median_us is None for trial in found.trials)
    assert again.options == found.options and again.best.measured == found.best.measured and again.best.engine is None
    built = [trial for trial in again.trials if trial.median_us is not None]
    assert built and all(trial.remembered for trial in built)
    assert [trial.reason for trial in again.trials] == [trial.reason for trial in found.trials]
    assert not any(trial.remembered for trial in found.trials) and said == []


@pytest.mark.parametrize("content", [b"", b"{}", b'{"median_us": "x"}', b"[" * 10_000, b"null"])
def test_a_time_that_is_none_is_measured_anew(tmp_path: Path, content: bytes) -> None:
    cache = EngineCache(tmp_path, ignore)
    cache.times.store(KEY, [content])
    net = Landscape({})
    assert remembered(cache, KEY, lambda: net.ask(())).engine == ()
    assert remembered(cache, KEY, lambda: net.ask(())).engine is None and len(net.asked) == 1
    (file,) = (tmp_path / "times").iterdir()
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    said: list[Event] = []
    assert remembered(EngineCache(tmp_path, said.append), KEY, lambda: net.ask(())).engine == ()
    assert len(said) == 1 and "measured anew" in said[0].text


def test_a_failure_of_the_engine_that_there_has_to_be_is_not_remembered(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path, ignore)
    net = Landscape({})
    net.refuses = {"tiling=fast"}
    with pytest.raises(EngineBuildError):
        remembered(cache, KEY, lambda: net.ask(("tiling=fast",)), refusals=False)
    assert remembered(cache, KEY, lambda: net.ask(()), refusals=False).engine == ()


def test_where_no_engine_runs_the_search_is_refused_before_the_work() -> None:
    config = BuildConfig(builder=("search=8",))
    if why_not_run(TENSORRT):
        with pytest.raises(TargetError, match="none can run here") as caught:
            check_search(config, TENSORRT)
        assert caught.value.where == "--builder search=8"
    check_search(config, TENSORRT_RTX)  # which ignores it
    check_search(BuildConfig(builder=("tiling=full",)), TENSORRT)
    with pytest.raises(UsageError, match="without its weights"):
        check_search(BuildConfig(builder=("search=8", "strip_plan=true")), TENSORRT)


def test_the_manifest_tells_the_options_that_were_chosen() -> None:
    trials = (
        BuilderTrial((), 1.0, 1000.0, 0.0, False, False, ""),
        BuilderTrial(("tiling=fast", "max_aux_streams=0"), 1.0, 900.0, 0.0, True, False, ""),
    )
    asked = ("Search=8", "workspace=1G")
    found = builder_of(asked, replace(ENGINE, builder_search=trials))
    assert found == ("workspace=1G", "tiling=fast", "max_aux_streams=0")
    assert builder_of(asked, ENGINE) == asked


def test_without_a_cache_nothing_is_remembered() -> None:
    net = Landscape({})
    assert [remembered(None, KEY, lambda: net.ask(())).engine for _ in range(2)] == [(), ()]
