"""A script has no line that could only run after the import of a module that it leaves out."""

import pytest

from birdie.golf.packed_script import pack
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.score.settings import EvaluationSettings


@pytest.mark.parametrize(("mode", "trains"), [("windows", False), ("ttt-sgd", True)])
def test_what_a_mode_does_is_in_scripts_of_that_mode_alone(mode: str, trains: bool) -> None:
    sources = pack("score", Recipe(evaluation=EvaluationSettings(mode=mode))).sources
    assert ("birdie/gpt/score/sgd.py" in sources) == trains
    source = sources["birdie/gpt/score/modes/ttt_sgd.py"]  # its settings are in every script
    assert "score.sgd import" in source
    assert (".restore()" in source) == trains
