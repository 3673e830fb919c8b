"""Eight CPU devices, no silent broadcasting over missing axes, and no program compiled twice.

Each pytest-xdist worker is a process of its own and imports this file before any test module; jax
raises if its backends were already in use. Warnings are errors through pyproject.toml.
"""

import gc
import os
import shutil
import tempfile

import pytest

# Workers and the commands that tests start inherit the cache of compiled programs from here.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="ddtree-jax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import jax  # noqa: E402  (reads the environment)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture
def quick_compile():
    """Compile without XLA's costly passes: for exactness tests of many small programs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


_DONE = pytest.StashKey[int]()


@pytest.fixture(autouse=True)
def forget_programs(request):
    """Drop compiled programs now and then: they hold memory maps, and Linux gives 65,530."""
    yield
    done = request.session.stash.get(_DONE, 0) + 1
    request.session.stash[_DONE] = done
    if done % 20 == 0:
        jax.clear_caches()
        gc.collect()
