"""A model card has what the model's README says, and what the Hub needs besides."""

from pathlib import Path

import pytest
import torch
import yaml

import birdie
from birdie.artifact.saving import write_model
from birdie.errors import ConfigError
from birdie.hub.folder import write_birdie_folder
from birdie.hub.model_card import card


@pytest.fixture
def summary(tmp_path: Path) -> birdie.Summary:
    return birdie.save({"w": torch.ones(8, 8)}, tmp_path / "small.birdie")


def front(text: str) -> dict[str, object]:
    _, content, _ = text.split("---\n", 2)
    fields = yaml.safe_load(content)
    assert isinstance(fields, dict)
    return fields


TAGS = {"birdie", "compressed"}


@pytest.mark.parametrize(
    "keys",
    [
        "license: apache-2.0\nlanguage: 'no'\ntags:\n- a\n- b",
        "license: apache-2.0\nlanguage: 'no'\ntags: [a, b]",
        "tags:\n  - a\n  - b\nlicense: apache-2.0\nlanguage: 'no'",
        "tags: [a, b,\n  birdie]\nlicense: apache-2.0\nlanguage: 'no'",
        "license: apache-2.0\nlanguage: 'no'\ntags: []",
        "license: apache-2.0 # why\nlanguage: 'no'\nmodel-index:\n- name: x\n  results: []",
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_keys_of_the_readme_stay_and_ours_are_added(keys: str, newline: str, summary: birdie.Summary) -> None:
    text = f"---\n{keys}\n---\n# Mine\n\nA text.\n".replace("\n", newline)
    text_of_card = card(summary, text, origin="user/base", task="text-generation")
    theirs, fields = yaml.safe_load(keys), front(text_of_card)
    tags = fields.pop("tags")
    assert isinstance(tags, list)
    assert sorted(tags) == sorted({*(theirs.pop("tags", None) or []), *TAGS})
    assert fields == theirs | {
        "library_name": "birdie",
        "base_model": "user/base",
        "pipeline_tag": "text-generation",
    }
    assert (
        text_of_card.index(f"| bytes | {summary.bytes:,} |")
        < text_of_card.index("\n---\n\nThe README")
        < text_of_card.index("# Mine")
    )


def test_what_the_readme_says_wins(summary: birdie.Summary) -> None:
    keys = "---\nlibrary_name: transformers\npipeline_tag: fill-mask\nbase_model:\n- a/b\n---\n"
    fields = front(card(summary, keys, origin="user/base", task="text-generation"))
    assert (fields["library_name"], fields["pipeline_tag"], fields["base_model"]) == (
        "transformers",
        "fill-mask",
        ["a/b"],
    )
    with pytest.raises(ConfigError, match="base_model already"):
        card(summary, keys, base_model="user/base")


def test_without_a_readme_there_is_no_text_of_it(summary: birdie.Summary) -> None:
    text_of_card = card(summary, base_model="user/base", origin="other/base")
    assert front(text_of_card)["base_model"] == "user/base"
    assert "unchanged:" not in text_of_card
    assert "without front matter" in card(summary, "without front matter")


@pytest.mark.parametrize(
    ("name", "content", "origin"),
    [
        ("config.json", b'{"_name_or_path": "user/base"}', "user/base"),
        ("adapter_config.json", b'{"base_model_name_or_path": "user/base"}', "user/base"),
        ("config.json", b'{"_name_or_path": "/home/me/models/base"}', None),
        ("config.json", b'{"_name_or_path": "a/b\\nlicense: mit"}', None),
    ],
)
def test_the_configuration_names_the_origin(name: str, content: bytes, origin: str | None, tmp_path: Path) -> None:
    write_model({"w": torch.ones(4, 4)}, tmp_path / "x.birdie", files={name: content})
    write_birdie_folder(tmp_path / "x.birdie", tmp_path / "folder")
    assert front((tmp_path / "folder" / "README.md").read_text()).get("base_model") == origin
