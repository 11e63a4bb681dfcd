"""Ranks that are absent, signals and errors at any moment of a run, and what a run resumed afterwards has."""

import csv

from tests.distributed.moments import IN_ROUNDS, SET_UP, Act, play
from tests.distributed.outcomes import ABSENCES, ERRORS, SIGNALS, absent_rank, pressed_twice, signalled, told_error
from tests.drills.drill import SECONDS


def certificates(folder):
    tables = sorted(folder.glob("version_*/metrics.csv"))
    with tables[-1].open() as file:
        return [row["certificate"] for row in csv.DictReader(file)]


def resumed(drill, moment):
    """The same command again ends with the certificates of a run that was not disturbed."""
    if moment in SET_UP:
        assert not list(drill.folder.glob("version_*/last.ckpt"))
        return ""
    before = certificates(drill.folder) if list(drill.folder.glob("version_*/metrics.csv")) else []
    whole = drill.folder / "whole"
    whole.mkdir()
    for folder, ckpt_path in ((drill.folder, "last"), (whole, None)):
        ranks = drill.ranks(lambda f=folder, c=ckpt_path: play(Act(None, None, None), f, ckpt_path=c, timeout=20.0))
        assert not any(ranks.wait(SECONDS)), ranks.output(0)
    after = certificates(whole)
    assert certificates(drill.folder) == after
    assert before == after[: len(before)]
    return "; resumed to the same certificates"


def absent(drill, how):
    case = drill.draw.choice([case for case in ABSENCES if case[0] == how])
    absent_rank(drill.folder, *case)
    return f"named by all others within the timeout{resumed(drill, case[1])}"


def rank_killed_at_any_moment(drill):
    return absent(drill, "killed")


def rank_stopped_at_any_moment(drill):
    return absent(drill, "stopped")


def told(drill, name):
    case = drill.draw.choice([case for case in SIGNALS if case[0] == name])
    signalled(drill.folder, *case)
    if case[1] in IN_ROUNDS or case[1] == "fit end":
        return f"saved, all ranks leave alike{resumed(drill, case[1])}"
    return "all ranks leave alike, before the first round"


def sigterm_at_any_moment(drill):
    return told(drill, "SIGTERM")


def ctrl_c_at_any_moment(drill):
    if drill.draw.random() < 0.2:
        pressed_twice(drill.folder)
        return "pressed twice: ended at once"
    return told(drill, "SIGINT")


def error_of_one_rank(drill):
    moment, rank = drill.draw.choice(ERRORS)
    told_error(drill.folder, moment, rank)
    return f"told to all ranks at once{resumed(drill, moment)}"
