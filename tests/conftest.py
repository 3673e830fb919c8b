"""Eight CPU devices, and no silent broadcasting over missing axes.

Each pytest-xdist worker is a process of its own and imports this file before any test module; jax
raises if its backends were already in use. Warnings are errors through pyproject.toml.
"""

import gc

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


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
