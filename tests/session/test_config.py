"""Settings files: what they may say, and what a wrong one is told."""

import pytest

from narrowgauge.errors import UsageError
from narrowgauge.session.config import Config, load


def write(tmp_path, text):
    path = tmp_path / "narrowgauge.toml"
    path.write_text(text)
    return path


def test_no_file_is_the_defaults():
    assert load(None) == Config()


def test_everything_is_read(tmp_path):
    path = write(tmp_path, 'seed = 7\n[watch]\nevery = 2\n[convert]\nskip = ["lm_head"]\nlast = 2\n')
    assert load(path) == Config(7, 2, {"skip": ["lm_head"], "last": 2})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sead = 1", "unknown key 'sead': did you mean 'seed'?"),
        ("[convert]\nlats = 1", "unknown key convert.'lats': did you mean 'last'?"),
        ("[watch]\nevery = 0", "watch.every is 0; expected 1"),
        ("[watch]\nevery = true", "watch.every is True; expected a value of type int"),
        ('[convert]\nskip = "x"', "convert.skip is 'x'; expected a value of type list"),
        ("seed = ", "is not valid TOML"),
    ],
)
def test_wrong_files_are_told_why(tmp_path, text, says):
    with pytest.raises(UsageError) as raised:
        load(write(tmp_path, text))
    assert says in str(raised.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match="cannot read the configuration"):
        load(tmp_path / "none.toml")
