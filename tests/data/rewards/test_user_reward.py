"""A user's reward is loaded by its name, and what is wrong with it is said."""

import pickle

import numpy as np
import pytest

from agentic_ring.data.rewards.features import Features
from agentic_ring.data.rewards.user_reward import load_reward
from agentic_ring.errors import ArgumentError, DataError, UnknownNameError

FILE = """
from math import nan
SCALE = 2
def good(features): return features["height"] * SCALE > 2
def misspelt(features): return features["hieght"]
def one(features): return features["height"].sum()
def missing(features): return features["height"] + [0, nan, 0]
def failing(features): return {}["key"]
"""
FEATURES = Features(height=np.array([0.0, 1.0, 2.0]), speed=np.zeros(3))


def test_a_reward_is_loaded_and_checked(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    good = load_reward(f"{path}:good")
    for each in (good, pickle.loads(pickle.dumps(good))):  # as in another process
        np.testing.assert_array_equal(each(FEATURES), np.array([0.0, 0, 1]), strict=True)
    good.require_variation(FEATURES)
    with pytest.raises(
        DataError, match=r"mine.py:good is 0 in all 2 rows of the data.* reward what the data"
    ):
        good.require_variation(Features(height=np.zeros(2)))
    with pytest.raises(UnknownNameError, match="unknown feature 'hieght'; choose one of: height, speed"):
        load_reward(f"{path}:misspelt")(dict(FEATURES))
    wrong = {
        "one": r"returns shape \(\), expected \(3,\): a number for each row",
        "missing": "returns nan in row 1; rewards must be finite",
        "failing": "fails with KeyError: 'key'; it must return a number for each of the 3 rows",
    }
    for name, message in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            load_reward(f"{path}:{name}")(FEATURES)
    with pytest.raises(
        UnknownNameError, match=r"unknown function of .*mine.py 'hop'; choose one of: good, mis"
    ):
        load_reward(f"{path}:hop")
    path.write_text("1 / 0")
    with pytest.raises(
        DataError, match=r"mine.py fails with ZeroDivisionError: division by zero; correct it"
    ):
        load_reward(f"{path}:good")


def test_a_name_of_another_form_or_an_absent_file_is_refused():
    for name in ("good", "mine.txt:good", "mine.py", "mine.py:", "mine.py:a.b"):
        with pytest.raises(ArgumentError, match=r"write FILE.py:function, such as my_rewards.py:hop"):
            load_reward(name)
    with pytest.raises(DataError, match=r"absent.py fails with FileNotFoundError"):
        load_reward("absent.py:good")
