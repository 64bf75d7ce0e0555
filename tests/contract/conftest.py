"""The contract's assertions tell what they compared, as those of a test module do."""

import pytest

pytest.register_assert_rewrite("tests.contract.store_contract")
