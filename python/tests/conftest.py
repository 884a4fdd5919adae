# SPDX-License-Identifier: Apache-2.0
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import apis  # noqa: E402


@pytest.fixture(params=apis.APIS, ids=lambda api: api.device)
def api(request):
    """attune, or attune on the GPU: see apis.py."""
    return request.param


@pytest.fixture(params=apis.APIS_AND_DTYPES, ids=lambda api: f"{api.device}-{api.dtype}")
def typed_api(request):
    """The same, with the dtypes that attention on the GPU is tested with (dense keys have 16 bits there)."""
    return request.param
