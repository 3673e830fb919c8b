"""The goldens made anew by the real libraries, compared with the committed ones.

Runs where the `oracle` extra is installed: in this interpreter, or in the one that the environment
variable ORACLE_PYTHON names (torch's CPU build may want another Python than ours).
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import ddtree_jax  # noqa: F401  (registers bfloat16 with numpy)

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("script", ("kimi_golden", "dflash_golden", "sampling_golden"))
def test_goldens_can_be_made_again(tmp_path, script):
    python = os.environ.get("ORACLE_PYTHON")
    if python is None:
        if importlib.util.find_spec("torch") is None:
            pytest.skip("needs the oracle extra, or ORACLE_PYTHON")
        python = sys.executable
    path = TESTS / "oracles" / f"{script}.py"
    subprocess.run([python, path, tmp_path], check=True, timeout=300)
    made = sorted(tmp_path.rglob("*.safetensors"))
    assert made
    for file in made:
        new = load_file(file)
        old = load_file(TESTS / "golden" / file.relative_to(tmp_path))
        assert new.keys() == old.keys()
        for key, value in new.items():
            wide = np.asarray(value, np.float64), np.asarray(old[key], np.float64)
            np.testing.assert_allclose(*wide, rtol=0, atol=1e-4, err_msg=key)
