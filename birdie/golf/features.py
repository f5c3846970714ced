"""Features of a recipe, as far as a packed script leaves out those it does not use.

A packed script has the modules of one recipe. Its settings may be changed by the environment, those here only to values
that need nothing else: `require_same` finds out before training starts.
"""

from collections.abc import Mapping
from typing import Any

from birdie.errors import ConfigError
from birdie.run.recipe import Recipe


def features(recipe: Recipe) -> dict[str, Any]:
    """Return the features of `recipe`: setting → value, False or None if it is off."""
    evaluation, export, qat = recipe.evaluation, recipe.export, recipe.qat
    return {
        "evaluation.mode": evaluation.mode,
        "evaluation.ngram.enabled": evaluation.ngram.enabled,
        "train.fp8": recipe.train.fp8 != "off",
        "train.step_graphs": recipe.train.step_graphs,
        "data.order": recipe.data.order,
        "average.kind": recipe.average.kind,
        "bandit.every": recipe.bandit.every > 0,
        "calibration.data": recipe.calibration.data,
        "qat": qat.spec if qat.enabled else None,
        "qat.budget": qat.budget,
        "export.scheme": export.scheme,
        "export.embedding": export.embedding,
        "export.attention": export.attention,
        "export.mlp": export.mlp,
        "export.fit_temperature": export.fit_temperature,
    }


def require_same(recipe: Recipe, packed: Recipe) -> None:
    """Check that a script packed for `packed` has what `recipe` needs.

    Raises:
        ConfigError: a feature differs.
    """
    ours: Mapping[str, Any] = features(packed)
    for name, value in features(recipe).items():
        if value != ours[name]:
            raise ConfigError(
                f"{name} is {value!r}, but this script was packed for {ours[name]!r} and has nothing else; "
                "pack a recipe with that setting"
            )
