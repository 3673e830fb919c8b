"""What training leaves on disk: the compilation cache as archives, exports, and back."""

from pathlib import Path

import ddtree_jax
from ddtree_jax.train import publish, store


def test_cache_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "TAR_BYTES", 1000)
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    files = {f"xla/{i}": bytes([i]) * 600 for i in range(3)} | {"xla/deep/3": b"x"}
    for name, content in files.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    store.pack_cache(here)
    store.pack_cache(here)  # replaces the archives
    assert len(list(here.glob("xla-*.tar"))) == 3
    store.unpack_cache(there, here)
    found = {str(p.relative_to(there)): p.read_bytes() for p in there.rglob("*") if p.is_file()}
    assert found == files


def test_published_model_to_exports_and_back(tmp_path):
    bundled = Path(ddtree_jax.__file__).parent / "models" / "kimi-nano"
    publish.unpublish(bundled, tmp_path)
    publish.publish(tmp_path, tmp_path / "again")
    files = [p.relative_to(bundled) for p in bundled.rglob("*") if p.suffix != ".model"]
    for name in files:
        path = tmp_path / "again" / name
        assert path.is_dir() or path.read_bytes() == (bundled / name).read_bytes(), name
