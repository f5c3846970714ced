"""The recipe in a file of `birdie train`, and what must hold before its model is built; nothing is decoded."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from birdie.errors import ArtifactError, ConfigError
from birdie.gpt.data.tokenizer import require_tokenizer
from birdie.gpt.model.stored_shape import require_shape
from birdie.gpt.run.recipe_settings import Recipe


def require_gpt(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path | str) -> Recipe:
    """Return the recipe of an artifact of `birdie train`, whose model its tensors fit.

    Args:
        metadata: of the artifact, which holds no checkpoint of another program.
        shapes: name → shape of its tensors.
        path: of the artifact, for the messages.

    Raises:
        ArtifactError: the file holds no birdie GPT, or does not fit what it says about its model.
    """
    if metadata.get("model") != "gpt":
        raise ArtifactError(
            f"{path} does not hold a birdie GPT, as `birdie train` writes them; of a Hugging Face model compress the "
            "folder with its configuration, to sample from it"
        )
    try:
        recipe, _ = recipe_of(metadata)
    except ConfigError as error:
        reason = str(error) if len(str(error)) <= 1000 else f"{str(error)[:1000]}…"  # it quotes what a stranger wrote
        raise ArtifactError(f"{path} describes its model in a way this version does not know: {reason}") from error
    require_tokenizer(metadata.get("tokenizer"), path)
    require_shape(recipe.model, shapes, path)
    return recipe


def recipe_of(metadata: Mapping[str, Any]) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe in an artifact's metadata, and warnings.

    Settings of evaluation do not describe the model, so those of another version, or of a scoring mode that is not
    registered, give way to the defaults.
    """
    values: Mapping[str, Any] = metadata.get("recipe", {})
    try:
        return Recipe.from_dict(values), ()
    except ConfigError as error:
        if not isinstance(values, dict):
            raise
        known = {table.name for table in fields(Recipe)} - {"evaluation"}
        recipe = Recipe.from_dict({name: value for name, value in values.items() if name in known})
        return recipe, (f"the artifact's settings of evaluation are replaced by the defaults: {error}",)
