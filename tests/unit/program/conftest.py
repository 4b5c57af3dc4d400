"""``programs`` is a module of helpers whose assertions explain themselves."""

import pytest

pytest.register_assert_rewrite("programs")
