"""The cases by which tests cover pairs of factors instead of their product."""

from itertools import combinations, product

import pytest

from tests.helpers import covering


@pytest.mark.parametrize(("factors", "most"), [(("abc", "de"), 6), (("abc", "def", "ghi"), 10), (("abcdefg", "hij", "klmn", "op"), 28)])
def test_every_pair_of_values_is_in_a_case(factors, most):
    cases = covering(*factors)
    assert len(cases) <= most
    assert cases == covering(*factors)
    for one, other in combinations(range(len(factors)), 2):
        assert {(case[one], case[other]) for case in cases} == set(product(factors[one], factors[other]))
