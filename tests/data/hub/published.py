"""A data set on the stand-in of the hub: its paths, its download, and changes of its manifest."""

import json
from pathlib import Path
from typing import Any

from birdie.data.hub.download import DownloadedDataset, Source, download
from tests.data.hub.server import REPO, Hub

ROOT = "datasets/"  # of the repository
FOLDER = f"{ROOT}datasets/fineweb10B_sp400/"
MODEL = f"{ROOT}tokenizers/fineweb_400_bpe.model"
MANIFEST = f"{ROOT}manifest.json"


def shard(number: int, split: str = "train") -> str:
    return f"fineweb_{split}_{number:06d}.bin"


def get(hub: Hub, data: Path, train_shards: int = 2, variant: str = "sp400", **settings: Any) -> DownloadedDataset:
    return download(variant, train_shards, data, source=Source(REPO, endpoint=hub.endpoint), **settings)


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def change_manifest(hub: Hub, **stats: object) -> None:
    manifest = json.loads(hub.files[MANIFEST])
    manifest["datasets"][0]["stats"] |= stats
    hub.files[MANIFEST] = json.dumps(manifest).encode()
