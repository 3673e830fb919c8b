"""`python -m ddtree_jax`."""

from ddtree_jax.cli import main

raise SystemExit(main())
