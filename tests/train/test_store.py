"""The compilation cache as archives, and back."""

from ddtree_jax.train import store


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
