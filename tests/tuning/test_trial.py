"""The trial with a device that does not exist: its times are made up, and so are its troubles."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ck_patch.trial import MARGIN, SAMPLES, Trial

Times = Mapping[str, float]
Trouble = Callable[[float, int], float]
"""What a call is measured to take, from what it takes and its number."""

OURS, OTHER, CFG = "triton:a", "triton:b", "cfg1"
NAMES = (OURS, "stock", OTHER, CFG)


def run(
    trial: Trial, times: Times, trouble: Trouble = lambda time, call: time, calls: int = 40
) -> list[str | None]:
    """What each of so many calls in a row ran by, until there is a winner."""
    ran = []
    for call in range(calls):
        name = None if trial.rests() else trial.next()
        ran.append(name)
        if name is not None:
            trial.add(name, trouble(times[name], call))
        if trial.winner is not None:
            break
    return ran


def noisy(seed: int, spread: float) -> Trouble:
    generator = random.Random(seed)
    return lambda time, call: time * generator.gauss(1, spread)


def test_the_first_to_run_is_the_one_to_start_with_and_stock_is_second() -> None:
    ran = run(Trial(NAMES), dict.fromkeys(NAMES, 100.0))
    assert ran[:4] == list(NAMES)


@pytest.mark.parametrize("fastest", NAMES)
def test_the_fastest_wins_within_one_pass_of_forty_blocks(fastest: str) -> None:
    trial = Trial(NAMES)
    ran = run(trial, {name: 80.0 if name == fastest else 100.0 for name in NAMES})
    assert trial.winner == fastest
    assert len(ran) <= 40
    assert None not in ran


def test_a_loser_is_given_up_after_one_or_two_of_its_calls() -> None:
    ran = run(Trial(NAMES), {OURS: 10.0, "stock": 15.0, OTHER: 14.0, CFG: 101.0})
    assert ran.count(CFG) == 1
    assert ran.count(OTHER) == 2
    assert ran.count("stock") == 3
    assert ran.count(OURS) == SAMPLES or len(ran) < 40


@pytest.mark.parametrize("ours", [100.0, 99.0, 100 * (1 - MARGIN), 101.0])
def test_a_tie_is_stocks(ours: float) -> None:
    trial = Trial((OURS, "stock"))
    run(trial, {OURS: ours, "stock": 100.0})
    assert trial.winner == "stock"


def test_what_beats_stock_by_more_than_noise_wins() -> None:
    trial = Trial((OURS, "stock"))
    run(trial, {OURS: 97.0, "stock": 100.0})
    assert trial.winner == OURS


@pytest.mark.parametrize("seed", range(200))
def test_noise_chooses_nothing_that_is_slower_than_stock(seed: int) -> None:
    trial = Trial(NAMES)
    run(trial, {OURS: 104.0, "stock": 100.0, OTHER: 105.0, CFG: 110.0}, noisy(seed, 0.01))
    assert trial.winner == "stock"


@pytest.mark.parametrize("seed", range(200))
def test_noise_hides_no_clear_winner(seed: int) -> None:
    trial = Trial(NAMES)
    run(trial, {OURS: 70.0, "stock": 100.0, OTHER: 80.0, CFG: 90.0}, noisy(seed, 0.02))
    assert trial.winner == OURS


@pytest.mark.parametrize("seed", range(200))
def test_one_call_in_ten_that_takes_five_times_as_long_changes_nothing(seed: int) -> None:
    generator = random.Random(seed)

    def outlier(time: float, call: int) -> float:
        # Other streams' work, a page fault: never faster than it is.
        return time * (5 if call % 10 == seed % 10 else generator.gauss(1, 0.005))

    trial = Trial(NAMES)
    run(trial, {OURS: 90.0, "stock": 100.0, OTHER: 104.0, CFG: 112.0}, outlier)
    assert trial.winner == OURS


def test_a_slow_first_call_of_stocks_does_not_take_it_out() -> None:
    trial = Trial((OURS, "stock"))
    run(trial, {OURS: 104.0, "stock": 100.0}, lambda time, call: time * (50 if call == 1 else 1))
    assert trial.winner == "stock"


@pytest.mark.parametrize("drift", [1.01, 0.99])
def test_a_gpu_that_slows_down_slows_all_alike(drift: float) -> None:
    trial = Trial(NAMES)
    times = {OURS: 96.0, "stock": 100.0, OTHER: 103.0, CFG: 107.0}
    run(trial, times, lambda time, call: time * drift**call)
    assert trial.winner == OURS


@pytest.mark.parametrize("time", [0.0, -3.0, float("nan"), float("inf")])
def test_a_clock_that_goes_backwards_counts_for_nothing(time: float) -> None:
    trial = Trial((OURS, "stock"))
    assert trial.next() == OURS
    trial.add(OURS, time)
    assert trial.microseconds == {}
    assert trial.winner is None


def test_attempts_that_told_nothing_become_rare() -> None:
    trial = Trial((OURS, "stock"))
    attempts = 0
    for _ in range(10_000):
        name = None if trial.rests() else trial.next()
        if name is not None:
            attempts += 1
            trial.void(name)
    assert attempts < 30
    assert (trial.best, trial.winner) == (OURS, None)


def test_measuring_goes_on_after_attempts_that_told_nothing() -> None:
    trial = Trial((OURS, "stock"))
    for _ in range(3):
        while trial.rests():
            pass
        name = trial.next()
        assert name is not None
        trial.void(name)
    run(trial, {OURS: 50.0, "stock": 100.0}, calls=100)
    assert trial.winner == OURS


def test_no_candidate_is_asked_for_more_than_it_needs_while_times_are_out() -> None:
    trial = Trial(NAMES)
    out = [trial.next() for _ in range(100)]
    assert [out.count(name) for name in NAMES] == [SAMPLES] * len(NAMES)
    assert trial.best == OURS


def test_one_sample_does_not_depose_the_first() -> None:
    trial = Trial((OURS, OTHER))
    trial.add(_asked(trial, OURS), 100.0)
    trial.add(_asked(trial, OTHER), 90.0)
    assert trial.best == OURS


def _asked(trial: Trial, name: str) -> str:
    assert trial.next() == name
    return name


def test_a_choice_is_sound_once_all_that_are_left_have_three_samples() -> None:
    trial = Trial((OURS, "stock"))
    sound = []
    for _ in range(6):
        assert not trial.is_sound
        name = trial.next()
        assert name is not None
        trial.add(name, 97.0 if name == OURS else 100.0)
        sound.append(trial.is_sound)
    assert sound == [False] * 5 + [True]
    assert (trial.best, trial.winner) == (OURS, None)


def test_what_fails_is_out_and_the_rest_goes_on() -> None:
    trial = Trial(NAMES)
    trial.void(_asked(trial, OURS), pause=False)
    trial.drop(OURS)
    ran = run(trial, {"stock": 100.0, OTHER: 50.0, CFG: 70.0})
    assert OURS not in ran
    assert trial.winner == OTHER


def test_stock_is_left_when_all_have_failed() -> None:
    trial = Trial((OURS, OTHER))
    trial.drop(OURS)
    trial.drop(OTHER)
    assert trial.winner == trial.best == "stock"
    assert trial.next() is None


@given(
    st.lists(st.floats(1.0, 1e6), min_size=4, max_size=4),
    st.integers(0, 2**32),
    st.floats(0, 0.3),
)
def test_whatever_the_times_are_it_ends_and_stock_is_never_left_for_less(
    times: list[float], seed: int, spread: float
) -> None:
    trial = Trial(NAMES)
    run(trial, dict(zip(NAMES, times, strict=True)), noisy(seed, spread), calls=200)
    measured = trial.microseconds
    assert trial.winner is not None
    if trial.winner != "stock":
        assert measured[trial.winner] < (1 - MARGIN) * measured["stock"]


def test_many_threads_share_a_trial() -> None:
    trial = Trial(NAMES)
    times = {OURS: 80.0, "stock": 100.0, OTHER: 105.0, CFG: 108.0}
    threads = [threading.Thread(target=run, args=(trial, times)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trial.winner == OURS
    assert len(trial.microseconds) == len(NAMES)


def test_a_sample_that_never_comes_back_does_not_hold_up_the_choice_for_ever() -> None:
    trial = Trial(["stock", "fast"])
    lost = trial.next()
    assert lost is not None
    for _ in range(2000):
        name = trial.next()
        if name is not None:
            trial.add(name, 50.0 if name == "fast" else 60.0)
    assert trial.winner == "fast"


def test_a_sample_that_comes_back_after_it_was_given_up_counts_like_any_other() -> None:
    trial = Trial(["stock", "fast"])
    late = [trial.next() for _ in range(14)]
    while trial.next() is None:
        pass
    for name in late:
        assert name is not None
        trial.add(name, 50.0 if name == "fast" else 60.0)
    assert trial.winner == "fast"


def test_after_a_loss_samples_that_are_under_way_are_waited_for_as_before() -> None:
    trial = Trial(["stock", "fast"])
    handed_out = 0
    for _ in range(14 + 1025):
        handed_out += trial.next() is not None
    assert handed_out == 14  # All of them are lost.
    for _ in range(14 + 1000):
        handed_out += trial.next() is not None
    assert handed_out == 28
