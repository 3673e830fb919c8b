"""How tests ask that something be refused."""

import pytest


def refused(said, function, *arguments, kind=ValueError, **options):
    """Assert that the call raises `kind` with this in its message, on one line."""
    with pytest.raises(kind) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    assert said in message
    assert "\n" not in message
