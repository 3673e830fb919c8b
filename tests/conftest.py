"""Eight CPU devices, no silent broadcasting over missing axes, and no program compiled twice.

Each pytest-xdist worker is a process of its own and imports this file before any test module; jax
raises if its backends were already in use. Warnings are errors through pyproject.toml.
"""

import gc
import os
import shutil
import tempfile

import pytest

# Workers and the commands that tests start inherit from here the cache of compiled programs, and
# on a CPU that most passes of XLA are left out: most tests compile much and run little. The others
# ask for `optimized`; tests on a GPU look at what users get. XLA's newer emitters of CPU kernels
# make an MLIR context for every fusion: without them a program compiles in 0.4 of the time.
if "PYTEST_XDIST_WORKER" not in os.environ:
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        older = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {older}".strip()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="ddtree-jax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import jax  # noqa: E402  (reads the environment)

jax.config.update("jax_num_cpu_devices", 8)
gc.set_threshold(100_000, 20, 20)  # tracing makes many objects, few of them garbage
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    """Those with a time limit of their own first: no worker is left with a long one at the end."""

    def limit(item) -> float:
        mark = item.get_closest_marker("timeout")
        return mark.args[0] if mark else 0

    items.sort(key=limit, reverse=True)


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(scope="module")
def optimized():
    """All of XLA's passes: where runs are long, or the compiled program is what is looked at."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    quick = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"
    jax.config.update("jax_disable_most_optimizations", quick)


def memory_maps() -> int:
    """Memory maps of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/maps") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0


@pytest.fixture(autouse=True)
def forget_programs():
    """Drop compiled programs that hold many memory maps: Linux gives a process 65,530, and XLA
    dies at the last one. One test of the slow tier leaves up to some 5,000."""
    yield
    if memory_maps() > 20_000:
        jax.clear_caches()
        gc.collect()
