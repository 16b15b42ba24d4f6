"""Of which steps a comparison of recipes is."""

import numpy as np

from narrowgauge.observe.report.together import together
from narrowgauge.observe.store import RunWriter, open_run


def asked_of(folder, steps_of):
    """A recipe's run that has rows of these steps by site."""
    with RunWriter(folder) as writer:
        for site, steps in steps_of.items():
            for step in steps:
                writer.add_tensors(step, [site], {"amax": np.ones(1)})
    return open_run(folder)


def test_a_site_is_compared_in_the_later_half_of_the_steps_in_which_all_were_asked_of_it(tmp_path):
    first = asked_of(tmp_path / "a", {"both:input": range(8), "one:input": [1, 2], "apart:input": [0, 4, 8]})
    second = asked_of(tmp_path / "b", {"both:input": range(4, 12), "apart:input": [2, 6, 10]})
    assert together([first, second]) == {
        "both:input": (6, 7),
        "one:input": (2,),
        "apart:input": (6, 8, 10),  # they never met: each recipe by its own steps is more than none
    }
